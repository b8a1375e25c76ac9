"""Barriers with a name: they say who is missing.

A barrier here is a gate in the job's store, not a collective: it costs a tenth of `dist.barrier()` on gloo, has a
time-out of its own, works the same beside NCCL, and every rank that gives up names the ranks that did not come. It does
not wait for work queued on an accelerator.

Each rank sets a key of its own and waits for everybody's:

    rankdeck/barrier/<label>/<n-th call of this label>/<rank>

Keys carry the label and its own count, so that ranks which have called different numbers of other barriers still meet.
Once a rank has passed a gate, everybody has left the gates before it: at the next one it deletes its keys of those.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from ddpcore import probe
from ddpcore.errors import BarrierTimeoutError, StoreLostError
from ddpcore.samples import BarrierMark

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PREFIX = "rankdeck/barrier"


class _Gate:
    """This process's side of all gates of one store.

    Args:
        store: A connection of its own: a wait holds its store's lock, and NCCL's watchdog uses the default one too.
        rank: This process's global rank.
        world_size: Ranks of the job.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._calls_of_label: Counter[str] = Counter()
        self._own_keys: list[str] = []
        self._deletable_keys: list[str] = []

    def pass_through(self, label: str, timeout_s: float, value: str | None = None) -> list[str]:
        """Wait for everybody; return each rank's value if this rank brings one, else nothing."""
        self._calls_of_label[label] += 1
        gate = f"{_PREFIX}/{label}/{self._calls_of_label[label]}"
        own_key = f"{gate}/{self._rank}"
        earlier_keys, self._own_keys = self._own_keys, [*self._own_keys, own_key]
        try:
            self._store.set(own_key, value or "")
            # Between arriving and waiting, so that the round trip holds up nobody else.
            for key in self._deletable_keys:
                self._store.delete_key(key)
            self._deletable_keys = []
            keys = [f"{gate}/{rank}" for rank in range(self._world_size)]
            self._wait(keys, label, timeout_s)
            values = [] if value is None else [raw.decode() for raw in self._store.multi_get(keys)]
        except dist.DistNetworkError as error:
            raise _store_lost(label) from error
        self._own_keys = [own_key]
        self._deletable_keys = earlier_keys
        return values

    def _wait(self, keys: list[str], label: str, timeout_s: float) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:
                raise BarrierTimeoutError(label, missing, timeout_s) from error


_gate: _Gate | None = None
_gate_of: Store | None = None
_num_calls = 0


def barrier(label: str, timeout_s: float = 1800.0) -> None:
    """Wait until every rank has called `barrier` with this label as often as this one has.

    Main thread; blocks. Without a process group, or alone in it, it returns at once.

    Args:
        label: What people read in the console and in errors: the same on every rank, and one for a place in the
            program, not one for each step.
        timeout_s: How long to wait for the others.

    Raises:
        BarrierTimeoutError: Some ranks did not come; it names them.
        StoreLostError: The job's store is gone.
    """
    _meet(label, timeout_s, None)


def exchange(label: str, value: str, timeout_s: float = 1800.0) -> list[str]:
    """Meet as at a `barrier`, and return what every rank has brought, in the order of ranks.

    For short texts that ranks must agree on. Main thread; blocks. Without a process group it returns `[value]`.

    Args:
        label: As of `barrier`; the two count their calls together.
        value: This rank's text.
        timeout_s: How long to wait for the others.

    Raises:
        BarrierTimeoutError: Some ranks did not come; it names them.
        StoreLostError: The job's store is gone.
    """
    return _meet(label, timeout_s, value)


def _meet(label: str, timeout_s: float, value: str | None) -> list[str]:
    global _num_calls  # noqa: PLW0603 - counts the calls of this process
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [] if value is None else [value]
    gate = _current_gate(label)
    _num_calls += 1
    mark = BarrierMark(label, _num_calls, time.monotonic(), is_over=False)
    probe.marks.barrier = mark
    try:
        return gate.pass_through(label, timeout_s, value)
    finally:
        probe.marks.barrier = mark._replace(is_over=True)


def _current_gate(label: str) -> _Gate:
    """Return the gate of the present process group; a new group has a new store and begins anew."""
    global _gate, _gate_of
    store = _default_store()
    if _gate is None or _gate_of is not store:
        clone = getattr(store, "clone", None)
        try:
            own_connection = clone() if clone else store
        except dist.DistNetworkError as error:
            raise _store_lost(label) from error
        _gate, _gate_of = _Gate(own_connection, dist.get_rank(), dist.get_world_size()), store
    return _gate


def _default_store() -> Store:
    """Return the store in which the ranks met: torch has it, but no public name for it."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def _store_lost(label: str) -> StoreLostError:
    return StoreLostError(
        f"the job's store does not answer at barrier {label!r}: "
        "torchrun on the first node has ended; start the job anew"
    )
