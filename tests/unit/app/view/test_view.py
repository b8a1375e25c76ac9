"""Rows and first lines: what is known in clean words, what is not known as None."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from agent.wire.jobs import JobState
from agent.wire.reports import ProcessState, WorkerReport
from app.diagnosis.causes import RankState, Severity
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.view.summary import status_object
from app.view.view import View
from ddpcore.wire import BARRIER_GROUP, Phase, Place, TrainingReport
from tests.support.node_reports import dead_worker, group_report, job_status, node_report, rank_report, worker_report
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTILE = "\x1b]52;c;aGk=\x07\u202e[/x]"
MIB = 2**20


class Console:
    """A console on two nodes, `a` and `b`."""

    def __init__(self) -> None:
        self.cluster = Cluster(["a", "b"])
        self.diagnoser = Diagnoser()
        self.now_s = 100.0
        self.seq = 0

    def receive(self, node: str, *workers: WorkerReport, **fields: Any) -> View:
        self.seq += 1
        fields.setdefault("jobs", [job_status(0 if node == "a" else 2)])
        self.cluster.apply(node, node_report(self.seq, workers=list(workers), **fields), self.now_s)
        return self.view()

    def view(self) -> View:
        diagnosis = self.diagnoser.observe(self.cluster, self.now_s)
        diagnosis.validate()
        return View(self.cluster, diagnosis, self.now_s)


def test_an_empty_cluster_has_rows_for_its_nodes_and_nothing_else() -> None:
    view = Console().view()

    assert [(row.node, row.state, row.age_s, row.cpu_frac) for row in view.nodes()] == [
        ("a", "connecting", None, None),
        ("b", "connecting", None, None),
    ]
    assert view.num_ranks == 0
    assert (view.job(), view.memory_summary()) == (None, None)
    assert [*view.ranks(), *view.barriers(), *view.verdicts(), *view.memory()] == []
    assert view.progress().steps is None
    assert view.headline().text == "waiting for the agents on a and b (0 of 2 nodes up)"


def test_nodes_without_a_job_are_idle() -> None:
    console = Console()
    console.receive("a", jobs=[])
    view = console.receive("b", jobs=[])

    assert view.headline().text == "2 nodes up, no job yet"
    assert console.receive("b", jobs=[]).nodes()[0].ranks == ""
    console.now_s += 4
    assert console.view().headline().text == "a and b have not reported for 4.0 s"


def test_a_stop_that_has_left_no_rank_kills_none() -> None:
    console = Console()
    detail = "stopping by SIGTERM; what is left in 10 s is killed"
    jobs = [job_status(num_nodes=1, world_size=2, state=JobState.STOPPING, detail=detail)]

    some = console.receive("a", worker_report(0), dead_worker(1, code=0), jobs=jobs)
    assert some.headline().text.endswith("SIGTERM: 1 of 2 ranks are left; what is left in 10 s is killed")
    none = console.receive("a", dead_worker(0, code=0), dead_worker(1, code=0), jobs=jobs)
    assert none.headline().text == "job job is stopping by SIGTERM: 0 of 2 ranks are left"


def test_a_node_row_tells_memory_cpu_and_age() -> None:
    console = Console()
    console.receive(
        "a",
        worker_report(0),
        dead_worker(1, code=0),
        cpu_frac=0.5,
        memory_total_bytes=1000,
        memory_available_bytes=400,
        agent_rss_bytes=7,
    )
    console.now_s += 0.5
    row = console.view().nodes()[0]

    assert (row.cpu_frac, row.memory_used_bytes, row.memory_total_bytes, row.agent_rss_bytes) == (0.5, 600, 1000, 7)
    assert (row.ranks, row.num_running, row.num_ranks) == ("0-1", 1, 2)
    assert row.age_s == pytest.approx(0.5)
    assert row.severity is Severity.OK


def test_a_node_with_hardly_any_memory_left_is_a_warning() -> None:
    row = Console().receive("a", memory_total_bytes=1000, memory_available_bytes=20, cpu_frac=math.nan).nodes()[0]

    assert row.severity is Severity.WARNING
    assert row.cpu_frac is None


def test_a_job_row_tells_the_slowest_step_and_the_mean_loss() -> None:
    console = Console()
    reports = [
        rank_report(rank, step=10 + rank, loss=2.0 + rank, loss_first=5.0, steps_done=9, epoch=1) for rank in (0, 1)
    ]
    view = console.receive("a", *(worker_report(report.rank, report) for report in reports))
    job = view.job()

    assert job is not None
    assert (job.step, job.epoch, job.loss, job.steps_per_s, job.exit_code) == (10, 1, 2.5, None, None)
    assert msgspec.to_builtins(view.progress()) == {"steps": 9, "loss_first": 5.0, "loss_last": 2.5}


def test_a_job_row_tells_what_the_engine_knows_of_its_training() -> None:
    console = Console()
    training = TrainingReport(last_step=1000, goodput_frac=0.97, checkpoint_step=100, checkpoint_age_s=12.0)
    view = console.receive("a", worker_report(0, rank_report(0, step=110, steps_done=10, training=training)))
    job = view.job()

    assert job is not None
    assert (job.last_step, job.goodput_frac, job.checkpoint_step, job.checkpoint_age_s) == (1000, 0.97, 100, 12.0)
    assert job.remaining_s is None, "the rate is not known yet"


def test_the_remaining_time_is_the_remaining_steps_at_the_present_rate() -> None:
    console = Console()
    view = console.view()
    training = TrainingReport(last_step=1000)
    report = rank_report(0)
    for second in range(10):
        report = rank_report(0, report_seq=second + 1, step=100 + 10 * second, training=training)
        console.now_s = 100.0 + second
        view = console.receive("a", worker_report(0, report, seen_s=second))
    job = view.job()

    assert job is not None
    assert job.remaining_s == pytest.approx((1000 - 190) / 10)

    view = console.receive("a", worker_report(0, report, process=ProcessState.FROZEN, process_s=5.0))
    job = view.job()
    assert job is not None
    assert (job.severity, job.remaining_s) == (Severity.CRITICAL, None), "what hangs does not get there"


def test_a_loss_that_is_no_number_is_shown_as_such_and_null_in_json() -> None:
    console = Console()
    console.receive("b")
    reports = [rank_report(0, step=1, loss=math.inf), rank_report(1, step=1, loss=-math.inf)]
    view = console.receive("a", *(worker_report(report.rank, report) for report in reports))

    job = view.job()
    assert job is not None
    assert job.loss is not None
    assert math.isnan(job.loss)
    assert "loss NaN" in view.headline().text
    assert status_object(view)["jobs"][0]["loss"] is None


def test_a_failed_job_tells_exit_code_and_detail_of_the_node_that_failed() -> None:
    console = Console()
    console.receive("a", jobs=[job_status(state=JobState.SUCCEEDED, exit_code=0)])
    view = console.receive("b", jobs=[job_status(2, state=JobState.FAILED, exit_code=3, detail=f"no port {HOSTILE}")])

    job = view.job()
    assert job is not None
    assert (job.state, job.exit_code, job.severity) == ("failed", 3, Severity.CRITICAL)
    assert view.headline().text == r"job job failed (exit code 3): no port \x1b]52;c;aGk=\x07\u202e[/x]"
    assert view.headline().severity is Severity.CRITICAL


def test_a_job_between_two_attempts_says_when_it_begins_again() -> None:
    detail = "rank 1 was killed by SIGKILL; restarts in 2 s, 1 of 3 restarts left"
    console = Console()
    console.receive("a", jobs=[job_status(state=JobState.RESTARTING, detail=detail)])
    view = console.receive("b", jobs=[job_status(2, state=JobState.RESTARTING)])

    job = view.job()
    assert job is not None
    assert (job.state, job.severity) == ("restarting", Severity.WARNING)
    assert view.headline().text == f"job job is between two attempts: {detail}"


def test_a_lost_job_is_as_bad_as_a_failed_one() -> None:
    console = Console()
    console.receive("a", jobs=[job_status(state=JobState.LOST, detail="the node was rebooted")])
    assert console.receive("b").headline().text == "job job was lost on a node and is ending: the node was rebooted"

    view = console.receive("b", jobs=[job_status(2, state=JobState.SUCCEEDED)])

    job = view.job()
    assert job is not None
    assert (job.state, job.severity) == ("lost", Severity.CRITICAL)
    assert view.headline().text == "job job was lost: the node was rebooted"
    assert view.headline().severity is Severity.CRITICAL


def test_a_job_that_has_failed_on_one_node_is_ending_on_the_other() -> None:
    console = Console()
    console.receive("a", jobs=[job_status(state=JobState.FAILED)])

    assert console.receive("b").headline().text == "job job has failed and is ending"
    job = console.receive("b", jobs=[job_status(2, state=JobState.FAILED)]).job()
    assert job is not None
    assert job.exit_code is None
    assert console.view().headline().text == "job job failed"


def test_a_rank_row_says_what_is_odd_about_it() -> None:
    console = Console()
    report = rank_report(0, slow_factor=8.0, recorder_missing=True, phase=Phase.DATA)
    view = console.receive("a", worker_report(0, report, process=ProcessState.BLOCKED), worker_report(1))

    rows = view.ranks()
    assert rows[0].detail == (
        "in uninterruptible sleep; this torch has no flight recorder (2.8 and newer have): collectives are not seen, "
        "lines are; slowed 8x on request"
    )
    assert (rows[1].detail, rows[1].state, rows[1].step) == ("importing torch", RankState.STARTING, None)
    assert (rows[2].detail, rows[2].node, rows[2].pid) == ("not started", "b", None), "no other node is left for it"


@pytest.mark.parametrize(
    ("end", "state", "detail"),
    [
        ({"code": 0}, RankState.DONE, "finished"),
        ({}, RankState.ENDED, "ended, it is not known how"),
        ({"signal": 11}, RankState.EXITED, "killed by SIGSEGV"),
        ({"code": 2, "error": "E: x\n"}, RankState.EXITED, r"exited with code 2: E: x\x0a"),
        ({"code": 2}, RankState.EXITED, "exited with code 2"),
    ],
)
def test_an_ended_rank_says_how(end: dict[str, Any], state: RankState, detail: str) -> None:
    row = Console().receive("a", dead_worker(0, **end)).ranks([0])[0]

    assert (row.state, row.detail, row.rss_bytes, row.waiting_s) == (state, detail, None, None)


def test_a_rank_of_a_stopped_job_is_stopped_also_where_a_new_agent_does_not_know_how_it_ended() -> None:
    stopped = job_status(state=JobState.STOPPED, state_s=30.0, exit_code=1)
    row = Console().receive("a", dead_worker(0), jobs=[stopped]).ranks([0])[0]

    assert (row.state, row.detail) == (RankState.STOPPED, "ended on request, it is not known how")


@pytest.mark.parametrize(
    ("file", "function", "where"),
    [
        ("/usr/lib/python3.11/multiprocessing/util.py", "_exit_function", ""),
        ("/usr/lib/python3.11/threading.py", "_shutdown", ""),
        ("/home/u/util.py", "step", "util.py:3 in step"),
    ],
)
def test_a_rank_that_has_ended_shows_no_line_of_the_interpreter_s_end(file: str, function: str, where: str) -> None:
    report = rank_report(0, place=Place(file, 3, function))
    (row,) = Console().receive("a", dead_worker(0, report, code=0)).ranks([0])
    (living,) = Console().receive("a", worker_report(0, report)).ranks([0])

    assert (row.where, living.where) == (where, f"{file.rpartition('/')[2]}:3 in {function}")


def test_a_rank_row_tells_the_group_that_it_waits_in_longest() -> None:
    groups = [
        group_report(5, op="all_reduce"),
        group_report(3, 0.5, group="7", ranks=[0, 1]),
        group_report(2, 4.0, group=BARRIER_GROUP, op="barrier", label="epoch"),
    ]
    console = Console()
    view = console.receive("a", worker_report(0, rank_report(0, groups=groups, phase_s=1.0), report_age_s=0.25))
    console.now_s += 0.5
    row = console.view().ranks([0])[0]

    assert view.ranks([0])[0].state is RankState.WAITING
    assert (row.group, row.op, row.label, row.seq) == (BARRIER_GROUP, "barrier", "epoch", 2)
    assert row.waiting_s == pytest.approx(4.75)
    assert row.phase_s == pytest.approx(1.75)
    assert row.age_s == pytest.approx(0.75)


def test_only_ranks_that_exist_have_rows_in_the_order_asked_for() -> None:
    view = Console().receive("a")

    assert [row.rank for row in view.ranks([3, 99, 1, -1])] == [3, 1]
    assert [row.rank for row in view.memory([2, 99, 0, -5])] == [2, 0]


def test_a_rank_is_missing_and_a_warning_once_others_have_waited_a_second() -> None:
    console = Console()
    waiting = rank_report(0, groups=[group_report(5, 0.9)])
    late = rank_report(1, groups=[group_report(4)])
    view = console.receive("a", worker_report(0, waiting), worker_report(1, late))
    assert [(row.state, row.severity) for row in view.ranks([0, 1])] == [
        (RankState.WAITING, Severity.OK),
        (RankState.RUNNING, Severity.OK),
    ]

    console.now_s += 0.2
    (row,) = console.view().ranks([1])
    assert (row.state, row.severity) == (RankState.MISSING, Severity.WARNING)


def test_of_a_job_that_is_over_a_rank_that_waited_less_is_past() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=4)
    sim.run_to_step(20)
    sim.slow(2, 3.0)
    sim.run_until(lambda: bool(sim.verdicts()), 40, "a verdict")
    pace = sim.view().pace
    assert pace is not None
    assert pace.summary().text.startswith("rank 2 costs the others ")
    sim.stop()
    sim.run_until(lambda: sim.view().job().state == "stopped", 60, "its end")  # type: ignore[union-attr]

    pace = sim.view().pace
    assert pace is not None
    summary = pace.summary()
    assert re.fullmatch(r"rank 2 waited \d+ % less than the others before the job ended", summary.text)
    assert summary.severity is Severity.QUIET


@pytest.mark.parametrize("seed", [22, 25, 29])
def test_in_the_first_second_of_a_hang_no_rank_is_missing_that_is_only_on_its_way(seed: int) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4, seed=seed)
    culprit = seed % 8
    sim.run(6 + 0.07 * seed)
    sim.freeze(culprit)
    missing: list[list[int]] = []
    waited_s = 0.0
    while waited_s < 2.0:
        sim.run(0.05)
        rows = sim.view().barriers()
        missing += [row.missing for row in rows]
        assert not [row for row in rows if row.is_settled and not row.missing]
        waited_s = max((row.waited_s for row in rows), default=0.0)

    assert {tuple(ranks) for ranks in missing} == {(), (culprit,)}


def test_in_the_first_second_of_a_wait_the_rank_that_a_verdict_names_is_missing() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run(6)
    sim.freeze(6)
    sim.run_until(lambda: bool(sim.verdicts() and sim.view().waits), 10, "a verdict and a wait")
    view = sim.view()
    wait = msgspec.structs.replace(view.waits[0], missing=np.array([5, 6]), waited_s=0.4)

    assert (view.barrier_row(wait).missing, view.barrier_row(wait).is_settled) == ([6], False)
    assert view.barrier_row(msgspec.structs.replace(wait, waited_s=1.5)).missing == [5, 6]


def test_a_barrier_row_tells_both_sides_with_their_lines() -> None:
    console = Console()
    console.receive("b", *(worker_report(rank, rank_report(rank, groups=[group_report(5, 2.0)])) for rank in (2, 3)))
    late = rank_report(1, groups=[group_report(4)], place=Place("/x/data.py", 7, "load"), phase=Phase.DATA, step=3)
    odd = rank_report(0, groups=[group_report(5, 6.0)], place=Place("/x/odd.py", 1, "f"))
    view = console.receive("a", worker_report(0, odd), worker_report(1, late))

    (row,) = view.barriers()
    assert (row.group, row.seq, row.op, row.waiting, row.missing) == ("0", 5, "all_reduce", [0, 2, 3], [1])
    assert (row.where, row.missing_where) == ("train.py:42 in train_step", "data.py:7 in load")
    assert row.text == "ranks 0, 2-3 wait in all_reduce #5 for rank 1, 6.0 s"
    assert row.severity is Severity.WARNING
    assert view.headline().text == f"{row.text}; rank 1 is loading data; no alarm before 10 s"
    assert view.headline().severity is Severity.WARNING


def test_ranks_that_wait_at_one_place_in_different_calls_are_told_apart() -> None:
    console = Console()
    reports = [
        worker_report(
            rank, rank_report(rank, groups=[group_report(5, 3.0, op="barrier" if rank == 2 else "all_reduce")])
        )
        for rank in range(4)
    ]
    console.receive("b", *reports[2:])
    view = console.receive("a", *reports[:2])

    (row,) = view.barriers()
    assert row.text == "rank 2 waits in barrier #5, ranks 0-1, 3 in all_reduce #5, 3.0 s"
    (other,) = row.other_calls
    assert (row.op, row.in_this_call, row.waiting) == ("all_reduce", [0, 1, 3], [0, 1, 2, 3])
    assert (other.ranks, other.op, other.text) == ([2], "barrier", "rank 2 calls barrier")


def test_a_wait_of_which_nothing_is_known_yet_is_for_others() -> None:
    view = Console().receive("a", worker_report(0, rank_report(0, groups=[group_report(5, 1.5)], step=1)))

    (row,) = view.barriers()
    assert row.text == "rank 0 waits in all_reduce #5 for others, 1.5 s"
    assert row.missing_where == ""


def test_a_program_that_tells_no_steps_is_running() -> None:
    console = Console()
    console.receive("b", *(worker_report(rank, rank_report(rank)) for rank in (2, 3)))
    view = console.receive("a", *(worker_report(rank, rank_report(rank)) for rank in (0, 1)))

    assert view.headline().text == "4 ranks running, no step reported yet"


def test_memory_is_told_beside_the_median() -> None:
    console = Console()
    sizes = (1000 * MIB, 1000 * MIB, 1000 * MIB, 1600 * MIB)
    console.receive("a", *(worker_report(rank, rss_bytes=sizes[rank]) for rank in (0, 1)))
    view = console.receive("b", *(worker_report(rank, rss_bytes=sizes[rank]) for rank in (2, 3)))

    summary = view.memory_summary()
    assert summary is not None
    assert (summary.median_bytes, summary.max_bytes, summary.max_rank) == (1000 * MIB, 1600 * MIB, 3)
    assert summary.imbalance_frac == pytest.approx(0.6)
    assert summary.severity is Severity.WARNING
    assert summary.total_bytes == 4600 * MIB
    assert summary.text == (
        "4 ranks hold 4.5 GiB (shared pages counted in each); most RSS on rank 3: 1.6 GiB, 60 % over median 1.0 GiB"
    )
    rows = view.memory()
    assert [row.severity for row in rows] == [Severity.OK] * 3 + [Severity.WARNING]
    assert rows[3].from_median_frac == pytest.approx(0.6)


def test_pages_that_ranks_share_are_counted_once_where_that_is_known_of_all_living() -> None:
    console = Console()
    console.receive("a", *(worker_report(rank, rss_bytes=1000 * MIB, pss_bytes=256 * MIB) for rank in (0, 1)))
    view = console.receive("b", worker_report(2, rss_bytes=1000 * MIB, pss_bytes=512 * MIB), dead_worker(3, code=1))

    summary = view.memory_summary()
    assert summary is not None
    assert (summary.total_bytes, summary.median_bytes) == (1024 * MIB, 1000 * MIB)
    assert summary.text == "1.0 GiB PSS in 3 ranks; RSS is even, about 1.0 GiB each"


def test_evenly_spread_memory_is_not_told_as_most_on_anybody() -> None:
    console = Console()
    console.receive("a", *(worker_report(rank, rss_bytes=1000 * MIB + rank) for rank in (0, 1)))
    view = console.receive("b", *(worker_report(rank, rss_bytes=1000 * MIB) for rank in (2, 3)))

    summary = view.memory_summary()
    assert summary is not None
    assert summary.text == ("4 ranks hold 3.9 GiB (shared pages counted in each); RSS is even, about 1.0 GiB each")


def test_memory_of_ranks_that_are_not_there_is_not_known() -> None:
    view = Console().receive("a", worker_report(0, rss_bytes=0), dead_worker(1, code=0))

    rows = view.memory()
    assert [(row.rss_bytes, row.severity) for row in rows[:2]] == [(0, Severity.OK), (None, Severity.QUIET)]
    assert rows[0].from_median_frac is None
    assert rows[2].node == ""
    summary = view.memory_summary()
    assert summary is not None
    assert summary.text == "1 rank holds 0 B"


def test_when_no_rank_lives_any_more_their_peaks_are_told() -> None:
    console = Console()
    sizes = (1000 * MIB, 1000 * MIB, 1000 * MIB, 1600 * MIB)
    console.receive("a", *(worker_report(rank, rss_bytes=sizes[rank]) for rank in (0, 1)))
    console.receive("b", *(worker_report(rank, rss_bytes=sizes[rank]) for rank in (2, 3)))
    console.receive("a", *(dead_worker(rank, code=1) for rank in (0, 1)))
    view = console.receive("b", *(dead_worker(rank, code=1) for rank in (2, 3)))

    summary = view.memory_summary()
    assert summary is not None
    assert summary.text == (
        "no rank lives; at their peaks 4 ranks held 4.5 GiB (shared pages counted in each); "
        "most RSS on rank 3: 1.6 GiB, 60 % over median 1.0 GiB"
    )
    row = view.memory()[3]
    assert (row.rss_bytes, row.peak_rss_bytes, row.has_ended, row.is_old) == (None, 1600 * MIB, True, True)
    assert row.from_median_frac == pytest.approx(0.6)


def test_the_peak_of_a_rank_that_is_gone_stands_beside_what_the_living_hold() -> None:
    console = Console()
    console.receive("a", *(worker_report(rank, rss_bytes=1000 * MIB) for rank in (0, 1)))
    console.receive("b", *(worker_report(rank, rss_bytes=3000 * MIB) for rank in (2, 3)))
    view = console.receive("b", *(dead_worker(rank, code=1) for rank in (2, 3)))

    summary = view.memory_summary()
    assert summary is not None
    assert (summary.median_bytes, summary.max_rank) == (1000 * MIB, 0)
    assert [row.from_median_frac for row in view.memory()] == pytest.approx([0.0, 0.0, 2.0, 2.0])


def test_no_string_of_any_row_holds_what_a_terminal_would_act_on() -> None:
    console = Console()
    place = Place(f"/x/{HOSTILE}.py", 1, HOSTILE)
    hostile = group_report(5, 30.0, group=HOSTILE, op=HOSTILE[:60], label=HOSTILE)
    quiet = group_report(4, group=HOSTILE, op=HOSTILE[:60], label=HOSTILE)
    fields: dict[str, Any] = {"hostname": HOSTILE, "jobs": [job_status(job_id="job", detail=HOSTILE)]}
    for _ in range(3):
        console.receive(
            "b", dead_worker(2, code=1, error=HOSTILE), worker_report(3, rank_report(3, groups=[quiet], place=place))
        )
        console.receive(
            "a",
            worker_report(0, rank_report(0, groups=[hostile], place=place)),
            worker_report(1, rank_report(1, groups=[quiet], place=place), process=ProcessState.FROZEN),
            **fields,
        )
        console.now_s += 1

    view = console.view()
    texts = [*strings(status_object(view)), view.headline().text]
    assert {verdict.cause for verdict in view.verdicts()} >= {"frozen", "exited"}
    assert any("x1b" in text for text in texts)
    assert [text for text in texts if set(text) & set("\x1b\x07\u202e")] == []


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def test_the_status_object_has_the_documented_shape() -> None:
    sim = SimCluster()
    sim.freeze(2, at_step=20)
    sim.run(12)
    status = status_object(sim.view())

    assert json.loads(json.dumps(status, allow_nan=False)) == status
    assert list(status) == ["schema", "nodes", "jobs", "other_jobs", "gpus", "ranks", "barriers", "verdicts"]
    assert status["schema"] == 1
    assert len(status["ranks"]) == 4
    assert {"rank", "node", "state", "step", "phase", "group", "op", "seq", "waiting_s", "rss_bytes"} <= set(
        status["ranks"][0]
    )
    assert {"job", "attempt", "group", "seq", "op", "label", "waiting", "missing", "waited_s"} <= set(
        status["barriers"][0]
    )
    (verdict,) = status["verdicts"]
    assert (verdict["cause"], verdict["culprits"], verdict["waiting"]) == ("frozen", [2], [0, 1, 3])
    assert {"node", "group", "seq", "op", "label", "waited_s", "where", "text", "hint"} <= set(verdict)
    assert status["ranks"][2]["state"] == "frozen"
    assert status["ranks"][2]["detail"].startswith("frozen for")


def test_no_job_makes_an_empty_status() -> None:
    assert status_object(Console().view())["jobs"] == []


def test_a_job_whose_ranks_have_ended_is_not_training_while_its_launcher_is_there() -> None:
    console = Console()
    for node, first in (("a", 0), ("b", 2)):
        console.receive(node, *(dead_worker(rank, rank_report(rank), code=0) for rank in (first, first + 1)))

    assert console.view().headline().text == "job job: all ranks have ended, their launcher has not"
