"""The model believes what fits, counts what does not, and never raises."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agent.wire.jobs import JobState, JobStatus
from agent.wire.logs import RootCause
from agent.wire.reports import ExitReport, ProcessState, WorkerReport
from app.diagnosis.causes import Severity
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import MAX_JOBS, MAX_OLD_EPOCHS, MAX_WORLD_SIZE, OLD_SETTLED_S, SETTLED_S, Cluster
from app.model.group_table import MAX_CALLS
from app.model.job_model import JobModel
from app.view.ranks import rank_row
from app.view.view import View
from ddpcore.wire import Phase
from tests.support.node_reports import dead_worker, group_report, job_status, node_report, rank_report, worker_report

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from app.model.rank_batch import RankBatch


def make(*nodes: str) -> Cluster:
    return Cluster(nodes or ("a", "b"))


def job_of(cluster: Cluster, job_id: str = "job") -> JobModel:
    cluster.validate()
    return cluster.jobs[job_id]


def apply(
    cluster: Cluster, seq: int, *workers: WorkerReport, node: str = "a", now_s: float = 10.0, **fields: Any
) -> None:
    first = 0 if node == "a" else 2
    fields.setdefault("jobs", [job_status(first)])
    cluster.apply(node, node_report(seq, workers=list(workers), **fields), now_s)
    cluster.validate()


def full(group: str = "0", seq: int = 5, **fields: Any) -> WorkerReport:
    return worker_report(0, rank_report(0, groups=[group_report(seq, group=group, **fields)]))


def test_membership_comes_from_the_world_size_and_not_from_who_has_talked() -> None:
    cluster = make()
    apply(cluster, 1, worker_report(0))

    job = job_of(cluster)
    assert job.world_size == 4
    assert job.node_of.tolist() == [0, 0, -1, -1]
    assert job.ranks_of(0) == [0, 1]
    assert job.ranks_of(1) == []


def test_a_node_outside_the_cluster_is_counted() -> None:
    cluster = make()
    cluster.apply("c", node_report(1, [job_status()], []), 10.0)

    assert cluster.num_unknown_nodes == 1
    assert cluster.jobs == {}
    assert cluster.current_job() is None


def test_a_report_that_comes_late_is_dropped_and_counted() -> None:
    cluster = make()
    apply(cluster, 5, worker_report(0, rank_report(0, step=9, report_seq=9)))
    apply(cluster, 4, worker_report(0, rank_report(0, step=8, report_seq=8)), now_s=10.1)

    assert job_of(cluster).step[0] == 9
    assert cluster.nodes["a"].num_ignored == 1
    assert cluster.last_report_s[0] == 10.0


def test_a_new_life_of_an_agent_counts_anew_and_late_reports_of_the_old_one_are_dropped() -> None:
    cluster = make()
    apply(cluster, 50, epoch="old")
    apply(cluster, 1, epoch="new", now_s=11)
    apply(cluster, 51, epoch="old", now_s=12)

    assert cluster.last_report_s[0] == 11
    assert cluster.nodes["a"].num_ignored == 1


def test_only_some_old_lives_are_remembered() -> None:
    cluster = make()
    for life in range(MAX_OLD_EPOCHS + 5):
        apply(cluster, 1, epoch=f"e{life}")

    assert len(cluster.nodes["a"].old_epochs) == MAX_OLD_EPOCHS


def test_a_node_cannot_speak_for_ranks_of_another() -> None:
    cluster = make()
    apply(cluster, 1, worker_report(0), node="a")
    apply(cluster, 1, worker_report(2), worker_report(0, process=ProcessState.FROZEN), worker_report(77), node="b")

    job = job_of(cluster)
    assert job.process.tolist() == [1, 0, 1, 0]
    assert job.num_ignored == 2


def test_a_node_cannot_claim_ranks_of_another_nor_ranks_that_are_none() -> None:
    cluster = make()
    apply(cluster, 1)
    apply(cluster, 1, node="b", jobs=[job_status(1)])
    apply(cluster, 2, node="b", jobs=[job_status(3)])

    assert job_of(cluster).node_of.tolist() == [0, 0, -1, -1]
    assert job_of(cluster).num_ignored == 2


@pytest.mark.fault(row=30)
@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ({"first_rank": 1}, "rank 1 of job job, which it claims, runs on a"),
        ({"first_rank": 0}, "ranks 0-1 of job job, which it claims, run on a"),
        ({"ranks": [1, 3]}, "rank 1 of job job, which it claims, runs on a"),
        ({"world_size": 8}, "its part of job job does not fit the others'"),
        ({"num_nodes": 3}, "its part of job job does not fit the others'"),
        ({"ranks": [2, 2**31 - 1]}, "its part of job job does not fit the others'"),
        ({"local_world_size": 2**62}, "its part of job job does not fit the others'"),
        ({"first_rank": 2**31 - 1, "local_world_size": 2**63 - 1}, "its part of job job does not fit the others'"),
    ],
)
def test_a_node_that_is_not_believed_is_named_with_the_reason_until_it_fits(lie: dict[str, Any], text: str) -> None:
    cluster = make()
    apply(cluster, 1)
    apply(cluster, 1, node="b", jobs=[job_status(**({"first_rank": 2} | lie))])

    def view() -> View:
        return View(cluster, Diagnoser().observe(cluster, 10.0), 10.0)

    assert view().headline().text == f"b is not believed: {text}"
    assert [(row.trouble, row.severity) for row in view().nodes()] == [
        ("", Severity.OK), (f"not believed: {text}", Severity.WARNING)
    ]  # fmt: skip
    apply(cluster, 2, node="b", jobs=[job_status(2)])
    assert "not believed" not in view().headline().text
    assert view().nodes()[1].trouble == ""


def test_a_job_of_another_size_is_not_the_same_job() -> None:
    cluster = make()
    apply(cluster, 1)
    apply(cluster, 1, node="b", jobs=[job_status(2, world_size=8)])

    assert job_of(cluster).world_size == 4
    assert job_of(cluster).num_ignored == 1


@pytest.mark.parametrize(
    "status",
    [
        job_status(world_size=0),
        job_status(world_size=MAX_WORLD_SIZE + 1),
        job_status(world_size=2**62),
        job_status(num_nodes=0),
        job_status(num_nodes=5),
        job_status(first_rank=3),
    ],
)
def test_an_absurd_job_is_refused_before_anything_is_allocated(status: Any) -> None:
    cluster = make()
    apply(cluster, 1, worker_report(0), jobs=[status])

    assert cluster.jobs == {}
    assert cluster.nodes["a"].num_ignored == 2


def test_a_node_may_move_its_share() -> None:
    cluster = make()
    apply(cluster, 1)
    apply(cluster, 2, jobs=[job_status(0, local_world_size=1)])

    assert job_of(cluster).node_of.tolist() == [0, -1, -1, -1]


def test_a_new_attempt_starts_clean_and_the_old_one_is_not_believed_any_more() -> None:
    cluster = make()
    apply(cluster, 1, worker_report(0, rank_report(0, step=90, groups=[group_report(90)])))
    apply(cluster, 2, jobs=[job_status(attempt=1)])
    apply(cluster, 3, worker_report(0, rank_report(0, step=91)))

    job = job_of(cluster)
    assert job.attempt == 1
    assert job.groups == {}
    assert job.lowest_step() is None
    assert cluster.nodes["a"].num_ignored == 2


def test_the_newest_job_that_has_not_ended_is_shown() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[job_status(job_id="one")])
    apply(cluster, 2, jobs=[job_status(job_id="two")])
    assert cluster.current_job() is cluster.jobs["two"]

    apply(cluster, 3, jobs=[job_status(job_id="two", state=JobState.SUCCEEDED)])
    assert cluster.current_job() is cluster.jobs["one"]

    apply(cluster, 4, jobs=[job_status(job_id="one", state=JobState.STOPPED)])
    assert cluster.current_job() is cluster.jobs["two"]


def test_an_attempt_that_was_only_prepared_gives_way_to_the_one_before_it() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[job_status(attempt=4, state=JobState.PREPARED)])
    apply(cluster, 2, jobs=[job_status(attempt=3, state=JobState.STOPPED)])
    assert (job_of(cluster).attempt, job_of(cluster).together.state) == (3, JobState.STOPPED)

    apply(cluster, 3, jobs=[job_status(attempt=4, state=JobState.RUNNING)])
    apply(cluster, 4, jobs=[job_status(attempt=3, state=JobState.STOPPED)])
    assert job_of(cluster).attempt == 4, "it has begun"


def test_an_attempt_that_is_only_prepared_does_not_hide_the_one_before_it() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[job_status(attempt=3, state=JobState.STOPPED)])
    apply(cluster, 2, jobs=[job_status(attempt=4, state=JobState.PREPARED)])
    assert (job_of(cluster).attempt, job_of(cluster).is_ended()) == (3, True)

    apply(cluster, 3, jobs=[job_status(attempt=4, state=JobState.RUNNING)])
    assert (job_of(cluster).attempt, job_of(cluster).is_ended()) == (4, False)


def test_of_a_job_that_is_begun_again_older_attempts_are_forgotten() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[job_status(attempt=3, state=JobState.SUCCEEDED)])
    cluster.begin("job", 4)
    assert cluster.jobs == {}
    apply(cluster, 2, jobs=[job_status(attempt=3, state=JobState.SUCCEEDED)])
    assert cluster.jobs == {}, "the report was under way"

    apply(cluster, 3, jobs=[job_status(attempt=4, state=JobState.RUNNING)])
    assert job_of(cluster).attempt == 4


def test_jobs_are_bounded_and_an_ended_one_makes_room() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[job_status(job_id=f"j{index}") for index in range(MAX_JOBS + 3)])
    assert len(cluster.jobs) == MAX_JOBS
    assert cluster.nodes["a"].num_ignored == 3

    apply(cluster, 2, jobs=[job_status(job_id="j7", state=JobState.FAILED), job_status(job_id="newest")])
    assert "j7" not in cluster.jobs
    assert "newest" in cluster.jobs


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([JobState.PREPARED, JobState.PREPARED], "prepared"),
        ([JobState.RUNNING, JobState.PREPARED], "starting"),
        ([JobState.FAILED, JobState.RUNNING], "failed"),
        ([JobState.SUCCEEDED, JobState.STOPPING], "stopping"),
        ([JobState.SUCCEEDED, JobState.STOPPED], "stopped"),
        ([JobState.SUCCEEDED, JobState.SUCCEEDED], "succeeded"),
        ([JobState.LOST, JobState.RUNNING], "lost"),
        ([JobState.RESTARTING, JobState.RUNNING], "restarting"),
        ([JobState.RESTARTING, JobState.SUCCEEDED], "restarting"),
    ],
)
def test_the_job_s_state_is_told_from_its_nodes(states: list[JobState], told: str) -> None:
    cluster = make()
    for node, first, state in zip("ab", (0, 2), states, strict=True):
        apply(cluster, 1, node=node, jobs=[job_status(first, state=state)])

    assert job_of(cluster).state() == told


def test_ages_of_a_report_add_up_with_the_time_since_it_came() -> None:
    cluster = make()
    waiting = group_report(5, waiting_s=2.0)
    apply(cluster, 1, worker_report(0, rank_report(0, groups=[waiting]), report_age_s=0.5, process_s=7.0), now_s=100.0)

    job = job_of(cluster)
    assert job.report_at_s[0] == 99.5
    assert job.groups["0"].wait_since_s[0] == 97.5
    assert job.process_since_s[0] == 93.0


def test_a_report_of_another_rank_or_job_inside_a_worker_is_not_taken() -> None:
    cluster = make()
    apply(
        cluster,
        1,
        worker_report(0, rank_report(1)),
        worker_report(1, rank_report(1, job_id="other")),
        worker_report(1, rank_report(1, report_seq=2, attempt=3)),
    )

    assert job_of(cluster).num_ignored == 3
    assert all(map(math.isnan, job_of(cluster).report_at_s))


def test_the_same_report_is_folded_in_once() -> None:
    cluster = make()
    report = rank_report(0)
    apply(cluster, 1, worker_report(0, report))
    apply(cluster, 2, worker_report(0, report, report_age_s=0.2), now_s=10.3)

    assert job_of(cluster).stamp[0] == 1
    assert job_of(cluster).report_at_s[0] == 10.0
    assert job_of(cluster).report_age_s[0] == 0.2


def test_a_group_lists_its_members_and_others_are_refused() -> None:
    cluster = make()
    apply(
        cluster,
        1,
        full("7", ranks=[0, 2]),
        worker_report(1, rank_report(1, groups=[group_report(1, group="7", ranks=[0, 1])])),
    )

    job = job_of(cluster)
    assert job.groups["7"].members.tolist() == [0, 2]
    assert job.groups["7"].enqueued.tolist() == [5, 0]
    assert job.num_ignored == 1


def test_members_that_contradict_the_group_are_refused() -> None:
    cluster = make()
    apply(cluster, 1, full("7", ranks=[0, 2]))
    apply(
        cluster, 2, worker_report(0, rank_report(0, report_seq=2, groups=[group_report(9, group="7", ranks=[0, 1, 2])]))
    )
    apply(cluster, 3, worker_report(0, rank_report(0, report_seq=3, groups=[group_report(9, group="0", ranks=[0])])))
    assert job_of(cluster).groups["7"].enqueued.tolist() == [5, 0]
    assert job_of(cluster).num_ignored == 2


@pytest.mark.parametrize("ranks", [[0, 4], [0, 0, 1]])
def test_members_that_do_not_exist_open_no_group(ranks: list[int]) -> None:
    cluster = make()
    apply(cluster, 1, full("7", ranks=ranks))

    assert job_of(cluster).groups == {}
    assert job_of(cluster).num_ignored == 1


def test_a_group_of_everybody_may_be_listed_or_not() -> None:
    cluster = make()
    everybody = worker_report(1, rank_report(1, groups=[group_report(6, group="7")]))
    apply(cluster, 1, full("7", ranks=[0, 1, 2, 3]), everybody)

    assert job_of(cluster).groups["7"].enqueued.tolist() == [5, 6, 0, 0]


def test_groups_and_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.model.group_table.MAX_GROUPS", 3)
    monkeypatch.setattr("app.model.group_table.MAX_CALLS", 3)
    cluster = make()
    groups = [group_report(1, group=str(index), op=f"op{index}", ranks=[0, 1]) for index in range(1, 9)]
    apply(cluster, 1, worker_report(0, rank_report(0, groups=groups)))

    job = job_of(cluster)
    assert len(job.groups) == 3
    assert job.num_ignored == 5
    assert job.calls == [("", ""), ("op1", ""), ("op2", "")]
    assert job.groups["3"].code.tolist() == [0, 0]
    assert MAX_CALLS > 3


def test_a_death_keeps_its_earliest_time_and_its_latest_words() -> None:
    cluster = make()
    apply(cluster, 1, dead_worker(0, code=1, age_s=0.0), now_s=10.0)
    apply(cluster, 2, dead_worker(0, code=1, age_s=0.1), now_s=10.3)
    apply(cluster, 3, dead_worker(0, code=1, age_s=0.6, error="ValueError: boom"), now_s=10.5)

    death = job_of(cluster).deaths[0]
    assert death.at_s == pytest.approx(9.9)
    assert death.exit.error == "ValueError: boom"
    assert job_of(cluster).died_badly[0]


def test_a_rank_that_lives_again_is_not_dead() -> None:
    cluster = make()
    apply(cluster, 1, dead_worker(0, signal=9))
    apply(cluster, 2, worker_report(0, pid=99), now_s=11)

    assert job_of(cluster).deaths == {}


def test_peak_memory_is_the_highest_ever_seen() -> None:
    cluster = make()
    for seq, rss in enumerate((100, 300, 200), 1):
        apply(cluster, seq, worker_report(0, rss_bytes=rss))

    assert job_of(cluster).rss_bytes[0] == 200
    assert job_of(cluster).peak_rss_bytes[0] == 300
    assert math.isnan(job_of(cluster).peak_rss_bytes[1])


def test_the_step_rate_is_that_of_the_slowest_rank_over_the_last_seconds() -> None:
    cluster = make()
    for tick in range(40):
        steps = (
            worker_report(rank, rank_report(rank, report_seq=tick + 1, step=tick * (5 + rank)), seen_s=7 + tick / 2)
            for rank in (0, 1)
        )
        apply(cluster, tick + 1, *steps, now_s=100 + tick / 2)
        if tick == 1:
            assert job_of(cluster).steps_per_s(100 + tick / 2) is None

    assert job_of(cluster).lowest_step() == 39 * 5
    assert job_of(cluster).steps_per_s(119.5) == pytest.approx(10.0)
    assert job_of(cluster).steps_per_s(122.0) is None, "nobody has spoken of it for 2.5 s"


def test_a_step_that_goes_back_begins_a_new_history() -> None:
    cluster = make()
    for tick, step in enumerate((10, 20, 30, 5)):
        report = rank_report(0, report_seq=tick + 1, step=step)
        apply(cluster, tick + 1, worker_report(0, report, seen_s=tick), now_s=100 + tick)

    assert job_of(cluster).lowest_step() == 5
    assert job_of(cluster).steps_per_s(103.0) is None


def test_a_stop_is_remembered_by_its_beginning() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[job_status(state=JobState.STOPPING, state_s=1.0)], now_s=50.0)
    apply(cluster, 2, jobs=[job_status(state=JobState.STOPPED)], now_s=55.0)
    assert job_of(cluster).stop_began_s == 49.0

    unseen = make()
    apply(unseen, 1, jobs=[job_status(state=JobState.STOPPED)])
    assert job_of(unseen).stop_began_s == -math.inf


def test_a_stop_that_is_over_at_the_first_report_of_it_began_when_its_node_says() -> None:
    cluster = make()
    ended = worker_report(0, process=ProcessState.EXITED, exit=ExitReport(signal=2, age_s=0.2))
    apply(cluster, 1, ended, now_s=50.0)
    apply(cluster, 2, ended, jobs=[job_status(state=JobState.STOPPED, stop_s=1.5)], now_s=51.0)
    assert job_of(cluster).stop_began_s == 49.5


@pytest.mark.parametrize(("root_cause", "began_s"), [(None, 40.0), (RootCause(0, "exited with code 1"), 45.0)])
def test_a_stop_between_two_reports_began_after_the_first_unless_a_rank_had_failed(
    root_cause: RootCause | None, began_s: float
) -> None:
    cluster = make()
    apply(cluster, 1, now_s=40.0)
    apply(cluster, 2, jobs=[job_status(state=JobState.STOPPED, root_cause=root_cause)], now_s=50.0)
    assert job_of(cluster).stop_began_s == began_s


def test_a_job_of_another_launcher_is_dropped_once_its_node_has_not_named_it_for_a_while() -> None:
    cluster = make()
    for seq, now_s, jobs in ((1, 10.0, [adopted(0), job_status(job_id="ours")]), (2, 12.0, []), (3, 16.0, [])):
        apply(cluster, seq, jobs=jobs, now_s=now_s)
        assert ("job" in cluster.jobs) == (now_s < 15.0)
    assert list(cluster.jobs) == ["ours"]


def test_sizes_are_counted_in_elements_and_absurd_ones_are_cut() -> None:
    cluster = make()
    for seq, sizes in enumerate(([[3, 2], [4]], [[2**62] * 9], [[-5]], [[7]], []), 1):
        waiting = group_report(seq, waiting_s=1.0, sizes=sizes)
        apply(cluster, seq, worker_report(0, rank_report(0, report_seq=seq, groups=[waiting])))
        expected = [10, 2**62, -1, 7, -1][seq - 1]
        assert job_of(cluster).groups["0"].num_elements[0] == expected


def test_a_report_without_jobs_says_only_that_the_node_lives() -> None:
    cluster = make()
    cluster.apply("a", node_report(1, [], [worker_report(0)]), 10.0)

    assert cluster.nodes["a"].report is not None
    assert cluster.nodes["a"].num_ignored == 1


def adopted(*ranks: int, **fields: Any) -> JobStatus:
    """Return a job of another launcher on a node that knows these ranks of 4."""
    shape = {"num_nodes": 1, "node_rank": 0, "local_world_size": len(ranks), "ranks": list(ranks)}
    return job_status(ranks[0], **{**shape, **fields})


def test_ranks_of_another_launcher_are_any_set_and_grow() -> None:
    cluster = make()
    apply(cluster, 1, jobs=[adopted(0)])
    apply(cluster, 2, jobs=[adopted(0, 3)])
    apply(cluster, 1, jobs=[adopted(1, 2)], node="b")

    job = job_of(cluster)
    assert job.node_of.tolist() == [0, 1, 1, 0]
    assert (job.num_nodes, job.ranks_of(0), job.together.is_adopted) == (2, [0, 3], True)

    apply(cluster, 3, jobs=[adopted(0, 2, 3)])
    assert job_of(cluster).node_of.tolist() == [0, 1, 1, 0]
    assert job_of(cluster).num_ignored == 1


def test_nodes_whose_ranks_have_no_probe_for_different_reasons_are_named_with_each() -> None:
    cluster = make()
    nodes = {"a": (0, "python -I"), "b": (1, "torch not imported")}
    for node, (rank, why) in nodes.items():
        apply(cluster, 1, worker_report(rank), jobs=[adopted(rank, unprobed=why)], node=node)

    job = job_of(cluster)
    assert job.notes()["unprobed"].startswith("ranks 0-1 have no probe (python -I; torch not imported)")
    found = Diagnoser().observe(cluster, 10.0).jobs["job"]
    details = [rank_row(cluster, job, found, rank, 10.0).detail for rank in (0, 1)]
    assert details == [f"no probe ({why}): 0.0 cores busy" for _, why in nodes.values()]


def test_another_run_of_a_job_takes_its_place_and_nodes_that_have_only_ended_the_last_one_are_not_of_it() -> None:
    cluster = make()
    for node, rank in (("a", 0), ("b", 2)):
        apply(cluster, 1, jobs=[adopted(rank)], node=node)
        apply(cluster, 2, jobs=[adopted(rank, state=JobState.FAILED)], node=node)
    first = job_of(cluster)
    assert first.is_ended()

    apply(cluster, 3, jobs=[adopted(0)])
    apply(cluster, 3, jobs=[adopted(2, state=JobState.FAILED)], node="b")
    second = job_of(cluster)
    assert second is not first
    assert (second.state(), second.node_of.tolist()) == ("starting", [0, -1, -1, -1])

    apply(cluster, 4, jobs=[adopted(2)], node="b")
    apply(cluster, 4, jobs=[adopted(0)])
    assert job_of(cluster) is second
    assert second.node_of.tolist() == [0, -1, 1, -1]

    apply(cluster, 5, jobs=[adopted(0, world_size=1)])
    assert job_of(cluster).world_size == 1


def test_ranks_that_nobody_reports_once_the_others_have_opened_their_group_are_named() -> None:
    cluster = make()
    early, open_ = rank_report(0, phase=Phase.JOINING), rank_report(0)
    apply(cluster, 1, worker_report(0, early), jobs=[adopted(0)])
    assert job_of(cluster).notes() == {}

    apply(cluster, 2, worker_report(0, msgspec.structs.replace(open_, report_seq=2)), jobs=[adopted(0)])
    assert job_of(cluster).notes()["unknown"].startswith("ranks 1-3: on a host that is not watched here")


def test_a_node_without_a_report_has_the_other_ranks_only_where_they_must_be_its() -> None:
    cluster = make("a", "b")
    apply(cluster, 1, full(seq=9), jobs=[job_status(0)])
    assert cluster.unreported_of(job_of(cluster)) == ("b",)

    with_spare = make("a", "b", "spare")
    apply(with_spare, 1, full(seq=9), jobs=[job_status(0)])
    assert with_spare.unreported_of(job_of(with_spare)) == ()

    cluster = make("a", "b")
    apply(cluster, 1, full(seq=9), jobs=[adopted(0)])
    assert cluster.unreported_of(job_of(cluster)) == ()


@pytest.mark.parametrize(("age_s", "news_s"), [(0.0, SETTLED_S), (600.0, OLD_SETTLED_S)])
def test_ended_ranks_that_are_reported_again_and_again_are_not_taken_again(
    monkeypatch: pytest.MonkeyPatch, age_s: float, news_s: float
) -> None:
    taken: list[float] = []

    def put(job: JobModel, batch: RankBatch, rows: NDArray[np.int64]) -> None:
        taken.extend(set(batch.at_s[rows].tolist()))
        take(job, batch, rows)

    take = JobModel.put_ranks
    monkeypatch.setattr(JobModel, "put_ranks", put)
    cluster = make()

    def report(seq: int, node: str, now_s: float) -> None:
        first = 0 if node == "a" else 2
        ended = [dead_worker(rank, signal=9, age_s=age_s + now_s - 10.0) for rank in (first, first + 1)]
        status = job_status(first, state=JobState.FAILED, state_s=age_s + now_s - 10.0)
        apply(cluster, seq, *ended, node=node, now_s=now_s, jobs=[status])

    for second in range(60):
        report(second + 1, "a", 10.0 + second)
    assert max(taken) - 10.0 <= news_s + 1.0, taken

    # The other node may come only now.
    report(1, "b", 71.0)
    assert sorted(job_of(cluster).deaths) == [0, 1, 2, 3]


def test_a_rank_that_lives_on_after_the_end_of_its_job_is_followed() -> None:
    cluster = make()
    for second in range(60):
        status = job_status(0, state=JobState.FAILED, state_s=600.0 + second)
        workers = [dead_worker(0, signal=9, age_s=600.0 + second), worker_report(1)]
        apply(cluster, second + 1, *workers, now_s=10.0 + second, jobs=[status])
    apply(cluster, 61, dead_worker(1, signal=9), now_s=71.0, jobs=[job_status(0, state=JobState.FAILED)])
    assert sorted(job_of(cluster).deaths) == [0, 1]


@pytest.mark.parametrize(("state", "state_s"), [(JobState.RUNNING, 65.0), (JobState.SUCCEEDED, 45.0)])
def test_the_first_node_brings_a_job_into_a_state_and_the_last_one_ends_it(state: JobState, state_s: float) -> None:
    cluster = make()
    for node, first, age_s in (("a", 0, 60.0), ("b", 2, 40.0)):
        apply(cluster, 1, jobs=[job_status(first, state=state, state_s=age_s)], node=node)

    assert job_of(cluster).state_s(15.0) == state_s


def test_ranks_that_a_node_names_twice_and_in_no_order_are_its_own_once() -> None:
    cluster = Cluster(["a"])
    cluster.apply("a", node_report(1, [job_status(ranks=[3, 0, 0])], []), 1.0)

    cluster.validate()
    assert cluster.jobs["job"].ranks_of(0) == [0, 3]
