"""Calls to the job's store that gates are made of."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpcore.barriers.gate_keys import go_key, passed_with, value_key
from ddpcore.barriers.whereabouts import GateKind
from ddpcore.errors import StoreLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.journal import OpenWait

MAX_WAIT_S = 1_000_000.0
"""A store's wait counts milliseconds in 31 bits (torch 2.13)."""


def connect(store: Store, timeout_s: float | None = None) -> Store:
    """Return a connection of its own to a store.

    Args:
        store: Any connection to it; threads may be using it.
        timeout_s: How long to try, about; by default as long as the group's time-out, which is right where many
            thousands connect at once.

    Raises:
        StoreLostError: There is no store any more.
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
    """Return the error of a store that does not answer."""
    host = "torchrun on the first node" if has_agent_store() else "rank 0, which hosts it,"
    return StoreLostError(f"the job's store does not answer {where}: {host} has ended; start the job anew")


def has_agent_store() -> bool:
    """Say whether torchrun's agent hosts the ranks' store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def await_go(store: Store, wait: OpenWait) -> bool:
    """Wait until a gate is decided, or the time is over, and say whether it is decided.

    Source: a TCPStore whose time is over writes two warnings to stderr and looks up a host name for them, which takes
    up to 5 s where DNS does not answer (torch 2.13, `SocketImpl::waitForInput`).
    """
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
    """Decide a gate to which everybody has come; return what stands at it."""
    text = ""
    if wait.kind is GateKind.EXCHANGE:
        raw = store.multi_get([value_key(wait.key, rank) for rank in range(world_size)])
        text = passed_with([value.decode() for value in raw])
    store.set(go_key(wait.key), text)
    return text
