"""One daemon thread a process: it publishes where this rank is, and looks for waits that can never end.

The thread (`HeartbeatThread`) starts with the process's first store barrier. It writes a heartbeat into the job's store
every two seconds, slower in jobs of over 2,000 ranks, so that all heartbeats together cost the store at most 1,000
small writes a second. It also writes one before the thread begins, so that every rank is known from the opening of its
group on, and one immediately when the main thread begins to wait. While that waits, the thread looks for ranks that can
never come (`DeadlockCheck`); it deletes the keys of past store barriers, and watches the process of the next rank on
this machine, whose death other machines cannot see.

`DeadlockCheck` checks, in the same thread, whether those that the main thread waits for can come at all. Of the ranks
that wait at a store barrier the lowest looks for all, the second lowest less often in case the first is stopped; a rank
that waits for a first-block looks at its one rank itself. When a rank can never come
(`ddpcore.barriers.deadlock_check`), the store barrier fails: its `|go` key is set to an error, which releases everybody
who waits there.

Source: no call to the store is made with a time-out as a timer. Each that runs out writes two warnings to stderr, and
resolves host names for them, which takes up to 5 s where DNS does not answer (torch 2.13, `SocketImpl::waitForInput`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.barriers import deadlock_check, one_rank_blocks
from ddpcore.barriers.arrivals import (
    ARITY,
    BarrierResult,
    Reason,
    encode_result,
    failure_key,
    go_key,
    gone_key,
    heartbeat_key,
)
from ddpcore.barriers.barrier_session import complete, has_agent_store
from ddpcore.barriers.observer import started_ticks
from ddpcore.barriers.own_collectives import OwnCollectives
from ddpcore.barriers.rank_status import (
    ProcessState,
    RankHeartbeat,
    Sighting,
    Wait,
    barrier_text,
    encode_heartbeat,
    missing_ranks_text,
)
from ddpcore.errors import StoreLostError
from ddpcore.probe.stack import StackReader, code_roots, sendable, stack_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.barrier_session import BarrierSession
    from ddpcore.barriers.journal import OpenWait

TICK_S = 0.5
"""Seconds between looks at this process's own wait. The thread takes 0.04 % of a core beside work, 0.1 % in a wait of
20 s."""

HEARTBEAT_S = 2.0
MAX_HEARTBEATS_HZ = 1000.0
"""Heartbeats a second of all ranks together; one TCPStore takes 30,000 operations a second and more."""

HEARTBEAT_IN_WAIT_S = 0.25
"""Seconds of a wait after which it is published immediately, not only at the next heartbeat."""

GOODBYE_S = 0.5
"""Seconds that the end of the process waits for the last heartbeat."""

MAX_ERROR_CHARS = 200

MAX_DELETIONS = 20_000
"""Deletions in one tick: they keep up with a program that does nothing but pass barriers."""


class HeartbeatThread:
    """The heartbeat thread of one session."""

    def __init__(self, session: BarrierSession) -> None:
        self._session = session
        self._rank = session.placement.rank
        self._period_s = max(HEARTBEAT_S, session.placement.world_size / MAX_HEARTBEATS_HZ)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankdeck-heart", daemon=True)
        self._main_id = threading.main_thread().ident or 0
        self._reader = StackReader(code_roots())
        self._collectives = OwnCollectives(self._rank)
        self._began_s = time.monotonic()
        self._heartbeat_due_s = 0.0
        self._sent_wait: OpenWait | None = None
        self._pid = os.getpid()
        self._started_ticks = started_ticks(self._pid)
        self._host = socket.gethostname()
        self._ward = session.placement.local_rank
        self.cpu_s = 0.0
        """CPU time in seconds that the thread has taken."""

    def start(self, store: Store) -> None:
        """Publish this rank, and start the thread: the others know the process of a rank that dies immediately."""
        self._send_heartbeat(store, time.monotonic())
        self._thread.start()

    def end(self) -> None:
        """Send the last heartbeat and end the thread; blocks at most `GOODBYE_S`."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(GOODBYE_S)

    def wait_report(self, wait: OpenWait, now_s: float) -> Wait:
        """Return the main thread's wait as the others may know it, with its line."""
        left_s = None if wait.timeout_s is None else max(0.0, wait.entered_s + wait.timeout_s - now_s)
        return Wait(
            wait.kind,
            wait.label,
            wait.nth,
            key=wait.key,
            place=self._reader.read(stack_of(self._main_id)).place,
            timeout_s=wait.timeout_s,
            left_s=left_s,
            master=wait.master,
        )

    def _run(self) -> None:
        try:
            store = self._session.connect()
            deadlock_checker = DeadlockCheck(self._session, store, self._collectives, self.wait_report)
            while self._session.is_open():
                self._tick(store, deadlock_checker, time.monotonic())
                self.cpu_s = time.thread_time()
                if self._ending.wait(TICK_S):
                    break
            self._send_heartbeat(store, time.monotonic(), has_left=True)
        except (StoreLostError, RuntimeError):
            # Torch's errors are RuntimeErrors. The store is gone, and with it whoever could hear: the main thread
            # learns of it at its next barrier.
            return

    def _tick(self, store: Store, deadlock_checker: DeadlockCheck, now_s: float) -> None:
        wait = self._session.journal.wait
        is_new = wait is not None and wait is not self._sent_wait and now_s - wait.entered_s >= HEARTBEAT_IN_WAIT_S
        if is_new or now_s >= self._heartbeat_due_s:
            self._send_heartbeat(store, now_s)
            self._look_after_ward(store, now_s)
            self._keep_failure_notice(store)
        self._delete(store)
        if wait is not None:
            deadlock_checker.examine(wait, now_s)

    def _send_heartbeat(self, store: Store, now_s: float, *, has_left: bool = False) -> None:
        session = self._session
        wait = session.journal.wait
        stack = stack_of(self._main_id)
        place = self._reader.read(stack).place
        reported = self.wait_report(wait, now_s) if wait else self._collectives.blocking(stack, place)
        heartbeat = RankHeartbeat(
            uptime_s=now_s - self._began_s,
            period_s=self._period_s,
            host=self._host,
            machine=session.machine,
            pid=self._pid,
            started_ticks=self._started_ticks,
            place=place,
            wait=reported,
            calls=session.journal.latest(),
            block=one_rank_blocks.block_of_main_thread(),
            is_threaded=session.journal.num_threads > 1,
            has_left=has_left,
            error=_uncaught_error() if has_left else "",
            session=session.number,
        )
        store.set(heartbeat_key(self._rank), encode_heartbeat(heartbeat))
        # More often at first, when a program moves most.
        self._heartbeat_due_s = now_s + min(self._period_s, now_s - self._began_s)
        self._sent_wait = wait

    def _look_after_ward(self, store: Store, now_s: float) -> None:
        """Publish a local rank whose process has ended without a notice, and watch the next one from then on."""
        placement = self._session.placement
        ward = self._session.neighbours.rank_of(store, self._ward)
        sighting = self._session.observer.look_at(store, ward, now_s) if ward != self._rank else None
        if sighting is None or sighting.has_ended:
            if sighting is not None and sighting.process is ProcessState.GONE:
                store.set(gone_key(ward), "")
            self._ward = (self._ward + 1) % placement.local_world_size

    def _keep_failure_notice(self, store: Store) -> None:
        """Keep the first failure where it may be gone, with its host, before the main thread asks for it."""
        key = failure_key(self._session.number)
        if not self._session.failure_notice and not has_agent_store() and store.check([key]):
            self._session.failure_notice = store.get(key)

    def _delete(self, store: Store) -> None:
        for key in islice(self._session.keys_to_delete(), MAX_DELETIONS):
            store.delete_key(key)


