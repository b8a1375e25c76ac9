"""Which rank is behind a process on a GPU, which GPU it is at home on, and who is where he should not be."""

from __future__ import annotations

from typing import Any

import pytest

from agent.node_state.gpu_ranks import Home, RankProcess, gpu_fault, gpu_reports, num_visible_gpus
from agent.node_state.gpu_sample import GpuProcess, SampledGpu
from agent.wire.ends import GpuFault
from agent.wire.machine import GpuCondition, GpuFigures, GpuReport, JobRank, MigInstance, Xid

GIB = 2**30


def gpu(index: int, *processes: GpuProcess, name: str = "H100", migs: tuple[str, ...] = ()) -> SampledGpu:
    figures = GpuFigures(index, f"GPU-{index}", name, mig_instances=[MigInstance(uuid) for uuid in migs])
    return SampledGpu(figures, list(processes))


def rank(number: int, **fields: Any) -> RankProcess:
    return RankProcess(JobRank("job", number), number, 100 + number, **fields)


def process(number: int, gib: float = 1.0, **fields: Any) -> GpuProcess:
    return GpuProcess(100 + number, int(gib * GIB), **fields)


def owners(reports: list[GpuReport]) -> list[list[int]]:
    return [[owner.rank for owner in report.owners] for report in reports]


def foreign(reports: list[GpuReport]) -> list[list[int | None]]:
    return [
        [holder.whose.rank if holder.whose else None for holder in report.holders if holder.is_foreign]
        for report in reports
    ]


def test_each_rank_is_at_home_on_the_gpu_of_its_local_rank() -> None:
    reports = gpu_reports([gpu(0, process(0)), gpu(1, process(1))], [rank(0), rank(1)])

    assert owners(reports) == [[0], [1]]
    assert foreign(reports) == [[], []]


def test_a_rank_with_a_context_on_anothers_gpu_is_foreign_there() -> None:
    reports = gpu_reports([gpu(0, process(0, 20), process(1, 0.5)), gpu(1, process(1, 20))], [rank(0), rank(1)])

    assert owners(reports) == [[0], [1]]
    assert foreign(reports) == [[1], []]


def test_ranks_that_all_compute_on_the_first_gpu_are_foreign_but_for_its_owner() -> None:
    ranks = [rank(0), rank(1), rank(2)]
    reports = gpu_reports([gpu(0, process(0), process(1), process(2)), gpu(1), gpu(2)], ranks)

    assert owners(reports) == [[0], [1], [2]]
    assert set(foreign(reports)[0]) == {1, 2}


def test_a_program_that_deals_gpus_in_another_order_does_nothing_wrong() -> None:
    reports = gpu_reports([gpu(0, process(1)), gpu(1, process(0))], [rank(0), rank(1)])

    assert owners(reports) == [[1], [0]]
    assert foreign(reports) == [[], []]


def test_two_gpus_for_each_rank_are_nobodys_mistake() -> None:
    gpus = [gpu(0, process(0, 9)), gpu(1, process(0, 9)), gpu(2, process(1, 9)), gpu(3, process(1, 9))]

    assert foreign(gpu_reports(gpus, [rank(0), rank(1)])) == [[], [], [], []]


def test_more_ranks_than_gpus_share_them() -> None:
    gpus = [gpu(0, process(0), process(2)), gpu(1, process(1), process(3))]
    reports = gpu_reports(gpus, [rank(number) for number in range(4)])

    assert owners(reports) == [[0, 2], [1, 3]]
    assert foreign(reports) == [[], []]


@pytest.mark.parametrize("visible", ["3,2", "GPU-3,GPU-2"])
def test_cuda_visible_devices_says_which_gpu_a_local_rank_means(visible: str) -> None:
    gpus = [
        gpu(0),
        gpu(1),
        gpu(2, process(1, visible_devices=visible)),
        gpu(3, process(0, visible_devices=visible), process(1, 0.5, visible_devices=visible)),
    ]
    reports = gpu_reports(gpus, [rank(0), rank(1)])

    assert owners(reports) == [[], [], [1], [0]]
    assert foreign(reports) == [[], [], [], [1]]


def test_a_rank_that_sees_one_gpu_is_at_home_there_whatever_its_local_rank() -> None:
    gpus = [gpu(0, process(0, visible_devices="0")), gpu(1, process(1, visible_devices="1"))]

    assert owners(gpu_reports(gpus, [rank(0), rank(1)])) == [[0], [1]]


def test_gpus_of_different_kinds_have_an_order_that_only_cuda_knows() -> None:
    gpus = [gpu(0, process(1, 9), name="A100"), gpu(1, process(0, 9), name="T4")]

    assert owners(gpu_reports(gpus, [rank(0), rank(1)])) == [[1], [0]]


def test_ranks_on_parts_of_one_gpu_are_at_home_on_it_together() -> None:
    processes = [process(number, mig_uuid=f"MIG-{number}", visible_devices=f"MIG-{number}") for number in (0, 1)]
    (report,) = gpu_reports([gpu(0, *processes, migs=("MIG-0", "MIG-1"))], [rank(0), rank(1)])

    assert [owner.rank for owner in report.owners] == [0, 1]
    assert [holder.mig_uuid for holder in report.holders] == ["MIG-0", "MIG-1"]


def test_a_child_of_a_worker_is_the_workers_rank() -> None:
    (report,) = gpu_reports([gpu(0, GpuProcess(999, GIB, ancestors=[500, 100, 1]))], [rank(0)])

    assert report.holders[0].whose == JobRank("job", 0)


