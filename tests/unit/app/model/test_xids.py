"""Which Xid errors explain how a rank ended: by what they mean, when they came, and what the rank reports itself."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agent.wire.ends import EndFacts, GpuFault
from agent.wire.machine import GpuCondition, Xid
from agent.wire.reports import ExitReport
from app.model.xids import BROKEN_XIDS, XIDS, Action, Blame, gpu_cause, is_gpu_at_fault

SIGABRT, SIGKILL, SIGTERM, SIGINT, SIGSEGV = 6, 9, 15, 2, 11
CUDA = ExitReport(code=1, error="torch.AcceleratorError: CUDA error: unspecified launch failure")
ABORTED = ExitReport(signal=SIGABRT)
TIMED_OUT = ExitReport(
    signal=SIGABRT,
    error="[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 12000 milliseconds before "
    "timing out.",
)


def with_xids(end: ExitReport, *xids: Xid, condition: GpuCondition = GpuCondition.OK) -> ExitReport:
    return replace(end, facts=EndFacts(gpu=GpuFault(3, condition, list(xids))))


def codes(end: ExitReport) -> list[int] | None:
    cause = gpu_cause(end)
    return None if cause is None else [xid.code for xid in cause.xids]


@pytest.mark.parametrize(
    ("end", "xid", "is_cause"),
    [
        (CUDA, Xid(31, 1, 0.2), True),
        (CUDA, Xid(31, 1, 61.0), False),  # it would have been raised long ago
        (CUDA, Xid(31, 1, 0.0), False),  # logged as the process was taken down
        (CUDA, Xid(43, 1, 0.2), True),
        (CUDA, Xid(45, 1, 0.2), False),
        (CUDA, Xid(63, 1, 0.2), False),
        (CUDA, Xid(92, 1, 0.2), False),
        (CUDA, Xid(79, 1, 0.0), True),
        (CUDA, Xid(79, 1, 1800.0), True),  # a process group's timeout ends what hangs
        (CUDA, Xid(79, 1, 3601.0), False),
        (CUDA, Xid(64, 1, 9.0), True),
        (CUDA, Xid(64, 1, 3000.0), False),  # its GPU computed on
        *((ExitReport(signal=SIGTERM), Xid(code, 1, 3000.0), False) for code in (64, 156, 157)),
        (CUDA, Xid(999, 1, 1.0), True),
        (CUDA, Xid(999, 1, 0.0), False),
        (ABORTED, Xid(31, 1, 0.2), True),
        (ExitReport(signal=SIGSEGV), Xid(79, 1, 0.2), True),
        (ExitReport(signal=SIGTERM), Xid(119, 1, 600.0), True),
        (ExitReport(signal=SIGKILL), Xid(119, 1, 600.0), True),
        (ExitReport(signal=SIGKILL), Xid(31, 1, 0.2), False),  # no kernel sends it
        (ExitReport(signal=SIGTERM), Xid(94, 1, 0.2), False),
        (ExitReport(signal=SIGTERM, error=CUDA.error), Xid(94, 1, 0.2), True),
        (ExitReport(signal=SIGINT), Xid(79, 1, 0.2), False),
        (ExitReport(code=1, error="KeyError: 'labels'"), Xid(79, 1, 0.2), False),
        (ExitReport(code=1, last_line="no such file"), Xid(79, 1, 0.2), False),
        (ExitReport(code=1, error="RuntimeError: [Rank 3] Watchdog caught collective"), Xid(79, 1, 700.0), True),
        (TIMED_OUT, Xid(79, 1, 12.0), True),
        (TIMED_OUT, Xid(74, 1, 12.0), True),  # a collective hangs over a link
        (TIMED_OUT, Xid(94, 1, 12.0), False),  # it would have been raised; another process of that GPU has it
        (TIMED_OUT, Xid(999, 1, 12.0), False),
        (ExitReport(code=1, error="CUDA error: the launch timed out and was terminated"), Xid(8, 1, 0.2), True),
        (ExitReport(code=1), Xid(79, 1, 0.2), True),
        (ExitReport(code=0), Xid(79, 1, 0.2), False),
        (ExitReport(signal=SIGKILL, oom_kills=1), Xid(79, 1, 0.2), False),
        (replace(CUDA, oom_kills=1), Xid(31, 1, 0.2), True),  # another process of its cgroup was killed
    ],
)
def test_an_error_explains_an_end(end: ExitReport, xid: Xid, is_cause: bool) -> None:
    assert codes(with_xids(end, xid)) == ([xid.code] if is_cause else None)


def test_the_gravest_error_comes_first_and_then_the_latest() -> None:
    end = with_xids(CUDA, Xid(13, 1, 0.1), Xid(74, 1, 0.1), Xid(64, 1, 9.0), Xid(45, 1, 0.1), Xid(48, 1, 2.0))
    assert codes(end) == [48, 64, 13, 74]
    cause = gpu_cause(end)
    assert cause is not None
    assert cause.kind is XIDS[48]
    assert (cause.gpu, cause.is_own, cause.is_gone) == (3, True, False)


@pytest.mark.parametrize(
    ("xids", "condition", "is_at_fault"),
    [
        ([Xid(31, 1, 0.2)], GpuCondition.OK, True),
        ([Xid(119, 1, 0.2)], GpuCondition.OK, True),
        ([], GpuCondition.LOST, True),
        ([], GpuCondition.RESET_REQUIRED, True),
        ([Xid(74, 1, 0.2)], GpuCondition.OK, False),  # the GPU at the other end may be the one that failed
        ([Xid(999, 1, 0.2)], GpuCondition.OK, False),
        ([Xid(45, 1, 0.2)], GpuCondition.OK, False),
    ],
)
def test_an_end_is_laid_on_a_rank_only_where_the_error_began_there(
    xids: list[Xid], condition: GpuCondition, is_at_fault: bool
) -> None:
    assert is_gpu_at_fault(with_xids(CUDA, *xids, condition=condition)) is is_at_fault


def test_an_end_without_facts_has_no_cause_of_a_gpu() -> None:
    assert gpu_cause(None) is None
    assert gpu_cause(CUDA) is None
    assert gpu_cause(with_xids(CUDA)) is None
    assert not is_gpu_at_fault(CUDA)


def test_the_catalog_is_consistent() -> None:
    assert {48, 64, 74, 79, 95, 119, 120} <= BROKEN_XIDS
    for code, kind in XIDS.items():
        assert kind.what, code
        assert (kind.action is Action.NOTHING) == (kind.blame is Blame.NOBODY), code
        assert (kind.action is Action.FIX_PROGRAM) == (kind.blame is Blame.PROGRAM), code
        assert kind.action not in {Action.RESET_GPU, Action.REBOOT_NODE} or kind.blame in {
            Blame.HARDWARE,
            Blame.DRIVER,
            Blame.FABRIC,
        }, code
