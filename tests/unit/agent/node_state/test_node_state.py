from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agent.node_state.gpu_sample import GpuProcess, GpuSample, SampledGpu
from agent.node_state.node_state import NodeState
from agent.node_state.observations import (
    GpusSampled,
    GpuWatchChanged,
    HostSampled,
    JobAdmitted,
    JobForgotten,
    RankPrinted,
    RankReported,
    SeenFromOutside,
    WorkerEnded,
    WorkerSampled,
    WorkerSeen,
)
from agent.wire.machine import GpuFigures, GpuWatchState, JobRank
from agent.wire.reports import ExitReport, NodeReport, OutsideLook, ProcessState, decode_node_report, encode_node_report
from ddpcore.wire import WIRE_VERSION, ChildWait, GpuMemoryReport, GroupReport, Phase, Place, RankReport
from tests.support.node_reports import job_status


def rank_report(rank: int = 2, **changes: Any) -> RankReport:
    report = RankReport(
        wire_version=WIRE_VERSION,
        rank=rank,
        local_rank=rank - 2,
        world_size=4,
        pid=100 + rank,
        job_id="train",
        attempt=0,
        report_seq=1,
        phase=Phase.FORWARD,
    )
    return msgspec.structs.replace(report, **changes)


@pytest.fixture
def state() -> NodeState:
    state = NodeState("a", "e0", "host", 7, 16)
    state.apply(JobAdmitted(job_status(2, job_id="train")), 0.0)
    return state


def report_of(state: NodeState, now_s: float) -> NodeReport:
    state.validate()
    report = state.report(now_s, report_seq=5, jobs=[], log_seq=9, malformed_datagrams=1)
    assert decode_node_report(encode_node_report(report)) == report
    return report


def sampled(process: ProcessState, rank: int = 2) -> WorkerSampled:
    return WorkerSampled("train", rank, process, 4096, 1.5)


def test_the_host_and_the_callers_figures_are_passed_on(state: NodeState) -> None:
    state.apply(HostSampled(0.5, 100, 40, 3), 0.0)
    report = report_of(state, 1.0)
    assert (report.node, report.epoch, report.hostname, report.agent_pid, report.num_cpus) == ("a", "e0", "host", 7, 16)
    assert (report.cpu_frac, report.memory_total_bytes, report.memory_available_bytes) == (0.5, 100, 40)
    assert (report.agent_rss_bytes, report.report_seq, report.log_seq, report.malformed_reports) == (3, 5, 9, 1)


def test_a_worker_shows_its_process_and_its_last_report_with_ages(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 10.0)
    state.apply(sampled(ProcessState.RUNNING), 10.2)
    state.apply(RankReported(rank_report()), 11.0)
    (worker,) = report_of(state, 12.5).workers
    assert (worker.rank, worker.local_rank, worker.pid, worker.attempt) == (2, 0, 102, 0)
    assert (worker.process, worker.process_s, worker.rss_bytes, worker.cpu_s) == (ProcessState.RUNNING, 2.5, 4096, 1.5)
    assert worker.report == rank_report()
    assert worker.report_age_s == 1.5
    assert worker.exit is None


def test_a_worker_without_a_report_says_so(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 3, 103), 0.0)
    (worker,) = report_of(state, 5.0).workers
    assert worker.report is None
    assert worker.report_age_s == 0.0


def test_the_age_of_a_process_state_begins_with_its_change(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(sampled(ProcessState.FROZEN), 5.0)
    state.apply(sampled(ProcessState.FROZEN), 6.0)
    (worker,) = report_of(state, 8.0).workers
    assert (worker.process, worker.process_s) == (ProcessState.FROZEN, 3.0)


def test_an_ended_worker_stays_ended_and_keeps_its_last_report(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(RankReported(rank_report()), 1.0)
    state.apply(WorkerEnded("train", 2, ExitReport(None, 9, error="boom")), 2.0)
    state.apply(sampled(ProcessState.RUNNING), 2.1)
    (worker,) = report_of(state, 5.0).workers
    assert worker.process is ProcessState.EXITED
    assert worker.exit == ExitReport(code=None, signal=9, age_s=3.0, error="boom")
    assert worker.rss_bytes == 0
    assert worker.report is not None


def test_workers_are_sorted_by_rank(state: NodeState) -> None:
    for rank in (3, 2):
        state.apply(WorkerSeen("train", rank, 100 + rank), 0.0)
    assert [worker.rank for worker in report_of(state, 0.0).workers] == [2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"job_id": "other"},
        {"attempt": 1},
        {"world_size": 8},
        {"rank": 1, "local_rank": 0},
        {"rank": 4, "local_rank": 2},
        {"local_rank": 1},
    ],
)
def test_reports_that_belong_to_no_job_here_are_counted_and_dropped(state: NodeState, changes: dict[str, Any]) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(RankReported(rank_report(**changes)), 1.0)
    report = report_of(state, 1.0)
    assert report.malformed_reports == 2
    assert report.workers[0].report is None


