"""One daemon thread a process, from its first gate on: it tells the others where this rank is, and looks after waits.

It beats into the job's store every two seconds, slower in jobs of over 2,000 ranks, so that all beats together cost the
store at most 1,000 small writes a second; once before the thread begins, so that every rank is known from the opening
of its group on; and at once when the main thread begins to wait. While that waits, the thread looks for ranks that can
never come (`ddpcore.barriers.examiner`); it deletes the keys of past gates, and watches the process of the next rank on
this machine, whose death other machines cannot see.

Source: no call to the store is made with a time-out as a timer. Each that runs out writes two warnings to stderr, and
resolves host names for them, which takes up to 5 s where DNS does not answer (torch 2.13, `SocketImpl::waitForInput`).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING

from ddpcore.barriers import one_rank_blocks
from ddpcore.barriers.examiner import Examiner
from ddpcore.barriers.gate_keys import beat_key, failure_key, gone_key
from ddpcore.barriers.gate_store import has_agent_store
from ddpcore.barriers.own_collectives import OwnCollectives
from ddpcore.barriers.process_table import started_ticks
from ddpcore.barriers.whereabouts import Beat, ProcessState, Wait, encode_beat
from ddpcore.errors import StoreLostError
from ddpcore.probing.code_places import code_roots, stack_of
from ddpcore.probing.stack import StackReader, sendable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.gate_session import GateSession
    from ddpcore.barriers.journal import OpenWait

TICK_S = 0.5
"""Between two looks at this process's own wait. The thread takes 0.04 % of a core beside work, 0.1 % in a wait of 20 s
(tests/bench/bench_barrier.py)."""

BEAT_S = 2.0
MAX_BEATS_HZ = 1000.0
"""Of all ranks together; one TCPStore takes 30,000 operations a second and more."""

BEAT_IN_WAIT_S = 0.25
"""A wait longer than this is told at once, not only at the next beat."""

GOODBYE_S = 0.5
"""How long the end of the process waits for the last beat to be sent."""

MAX_ERROR_CHARS = 200

MAX_DELETIONS = 20_000
"""Of one tick: the deletions of a program that does nothing but pass gates keep up with it."""


class Heart:
    """The thread of one session.

    Args:
        session: Whose it is.
    """

    def __init__(self, session: GateSession) -> None:
        self._session = session
        self._rank = session.placement.rank
        self._period_s = max(BEAT_S, session.placement.world_size / MAX_BEATS_HZ)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankdeck-heart", daemon=True)
        self._main_id = threading.main_thread().ident or 0
        self._reader = StackReader(code_roots())
        self._collectives = OwnCollectives(self._rank)
        self._began_s = time.monotonic()
        self._beat_due_s = 0.0
        self._told: OpenWait | None = None
        self._pid = os.getpid()
        self._started_ticks = started_ticks(self._pid)
        self._host = socket.gethostname()
        self._ward = session.placement.local_rank
        self.cpu_s = 0.0
        """CPU time that the thread has taken."""

    def start(self, store: Store) -> None:
        """Tell the others of this rank, and start the thread: of a rank that dies at once they know its process.

        Args:
            store: The calling thread's connection.
        """
        self._beat(store, time.monotonic())
        self._thread.start()

    def end(self) -> None:
        """Say goodbye and end the thread; blocks at most `GOODBYE_S`."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(GOODBYE_S)

    def told_wait(self, wait: OpenWait, now_s: float) -> Wait:
        """Return the main thread's wait as the others may know it, with the line it stands at."""
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
            examiner = Examiner(self._session, store, self._collectives)
            while self._session.is_open():
                self._tick(store, examiner, time.monotonic())
                self.cpu_s = time.thread_time()
                if self._ending.wait(TICK_S):
                    break
            self._beat(store, time.monotonic(), has_left=True)
        except (StoreLostError, RuntimeError):
            # Torch's errors are RuntimeErrors. The store is gone, and with it whoever could hear: the main thread
            # learns of it at its next gate.
            return

    def _tick(self, store: Store, examiner: Examiner, now_s: float) -> None:
        wait = self._session.journal.wait
        is_new = wait is not None and wait is not self._told and now_s - wait.entered_s >= BEAT_IN_WAIT_S
        if is_new or now_s >= self._beat_due_s:
            self._beat(store, now_s)
            self._look_after_ward(store, now_s)
            self._keep_failure_notice(store)
        self._delete(store)
        if wait is not None:
            examiner.examine(wait, now_s)

    def _beat(self, store: Store, now_s: float, *, has_left: bool = False) -> None:
        session = self._session
        wait = session.journal.wait
        stack = stack_of(self._main_id)
        place = self._reader.read(stack).place
        told = self.told_wait(wait, now_s) if wait else self._collectives.blocking(stack, place)
        beat = Beat(
            uptime_s=now_s - self._began_s,
            period_s=self._period_s,
            host=self._host,
            machine=session.machine,
            pid=self._pid,
            started_ticks=self._started_ticks,
            place=place,
            wait=told,
            calls=session.journal.latest(),
            block=one_rank_blocks.block_of_main_thread(),
            is_threaded=session.journal.num_threads > 1,
            has_left=has_left,
            error=_uncaught_error() if has_left else "",
            session=session.number,
        )
        store.set(beat_key(self._rank), encode_beat(beat))
        # More often at first, when a program moves most.
        self._beat_due_s = now_s + min(self._period_s, now_s - self._began_s)
        self._told = wait

    def _look_after_ward(self, store: Store, now_s: float) -> None:
        """Tell of a local rank whose process has ended without a word, and look after the next one from then on."""
        placement = self._session.placement
        ward = self._session.neighbours.rank_of(store, self._ward)
        sighting = self._session.observer.look_at(store, ward, now_s) if ward != self._rank else None
        if sighting is None or sighting.has_ended:
            if sighting is not None and sighting.process is ProcessState.GONE:
                store.set(gone_key(ward), "")
            self._ward = (self._ward + 1) % placement.local_world_size

    def _keep_failure_notice(self, store: Store) -> None:
        """Keep what says who has failed first, where it may be gone, with its host, before the main thread can ask."""
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
