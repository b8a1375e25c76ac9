"""This process's part in the gates of one process group: made at the first use of a gate, or by `announce`."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpcore.barriers.gate_keys import go_key, value_key
from ddpcore.barriers.gate_store import connect, store_lost
from ddpcore.barriers.heart import Heart
from ddpcore.barriers.journal import Journal
from ddpcore.barriers.observer import Observer
from ddpcore.barriers.process_table import this_machine
from ddpcore.barriers.tally import Tally
from ddpcore.barriers.wait_marks import is_main_thread
from ddpcore.barriers.whereabouts import GateKind
from ddpcore.errors import BarrierUseError
from ddpcore.placement import current_placement
from ddpcore.process_group.neighbours import Neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.journal import OpenWait
    from ddpcore.placement import Placement

_USED_KEY = "rankdeck/used by"


class Lane:
    """One thread's way through gates.

    Attributes:
        store: Its connection.
        is_main: Whether it is the main thread, whose waits are told.
    """

    __slots__ = ("_last", "_left", "is_main", "store")

    def __init__(self, store: Store, left: deque[OpenWait]) -> None:
        self.store = store
        self.is_main = is_main_thread()
        self._left = left
        self._last: OpenWait | None = None

    def passed(self, gate: OpenWait) -> None:
        """Take the gate that the thread has just passed: everybody has come to it, and so has left the one before."""
        if self._last is not None:
            self._left.append(self._last)
        self._last = gate


class GateSession:
    """All that gates share in this process.

    Args:
        store: In which the ranks have met; every thread gets a connection of its own, since a wait holds its
            connection's lock, and NCCL's watchdog uses the default one too.
        placement: This rank's.
        journal: Of an earlier session in the same store, whose counts go on: its keys are still there.
        number: The n-th session in this store.
        machine: See `process_table.this_machine`.
        is_open: Says whether the process group is still there.
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
        self.tally = Tally(placement.rank, placement.world_size)
        self.neighbours = Neighbours(placement)
        self.deletable: deque[str] = deque()
        """Keys that nobody needs any more: the heart deletes them."""
        self.failure_notice = b""
        """Who has failed first, as it stands in the store, where that ends with rank 0; empty while nobody has."""
        self._left: deque[OpenWait] = deque()
        self._local = threading.local()
        self.heart = Heart(self)

    def lane(self) -> Lane:
        """Return the calling thread's own way.

        Raises:
            StoreLostError: There is no store any more.
        """
        lane: Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            # Counted before it connects, which may take seconds: nobody must take it for one that never comes.
            self.journal.num_threads += 1
            try:
                lane = self._local.lane = Lane(self.connect(), self._left)
            finally:
                if lane is None:
                    self.journal.num_threads -= 1
        return lane

    def connect(self, timeout_s: float | None = None) -> Store:
        """Return one more connection to the store.

        Args:
            timeout_s: How long to try; by default as long as the group's time-out.

        Raises:
            StoreLostError: There is no store any more.
        """
        return connect(self.store, timeout_s)

    def keys_to_delete(self) -> Iterator[str]:
        """Yield the keys that this rank is to delete and that nobody needs any more."""
        rank, world_size = self.placement.rank, self.placement.world_size
        while self._left:
            gate = self._left.popleft()
            yield from self.tally.keys_to_delete(gate.key, gate.nth)
            if rank == (gate.nth + 1) % world_size:
                yield go_key(gate.key)
            if gate.kind is GateKind.EXCHANGE:
                yield value_key(gate.key, rank)
        while self.deletable:
            yield self.deletable.popleft()

    def _has_group(self) -> bool:
        try:
            return dist.is_initialized() and default_store() is self.store
        except (AttributeError, KeyError, ValueError):
            # The main thread destroys it right now.
            return False


_session: GateSession | None = None
_last_journal: Journal | None = None
_inherited: list[GateSession | Store] = []
"""What a forked child has from its parent and must neither use nor destroy."""


def current_session() -> GateSession | None:
    """Return the session of the present process group; None without one, or alone in it.

    Raises:
        BarrierUseError: There is a group, but not for this process, or without a store.
        StoreLostError: Its store is gone.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = default_store()
    session = _session
    return session if session is not None and session.store is store else _open(store)


def end_session() -> None:
    """Say goodbye: whoever waits for this rank learns that it never comes. Blocks at most half a second."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.heart.end()


def default_store() -> Store:
    """Return the store in which the ranks met: torch has it, but no public name for it."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def _open(store: Store) -> GateSession:
    global _session, _last_journal
    if any(store is known for known in _inherited):
        raise BarrierUseError(
            f"process {os.getpid()} is a forked child (of a DataLoader?) of rank {dist.get_rank()}: "
            "only the process that has opened the group takes part in barriers"
        )
    if store is None:
        raise BarrierUseError(
            f"backend {dist.get_backend()!r} has no store to meet in: open the group with gloo or nccl"
        )
    end_session()
    placement = current_placement()
    used_key = f"{_USED_KEY} {placement.rank}"
    try:
        is_used = store.check([used_key])
        number = store.add(used_key, 1)
        Neighbours(placement).tell(store)
        session = GateSession(store, placement, journal=_last_journal if is_used else None, number=number)
        session.heart.start(store)
    except dist.DistNetworkError as error:
        raise store_lost("where ranks meet") from error
    _session, _last_journal = session, session.journal
    return session


def _forget() -> None:
    """Leave the parent's session to the parent, in a forked child."""
    global _session  # noqa: PLW0603 - see _open
    if _session is not None:
        _inherited.append(_session)
    _session = None
    if dist.is_available() and dist.is_initialized():
        _inherited.append(default_store())


os.register_at_fork(after_in_child=_forget)
atexit.register(end_session)
