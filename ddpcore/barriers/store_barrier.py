"""One passage of a barrier that every rank comes to, alone or with an exchange of texts.

A rank adds itself to the barrier's counters. The last one sets `|go`, for which the others wait: two round trips, one
for the last. Each key is deleted by one rank's heartbeat thread, once a later barrier is passed.

A barrier may also be failed (`heartbeat.DeadlockCheck`). To make that cost nothing where all is well, the mark in the
counters comes half a second before `|go` is set to an error: who comes later sees the mark, and who came before has
waited so long that it reads `|go`. A shorter wait than `TRUST_S` has certainly ended well.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from ddpcore.barriers import journal, one_rank_blocks
from ddpcore.barriers.arrivals import PASSED, Arrival, Reason, decode_result, go_key, value_key
from ddpcore.barriers.barrier_session import await_go, complete, store_lost
from ddpcore.barriers.failure_notice import first_failure
from ddpcore.barriers.rank_status import barrier_text, missing_ranks_text
from ddpcore.errors import BarrierDeadlockError, BarrierTimeoutError, BarrierUseError
from ddpcore.probe.stack import caller_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.arrivals import BarrierResult
    from ddpcore.barriers.barrier_session import BarrierSession
    from ddpcore.barriers.journal import OpenWait
    from ddpcore.barriers.rank_status import BarrierKind

TimeoutT = TypeVar("TimeoutT", bound=BarrierTimeoutError)

TRUST_S = 0.25
"""Seconds; half of `deadlock_check.FAILURE_DELAY_S`."""

MAX_VALUE_BYTES = 1 << 20
"""Bytes of one rank's text: over 8 MiB in one value TCPStore closes the connection."""

MAX_MISSING = 64
"""Missing ranks that are looked at when the time is over."""


def pass_barrier(
    session: BarrierSession, kind: BarrierKind, label: str, timeout_s: float, value: str | None = None
) -> list[str]:
    """Wait until every rank has arrived; return each rank's text if this rank brings one, else nothing.

    Raises BarrierUseError where it cannot be passed (in a block that only one rank runs, or without time),
    BarrierDeadlockError if some ranks can never arrive, BarrierTimeoutError and StoreLostError.
    """
    calls = session.journal.calls(kind, label)
    check_use(kind, label, timeout_s, one_rank_blocks.current_block() if one_rank_blocks.num_open else "")
    if value is not None and len(value.encode()) > MAX_VALUE_BYTES:
        raise BarrierUseError(
            f"{barrier_text(kind, label)}: a text of {len(value):,} characters, at most {MAX_VALUE_BYTES:,} bytes fit"
        )
    connection = session.connection()
    wait = calls.enter(time.monotonic(), timeout_s)
    try:
        if value is not None:
            connection.store.set(value_key(wait.key, session.placement.rank), value)
        arrival = session.arrival_counter.arrive(connection.store, wait.key)
        text: str | bytes = ""
        if arrival is Arrival.LAST:
            text = complete(connection.store, wait, session.placement.world_size)
        # What nobody waits for comes after the arrival.
        calls.line = caller_line()
        if connection.is_main:
            journal.open_barrier(calls.label, wait.entered_s)
        if arrival is not Arrival.LAST:
            must_read = value is not None or arrival is Arrival.FAILED
            text = _await(session, connection.store, wait, is_main=connection.is_main, must_read=must_read)
    except dist.DistNetworkError as error:
        raise store_lost(f"at {barrier_text(kind, label)}") from error
    finally:
        if connection.is_main:
            session.journal.wait = None
            journal.close_barrier()
    result = decode_result(text) if text else PASSED
    if result.reason is not None:
        raise _refused(wait, result)
    connection.passed(wait)
    return result.values


def check_use(kind: BarrierKind, label: str, timeout_s: float | None, block: str) -> None:
    """Raise BarrierUseError for a barrier that nobody could pass.

    `block` is the block around it that the other ranks do not run now, or "".
    """
    if timeout_s is not None and not timeout_s > 0:
        raise BarrierUseError(f"{barrier_text(kind, label)}: timeout_s is {timeout_s}, and must be above 0")
    if block:
        raise BarrierUseError(
            f"{barrier_text(kind, label)} inside {block}: the other ranks do not run this block now and would never "
            "come; move it behind the block"
        )


def _await(session: BarrierSession, store: Store, wait: OpenWait, *, is_main: bool, must_read: bool) -> str | bytes:
    """Wait until the barrier is decided, and return its result as text, as far as it matters."""
    if is_main:
        session.journal.wait = wait
    if not await_go(store, wait):
        missing = list(session.arrival_counter.missing(store, wait.key))
        if missing:
            raise _explained(_timed_out(session, store, wait, missing))
        return complete(store, wait, session.placement.world_size)
    if must_read or time.monotonic() - wait.entered_s > TRUST_S:
        return store.get(go_key(wait.key))
    return ""


def _timed_out(session: BarrierSession, store: Store, wait: OpenWait, missing: list[int]) -> BarrierTimeoutError:
    sightings = session.observer.look(store, missing[:MAX_MISSING], time.monotonic())
    more = f"; {len(missing) - MAX_MISSING} more are not listed" if len(missing) > MAX_MISSING else ""
    details = missing_ranks_text(wait.kind, wait.label, sightings) + more
    error = BarrierTimeoutError(wait.label, missing, wait.timeout_s or 0.0, details, did_not=f"reach {wait.kind}")
    error.ended = sorted(rank for rank, sighting in sightings.items() if sighting.has_ended)
    return error


def _refused(wait: OpenWait, result: BarrierResult) -> BarrierDeadlockError | BarrierUseError:
    if result.reason is Reason.TOO_LARGE:
        return BarrierUseError(f"{barrier_text(wait.kind, wait.label)}: {result.text}")
    error = BarrierDeadlockError(wait.label, result.missing, time.monotonic() - wait.entered_s, result.text)
    error.ended = result.ended
    return _explained(error)


def _explained(error: TimeoutT) -> TimeoutT:
    """Add to an error what a missing rank has raised."""
    failure = first_failure(0.0, among=error.ended, counts_leaving=False) if error.ended else None
    if failure is not None and failure.trace:
        error.add_note(f"{failure}\n{failure.trace.rstrip()}")
    return error
