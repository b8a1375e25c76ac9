"""Memory of simulated ranks that grows, against a limit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from agent.node_state.observations import LimitSampled, MemorySampled
from agent.wire.machine import LimitKind, LimitReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.sim import SimCluster

MIB, GIB = 2**20, 2**30
BASE_BYTES = GIB


def leak(
    sim: SimCluster, rank: int, bytes_per_min: float, limit_bytes: int, kind: LimitKind = LimitKind.CGROUP
) -> None:
    """Let a rank's memory grow from now on, until its limit kills it."""
    give_memory(sim, rank, partial(_grown, sim.now_s, bytes_per_min), limit_bytes, kind)


def _grown(begin_s: float, bytes_per_min: float, now_s: float) -> int:
    return int(BASE_BYTES + bytes_per_min * (now_s - begin_s) / 60.0)


def give_memory(
    sim: SimCluster,
    rank: int,
    held_at: Callable[[float], int],
    limit_bytes: int,
    kind: LimitKind = LimitKind.CGROUP,
) -> None:
    """Let a rank hold what a function of the time says; one that comes to its limit is killed by the kernel."""
    sim.ranks[rank].memory = partial(_look, sim, rank, held_at, limit_bytes, kind)


def _look(  # at the top level: a simulation is copied by pickle
    sim: SimCluster, rank: int, held_at: Callable[[float], int], limit_bytes: int, kind: LimitKind, now_s: float
) -> MemorySampled:
    held_bytes = held_at(now_s)
    if held_bytes >= limit_bytes:
        sim.kill_for_memory(rank)
    return MemorySampled(held_bytes, [LimitSampled(f"{kind} {rank}", LimitReport(kind, limit_bytes, held_bytes))])
