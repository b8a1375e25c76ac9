"""Nodes whose agent has ended while their ranks go on: no alarm, as long as nobody waits for them."""

from __future__ import annotations

import re

import pytest

from agent.wire.jobs import JobState
from agent.wire.reports import ExitReport, ProcessState
from app.diagnosis.causes import Cause, RankState, Severity
from app.diagnosis.diagnoser import Diagnoser
from app.diagnosis.rank_facts import Thresholds
from app.errors import ExitCode
from app.model.cluster import Cluster
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.recording.events import EventKind, EventLog
from app.view.summary import exit_code
from app.view.view import View
from tests.support.node_reports import job_status, node_report, worker_report
from tests.support.sim import SimCluster

LOST_S = Thresholds().lost_s


def test_an_agent_that_is_stopped_is_down_at_once_and_its_ranks_are_a_warning_later() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    for node in (0, 1):
        sim.stop_agent(node)
    sim.run(0.3)
    assert [row.state for row in sim.view().nodes()] == ["down", "down"]
    assert {row.severity for row in sim.view().nodes()} == {Severity.QUIET}
    assert {row.trouble for row in sim.view().nodes()} == {"no agent: stopped on request"}

    sim.run(LOST_S - 1)
    assert sim.view().headline().text.startswith("no agent on demo-0 and demo-1 for 5.")
    sim.run(2)

    (first, second) = sim.verdicts()
    assert (first.cause, first.severity, first.culprits) == (Cause.NODE_LOST, Severity.WARNING, [0, 1])
    assert first.text.startswith("no agent on demo-0 for ")
    assert first.text.endswith(" s: stopped on request; whether ranks 0-1 still run is not known")
    assert first.hint == "start the agent on demo-0 again (rankdeck up)"
    assert second.culprits == [2, 3]
    assert exit_code(sim.view()) is ExitCode.VERDICT_STANDS


def test_ranks_that_are_not_seen_train_on_where_the_others_make_steps() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.stop_agent(1)
    sim.run(LOST_S + 2)

    (verdict,) = sim.verdicts()
    assert (verdict.severity, verdict.culprits, verdict.waiting) == (Severity.WARNING, [2, 3], [])
    assert verdict.text.endswith(": stopped on request; ranks 2-3 train on unseen, as the others step on")
    assert [row.state for row in sim.view().ranks([2])] == [RankState.LOST]


@pytest.mark.parametrize("is_known_gone", [True, False])
def test_an_agent_that_died_is_a_warning_while_the_others_make_steps(*, is_known_gone: bool) -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.nodes[1].is_unheard = True
    if is_known_gone:
        sim.cluster.put_unreachable("demo-1", UnreachableReason("nothing is known there", UnreachableKind.AGENT))
    sim.run(LOST_S + 2)

    (verdict,) = sim.verdicts()
    assert (verdict.severity, verdict.cause) == (Severity.WARNING, Cause.NODE_LOST)
    assert verdict.text.endswith("ranks 2-3 train on unseen, as the others step on")
    assert sim.view().nodes()[1].state == "lost"
    assert all(severity is not Severity.CRITICAL for severity in (sim.view().headline().severity, verdict.severity))


def test_a_wait_for_unwatched_ranks_is_an_alarm_after_the_time_of_a_stall() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.stop_agent(1)
    sim.run(LOST_S + 2)
    assert [verdict.severity for verdict in sim.verdicts()] == [Severity.WARNING]

    sim.freeze(3)
    sim.run(Thresholds().stall_s + 2)
    (verdict,) = sim.verdicts()
    assert (verdict.severity, verdict.culprits, verdict.waiting) == (Severity.CRITICAL, [2, 3], [0, 1])
    assert "stopped on request; whether ranks 2-3 still run is not known; ranks 0-1 wait for them" in verdict.text


def test_another_agent_brings_the_node_back() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.stop_agent(1)
    sim.run(LOST_S + 2)
    sim.restart_agent(1)
    sim.run_until(lambda: not sim.causes(), within_s=1)
    sim.run(10)

    assert sim.view().nodes()[1].state == "up"
    assert [found[1:] for found in sim.told] == [(Cause.NODE_LOST, (2, 3))]


def test_the_events_say_that_the_agent_went_and_came_and_no_alarm_is_among_them() -> None:
    sim, events = SimCluster(), EventLog()
    sim.each_view = events.observe
    sim.run_to_step(30)
    sim.stop_agent(1)
    sim.run(LOST_S + 2)
    sim.restart_agent(1)
    sim.run(5)

    told = [event.text for event in events.latest_first() if event.kind is EventKind.NODE]
    assert told[:2] == ["node demo-1: down, now up", "node demo-1: agent stopped"]
    assert all(event.severity is not Severity.CRITICAL for event in events.latest_first())


