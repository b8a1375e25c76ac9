"""What the store barriers of one process group share in this process, and their calls to the job's store.

`BarrierSession` holds what is shared, `ThreadConnection` is one thread's passage through store barriers. `connect`,
`await_go` and `complete` are the calls to the store.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpcore.barriers.arrivals import PASSED_TEXT, ArrivalCounter, go_key, passed_with, value_key
from ddpcore.barriers.journal import Journal, is_main_thread
from ddpcore.barriers.observer import Observer, this_machine
from ddpcore.barriers.rank_status import BarrierKind
from ddpcore.errors import StoreLostError
from ddpcore.process_group.machine import Neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.journal import OpenWait
    from ddpcore.placement import Placement

MAX_WAIT_S = 1_000_000.0
"""Longest wait: a store's wait counts milliseconds in 31 bits (torch 2.13)."""


def connect(store: Store, timeout_s: float | None = None) -> Store:
    """Return a connection of its own to a store, through any other connection to it.

    By default it tries for as long as the group's time-out: right where many thousands connect at once. Raises
    StoreLostError if there is no store any more.
    """
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    try:
        return clone() if timeout_s is None else _clone_within(timeout_s, store, clone)
    except dist.DistNetworkError as error:
        raise store_lost("where ranks meet") from error


def _clone_within(timeout_s: float, store: Store, clone: Callable[[], Store]) -> Store:
    usual: timedelta = store.timeout  # type: ignore[attr-defined] # torch's stubs lack it
    # A clone inherits it: whoever connects to a store that has gone tries again for so long.
    store.set_timeout(min(usual, timedelta(seconds=timeout_s)))
    try:
        return clone()
    finally:
        store.set_timeout(usual)


def store_lost(where: str) -> StoreLostError:
    host = "torchrun on the first node" if has_agent_store() else "rank 0, which hosts it,"
    return StoreLostError(f"the job's store does not answer {where}: {host} has ended; start the job again")


def has_agent_store() -> bool:
    """Return whether torchrun's agent hosts the ranks' store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def await_go(store: Store, wait: OpenWait) -> bool:
    """Wait until a barrier is decided, or the time is over, and return whether it is decided."""
    go = go_key(wait.key)
    timeout_s = MAX_WAIT_S if wait.timeout_s is None else min(wait.timeout_s, MAX_WAIT_S)
    try:
        store.wait([go], timedelta(seconds=timeout_s))
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        # DistStoreError of a TCPStore, a bare RuntimeError of a FileStore.
        return store.check([go])
    return True


def complete(store: Store, wait: OpenWait, world_size: int) -> str:
    """Decide a barrier at which all ranks have arrived; return its result as text."""
    text = PASSED_TEXT
    if wait.kind is BarrierKind.EXCHANGE:
        raw = store.multi_get([value_key(wait.key, rank) for rank in range(world_size)])
        text = passed_with([value.decode() for value in raw])
    store.set(go_key(wait.key), text)
    return text


class ThreadConnection:
    """One thread's connection to the store."""

    __slots__ = ("_last", "_left", "is_main", "store")

    def __init__(self, store: Store, left: deque[OpenWait]) -> None:
        self.store = store
        self.is_main = is_main_thread()
        self._left = left
        self._last: OpenWait | None = None

    def passed(self, passed_wait: OpenWait) -> None:
        """Take the barrier that the thread has just passed: all ranks are there, and have left the one before."""
        if self._last is not None:
            self._left.append(self._last)
        self._last = passed_wait


class BarrierSession:
    """The barriers of this process: the store, who this rank is, and how often each barrier was called.

    Each thread gets a connection of its own: a wait holds its connection's lock, and NCCL's watchdog uses the default
    one too. `journal` is that of an earlier session in the same store: its keys are still there, so its counts
    continue.
    """

    def __init__(
        self,
        store: Store,
        placement: Placement,
        *,
        journal: Journal | None = None,
        number: int = 1,
        machine: str | None = None,
        is_open: Callable[[], bool] | None = None,
    ) -> None:
        self.placement = placement
        self.store = store
        self.number = number
        self.is_open = is_open or self._has_group
        self.machine = this_machine() if machine is None else machine
        self.journal = journal or Journal()
        self.observer = Observer(self.machine, number)
        self.arrival_counter = ArrivalCounter(placement.rank, placement.world_size)
        self.neighbours = Neighbours(placement)
        self.deletable: deque[str] = deque()
        """Keys that no rank needs any more: the heartbeat thread deletes them."""
        self.failure_notice = b""
        """The first failure, as it stands in the store, where that ends with rank 0; empty before one."""
        self._left: deque[OpenWait] = deque()
        self._local = threading.local()

    def connection(self) -> ThreadConnection:
        """Return the calling thread's own connection; raise StoreLostError if there is no store any more."""
        connection: ThreadConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            # Counted before it connects, which may take seconds: nobody must take it for one that never comes.
            self.journal.num_threads += 1
            try:
                connection = self._local.connection = ThreadConnection(self.connect(), self._left)
            finally:
                if connection is None:
                    self.journal.num_threads -= 1
        return connection

    def connect(self, timeout_s: float | None = None) -> Store:
        """Return one more connection to the store; see the function `connect`."""
        return connect(self.store, timeout_s)

    def keys_to_delete(self) -> Iterator[str]:
        """Yield the keys that this rank deletes and that no rank needs any more."""
        rank, world_size = self.placement.rank, self.placement.world_size
        while self._left:
            passed_wait = self._left.popleft()
            yield from self.arrival_counter.keys_to_delete(passed_wait.key, passed_wait.nth)
            if rank == (passed_wait.nth + 1) % world_size:
                yield go_key(passed_wait.key)
            if passed_wait.kind is BarrierKind.EXCHANGE:
                yield value_key(passed_wait.key, rank)
        while self.deletable:
            yield self.deletable.popleft()

    def _has_group(self) -> bool:
        try:
            return dist.is_initialized() and default_store() is self.store
        except (AttributeError, KeyError, ValueError):
            # The main thread destroys it right now.
            return False


def default_store() -> Store:
    """Return the store in which the ranks joined: torch has it, but no public name for it."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001
