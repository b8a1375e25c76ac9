"""Where this process stands in the job: its rank among all, and among those of its node."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed as dist


class Placement(NamedTuple):
    """Numbers of one rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


ALONE = Placement(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)

_remembered: tuple[Placement, dist.ProcessGroup] | None = None


def current_placement() -> Placement:
    """Return this process's placement; `ALONE` without a process group. Cheap, asks no other rank.

    In a group that `open_process_group` has opened it is what the ranks have found out together. In a group that the
    program has opened itself it is the launcher's; without a launcher all ranks count as on one node.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    if _remembered is not None and _remembered[1] is dist.group.WORLD:
        return _remembered[0]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    environ = os.environ
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=int(environ.get("LOCAL_RANK") or rank),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE") or world_size),
        node_rank=int(environ.get("GROUP_RANK") or 0),
    )


def remember(placement: Placement) -> None:
    """Keep the placement of the present default group, for as long as that is the default group."""
    global _remembered  # noqa: PLW0603 - one for the process's default group, which is as global
    group = dist.group.WORLD
    _remembered = None if group is None else (placement, group)


def forget() -> None:
    """Let go of the group."""
    global _remembered  # noqa: PLW0603 - see remember
    _remembered = None