def _uncaught_error() -> str:
    """Return the exception that ends the program, if one does: Python keeps it for debuggers."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return "" if error is None else sendable(f"{type(error).__name__}: {error}".partition("\n")[0], MAX_ERROR_CHARS)


LOOK_AFTER_S = 1.0
"""Seconds below which waits are usual: nobody looks into them."""

MAX_LOOKS_HZ = 2000.0
"""Looks a second of all waiting ranks together."""

MAX_INTERVAL_S = 2.0
"""Longest pause in seconds between looks into a long wait, in jobs of up to 4,000 ranks."""

LOG_EVERY_S = 30.0
"""Seconds between two lines in the log about a long wait."""

FAILURE_DELAY_S = 0.5
"""Seconds between the mark that makes later ranks read why, and the release of those who wait (see
`ddpcore.barriers.store_barrier.TRUST_S`)."""

MAX_LOOKED_AT = 64
"""Missing ranks looked at in one turn."""

MAX_CHAIN = 4
"""Ranks followed that wait for a rank that waits."""

_DEPUTY_TURNS = 3
_log = logging.getLogger(__name__)


class _Verdict(NamedTuple):
    """A barrier that can never be passed."""

    wait: Wait
    rank: int
    """A rank that waits there."""
    lost: Mapping[int, Sighting]
    """Ranks that never arrive there."""

    def result(self) -> BarrierResult:
        has_died = self.wait.master is not None and any(sighting.has_ended for sighting in self.lost.values())
        text = deadlock_check.never_text(self.wait, self.rank, self.lost)
        ended = sorted(rank for rank, sighting in self.lost.items() if sighting.has_ended)
        reason = Reason.DIED if has_died else Reason.NEVER
        return BarrierResult(reason=reason, text=text, missing=sorted(self.lost), ended=ended)


class DeadlockCheck:
    """Examines the waits of one session.

    `wait_report` returns the main thread's wait at a time, as the others may know it.
    """

    def __init__(
        self,
        session: BarrierSession,
        store: Store,
        collectives: OwnCollectives,
        wait_report: Callable[[OpenWait, float], Wait],
    ) -> None:
        self._session = session
        self._store = store
        self._wait_report = wait_report
        self._own = deadlock_check.OwnCalls(session.journal.count, session.journal.finished, collectives.called)
        self._rank = session.placement.rank
        self._world_size = session.placement.world_size
        self._interval_s = self._world_size / MAX_LOOKS_HZ
        self._wait: OpenWait | None = None
        self._num_turns = 0
        self._due_s = 0.0
        self._log_due_s = 0.0

    def examine(self, wait: OpenWait, now_s: float) -> None:
        """Look once into the main thread's wait, if that is due."""
        if wait is not self._wait:
            self._wait, self._num_turns = wait, 0
            self._due_s = wait.entered_s + LOOK_AFTER_S
            self._log_due_s = wait.entered_s + LOG_EVERY_S
        if now_s < self._due_s:
            return
        slackening_s = min(MAX_INTERVAL_S, (now_s - wait.entered_s) / 20)
        self._due_s = now_s + max(self._interval_s, slackening_s)
        if wait.master is None:
            self._check_barrier(wait, now_s)
        else:
            self._examine_first(wait, wait.master, now_s)
        self._num_turns += 1

    def _check_barrier(self, wait: OpenWait, now_s: float) -> None:
        missing = list(self._session.arrival_counter.missing(self._store, wait.key))
        if not missing:
            # The last one has come, and was stopped before it could say so.
            complete(self._store, wait, self._world_size)
            return
        before_me = _num_here_before(self._rank, missing)
        is_my_turn = before_me == 0 or (before_me == 1 and self._num_turns % _DEPUTY_TURNS == _DEPUTY_TURNS - 1)
        if not is_my_turn and self._num_turns:
            return
        first = self._num_turns * MAX_LOOKED_AT % max(1, len(missing) - MAX_LOOKED_AT + 1)
        sightings = self._session.observer.look(self._store, missing[first : first + MAX_LOOKED_AT], now_s)
        if is_my_turn and not self._give_up(wait, sightings, now_s) and before_me == 0:
            self._log_wait(wait, sightings, now_s)

    def _examine_first(self, wait: OpenWait, master: int, now_s: float) -> None:
        sightings = self._session.observer.look(self._store, [master], now_s)
        is_first_here = self._rank == master + 1 or self._session.placement.local_rank <= 1
        if not self._give_up(wait, sightings, now_s) and is_first_here:
            self._log_wait(wait, sightings, now_s)

    def _give_up(self, wait: OpenWait, sightings: Mapping[int, Sighting], now_s: float) -> bool:
        """Fail the barriers that can never be passed, mine and theirs, and return whether there are any."""
        mine = self._wait_report(wait, now_s)
        ended = {rank: sighting for rank, sighting in sightings.items() if sighting.has_ended}
        if ended:
            self._mark_failed([_Verdict(mine, self._rank, ended)])
            return True
        if self._session.journal.num_threads > 1:
            return False
        lost: dict[int, Sighting] = {}
        verdicts = []
        for rank, sighting in sightings.items():
            theirs = self._wait_for_me(sighting, now_s, 0)
            if theirs is not None and deadlock_check.gives_up_first(mine, theirs):
                lost[rank] = sighting
            if theirs is not None and theirs.key and deadlock_check.gives_up_first(theirs, mine):
                me = Sighting(RankHeartbeat(0.0, 0.0, "", "", 0, 0, wait=mine, calls=self._session.journal.latest()))
                verdicts.append(_Verdict(theirs, rank, {self._rank: me}))
        if lost:
            verdicts.append(_Verdict(mine, self._rank, lost))
        self._mark_failed(verdicts)
        return bool(verdicts)

    def _wait_for_me(self, sighting: Sighting, now_s: float, depth: int) -> Wait | None:
        """Return the wait that a rank is in, or follows others in, and that only this rank can end."""
        heartbeat = sighting.heartbeat
        if heartbeat is None or heartbeat.wait is None or heartbeat.is_threaded:
            return None
        wait = heartbeat.wait
        if deadlock_check.needs(wait, self._rank, self._own):
            is_decided = bool(wait.key) and self._store.check([go_key(wait.key)])
            return None if is_decided else wait
        if wait.master is None or depth == MAX_CHAIN:
            return None
        further = self._session.observer.look_at(self._store, wait.master, now_s)
        return self._wait_for_me(further, now_s, depth + 1)

    def _mark_failed(self, verdicts: list[_Verdict]) -> None:
        """Release the ranks that wait at these barriers, and those that arrive later, with an error."""
        arrival_counter, store = self._session.arrival_counter, self._store
        at_barriers = [verdict for verdict in verdicts if verdict.wait.master is None]
        for verdict in at_barriers:
            arrival_counter.mark_failed(store, verdict.wait.key, list(arrival_counter.missing(store, verdict.wait.key)))
        if at_barriers:
            # Whoever else finds it out does the same; the first one's words stand.
            time.sleep(FAILURE_DELAY_S)
        for verdict in verdicts:
            is_first_block = verdict.wait.master is not None
            if is_first_block or verdict.lost.keys() & arrival_counter.missing(store, verdict.wait.key):
                store.compare_set(go_key(verdict.wait.key), "", encode_result(verdict.result()))

    def _log_wait(self, wait: OpenWait, sightings: Mapping[int, Sighting], now_s: float) -> None:
        if now_s < self._log_due_s:
            return
        self._log_due_s = now_s + LOG_EVERY_S
        _log.warning(
            "rank %d has waited for %.0f s in %s: %s",
            self._rank,
            now_s - wait.entered_s,
            barrier_text(wait.kind, wait.label),
            missing_ranks_text(wait.kind, wait.label, sightings),
        )


def _num_here_before(rank: int, missing: list[int]) -> int:
    """Return how many lower ranks of the same counter have arrived."""
    first = rank // ARITY * ARITY
    return rank - first - sum(first <= other < rank for other in missing)
