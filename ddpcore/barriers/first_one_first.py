"""Blocks that one rank runs before the others: it reads, downloads or converts, they find it done.

The rank that goes first reports in the store how its block ended; the others wait for that, then run the block too. If
it raised, they raise at once, with its error and traceback. If it dies, or can never come, they raise within
seconds (`ddpcore.barriers.heartbeat`). If it is slow or stopped they wait, and log a line every 30 s.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpcore.arguments import check_number, check_text
from ddpcore.barriers import journal as wait_marks
from ddpcore.barriers import one_rank_blocks
from ddpcore.barriers.arrivals import (
    PASSED_TEXT,
    BarrierResult,
    Reason,
    decode_result,
    encode_result,
    go_key,
    readers_key,
)
from ddpcore.barriers.barrier_session import await_go, store_lost
from ddpcore.barriers.one_rank_blocks import OneRankBlock
from ddpcore.barriers.open_session import current_session
from ddpcore.barriers.rank_status import BarrierKind, barrier_text, missing_ranks_text
from ddpcore.barriers.store_barrier import check_use
from ddpcore.errors import BarrierDeadlockError, BarrierTimeoutError, BarrierUseError, MasterFailedError, StoreLostError
from ddpcore.probe.stack import caller_line

if TYPE_CHECKING:
    from types import TracebackType

    from ddpcore.barriers.barrier_session import BarrierSession

MAX_TRACE_CHARS = 16_000


class _Turn:
    """One rank's part in one block."""

    def __init__(self, session: BarrierSession, kind: BarrierKind, name: str, timeout_s: float | None) -> None:
        placement, neighbours = session.placement, session.neighbours
        self._session = session
        self._rank = placement.rank
        self._is_local = kind is BarrierKind.LOCAL_FIRST
        self._master = neighbours.rank_of(session.connection().store, 0) if self._is_local else 0
        self._num_members = placement.local_world_size if self._is_local else placement.world_size
        self._calls = session.journal.calls(kind, name, neighbours.node if self._is_local else "")
        self._calls.line = caller_line()
        self._wait = self._calls.enter(time.monotonic(), timeout_s, self._master)
        self._text = barrier_text(kind, self._calls.label)
        self._block = OneRankBlock(self._text, is_lone=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank goes first."""
        return self._session.placement.local_rank == 0 if self._is_local else self._rank == 0

    def begin(self) -> None:
        """Begin the block as the one that goes first."""
        self._report(self._wait.nth - 1, is_over=True)
        self._block.__enter__()

    def end(self, error: BaseException | None) -> None:
        """End it, and release the others."""
        self._block.__exit__(None, None, None)
        self._calls.finished = self._wait.nth
        text = PASSED_TEXT if error is None else encode_result(self._failure(error))
        try:
            self._session.connection().store.set(go_key(self._wait.key), text)
        except (dist.DistNetworkError, StoreLostError) as lost:
            # The block's own error says more.
            if error is None:
                raise store_lost(f"at the end of {self._text}") from lost
        finally:
            self._report(self._wait.nth, is_over=True)

    def follow(self) -> None:
        """Wait for the one that goes first, and raise what it has raised."""
        journal, is_main = self._session.journal, self._session.connection().is_main
        self._report(self._wait.nth, is_over=False)
        if is_main:
            journal.wait = self._wait
        try:
            result = self._read()
        except dist.DistNetworkError as error:
            raise store_lost(f"at {self._text}") from error
        finally:
            if is_main:
                journal.wait = None
            self._report(self._wait.nth, is_over=True)
        if result.reason is Reason.NEVER:
            waited_s = time.monotonic() - self._wait.entered_s
            raise BarrierDeadlockError(self._calls.label, result.missing, waited_s, result.text)
        if result.reason is not None:
            raise MasterFailedError(self._calls.label, self._master, result.text, result.trace)

    def _read(self) -> BarrierResult:
        session, wait = self._session, self._wait
        store = session.connection().store
        if not await_go(store, wait):
            sightings = session.observer.look(store, [self._master], time.monotonic())
            details = missing_ranks_text(wait.kind, wait.label, sightings)
            raise BarrierTimeoutError(
                wait.label, [self._master], wait.timeout_s or 0.0, details, did_not=f"finish {wait.kind}"
            )
        result = decode_result(store.get(go_key(wait.key)))
        if store.add(readers_key(wait.key), 1) == self._num_members - 1:
            session.deletable.extend((go_key(wait.key), readers_key(wait.key)))
        return result

    def _failure(self, error: BaseException) -> BarrierResult:
        text = f"rank {self._rank} failed in {self._text}: {type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))
        return BarrierResult(
            reason=Reason.RAISED,
            text=text.encode(errors="replace").decode()[:MAX_TRACE_CHARS],
            missing=[self._rank],
            trace=trace.encode(errors="replace").decode()[-MAX_TRACE_CHARS:],
        )

    def _report(self, nth: int, *, is_over: bool) -> None:
        if self._session.connection().is_main:
            ranks = self._session.neighbours.ranks(self._session.connection().store) if self._is_local else ()
            scope = f"node {self._master}" if self._is_local else ""
            wait_marks.report_first(scope, self._calls.label, nth, ranks, is_over=is_over)


class _FirstBlock:
    """The context manager."""

    def __init__(self, kind: BarrierKind, name: str | None, timeout_s: float | None) -> None:
        if name is not None:
            check_text(BarrierUseError, "name", name)
        if timeout_s is not None:
            check_number(BarrierUseError, "timeout_s", timeout_s, wanted="a number above 0, or None")
        self._kind = kind
        self._name = _line_name() if name is None else name
        self._timeout_s = timeout_s
        self._turn: _Turn | None = None

    def __enter__(self) -> bool:
        self._turn = None
        session = current_session()
        is_local = self._kind is BarrierKind.LOCAL_FIRST
        if session is None or (is_local and session.placement.local_world_size == 1):
            return True
        check_use(self._kind, self._name, self._timeout_s, one_rank_blocks.current_lone_block())
        turn = _Turn(session, self._kind, self._name, self._timeout_s)
        if not turn.is_first:
            turn.follow()
            return False
        turn.begin()
        self._turn = turn
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._turn is not None:
            self._turn.end(error)


class master_first(_FirstBlock):  # noqa: N801 - used like a function
    """Let rank 0 run a block before all other ranks run it: `with master_first("corpus"): ...`.

    Yields True on the rank that goes first, and outside of a distributed run. Blocks on the others until it has left
    the block; they may nest and repeat. Main thread.

    Args:
        name: What people read in the console and in errors; None is the line of the call. Equal on all ranks.
        timeout_s: How long to wait at most; None as long as it takes.

    Raises:
        MasterFailedError: Rank 0 has raised in the block, or died; it carries that error and its traceback.
        BarrierDeadlockError: Rank 0 waits elsewhere for this very rank.
        BarrierTimeoutError: It has not finished the block in `timeout_s`.
        BarrierUseError: Inside a block that only one rank runs.
        StoreLostError: The job's store is gone.
    """

    def __init__(self, name: str | None = None, timeout_s: float | None = None) -> None:
        super().__init__(BarrierKind.FIRST, name, timeout_s)


class local_master_first(_FirstBlock):  # noqa: N801 - used like a function
    """Let the first rank of each node run a block before the others of its node; else as `master_first`."""

    def __init__(self, name: str | None = None, timeout_s: float | None = None) -> None:
        super().__init__(BarrierKind.LOCAL_FIRST, name, timeout_s)


def _line_name() -> str:
    """Return `train.py:12`: without the directory, which may differ between nodes."""
    file, line, _ = caller_line()
    return f"{file.rpartition('/')[2]}:{line}"
