"""What happened, as a simulated cluster lives through it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from agent.wire.digest import frame_of
from agent.wire.jobs import JobState
from agent.wire.logs import RootCause
from app.diagnosis.causes import Severity
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.recording.events import MAX_EVENTS, NEWS_S, EventKind, EventLog
from app.recording.note_watch import NOTE_SETTLES_S, NoteWatch
from app.view.summary import summary_lines, summary_object
from app.view.view import View
from ddpcore.wire import Anomaly
from tests.support.node_reports import dead_worker, job_status, node_report, rank_report, worker_report
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from app.recording.events import Event


class Witness:
    """Looks at a simulated cluster as often as a console does."""

    def __init__(self, sim: SimCluster) -> None:
        self.sim = sim
        self.log = EventLog()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.sim.run(0.2)
            self.log.observe(self.sim.view())

    @property
    def events(self) -> list[Event]:
        return [self.log[index] for index in range(len(self.log))]

    def told(self, kind: EventKind) -> list[str]:
        return [event.text for event in self.events if event.kind is kind]


@pytest.fixture
def witness() -> Witness:
    return Witness(SimCluster())


def test_nodes_come_up_and_a_job_runs(witness: Witness) -> None:
    witness.run(12)

    assert sorted(witness.told(EventKind.NODE)) == ["node demo-0: up", "node demo-1: up"]
    jobs = witness.told(EventKind.JOB)
    assert jobs[-1] == "job demo: running"
    assert len(jobs) == len(set(jobs)), "each state once"
    assert witness.told(EventKind.VERDICT) == []


def test_a_verdict_comes_and_goes_once(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.run(5)
    witness.sim.thaw(2)
    witness.run(5)

    (said,) = witness.told(EventKind.VERDICT)
    assert said.startswith("rank 2 on demo-1 is frozen (SIGSTOP)")
    (over,) = witness.told(EventKind.OVER)
    assert re.fullmatch(r"rank 2: no longer frozen, after [45]\.\d s", over)
    (verdict,) = [event for event in witness.events if event.kind is EventKind.VERDICT]
    assert verdict.severity is Severity.CRITICAL


def test_the_event_of_a_slow_rank_gets_its_usual_line_once_that_is_known() -> None:
    witness = Witness(SimCluster(num_nodes=2, ranks_per_node=4))
    witness.run(25)
    witness.sim.slow(6, 3.0)
    while not witness.told(EventKind.VERDICT):
        witness.run(0.2)
    (first,) = (event for event in witness.events if event.kind is EventKind.VERDICT)
    assert "; last seen at " in first.text
    while not witness.sim.view().usual_place(6):
        witness.run(0.2)
    witness.run(0.2)

    (event,) = (event for event in witness.events if event.kind is EventKind.VERDICT)
    assert re.search(r"mostly at or below bytegpt\.py:\d+ in train_step", event.text)
    assert (event.at_s, event.ranks, event.severity) == (first.at_s, first.ranks, first.severity)
    witness.run(10)
    assert witness.told(EventKind.VERDICT) == [event.text], "once: what it is later is on the screen"


def test_the_event_of_a_frozen_rank_names_who_waits_for_it_once_somebody_does(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.run(8)

    (event,) = (event for event in witness.events if event.kind is EventKind.VERDICT)
    assert re.search(r"; ranks 0-1, 3 wait for it in all_reduce #\d+ for ", event.text)


def test_who_is_no_longer_seen_has_not_recovered(witness: Witness) -> None:
    witness.run(12)
    witness.sim.slow(2, 4.0)
    witness.run(20)
    assert len(witness.told(EventKind.VERDICT)) == 1
    witness.sim.lose_node(1)
    witness.run(12)

    (over,) = (event for event in witness.events if event.kind is EventKind.OVER)
    assert over.text.startswith("rank 2: no longer seen, after ")
    assert over.severity is Severity.QUIET, "nobody knows that it is well"


@pytest.mark.parametrize("end", ["a hang", "the end of the program"])
def test_a_slow_rank_has_not_recovered_when_that_no_longer_shows(witness: Witness, end: str) -> None:
    witness.run(12)
    witness.sim.slow(2, 4.0)
    witness.run(20)
    assert len(witness.told(EventKind.VERDICT)) == 1
    if end == "a hang":
        witness.sim.freeze(0)
    else:
        for rank in range(4):
            witness.sim.leave(rank, teardown_s=1.0 + 3.0 * rank)
    witness.run(12)

    assert witness.told(EventKind.OVER) == []


def test_what_ends_with_its_job_has_not_recovered(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.run(5)
    witness.sim.stop()
    witness.run(10)

    assert any(text.startswith("job demo: stop") for text in witness.told(EventKind.JOB))
    assert witness.told(EventKind.OVER) == []


def test_one_more_culprit_is_news_and_no_end(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.run(3)
    witness.sim.freeze(3)
    witness.run(3)

    assert len(witness.told(EventKind.VERDICT)) == 2
    assert witness.told(EventKind.OVER) == []


def test_an_event_is_about_all_ranks_that_it_names(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.sim.freeze(3)
    witness.run(3)
    witness.sim.thaw(2)
    witness.sim.thaw(3)
    witness.run(5)

    both = [event for event in witness.events if "2-3" in event.text]
    assert {event.kind for event in both} == {EventKind.VERDICT, EventKind.OVER}
    assert {event.ranks for event in both} == {(2, 3)}
    assert {event.ranks[0] for event in both} == {2}


def test_a_note_is_told_once_with_the_ranks_that_come_together() -> None:
    log, cluster, diagnoser = EventLog(), Cluster(["n0"]), Diagnoser()
    num_ranks = [*range(1, 33), *[32] * 20, *[33] * 20]
    for look, count in enumerate(num_ranks):
        workers = [
            worker_report(
                rank, rank_report(rank, 64, anomalies=[Anomaly.DEBUG_DETAIL], local_rank=rank), local_rank=rank
            )
            for rank in range(count)
        ]
        job = job_status(world_size=64, num_nodes=1, local_world_size=64)
        now_s = 100.0 + look / 5
        cluster.apply("n0", node_report(look + 1, [job], workers), now_s)
        log.observe(View(cluster, diagnoser.observe(cluster, now_s), now_s))

    (told,) = [log[index].text for index in range(len(log)) if log[index].kind is EventKind.NOTE]
    assert told.startswith("ranks 0-31: TORCH_DISTRIBUTED_DEBUG=DETAIL")


def test_a_note_that_comes_back_is_told_again() -> None:
    watch = NoteWatch()
    looks = [{"off": "rank 0: off"}, {"off": "rank 0: off"}, {}, {"off": "rank 1: off"}, {"off": "rank 1: off"}]
    told = [watch.news(notes, NOTE_SETTLES_S * look) for look, notes in enumerate(looks)]
    assert told == [[], ["rank 0: off"], [], [], ["rank 1: off"]]


def test_a_job_that_fails_says_why(witness: Witness) -> None:
    witness.run(12)
    witness.sim.kill(2)
    witness.run(20)

    assert any(text.startswith("job demo: failed, exit code 1") for text in witness.told(EventKind.JOB))
    (said,) = witness.told(EventKind.VERDICT)
    assert said.startswith("rank 2 on demo-1 was killed by SIGKILL")
    assert witness.told(EventKind.OVER) == []


def test_a_job_that_failed_before_anybody_looked_has_its_own_time_and_place_among_the_events(witness: Witness) -> None:
    witness.run(12)
    witness.sim.kill(2)
    witness.run(20)
    (failed,) = [event for event in witness.events if "failed" in event.text]
    witness.sim.run(120)

    late = Witness(witness.sim)
    late.run(1)

    (found,) = [event for event in late.events if "failed" in event.text]
    assert found.text == failed.text
    assert found.at_s == pytest.approx(failed.at_s, abs=2.0)
    assert {event.at_s for event in late.events if event.kind is EventKind.VERDICT} == {found.at_s}
    assert [event.at_s for event in late.events] == sorted(event.at_s for event in late.events)


def test_a_lost_node_is_told_with_its_way_there(witness: Witness) -> None:
    witness.run(12)
    witness.sim.lose_node(1)
    witness.run(10)

    assert witness.told(EventKind.NODE)[2:] == ["node demo-1: up, now stale", "node demo-1: stale, now lost"]


def test_a_node_is_back_after_the_time_since_its_last_report(witness: Witness) -> None:
    witness.run(12)
    witness.sim.lose_node(1)
    lost_s = witness.sim.now_s
    witness.run(10)
    witness.sim.return_node(1)
    while not witness.told(EventKind.OVER):
        witness.run(0.2)

    (over,) = witness.told(EventKind.OVER)
    found = re.fullmatch(r"ranks 2-3: the node is back, after (\d+) s", over)
    assert found is not None, over
    assert float(found[1]) == pytest.approx(witness.sim.now_s - lost_s, abs=1.0)


def test_a_node_that_has_never_reported_is_not_reached_and_not_lost_just_now() -> None:
    log, cluster = EventLog(), Cluster(["h1", "h2"])
    cluster.apply("h2", node_report(1, [], []), 1_000.0)
    cluster.put_unreachable("h1", UnreachableReason("no agent runs there", UnreachableKind.AGENT))
    log.observe(View(cluster, Diagnoser().observe(cluster, 1_000.0), 1_000.0))

    told = [(event.text, event.severity) for event in log.latest_first() if event.kind is EventKind.NODE]
    assert sorted(told) == [("node h1: not reached", Severity.WARNING), ("node h2: up", Severity.OK)]
    cluster.put_unreachable("h1", None)
    cluster.apply_all([(node, frame_of(node_report(2, [], [])), 1_000.2) for node in ("h1", "h2")])
    log.observe(View(cluster, Diagnoser().observe(cluster, 1_000.2), 1_000.2))

    last = next(log.latest_first())
    assert (last.text, last.severity) == ("node h1: not reached, now up", Severity.OK)


def test_what_is_done_is_told_clean_and_old_events_are_dropped() -> None:
    log = EventLog()
    for number in range(MAX_EVENTS + 3):
        log.add_event(f"fault {number}\x1b[2J", float(number))

    assert (len(log), log.num_dropped) == (MAX_EVENTS, 3)
    assert "\x1b" not in log[0].text
    assert log[0].text.startswith("fault 3")
    assert log[len(log) - 1].at_s == MAX_EVENTS + 2


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (JobState.RUNNING, "job job, restart 2: starting"),
        (JobState.RESTARTING, "job job, restart 2: restarting"),
        (JobState.STOPPING, "job job, restart 2: stopping"),
        (JobState.STOPPED, "job job, restart 2: stopped"),
        (JobState.FAILED, "job job, restart 2: failed, exit code 1"),
    ],
)
def test_an_exit_code_is_of_an_end_that_was_not_asked_for(state: JobState, text: str) -> None:
    log, cluster = EventLog(), Cluster(["n0"])
    job = job_status(num_nodes=1, world_size=2, attempt=2, state=state, exit_code=1)
    cluster.apply("n0", node_report(1, [job], []), 1_000.0)
    view = View(cluster, Diagnoser().observe(cluster, 1_000.0), 1_000.0)
    log.observe(view)

    assert [event.text for event in log.latest_first() if event.kind is EventKind.JOB] == [text]
    assert summary_lines(summary_object(view))[0] == text.replace(", restart 2", "")


@pytest.mark.parametrize(("state_s", "told_s"), [(3600.0, 3600.0), (NEWS_S / 2, 0.0)])
def test_a_job_is_dated_by_its_nodes_unless_it_is_news_and_its_root_cause_by_the_look_that_shows_it(
    state_s: float, told_s: float
) -> None:
    log, cluster, diagnoser = EventLog(), Cluster(["n0"]), Diagnoser()
    cause = RootCause(1, exception="ValueError: no such shard")
    job = job_status(num_nodes=1, world_size=2, state_s=state_s, root_cause=cause)
    workers = [worker_report(0, rank_report(0, 2)), dead_worker(1, rank_report(1, 2), code=1)]
    now_s = 10_000.0
    cluster.apply("n0", node_report(1, [job], workers), now_s)
    log.observe(View(cluster, diagnoser.observe(cluster, now_s), now_s))

    dated = {event.text: event.at_s for event in log.latest_first() if event.kind is EventKind.JOB}
    assert dated["job job: started" if told_s else "job job: running"] == now_s - told_s
    assert [at_s for text, at_s in dated.items() if text.startswith("root cause")] == [now_s]
