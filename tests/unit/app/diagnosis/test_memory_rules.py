from __future__ import annotations

import pytest

from agent.wire.reports import ExitReport
from app.diagnosis.memory import is_killed_by_kernel, is_of_gpu, is_out_of_memory

LOADER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: NCCL error in: NCCLUtils.cpp:77\nLast error:\nCuda failure 'out of memory'",
        "RuntimeError: Cuda failure 2 'out of memory'",
        "RuntimeError: the loader failed\nOSError: [Errno 12] Cannot allocate memory",
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


@pytest.mark.parametrize(
    ("end", "is_it"),
    [
        (ExitReport(signal=9, oom_kills=1), True),
        (ExitReport(signal=9), False),
        (ExitReport(signal=11, oom_kills=1), False),
        (ExitReport(code=1, error=LOADER, oom_kills=2), True),
        (ExitReport(code=1, error=LOADER), False),
        (ExitReport(code=1, last_line="train.py: CUDA out of memory. Tried to allocate 2 GiB"), True),
        (ExitReport(code=1, error="ValueError: out of range", oom_kills=1), False),
        (ExitReport(code=1, error="RuntimeError: the memory of GPUs is fine"), False),
        (None, False),
    ],
)
def test_the_kernel_s_hand_is_told_from_others(end: ExitReport | None, is_it: bool) -> None:
    assert is_out_of_memory(end) is is_it


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB", True),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has 64 GiB", True),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: Cuda failure 2 'out of memory'", True),
        ("RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", False),
        ("MemoryError", False),
        ("ibv_reg_mr: fine\nOSError: [Errno 12] Cannot allocate memory", False),
    ],
)
def test_a_gpu_s_memory_is_told_from_the_host_s(error: str, is_it: bool) -> None:
    end = ExitReport(code=1, error=error)
    assert (is_out_of_memory(end), is_of_gpu(end)) == (True, is_it)


def test_memory_that_a_network_card_may_not_register_is_no_want_of_memory() -> None:
    error = "RuntimeError: NCCL error\nLast error:\nCall to ibv_reg_mr failed with error Cannot allocate memory"
    assert not is_out_of_memory(ExitReport(code=1, error=error))