def test_a_process_in_a_container_is_told_by_its_environment() -> None:
    told = GpuProcess(999, GIB, job_id="job", rank=0)
    strange = GpuProcess(998, GIB, job_id="other", rank=0)
    (report,) = gpu_reports([gpu(0, told, strange)], [rank(0)])

    assert [holder.whose for holder in report.holders] == [None, JobRank("job", 0)]


def test_a_process_in_a_container_is_told_by_its_inner_pid_as_long_as_that_is_one_ranks() -> None:
    process = GpuProcess(999, GIB, inner_pids=[7])

    (alone,) = gpu_reports([gpu(0, process)], [rank(0, reported_pid=7)])
    (twice,) = gpu_reports([gpu(0, process)], [rank(0, reported_pid=7), rank(1, reported_pid=7)])

    assert alone.holders[0].whose == JobRank("job", 0)
    assert twice.holders[0].whose is None


def test_where_pids_mean_nothing_torch_says_where_a_rank_is_at_home() -> None:
    gpus = [gpu(0, GpuProcess(5_000_000, GIB)), gpu(1, GpuProcess(5_000_001, GIB), migs=("MIG-a",))]
    ranks = [rank(0, torch_bytes={"GPU-0": GIB}), rank(1, torch_bytes={"MIG-a": GIB, "MIG-elsewhere": GIB})]

    assert owners(gpu_reports(gpus, ranks)) == [[0], [1]]


def test_what_is_not_ours_is_shown_and_never_foreign() -> None:
    (report,) = gpu_reports([gpu(0, process(0), GpuProcess(4711, None))], [rank(0)])

    assert [(holder.pid, holder.whose is None, holder.is_foreign) for holder in report.holders] == [
        (100, False, False),
        (4711, True, False),
    ]


def test_a_rank_alone_on_a_gpu_that_is_nobodys_home_is_at_home_there() -> None:
    reports = gpu_reports([gpu(0, process(1)), gpu(1)], [rank(0), rank(1)])

    assert owners(reports) == [[1], []]
    assert foreign(reports) == [[], []]


@pytest.mark.parametrize(
    ("env", "num_visible"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_what_a_program_would_see_is_counted_by_its_environment(env: dict[str, str], num_visible: int) -> None:
    reports = gpu_reports([gpu(index) for index in range(4)], [])
    assert num_visible_gpus(reports, env) == num_visible
    assert num_visible_gpus([], env) == 0


def test_what_only_cuda_knows_is_not_guessed() -> None:
    mixed = gpu_reports([gpu(0), gpu(1, name="T4")], [])
    assert num_visible_gpus(mixed, {"CUDA_VISIBLE_DEVICES": "0"}) is None
    parts = gpu_reports([gpu(0, migs=("MIG-1", "MIG-2"))], [])
    assert num_visible_gpus(parts, {}) is None


def failed(*xids: Xid, condition: GpuCondition = GpuCondition.OK) -> GpuFigures:
    return GpuFigures(3, "GPU-3", "H100", condition, xids=list(xids))


def test_errors_of_a_home_are_dated_back_from_the_end_and_those_before_the_rank_are_left_out() -> None:
    figures = failed(Xid(79, 1, 2.0), Xid(31, 4, 7.0), Xid(13, 1, 61.0))
    assert gpu_fault(figures, None, alive_s=50.0, ended_s=106.0, sampled_s=110.0) == GpuFault(
        3, xids=[Xid(79, 1, 0.0), Xid(31, 4, 3.0)]
    )


def test_an_error_that_comes_again_or_long_after_the_end_changes_nothing() -> None:
    known = GpuFault(3, xids=[Xid(31, 1, 3.0)])
    assert gpu_fault(failed(Xid(31, 2, 0.5)), known, alive_s=50.0, ended_s=100.0, sampled_s=101.0) == known
    assert gpu_fault(failed(Xid(79, 1, 0.5)), known, alive_s=50.0, ended_s=100.0, sampled_s=106.0) == known


@pytest.mark.parametrize(
    ("condition", "sampled_s", "expected"),
    [
        (GpuCondition.LOST, 101.0, GpuCondition.LOST),
        (GpuCondition.RESET_REQUIRED, 101.0, GpuCondition.RESET_REQUIRED),
        (GpuCondition.LOST, 106.0, GpuCondition.OK),  # another program may have met it since
        (GpuCondition.UNREADABLE, 101.0, GpuCondition.OK),
        (GpuCondition.OK, 101.0, GpuCondition.OK),
    ],
)
def test_a_gpu_that_is_gone_as_a_rank_ends_is_a_fault(
    condition: GpuCondition, sampled_s: float, expected: GpuCondition
) -> None:
    fault = gpu_fault(failed(condition=condition), None, alive_s=50.0, ended_s=100.0, sampled_s=sampled_s)
    assert fault == GpuFault(3, expected)


def test_a_home_is_known_again_by_its_name_or_where_that_is_lost_by_its_number() -> None:
    home = Home(3, "GPU-3")
    assert home.is_(GpuFigures(3, "GPU-3"))
    assert home.is_(GpuFigures(2, "GPU-3"))
    assert home.is_(GpuFigures(3, ""))
    assert not home.is_(GpuFigures(3, "GPU-4"))
    assert not home.is_(GpuFigures(2, ""))
