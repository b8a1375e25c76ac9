"""Whether a rank ended for want of memory: by its own exception, or by the kernel's hand."""

from __future__ import annotations

import re
from signal import SIGKILL
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.wire.reports import ExitReport

_OWN_WORDS = re.compile(
    r"\bOutOfMemoryError\b|\bCUDA out of memory\b|\bCUDA (?:driver )?error: out of memory\b"
    r"|Cuda failure (?:\d+ )?'out of memory'"
    r"|\bDefaultCPUAllocator: can't allocate\b|(?:\b|_Array)MemoryError\b"
    r"|(?m:^(?!.*\bibv_).*\bCannot allocate memory\b)"
    r"|\bstd::bad_alloc\b|\bCU(?:BLAS|DNN)_STATUS_ALLOC_FAILED\b"
)
"""What torch, Python, C++ and the kernel call it."""
_KILLED_CHILD = re.compile(r"\bDataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)")
"""Source: torch/utils/data/_utils/signal_handling.py and dataloader.py."""
_GPU_WORDS = re.compile(r"\bCUDA|\bCuda|\bCUBLAS|\bCUDNN|\bGPU\b")


def is_out_of_memory(end: ExitReport | None) -> bool:
    """Return whether a rank, or a process that it needs, wanted memory that was not there."""
    return end is not None and (_OWN_WORDS.search(end.words) is not None or is_killed_by_kernel(end))


def is_killed_by_kernel(end: ExitReport) -> bool:
    """Return whether the kernel took the rank's life, or its loader's, while the node ran out of memory."""
    if not end.oom_kills:
        return False
    return end.signal == SIGKILL or _KILLED_CHILD.search(end.words) is not None


def is_of_gpu(end: ExitReport) -> bool:
    """Return whether it was a GPU's memory."""
    return _GPU_WORDS.search(end.words) is not None
