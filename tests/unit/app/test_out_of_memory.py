from __future__ import annotations

import pytest

from agent.wire.reports import ExitReport
from app.out_of_memory import is_killed_by_kernel, is_of_gpu, is_out_of_memory

LOADER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory",
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc': std::bad_alloc",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_what_libraries_say_of_it_is_known(error: str) -> None:
    end = ExitReport(code=1, error=error)
    assert is_out_of_memory(end)
    assert not is_killed_by_kernel(end)
    assert is_of_gpu(end) == ("CUDA" in error)


@pytest.mark.parametrize(
    ("end", "is_it"),
    [
        (ExitReport(signal=9, oom_kills=1), True),
        (ExitReport(signal=9), False),
        (ExitReport(signal=11, oom_kills=1), False),
        (ExitReport(code=1, error=LOADER, oom_kills=2), True),
        (ExitReport(code=1, error=LOADER), False),
        (ExitReport(code=1, error="ValueError: out of range", oom_kills=1), False),
        (ExitReport(code=1, error="RuntimeError: the memory of GPUs is fine"), False),
        (None, False),
    ],
)
def test_the_kernel_s_hand_is_told_from_others(end: ExitReport | None, is_it: bool) -> None:
    assert is_out_of_memory(end) is is_it
