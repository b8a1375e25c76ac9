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


def current_placement() -> Placement:
    """Return this process's placement; `ALONE` without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    environ = os.environ
    return Placement(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(environ.get("LOCAL_RANK", dist.get_rank())),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        node_rank=int(environ.get("GROUP_RANK", 0)),
    )
