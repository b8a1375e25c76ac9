"""Requested faults that need torch: a meeting that is left out, one that nobody else comes to, memory that runs out.

Loaded when one strikes, on the main thread. Torch.distributed is touched for a fault alone, and put back by the call
that it was meant for.
"""

from __future__ import annotations

import inspect
import os
import resource
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpcore.probe.faults import omission
from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.probe.stack import is_own
from ddpcore.wire import FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable

LEFT_OUT = ("barrier", "all_reduce", "broadcast")
"""Functions of torch.distributed whose tensors hold something sensible also when the call is left out."""

TORCH_DIR = f"{os.path.dirname(torch.__file__)}/"  # noqa: PTH120 - to be compared with names of files

HOARD_BYTES = 256 * 2**20
"""Bytes that a rank takes before its memory "runs out": enough to be seen in the console, too little to hurt the
machine."""
CHUNK_BYTES = 16 * 2**20
IMPOSSIBLE_BYTES = 2**30
"""Bytes requested where no more is allowed; above malloc's largest threshold (32 MiB), so that it needs new address
space."""


def strike(kind: FaultKind) -> None:
    """Do one of the faults of this file to the calling rank.

    Raises RuntimeError for `OOM`, with torch's text, and for `MISMATCH` when the group's time-out has passed.
    """
    if kind is FaultKind.SKIP_BARRIER:
        leave_out_next_meeting()
    elif kind is FaultKind.MISMATCH:
        call_out_of_turn()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        exhaust_gpu(torch.cuda.current_device())
    else:
        exhaust_memory()


def leave_out_next_meeting() -> None:
    """Have the main thread leave out its next meeting with the other ranks, whichever it is. One at a time.

    What this covers, and what happens there:

    - `ddpcore.barrier` returns at once.
    - `barrier`, `all_reduce` and `broadcast` of torch.distributed return at once, however the program has imported
      them: tensors stay as they are, a work that is returned is done. Calls of ddpcore's own (the engine's agreement on
      stops, its metrics) and of torch's (`broadcast_object_list` sends a size first) are passed over: they are not the
      program's.
    - The all-reduces of one backward: DDP's reducer in C++ cannot be made to leave out one of them, but a forward under
      `no_sync` makes it leave out all of that backward. It is what a rank does that skips a bad batch.

    Other collectives are not covered, nor those of FSDP, methods of a ProcessGroup, and compiled code.
    """
    if omission.is_armed:
        return
    put_back = [_wrap_forward(), *(_wrap_function(getattr(dist.distributed_c10d, name)) for name in LEFT_OUT)]

    def disarm() -> None:
        for undo in put_back:
            undo()

    omission.arm(disarm)


def _wrap_function(function: Any) -> Callable[[], None]:
    """Put a call that may be left out into torch's own decorator, through which every import of the name goes.

    Returns what puts it back.
    """
    names = function.__code__.co_freevars
    if "func" not in names:  # a torch that decorates otherwise
        return lambda: None
    cell = function.__closure__[names.index("func")]
    original = cell.cell_contents
    signature = inspect.signature(original)

    def unless_left_out(*args: Any, **options: Any) -> Any:
        # Above this frame is torch's decorator, and above that the caller.
        caller = sys._getframe(2).f_code.co_filename  # noqa: SLF001 - the documented way
        if is_own(caller) or caller.startswith(TORCH_DIR) or not omission.take():
            return original(*args, **options)
        given = signature.bind(*args, **options).arguments
        return _done_work(given.get("tensor")) if given.get("async_op", False) else None

    def put_back() -> None:
        if cell.cell_contents is unless_left_out:  # else somebody has wrapped it since: this one lets all through now
            cell.cell_contents = original

    cell.cell_contents = unless_left_out
    return put_back


def _wrap_forward() -> Callable[[], None]:
    """Let DDP's next forward that is to be synchronised be one that is not; return what puts DDP's own back."""
    original = DistributedDataParallel.forward

    def unless_left_out(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.require_backward_grad_sync and omission.take()):
            return original(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]
        with self.no_sync():
            return original(self, *inputs, **kwargs)  # type: ignore[no-untyped-call]

    def put_back() -> None:
        if DistributedDataParallel.forward is unless_left_out:  # as above
            DistributedDataParallel.forward = original  # type: ignore[method-assign]

    DistributedDataParallel.forward = unless_left_out  # type: ignore[method-assign]
    return put_back


def call_out_of_turn() -> None:
    """Call a collective of the default group that the others do not call; blocks, as a rule until the job is ended.

    A barrier, or where the program has called barriers of late, a reduction to this rank. It is another operation and
    not another size, since of two sizes gloo aborts the rank with the smaller one.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        _print("fault mismatch: nothing is done, there is no process group with other ranks")
        return
    if not any("barrier" in entry.op for entry in FlightRecorder().dump().entries):
        dist.barrier()
        return
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    dist.reduce(torch.zeros(1, device=device), dst=dist.get_rank())


def exhaust_memory() -> None:
    """Take some memory of the host, then let an allocation of torch fail by torch's RuntimeError.

    The process takes `HOARD_BYTES` at most, or a quarter of what is free. For the one allocation that is to fail it may
    have no more address space than it has; then all is as before.
    """
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_chunks = min(HOARD_BYTES, free_bytes // 4) // CHUNK_BYTES
    hoard = [torch.ones(CHUNK_BYTES, dtype=torch.uint8) for _ in range(num_chunks)]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes(), limits[1]))
    try:
        hoard.append(torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8))
        _print("fault oom: nothing is done, the allocator had room for it")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        hoard.clear()  # the exception's frames would keep it


def exhaust_gpu(device: int) -> None:
    """Take memory of a GPU until torch may have no more and raises OutOfMemoryError.

    The cap is `HOARD_BYTES` above what torch's allocator has reserved; afterwards it is what it was.
    """
    before_frac = torch.cuda.get_per_process_memory_fraction(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    cap_frac = (torch.cuda.memory_reserved(device) + HOARD_BYTES) / total_bytes
    torch.cuda.set_per_process_memory_fraction(min(before_frac, cap_frac), device)
    hoard = []
    try:
        while True:
            hoard.append(torch.ones(CHUNK_BYTES, dtype=torch.uint8, device=f"cuda:{device}"))
    finally:
        torch.cuda.set_per_process_memory_fraction(before_frac, device)
        hoard.clear()  # the exception's frames would keep it


def _done_work(tensor: torch.Tensor | None) -> Any:
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([] if tensor is None else [tensor])
    # No stub of torch's knows it; torch's own tests make works of it.
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]  # noqa: SLF001


def _address_space_bytes() -> int:
    """Return the size of this process's address space. Source: proc_pid_statm(5)."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - one line
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _print(text: str) -> None:
    print(f"rankdeck: {text}", file=sys.stderr, flush=True)  # noqa: T201 - who asked for it looks at the logs
