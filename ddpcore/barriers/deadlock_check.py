"""Who can never come: the rules by which a wait is given up before its time is over.

Pure. A wait is given up only where its time-out is certain: a rank that has not come has ended, or it waits itself, for
this very rank, and not with a shorter time-out. Slow, silent and stopped ranks are waited for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.barriers.rank_status import BarrierKind, Wait, barrier_text, missing_ranks_text, wait_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpcore.barriers.rank_status import Sighting

SYMMETRIC_OPS = frozenset(
    {"all_reduce", "all_gather", "all_to_all", "barrier", "reduce_scatter", "_all_gather_base", "_reduce_scatter_base"}
)
"""Collectives that are over for no rank before all have called them."""


PATIENT_S = 600.0
"""Time-out from which a wait counts as patient: nobody plans to continue after it, so both of two such waits end."""


class OwnCalls(NamedTuple):
    """What this rank has called so far."""

    num_calls: Callable[[BarrierKind, str], int]
    """Returns how often it has called a barrier, by kind and label."""
    num_finished: Callable[[BarrierKind, str], int]
    """Returns how many blocks it has finished as the rank that goes first."""
    last_collective: Callable[[str], int]
    """Returns the number of the last collective it has called in a process group."""


def needs(wait: Wait, rank: int, own: OwnCalls) -> bool:
    """Return whether the wait of another rank can only end when `rank`, this one, arrives."""
    if wait.kind is BarrierKind.COLLECTIVE:
        is_needed = rank in wait.needed
        if wait.label in SYMMETRIC_OPS:
            is_needed = not wait.ranks or rank in wait.ranks
        return is_needed and own.last_collective(wait.group) < wait.count
    if wait.kind in (BarrierKind.FIRST, BarrierKind.LOCAL_FIRST):
        return wait.master == rank and own.num_finished(wait.kind, wait.label) < wait.count
    return own.num_calls(wait.kind, wait.label) < wait.count


def gives_up_first(mine: Wait, theirs: Wait) -> bool:
    """Return whether, of two waits for each other, mine may be the one that ends."""
    if theirs.kind is BarrierKind.COLLECTIVE:
        return True
    if min(_limit(mine.timeout_s), _limit(theirs.timeout_s)) >= PATIENT_S:
        return True
    return _limit(mine.timeout_s) <= _limit(theirs.timeout_s) or _limit(mine.left_s) <= _limit(theirs.left_s)


def never_text(mine: Wait, rank: int, lost: Mapping[int, Sighting]) -> str:
    """Return why a barrier can never be passed: the state of the ranks that cannot arrive, and where this one waits."""
    barrier_name = barrier_text(mine.kind, mine.label)
    what = "can never end" if mine.master is not None else "can never be passed"
    missing_text = missing_ranks_text(mine.kind, mine.label, lost)
    return f"{barrier_name} {what}: {missing_text}; rank {rank} {wait_text(mine)}"


def _limit(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
