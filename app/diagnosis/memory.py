"""Whether a rank ran out of memory, by its own exception or killed by the kernel, and which rank is about to.

A node reports how the memory of its ranks grows, and whether a limit is near (`agent.node_state.memory_growth`): it
measures all the time, with or without a console. Here ranks that grow alike become one verdict.
"""

from __future__ import annotations

import re
from signal import SIGKILL
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from agent.wire.ends import Sender
from agent.wire.machine import GrowthReport, LimitKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.reports import ExitReport
    from app.model.job_model import JobModel

MAX_ASKED = 64
"""Limit of ranks whose growth is read at a time: where all of these leak alike, so do the others whose memory grows."""
ALIKE = 0.5
"""Fraction of the nearest rank's growth from which another rank leaks alike."""

_OWN_TEXT = re.compile(
    r"\bOutOfMemoryError\b|\bCUDA out of memory\b|\bCUDA (?:driver )?error: out of memory\b"
    r"|Cuda failure (?:\d+ )?'out of memory'"
    r"|\bDefaultCPUAllocator: can't allocate\b|(?:\b|_Array)MemoryError\b"
    r"|(?m:^(?!.*\bibv_).*\bCannot allocate memory\b)"
    r"|\bstd::bad_alloc\b|\bCU(?:BLAS|DNN)_STATUS_ALLOC_FAILED\b"
)
"""Out-of-memory messages of torch, Python, C++ and the kernel."""
_KILLED_CHILD = re.compile(r"\bDataLoader worker .*(?:killed by signal: Killed|exited unexpectedly)")
"""Source: torch/utils/data/_utils/signal_handling.py and dataloader.py."""
_GPU_TEXT = re.compile(r"\bCUDA|\bCuda|\bCUBLAS|\bCUDNN|\bGPU\b|\b(HIP|XPU) out of memory\b")


def is_out_of_memory(end: ExitReport | None) -> bool:
    """Return whether a rank, or a process that it needs, ran out of memory."""
    return end is not None and (_OWN_TEXT.search(end.error_text) is not None or is_killed_by_kernel(end))


def is_killed_by_kernel(end: ExitReport) -> bool:
    """Return whether the kernel, or oomd, killed the rank or its loader while the node ran out of memory."""
    if not end.oom_kills and end.facts.sender is not Sender.OOMD:
        return False
    return end.signal == SIGKILL or _KILLED_CHILD.search(end.error_text) is not None


def is_of_gpu(end: ExitReport) -> bool:
    """Return whether it was a GPU's memory."""
    return _GPU_TEXT.search(end.error_text) is not None


class Growth(msgspec.Struct, frozen=True):
    """Memory growth of ranks that leak alike."""

    ranks: tuple[int, ...]
    nearest: int
    """The rank that comes to its limit first."""
    report: GrowthReport
    """Report of the nearest rank."""
    lowest_hz: float
    """Bytes a second of the rank that grows least, and of the one that grows most."""
    highest_hz: float

    @property
    def is_of_gpu(self) -> bool:
        """Whether it is a GPU's memory."""
        return self.report.limit.kind is LimitKind.GPU


class _Grown(NamedTuple):
    rank: int
    report: GrowthReport


def near_growths(job: JobModel, is_alive: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[Growth]:
    """Return which live ranks are near a limit of their memory, those that leak alike together."""
    growing = np.flatnonzero(job.is_growing & is_alive)
    if not len(growing):
        return []
    asked = growing[:: -(-len(growing) // MAX_ASKED)].tolist()
    found = [_Grown(rank, report) for rank in asked for report in growths_of(job, rank)]
    together = [_together(found, of_gpu=of_gpu) for of_gpu in (False, True)]
    return [
        msgspec.structs.replace(growth, ranks=tuple(growing.tolist())) if list(growth.ranks) == asked else growth
        for growth in together
        if growth is not None
    ]


def growths_of(job: JobModel, rank: int) -> Sequence[GrowthReport]:
    """Return how a rank's memory grows, or grew before it ended."""
    worker = job.worker(rank)
    return () if worker is None or worker.memory is None else worker.memory.growths


def last_growth(job: JobModel, ranks: Sequence[int], end: ExitReport) -> Growth | None:
    """Return the memory growth of ranks that ran out of it, or were killed by SIGKILL; None where it did not grow."""
    found = [
        _Grown(rank, msgspec.structs.replace(report, is_near=True))
        for rank in ranks[:MAX_ASKED]
        for report in growths_of(job, rank)
    ]
    return _together(found, of_gpu=is_out_of_memory(end) and is_of_gpu(end))


def _together(found: Sequence[_Grown], *, of_gpu: bool) -> Growth | None:
    alike = [grown for grown in found if (grown.report.limit.kind is LimitKind.GPU) == of_gpu]
    near = [grown for grown in alike if grown.report.is_near]
    if not near:
        return None
    nearest = min(near, key=lambda grown: grown.report.remaining_s)
    least_hz = ALIKE * nearest.report.rate_bytes_hz
    named = [grown for grown in alike if grown.report.is_near or grown.report.rate_bytes_hz >= least_hz]
    rates_hz = [grown.report.rate_bytes_hz for grown in named]
    return Growth(
        ranks=tuple(sorted({grown.rank for grown in named})),
        nearest=nearest.rank,
        report=nearest.report,
        lowest_hz=min(rates_hz),
        highest_hz=max(rates_hz),
    )
