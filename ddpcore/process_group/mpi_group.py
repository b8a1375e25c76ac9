"""A process group whose ranks MPI has started: there is no store, MPI's runtime knows rank and world size."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from ddpcore.barriers.process_table import this_machine
from ddpcore.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence


def open_group(backend: str, timeout_s: float) -> Placement:
    """Open the default group with all ranks of mpirun, and find out who shares a machine; blocks.

    Named barriers need a store, which this group does not have.
    """
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    nodes: list[str | None] = [None] * world_size
    dist.all_gather_object(nodes, f"{socket.gethostname()} {this_machine().partition(' ')[0]}")
    return place(rank, cast("list[str]", nodes))


def place(rank: int, nodes: Sequence[str]) -> Placement:
    """Return a rank's placement among ranks whose nodes are these."""
    mine = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    order = list(dict.fromkeys(nodes))
    return Placement(rank, len(nodes), mine.index(rank), len(mine), order.index(nodes[rank]))
