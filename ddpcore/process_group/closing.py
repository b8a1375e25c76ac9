"""Leaves a process group without hanging, whatever state it and the other ranks are in.

Three things in torch 2.13 can hang or kill a rank that closes its group:

- Gloo's destructor waits for collectives that others have never joined, up to the group's time-out. It runs when the
  last reference goes: in `destroy_process_group`, or with a DDP model at the end of the program. A group with such a
  collective gets a reference that never goes.
- NCCL's shutdown may wait for kernels that never end: then the communicators are aborted.
- A gloo thread that lets go of its last collective needs the interpreter. Where that has already ended, the rank is
  aborted ("terminate called without an active exception"): at exit such threads get a moment.

Source: ProcessGroupGloo::~ProcessGroupGloo and runLoop; https://github.com/pytorch/pytorch/issues/190489 and
https://github.com/pytorch/pytorch/pull/179291.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from ddpcore import placement
from ddpcore.barriers import named_barriers
from ddpcore.errors import BarrierTimeoutError, DdpcoreError
from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.process_group.machine import comes_to_rest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch._C._distributed_c10d import Store

MEETING = "close of the process group"
"""Label of the barrier, as the console shows it."""

REST_S = 30.0
"""Seconds for what is queued on the device, once all ranks have called the close."""

DESTROY_S = 10.0
"""Seconds for torch to destroy the group; it takes milliseconds."""

PENDING_S = 0.2
"""Seconds for a collective to be recorded as done: 1 ms, with more ranks than cores 20 ms."""

GOODBYE_S = 5.0
"""Seconds that the host of the store waits for the others to leave: more than two ticks of
`ddpcore.barriers.heartbeat`, in which they read there who has failed."""

EXIT_GRACE_S = 0.1
"""Seconds between the close and the interpreter's end, where gloo's threads are still there."""

POLL_S = 0.002

_GLOO_THREAD = "pt_gloo_runloop"

logger = logging.getLogger(__name__)


class GroupLinks(NamedTuple):
    """Facts of an open group that closing needs."""

    rank: int
    world_size: int
    device: torch.device
    backends: frozenset[str]
    store: Store | None
    """Store of the group's generation; None where the backend has none."""
    hosts_store: bool = False


def close_group(links: GroupLinks, *, has_failed: bool, timeout_s: float, stays: bool = False) -> None:
    """Meet the others, destroy the group and let go of the store.

    Main thread. Blocks at most `timeout_s` for the others and some ten seconds more; never raises for what others do.
    With `has_failed` it waits for nobody and aborts what is under way. With `stays` a rank that hosts the store keeps
    it for a moment although it has failed.
    """
    has_met = not has_failed and _meet(links, timeout_s)
    if has_met and not comes_to_rest(links.device, REST_S):
        logger.warning(
            "rank %d: %s is still busy %g s after all ranks have come to the close, in a collective that not all have "
            "called or in a kernel without end: aborting it",
            links.rank,
            links.device,
            REST_S,
        )
        has_met = False
    named_barriers.leave()
    placement.forget()
    if dist.is_initialized():
        _destroy(links, aborts=not has_met)
    if links.store is not None:
        _announce_leaving(links, links.store, waits=has_met or stays)
    if _has_gloo_threads():
        atexit.register(_let_gloo_settle, time.monotonic())


def _meet(links: GroupLinks, timeout_s: float) -> bool:
    """Return whether all ranks have called the close."""
    if links.store is None or not dist.is_initialized():
        return dist.is_initialized()
    try:
        named_barriers.barrier(MEETING, timeout_s)
    except BarrierTimeoutError as error:
        logger.warning("rank %d closes its process group alone: %s", links.rank, error)
        return False
    except (DdpcoreError, RuntimeError) as error:
        # Torch's errors of a lost store are RuntimeErrors.
        logger.warning("rank %d closes its process group alone: %s", links.rank, str(error).partition("\n")[0])
        return False
    return True


def _destroy(links: GroupLinks, *, aborts: bool) -> None:
    groups = list(dist.distributed_c10d._world.pg_names)  # noqa: SLF001 - the only list of all groups
    if "gloo" in links.backends and _has_pending():
        logger.warning("rank %d leaves a collective behind that not all ranks have joined", links.rank)
        _keep_for_ever(groups)
    abort: Callable[[], None] | None = getattr(dist.distributed_c10d, "_abort_process_group", None)
    use_abort = aborts and "nccl" in links.backends and abort is not None
    what = abort if use_abort and abort is not None else dist.destroy_process_group
    work = _Destruction(what)
    work.start()
    work.join(DESTROY_S)
    if work.is_alive():
        logger.warning("rank %d: torch has not destroyed its process group in %g s", links.rank, DESTROY_S)
        _keep_for_ever(groups)
    elif work.error is not None:
        level = logging.INFO if aborts else logging.WARNING
        logger.log(level, "rank %d: destroying the process group: %s", links.rank, work.error)


class _Destruction(threading.Thread):
    def __init__(self, destroy: Callable[[], None]) -> None:
        super().__init__(name="rankdeck-destroy", daemon=True)
        self._destroy = destroy
        self.error: RuntimeError | ValueError | None = None

    def run(self) -> None:
        """Destroy, and keep torch's error."""
        try:
            self._destroy()
        except (RuntimeError, ValueError) as error:
            self.error = error


def _has_pending() -> bool:
    """Return whether a collective of this rank stays unfinished."""
    recorder = FlightRecorder()
    deadline_s = time.monotonic() + PENDING_S
    while any(enqueued > completed for enqueued, completed in recorder.counters().values()):
        if time.monotonic() > deadline_s:
            return True
        time.sleep(POLL_S)
    return False


def _keep_for_ever(groups: list[dist.ProcessGroup]) -> None:
    """Take references that are never released: not even the interpreter's end runs the groups' destructors."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _announce_leaving(links: GroupLinks, store: Store, *, waits: bool) -> None:
    """Leave the store: whoever comes next finds it closed, and its host stays until all have left.

    A rendezvous file stays too. Removed and made again, it would be another file under the feet of every FileStore that
    still exists in some process, and the next one that is destroyed there would read it from the middle, for ever, with
    file and interpreter locked (torch 2.13, FileStore.cpp: refresh, File::read).
    """
    try:
        if store.add("gone", 1) == links.world_size:
            store.set("closed", "")
        elif waits and links.hosts_store:
            deadline_s = time.monotonic() + GOODBYE_S
            while store.add("gone", 0) < links.world_size and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
    except RuntimeError as error:
        # Torch's errors are RuntimeErrors: the store has gone first, and with it whoever could hear.
        logger.debug("rank %d: %s", links.rank, error)


def _has_gloo_threads() -> bool:
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            if task.read_text().strip() == _GLOO_THREAD:
                return True
        except OSError:
            continue
    return False


def _let_gloo_settle(closed_s: float) -> None:
    time.sleep(max(0.0, closed_s + EXIT_GRACE_S - time.monotonic()))
