"""What the console says of GPUs: who holds what, what is wrong, and what to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from agent.node_state.gpu_sample import GpuProcess
from agent.wire.machine import (
    GpuCondition,
    GpuFigures,
    GpuHolder,
    GpuReport,
    GpusReport,
    GpuWatchState,
    HostReport,
    JobRank,
    MigInstance,
    ThrottleReason,
    Xid,
)
from app.diagnosis.causes import Severity
from app.model.cluster import Cluster
from app.view.gpus import USUAL_FIX, gpu_rows, held_by
from app.view.summary import status_object
from ddpcore.wire import GpuMemoryReport
from tests.support.node_reports import job_status, node_report, rank_report, worker_report
from tests.support.sim import SimCluster
from tests.support.sim_gpus import CONTEXT_BYTES, GIB, SimGpus, give_gpus, gpu_uuid

if TYPE_CHECKING:
    from typing import Any

    from app.view.rows import Finding, GpuRow


class Training:
    """Four ranks on two nodes with two GPUs each."""

    def __init__(self) -> None:
        self.sim = SimCluster()
        self.gpus: list[SimGpus] = give_gpus(self.sim)
        self.sim.run(8)

    def row(self, index: int = 0) -> GpuRow:
        self.sim.run(1)
        return self.sim.view().gpus()[index]

    def findings(self) -> list[Finding]:
        self.sim.run(1)
        view = self.sim.view()
        return view.gpu_findings(view.oddest_gpus(8))


@pytest.fixture
def training() -> Training:
    return Training()


def test_torchs_figures_stand_beside_nvmls(training: Training) -> None:
    row = training.row(1)

    assert (row.node, row.gpu, row.ranks, row.state, row.severity) == ("demo-0", 1, [1], "ok", Severity.OK)
    assert row.torch_reserved_bytes == 23 * GIB
    assert row.memory_used_bytes == 23 * GIB + 2 * CONTEXT_BYTES
    assert [(holder.rank, holder.used_bytes) for holder in row.holders] == [(1, 23 * GIB + CONTEXT_BYTES)]
    (rank,) = training.sim.view().ranks([1])
    assert (rank.gpu, rank.gpu_used_bytes) == (1, 23 * GIB + CONTEXT_BYTES)
    assert (rank.torch_allocated_bytes, rank.torch_reserved_bytes) == (20 * GIB, 23 * GIB)
    assert rank.torch_peak_bytes == 22 * GIB
    (memory,) = training.sim.view().memory([1])
    assert (memory.gpu, memory.gpu_total_bytes, memory.torch_peak_bytes) == (1, 80 * GIB, 22 * GIB)
    assert training.findings() == []


def test_ranks_on_anothers_gpu_are_named_with_the_usual_fix(training: Training) -> None:
    training.gpus[1].hold(0, rank=3)

    (finding,) = training.findings()

    assert finding.severity is Severity.WARNING
    assert finding.text == "rank 3 holds 512 MiB on GPU 0 of demo-1, home of rank 2"
    assert finding.hint == USUAL_FIX
    assert "torch.cuda.set_device(local_rank)" in finding.hint
    assert training.row(2).detail == "rank 3 holds memory here too; power cap"


def test_a_foreign_context_of_unknown_size_is_named_all_the_same(training: Training) -> None:
    training.gpus[1].extra[0] = [GpuProcess(training.sim.ranks[3].pid, None)]

    assert training.findings()[0].text == "rank 3 holds memory on GPU 0 of demo-1, home of rank 2"


def test_a_lost_gpu_comes_first_and_says_what_to_do(training: Training) -> None:
    training.gpus[0].hold(0, rank=1)
    training.gpus[1].change(1, condition=GpuCondition.LOST, xids=[Xid(79, 1, 5.0)], throttle_reasons=[])

    lost, _ = training.findings()

    assert lost.severity is Severity.CRITICAL
    assert lost.text == "GPU 1 of demo-1, home of rank 3: lost; Xid 79 (it has fallen off the bus) 5.0 s ago"
    assert "reboot" in lost.hint
    assert [row.gpu for row in training.sim.view().oddest_gpus(1)] == [1]


def test_a_lost_gpu_is_the_headline_and_the_first_thing_to_know_of_its_rank(training: Training) -> None:
    assert training.sim.view().headline().text.startswith("4 ranks training")
    training.gpus[1].change(1, condition=GpuCondition.LOST, xids=[Xid(79, 1, 5.0)], throttle_reasons=[])
    training.sim.run(1)

    headline = training.sim.view().headline()
    assert headline.severity is Severity.CRITICAL
    assert headline.text.startswith("GPU 1 of demo-1, home of rank 3: lost; Xid 79")

    training.sim.freeze(3)
    training.sim.run(1)
    assert training.sim.view().headline().text.startswith("rank 3 on demo-1 is frozen")
    assert training.sim.verdicts()[0].hint.startswith("GPU 1 of demo-1, home of rank 3: lost;")
    training.sim.thaw(3)
    training.sim.freeze(0)
    training.sim.run(2)
    assert "GPU" not in training.sim.verdicts()[0].hint


@pytest.mark.parametrize(
    ("figures", "severity", "detail"),
    [
        ({"xids": [Xid(31, 3, 60.0)]}, Severity.WARNING, "Xid 31 (a kernel touched memory that it must not) 3 times"),
        ({"xids": [Xid(31, 1, 7200.0)]}, Severity.OK, "Xid 31"),
        ({"xids": [Xid(9999, 1, 1.0)]}, Severity.WARNING, "Xid 9999 1.0 s ago"),
        ({"xids": [Xid(48, 1, 1.0)]}, Severity.CRITICAL, "double-bit memory error"),
        ({"ecc_uncorrected_errors": 3}, Severity.WARNING, "3 uncorrected memory errors"),
        ({"has_row_remap_failed": True}, Severity.WARNING, "a faulty row of memory could not be replaced"),
        ({"is_row_remap_pending": True}, Severity.OK, "a faulty row of memory is replaced at the next reset"),
        ({"throttle_reasons": [ThrottleReason.HW_POWER_BRAKE]}, Severity.WARNING, "slowed by the power supply"),
        ({"throttle_reasons": [ThrottleReason.SYNC_BOOST]}, Severity.OK, ""),
        ({"condition": GpuCondition.RESET_REQUIRED}, Severity.CRITICAL, "needs a reset"),
    ],
)
def test_each_oddity_has_its_words(
    training: Training, figures: dict[str, Any], severity: Severity, detail: str
) -> None:
    training.gpus[0].change(0, **({"throttle_reasons": []} | figures))

    row = training.row()

    assert row.severity is severity
    assert detail in row.detail
    assert row.detail or not detail


def test_broken_hardware_without_a_condition_has_a_hint_too(training: Training) -> None:
    training.gpus[0].change(0, xids=[Xid(74, 2, 1.0)])

    assert training.findings()[0].hint == "drain the node"


def test_what_strangers_hold_is_told_with_their_pids(training: Training) -> None:
    training.gpus[0].extra[0] = [GpuProcess(pid, GIB) for pid in range(1, 7)]

    row = training.row()

    assert row.detail == "power cap; 6.0 GiB held by pid 1, 2, 3, 4 and more"
    assert [holder.rank for holder in row.holders] == [0, *[None] * 6]


def test_the_dead_hold_nothing(training: Training) -> None:
    training.sim.kill(0)
    training.sim.run(1)

    (rank,) = training.sim.view().ranks([0])

    assert (rank.gpu, rank.gpu_used_bytes, rank.pss_bytes) == (None, None, None)
    row = training.row(0)
    assert (row.ranks, row.torch_reserved_bytes, row.holders) == ([], None, [])


def test_json_has_the_gpus_with_units_in_the_names(training: Training) -> None:
    status = status_object(training.sim.view())

    assert len(status["gpus"]) == 4
    assert {"memory_used_bytes", "temperature_celsius", "power_watts", "sm_clock_hz", "busy_frac"} <= set(
        status["gpus"][0]
    )
    assert {"shm_used_bytes", "swap_total_bytes", "nic_rx_bytes_hz", "disk_free_bytes"} <= set(status["nodes"][0])
    assert {"pss_bytes", "gpu", "gpu_used_bytes", "torch_reserved_bytes"} <= set(status["ranks"][0])


def cluster_with(gpus: GpusReport, **rank_fields: Any) -> Cluster:
    """Return a cluster of one node whose rank 0 reports."""
    cluster = Cluster(["a"])
    status = job_status(num_nodes=1, world_size=2)
    worker = worker_report(0, rank_report(0, 2, **rank_fields))
    cluster.apply("a", node_report(1, [status], [worker], gpus=gpus, host=HostReport(load_1min=math.nan)), 10.0)
    return cluster


def test_old_figures_are_called_silent_and_age() -> None:
    gpus = GpusReport(GpuWatchState.SILENT, "NVML has not answered for 9 s", 9.0, "550", [GpuReport(GpuFigures(0))])

    (row,) = gpu_rows(cluster_with(gpus), None, 12.0)

    assert (row.state, row.severity, row.age_s) == ("silent", Severity.WARNING, 11.0)


def test_without_nvml_torchs_own_figures_are_shown() -> None:
    memory = [GpuMemoryReport("GPU-x", 1, 2, 3, 4), GpuMemoryReport("GPU-y", 10, 20, 30, 40)]
    cluster = cluster_with(GpusReport(GpuWatchState.ABSENT, "no driver"), gpu_memory=memory)
    job = cluster.jobs["job"]

    assert held_by(cluster, job, 0) == (None, None, None, 10, 20, 30)
    assert held_by(cluster, job, 1) == (None,) * 6


def test_a_rank_on_a_part_of_a_gpu_is_told_by_the_parts_uuid() -> None:
    whose = JobRank("job", 0)
    parts = [MigInstance("MIG-a", 40), MigInstance("MIG-b", 20)]
    figures = GpuFigures(0, "GPU-x", memory_total_bytes=80, mig_instances=parts)
    gpu = GpuReport(figures, [whose], [GpuHolder(4000, None, "MIG-b", whose)])
    cluster = cluster_with(
        GpusReport(GpuWatchState.WATCHING, gpus=[gpu]), gpu_memory=[GpuMemoryReport("MIG-b", 5, 6, 7, 8)]
    )

    assert held_by(cluster, cluster.jobs["job"], 0) == (0, None, 20, 5, 6, 7)


def test_of_which_part_a_rank_has_its_share_may_not_be_known() -> None:
    whose = JobRank("job", 0)
    figures = GpuFigures(
        0, "GPU-x", memory_total_bytes=80, mig_instances=[MigInstance("MIG-a", 40), MigInstance("MIG-b")]
    )
    for holders in ([], [GpuHolder(4000, 5, "MIG-b", whose)]):
        gpu = GpuReport(figures, [whose], holders)
        cluster = cluster_with(GpusReport(GpuWatchState.WATCHING, gpus=[gpu]))
        assert held_by(cluster, cluster.jobs["job"], 0).total_bytes is None


def test_the_uuids_of_the_simulation_differ() -> None:
    assert len({gpu_uuid(node, index) for node in range(3) for index in range(3)}) == 9
