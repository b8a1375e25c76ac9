"""This process's barrier session: opened at the first use of a barrier, or by `announce`."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpcore.barriers.barrier_session import BarrierSession, default_store, store_lost
from ddpcore.barriers.heartbeat import HeartbeatThread
from ddpcore.errors import BarrierUseError
from ddpcore.placement import current_placement
from ddpcore.process_group.machine import Neighbours

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.journal import Journal

_USED_KEY = "rankdeck/used by"

_session: BarrierSession | None = None
_heartbeat: HeartbeatThread | None = None
_last_journal: Journal | None = None
_inherited: list[BarrierSession | Store] = []
"""Sessions that a forked child has from its parent and must neither use nor destroy."""


def current_session() -> BarrierSession | None:
    """Return the session of the present process group; None without one, or alone in it.

    Raises BarrierUseError if the group is not this process's or has no store, StoreLostError if its store is gone.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = default_store()
    session = _session
    return session if session is not None and session.store is store else _open(store)


def end_session() -> None:
    """End the session: ranks that wait for this one get an error. Blocks at most half a second."""
    global _session, _heartbeat
    heartbeat_thread, _session, _heartbeat = _heartbeat, None, None
    if heartbeat_thread is not None:
        heartbeat_thread.end()


def _open(store: Store) -> BarrierSession:
    global _session, _heartbeat, _last_journal
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
        Neighbours(placement).publish(store)
        session = BarrierSession(store, placement, journal=_last_journal if is_used else None, number=number)
        heartbeat_thread = HeartbeatThread(session)
        heartbeat_thread.start(store)
    except dist.DistNetworkError as error:
        raise store_lost("where ranks meet") from error
    _session, _heartbeat, _last_journal = session, heartbeat_thread, session.journal
    return session


def _forget() -> None:
    """Leave the parent's session to the parent, in a forked child."""
    global _session, _heartbeat  # noqa: PLW0603 - see _open
    if _session is not None:
        _inherited.append(_session)
    _session = _heartbeat = None
    if dist.is_available() and dist.is_initialized():
        _inherited.append(default_store())


os.register_at_fork(after_in_child=_forget)
atexit.register(end_session)
