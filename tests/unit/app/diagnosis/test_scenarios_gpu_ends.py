"""A rank whose GPU fails is named with its GPU, what that means and what to do; other errors of GPUs are no cause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.wire.machine import GpuCondition
from app.diagnosis.causes import Cause
from app.view.rows import EndRow
from tests.support.sim import SimCluster
from tests.support.sim_gpus import SimGpus, give_gpus

if TYPE_CHECKING:
    from app.view.rows import VerdictRow

SIGABRT = 6
WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError': [PG ID 0 PG GUID 0(default_pg) Rank 3] "
    "Process group watchdog thread terminated with exception: CUDA error: {what}"
)
UNSPECIFIED = "torch.AcceleratorError: CUDA error: unspecified launch failure"


class Training:
    """Four ranks on two nodes with two GPUs each; rank 3 is at home on GPU 1 of demo-1."""

    def __init__(self, **options: float | bool) -> None:
        self.sim = SimCluster(**options)  # type: ignore[arg-type]
        self.gpus: list[SimGpus] = give_gpus(self.sim)
        self.sim.run_to_step(20)

    def log(self, code: int, before_s: float = 0.0, *, node: int = 1, gpu: int = 1) -> None:
        """Let a driver log an Xid error some seconds ago, and let the sampler report it."""
        self.gpus[node].fail(gpu, code, self.sim.now_s - before_s)
        self.sim.run(1)

    def end(self, error: str = "", *, rank: int = 3, code: int | None = None, signal: int | None = None) -> VerdictRow:
        """End a rank; return the one verdict at last."""
        self.sim.ranks[rank].end = (code, signal, error)
        self.sim.run(8)
        (verdict,) = self.sim.verdicts()
        return verdict


def test_a_gpu_that_falls_off_the_bus_is_why_its_rank_ends_though_nccl_speaks_of_its_peers() -> None:
    training = Training(hangs_on_death=True)
    training.log(79)
    training.gpus[1].change(1, condition=GpuCondition.LOST)
    verdict = training.end(WATCHDOG.format(what="GPU is lost"), signal=SIGABRT)

    assert (verdict.cause, verdict.culprits, verdict.node) == (Cause.EXITED, [3], "demo-1")
    assert "; its GPU 1 reported Xid 79 (it has fallen off the bus) 1.0 s before, and is lost" in verdict.text
    assert "whose connection" not in verdict.text
    assert verdict.hint.startswith("drain demo-1 and reboot it, or switch it off and on; if it happens again,")
    assert "leave demo-1 out: rankdeck restart --exclude" in verdict.hint
    assert verdict.end == EndRow(1, "lost", [79], "hardware", "reboot_node", None, "", "", "", "")


def test_a_kernel_that_touches_what_it_must_not_is_the_program_s_fault() -> None:
    training = Training()
    training.log(31)
    verdict = training.end("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", code=1)

    assert verdict.culprits == [3]
    assert "; its GPU 1 reported Xid 31 (a kernel touched memory that it must not) 1.0 s before; " in verdict.text
    assert verdict.hint.startswith("as a rule the program did this: run it with CUDA_LAUNCH_BLOCKING=1")
    assert "exclude" not in verdict.hint
    assert verdict.end is not None
    assert (verdict.end.blame, verdict.end.action) == ("program", "fix_program")


def test_a_rank_that_hangs_on_a_broken_gpu_until_others_time_out_is_named_though_it_ends_last() -> None:
    training = Training(hangs_on_death=True, timeout_s=20.0)
    training.sim.ranks[3].is_blocked = True
    training.log(119)
    training.sim.run(35)
    (verdict,) = training.sim.verdicts()

    assert verdict.culprits == [3]
    assert "its GPU 1 reported Xid 119 (the GPU's own processor does not answer)" in verdict.text
    assert "nvidia-smi --gpu-reset -i 1" in verdict.hint


def test_an_error_that_the_driver_logs_as_the_rank_ends_counts_too() -> None:
    training = Training()
    training.sim.ranks[3].end = (None, SIGABRT, "")
    training.sim.run(0.2)
    training.log(95)
    training.sim.run(8)
    (verdict,) = training.sim.verdicts()

    assert "its GPU 1 reported Xid 95 (uncontained memory error) as it ended" in verdict.text


def test_ranks_of_one_fault_are_named_together_with_the_gpu_of_the_first() -> None:
    training = Training()
    for gpu in (0, 1):
        training.log(31, gpu=gpu)
    training.sim.ranks[2].end = (1, None, UNSPECIFIED)
    verdict = training.end(UNSPECIFIED, code=1)

    assert verdict.culprits == [2, 3]
    assert "rank 2's GPU 0 reported Xid 31" in verdict.text


@pytest.mark.parametrize(("code", "node", "gpu"), [(79, 1, 0), (94, 0, 1)])
def test_an_error_of_another_gpu_is_no_cause(code: int, node: int, gpu: int) -> None:
    training = Training()
    training.log(code, node=node, gpu=gpu)
    verdict = training.end(UNSPECIFIED, code=1)

    assert verdict.culprits == [3]
    assert "Xid" not in verdict.text + verdict.hint
    assert verdict.end is None


def test_an_exception_of_the_program_is_not_laid_on_its_gpu() -> None:
    training = Training()
    training.log(79)
    verdict = training.end("KeyError: 'labels'", code=1)

    assert verdict.culprits == [3]
    assert "Xid" not in verdict.text + verdict.hint


def test_a_victim_whose_own_gpu_is_well_stays_a_victim() -> None:
    training = Training(hangs_on_death=True)
    training.log(94, node=0, gpu=0)
    training.sim.ranks[0].end = (None, SIGABRT, WATCHDOG.format(what="uncorrectable ECC error encountered"))
    training.sim.run(0.3)
    verdict = training.end(WATCHDOG.format(what="unspecified"), signal=SIGABRT)

    assert verdict.culprits == [0]
    assert "contained memory error" in verdict.text


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_kernel_s_fault_that_nccl_s_watchdog_reports_is_the_rank_s_own_also_while_all_wait(*, is_cut: bool) -> None:
    training = Training(hangs_on_death=True, timeout_s=60.0)
    if is_cut:
        training.sim.cut_network()
        training.sim.run(15)
    verdict = training.end(WATCHDOG.format(what="an illegal memory access was encountered"), signal=SIGABRT)

    assert (verdict.cause, verdict.culprits) == (Cause.EXITED, [3])
    assert "whose connection" not in verdict.text
    assert verdict.hint == "the whole traceback: rankdeck logs demo --rank 3"