def test_an_older_report_does_not_replace_a_newer_one(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(RankReported(rank_report(report_seq=7)), 1.0)
    state.apply(RankReported(rank_report(report_seq=6)), 2.0)
    report = report_of(state, 2.0)
    assert report.malformed_reports == 2
    assert report.workers[0].report == rank_report(report_seq=7)
    state.apply(RankReported(rank_report(report_seq=1, pid=555)), 3.0)
    assert report_of(state, 3.0).workers[0].report == rank_report(report_seq=1, pid=555)


def test_a_new_attempt_begins_with_nothing_and_a_forgotten_job_is_gone(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(JobAdmitted(job_status(2, job_id="train", attempt=1)), 1.0)
    assert report_of(state, 1.0).workers == []
    state.apply(WorkerSeen("train", 2, 202), 1.0)
    assert report_of(state, 1.0).workers[0].attempt == 1
    state.apply(JobForgotten("train"), 2.0)
    state.apply(JobForgotten("train"), 2.0)
    assert report_of(state, 2.0).workers == []


def test_unequal_clocks_of_the_caller_never_make_a_negative_age(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 10.0)
    state.apply(RankReported(rank_report()), 10.0)
    (worker,) = report_of(state, 9.0).workers
    assert worker.process_s == 0.0
    assert worker.report_age_s == 0.0


def gpu_sample(*pids: int) -> GpuSample:
    processes = [GpuProcess(pid, 2**30) for pid in pids]
    return GpuSample(1, 77, driver_version="550", gpus=[SampledGpu(GpuFigures(0, "GPU-0"), processes)])


def test_gpus_are_told_with_the_ranks_on_them_and_their_age(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(WorkerSeen("train", 3, 103), 0.0)
    memory = [GpuMemoryReport("GPU-0", 1, 2, 3, 4)]
    state.apply(RankReported(rank_report(2, gpu_memory=memory)), 0.5)
    state.apply(WorkerEnded("train", 3, ExitReport(0)), 0.5)
    state.apply(GpuWatchChanged(GpuWatchState.WATCHING, ""), 1.0)
    state.apply(GpusSampled(gpu_sample(102, 103)), 1.0)

    report = report_of(state, 4.0)

    assert (report.gpus.state, report.gpus.age_s, report.gpus.driver_version) == (GpuWatchState.WATCHING, 3.0, "550")
    (gpu,) = report.gpus.gpus
    assert gpu.owners == [JobRank("train", 2)]
    assert [holder.whose for holder in gpu.holders] == [JobRank("train", 2), None]
    assert report.workers[0].report is not None
    assert report.workers[0].report.gpu_memory == memory


def test_silence_keeps_the_last_figures_and_absence_does_not(state: NodeState) -> None:
    state.apply(GpusSampled(gpu_sample()), 1.0)
    state.apply(GpuWatchChanged(GpuWatchState.SILENT, "no answer"), 2.0)
    silent = report_of(state, 3.0).gpus
    assert (silent.state, silent.detail, len(silent.gpus), silent.age_s) == (GpuWatchState.SILENT, "no answer", 1, 2.0)

    state.apply(GpuWatchChanged(GpuWatchState.ABSENT, "no driver"), 4.0)
    absent = report_of(state, 5.0).gpus
    assert (absent.state, absent.detail, absent.gpus, absent.age_s) == (GpuWatchState.ABSENT, "no driver", [], 0.0)


def test_the_shared_memory_of_a_worker_is_told_until_it_ends(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(WorkerSampled("train", 2, ProcessState.RUNNING, 4096, 1.0, 1024), 0.1)
    assert report_of(state, 0.2).workers[0].pss_bytes == 1024
    state.apply(WorkerEnded("train", 2, ExitReport(0)), 0.3)
    assert report_of(state, 0.4).workers[0].pss_bytes is None


def test_a_worker_tells_how_long_it_has_been_quiet_and_what_its_lines_say(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 10.0)
    (worker,) = report_of(state, 12.0).workers
    assert (worker.seen_s, worker.quiet_s, worker.metrics) == (2.0, 2.0, {})

    state.apply(RankPrinted("train", 2, {"loss": 2.5, "lr": 0.1}), 13.0)
    assert report_of(state, 13.5).workers[0].loss_step is None
    state.apply(RankPrinted("train", 2, {"loss": 1.5}, 1, 20.0), 14.0)
    state.apply(RankPrinted("train", 2, {"lr": 0.1}, 1), 14.0)
    state.apply(RankPrinted("gone", 2, {"loss": 9.0}), 14.5)

    (worker,) = report_of(state, 15.0).workers
    assert (worker.seen_s, worker.quiet_s, worker.metrics) == (5.0, 1.0, {"loss": 1.5, "lr": 0.1})
    assert worker.loss_step == 20


def test_a_loss_is_of_the_step_in_its_line_while_that_is_the_step_that_the_rank_counts(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 10.0)
    taken = []
    for second in range(20):
        report = rank_report(2, report_seq=second + 1, step=100 * second, is_step_counted=True)
        state.apply(RankReported(report), 10.0 + second)
        line_step = 100.0 * second - 60.0 if second < 15 else 40.0
        state.apply(RankPrinted("train", 2, {"loss": 2.5}, 1, None, line_step), 10.1 + second)
        taken.append(report_of(state, 10.2 + second).workers[0].loss_step)

    assert taken == [None] * 8 + [100 * second - 60 for second in range(8, 15)] + [None] * 5


def test_a_worker_tells_how_many_cores_it_keeps_busy_until_it_ends(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 10.0)
    for second in range(3):
        state.apply(WorkerSampled("train", 2, ProcessState.RUNNING, 4096, 2.0 * second), 10.0 + second)
    assert report_of(state, 12.0).workers[0].cpu_cores == 2.0

    state.apply(WorkerEnded("train", 2, ExitReport(0)), 12.5)
    assert report_of(state, 13.0).workers[0].cpu_cores == 0.0


def test_a_wait_that_begins_or_ends_is_news_until_it_is_reported(state: NodeState) -> None:
    waits = [GroupReport(group="0", enqueued_seq=3, completed_seq=2, is_waiting=True)]
    moves = [GroupReport(group="0", enqueued_seq=3, completed_seq=3)]

    def has_news(report_seq: int, groups: list[GroupReport]) -> bool:
        state.apply(RankReported(rank_report(report_seq=report_seq, groups=groups)), float(report_seq))
        had, _ = state.has_news, report_of(state, float(report_seq))
        assert not state.has_news
        return had

    state.apply(WorkerSeen("train", 2, 102), 0.0)
    assert [has_news(seq, groups) for seq, groups in enumerate([moves, moves, waits, waits, moves], start=1)] == [
        *(False, False),
        *(True, False, True),
    ]


def test_a_rank_that_does_not_report_is_wished_to_be_seen_from_outside_and_its_place_holds_until_it_reports(
    state: NodeState,
) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    state.apply(RankReported(rank_report(2, report_seq=5)), 1.0)
    pid = rank_report(2).pid

    assert state.wishes_from_outside("train", 1.5) == []
    (wish,) = state.wishes_from_outside("train", 2.5)
    state.apply(SeenFromOutside("train", 2, wish.pid, wish.report_seq, Place("train.py", 7, "match")), 2.6)

    assert (wish.pid, wish.report_seq, wish.is_child) == (pid, 5, False)
    assert report_of(state, 2.6).workers[0].outside == OutsideLook(pid, Place("train.py", 7, "match"))
    state.apply(RankReported(rank_report(2, report_seq=6)), 3.1)
    assert report_of(state, 3.2).workers[0].outside is None


def test_a_process_that_a_rank_waits_for_is_wished_to_be_seen_while_it_does(state: NodeState) -> None:
    state.apply(WorkerSeen("train", 2, 102), 0.0)
    waits = ChildWait(77, "loader worker", waiting_s=3.0)
    state.apply(RankReported(rank_report(2, report_seq=5, child_wait=waits)), 1.0)

    (wish,) = state.wishes_from_outside("train", 1.1)
    state.apply(SeenFromOutside("train", 2, 77, 0, None), 1.2)

    assert (wish.pid, wish.is_child) == (77, True)
    assert report_of(state, 1.3).workers[0].outside is not None
    state.apply(RankReported(rank_report(2, report_seq=6)), 1.4)
    assert report_of(state, 1.5).workers[0].outside is None