def test_a_node_that_a_stop_has_not_reached_and_that_is_back_does_not_start_the_job() -> None:
    sim, events = SimCluster(), EventLog()
    sim.each_view = events.observe
    sim.run_to_step(30)
    sim.stop_agent(1)
    sim.run(1)
    for state in (JobState.STOPPING, JobState.STOPPED):
        sim.nodes[0].go(state, sim.now_s)
        sim.run(1)
    sim.restart_agent(1)
    sim.run(1)
    assert sim.view().job().state == "running"  # type: ignore[union-attr]
    sim.nodes[1].go(JobState.STOPPED, sim.now_s)
    sim.run(1)

    told = [event.text for event in events.latest_first() if event.kind is EventKind.JOB]
    assert told[:2] == ["job demo: stopped", "job demo: stopping"]
    assert [text for text in told if text == "job demo: running"] == ["job demo: running"]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_rank_that_was_killed_while_nobody_watched_its_node_is_the_cause_once_an_agent_reports_its_end(
    *, is_stopped: bool
) -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    if is_stopped:
        sim.stop_agent(1)
    else:
        sim.nodes[1].is_unheard = True
    sim.run(LOST_S - 3)
    sim.kill(3)
    sim.run_until(lambda: sim.nodes[0].state is JobState.FAILED, within_s=LOST_S)
    sim.run(0.5)
    job = sim.view().job()
    assert job is not None
    assert (job.state, job.root_cause, job.detail, sim.verdicts()) == ("failed", None, "", [])
    sim.run(20)
    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.severity, verdict.culprits) == (Cause.NODE_LOST, Severity.CRITICAL, [2, 3])
    assert re.search(r"ranks? [01](-1)? lost a connection", verdict.text)

    sim.restart_agent(1)
    sim.run(30)
    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits) == (Cause.EXITED, [3])
    assert verdict.text.startswith("rank 3 on demo-1 was killed by SIGKILL; rank")
    assert all(1 not in found[2] and 0 not in found[2] for found in sim.told)


def test_a_node_that_is_back_did_not_report_and_is_no_longer_lost() -> None:
    sim = SimCluster(timeout_s=20.0)
    sim.run_to_step(30)
    sim.lose_node(1)
    sim.run_until(lambda: sim.nodes[0].state is JobState.FAILED, within_s=90)
    sim.run(3)
    assert sim.verdicts()[0].text.startswith("demo-1 did not report for 20 s: ranks 2-3 were lost; ranks 0-1 ")
    sim.nodes[1].reboot(sim.now_s)
    sim.return_node(1)
    sim.run(10)

    (verdict,) = sim.verdicts()
    assert re.match(r"demo-1 did not report for [^:]+ s: what ranks 2-3 did then is not known", verdict.text)
    assert verdict.hint == "the system log there may show what happened then"


@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED, JobState.SUCCEEDED])
def test_a_job_that_has_ended_where_it_is_seen_may_go_on_where_no_agent_is(state: JobState) -> None:
    cluster, diagnoser = Cluster(["h1", "h2"]), Diagnoser()
    cluster.put_unreachable("h1", UnreachableReason("nothing is known of jobs there", UnreachableKind.AGENT))
    status = job_status(2, state=state)
    workers = [worker_report(rank, process=ProcessState.EXITED, exit=ExitReport(code=0)) for rank in (2, 3)]
    for seq in range(1, 12):
        cluster.apply("h2", node_report(seq, [status], workers), 100.0 + seq)
        diagnoser.observe(cluster, 100.0 + seq)
    view = View(cluster, diagnoser.observe(cluster, 112.0), 112.0)

    if state is JobState.SUCCEEDED:
        assert (view.verdicts(), exit_code(view)) == ([], ExitCode.WELL)
        return
    (verdict,) = view.verdicts()
    assert (verdict.cause, verdict.severity, verdict.culprits) == (Cause.NODE_LOST, Severity.WARNING, [0, 1])
    assert verdict.text == "no agent on h1: nothing is known of jobs there; whether ranks 0-1 still run is not known"
    assert exit_code(view) is ExitCode.VERDICT_STANDS


def test_a_node_that_is_back_gives_way_to_what_its_ranks_report_of_the_failure() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.nodes[1].is_unheard = True
    sim.run(LOST_S + 2)
    sim.ranks[3].end = (None, 6, "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 16 vs 4")
    sim.run(20)
    assert [verdict.cause for verdict in sim.verdicts()] == [Cause.NODE_LOST]

    sim.restart_agent(1)
    sim.run(10)
    (verdict,) = sim.verdicts()
    assert verdict.cause is Cause.MISMATCH
    assert "gloo ended rank 3" in verdict.text
