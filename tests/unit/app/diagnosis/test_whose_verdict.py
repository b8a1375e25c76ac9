"""Whose verdict it is: what is shown, printed and returned is that of one job, whatever else these nodes know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from agent.wire.jobs import JobState
from agent.wire.reports import ProcessState
from app.cli.hosts import _print_status
from app.diagnosis.causes import Cause, RankState, Severity
from app.diagnosis.diagnoser import Diagnoser
from app.errors import ExitCode
from app.model.cluster import Cluster
from app.model.job_choice import LEAVES_S, NEVER, JobChoice
from app.recording.events import EventKind, EventLog
from app.view.rows import Headline
from app.view.summary import exit_code, headline_hint, headline_text, status_object, summary_lines, summary_object
from app.view.view import View
from tests.support.node_reports import dead_worker, group_report, job_status, node_report, rank_report, worker_report

if TYPE_CHECKING:
    from agent.wire.jobs import JobStatus
    from agent.wire.reports import WorkerReport


class Watched:
    """One node that several jobs of two ranks run on, and a console."""

    def __init__(self, job_id: str = "") -> None:
        self.cluster = Cluster(["n0"])
        self.diagnoser = Diagnoser()
        self.choice = JobChoice(job_id)
        self.now_s = 1000.0
        self.seq = 0

    def look(self, jobs: list[JobStatus], workers: list[WorkerReport], job_id: str | None = None) -> View:
        """Return what is seen after a report; of a certain job, or of the one that is chosen."""
        self.seq += 1
        self.now_s += 0.2
        self.cluster.apply("n0", node_report(self.seq, jobs, workers), self.now_s)
        diagnosis = self.diagnoser.observe(self.cluster, self.now_s)
        diagnosis.validate()
        shown = self.choice.choose(self.cluster, self.now_s) if job_id is None else job_id
        return View(self.cluster, diagnosis, self.now_s, shown)


def job(job_id: str, age_s: float | None = 60.0, **fields: Any) -> JobStatus:
    return job_status(job_id=job_id, world_size=2, num_nodes=1, age_s=age_s, **fields)


def failed(job_id: str, age_s: float = 60.0, state_s: float = 1.0, **fields: Any) -> JobStatus:
    return job(job_id, age_s, state=JobState.FAILED, state_s=state_s, exit_code=1, **fields)


ENDED: dict[str, Any] = {"state": JobState.FAILED, "state_s": 800.0, "exit_code": 1}


def well(job_id: str) -> list[WorkerReport]:
    return [
        worker_report(rank, rank_report(rank, 2, job_id=job_id, step=9, groups=[group_report(5)]), job_id=job_id)
        for rank in range(2)
    ]


def frozen(job_id: str, rank: int = 1) -> list[WorkerReport]:
    both = well(job_id)
    both[rank] = worker_report(rank, both[rank].report, process=ProcessState.FROZEN, job_id=job_id)
    return both


def shown(view: View) -> str:
    row = view.job()
    return "" if row is None else row.job_id


def test_after_a_job_that_failed_a_healthy_one_has_no_verdict_and_exit_code_0() -> None:
    watched = Watched()
    dead = [dead_worker(1, code=3, age_s=9.0, job_id="a"), dead_worker(0, signal=15, age_s=8.0, job_id="a")]
    before = watched.look([failed("a")], dead)
    assert (shown(before), exit_code(before)) == ("a", ExitCode.VERDICT_STANDS)

    view = watched.look([failed("a"), job("b", 0.5)], [*dead, *well("b")])

    assert (shown(view), view.verdicts(), exit_code(view)) == ("b", [], ExitCode.WELL)
    assert view.headline() == Headline(Severity.QUIET, "2 ranks training, step 9; not judged yet")
    printed = summary_lines(summary_object(view))
    assert not [line for line in printed if "verdict" in line]
    assert view.other_jobs_text == "", "it had failed before this one was started"
    (other,) = status_object(view)["other_jobs"]
    assert (other["job_id"], other["state"], other["severity"]) == ("a", "failed", "critical")


def test_a_job_that_succeeded_returns_0_whatever_stands_of_another_one() -> None:
    watched = Watched("b")
    ended = job("b", 5.0, state=JobState.SUCCEEDED, exit_code=0)

    view = watched.look([job("a"), ended], frozen("a"))

    assert (shown(view), view.verdicts(), exit_code(view)) == ("b", [], ExitCode.WELL)


@pytest.mark.parametrize(("job_id", "other"), [("a", "b"), ("b", "a")])
def test_of_two_jobs_each_has_its_own_verdicts_waits_and_exit_code(job_id: str, other: str) -> None:
    watched = Watched(job_id)
    waiting = worker_report(0, rank_report(0, 2, job_id="b", step=9, groups=[group_report(6, 3.0)]), job_id="b")
    workers = [*well("a"), waiting, frozen("b")[1]]

    view = watched.look([job("a", 60.0), job("b", 30.0)], workers)

    is_hurt = job_id == "b"
    assert [verdict.cause for verdict in view.verdicts()] == [Cause.FROZEN] * is_hurt
    assert {row.job for row in view.barriers()} == ({"b"} if is_hurt else set())
    assert exit_code(view) is (ExitCode.VERDICT_STANDS if is_hurt else ExitCode.WELL)
    assert ("frozen" in view.headline().text) is is_hurt
    how = "running" if is_hurt else "frozen rank 1"
    line = f"job {job_id} is shown; also on these nodes: job {other}, {how}; rankdeck attach {other}"
    assert view.other_jobs_text == line
    assert {sentence: row.job_id for sentence, row in view.beside().items()} == {
        f"job {other}, {how}, beside job {job_id}; rankdeck attach {other}": other
    }
    (row,) = status_object(view)["other_jobs"]
    assert (row["cause"], row["culprits"]) == ((None, []) if is_hurt else ("frozen", [1]))
    assert {verdict["job"] for verdict in status_object(view)["verdicts"]} == ({"b"} if is_hurt else set())


def test_shorter_lines_about_a_job_that_is_not_well_keep_what_it_suffers_from() -> None:
    two = Watched("a").look([job("a"), failed("b", 5.0, 2.0)], [])
    assert two.company_texts[1:] == ["also job b, failed; rankdeck attach b", "also job b, failed"]
    three = Watched("a").look([job("a"), job("c", 20.0), failed("b", 5.0, 2.0)], [])
    assert three.company_texts[1:] == [
        "also job b, failed; 1 more; rankdeck attach JOB",
        "also job b, failed; 1 more",
        "also job b, failed",
    ]
    assert "on these nodes: job b, failed; job c, starting" in three.company_texts[0]


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            {0: "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:9"},
            "rank 0 has lost a connection and is ending; who ended first is not known yet",
        ),
        ({0: "Timed out waiting 6000ms", 1: "Timed out waiting 6000ms"}, "ranks 0-1 have timed out and are ending"),
    ],
)
def test_ranks_that_are_about_to_end_because_of_another_one_are_named_until_more_is_known(
    raised: dict[int, str], line: str
) -> None:
    ranks = [
        rank_report(rank, 2, job_id="b", step=9, groups=[group_report(5)], raised=raised.get(rank, ""))
        for rank in range(2)
    ]
    workers = [worker_report(rank, report, job_id="b") for rank, report in enumerate(ranks)]
    assert Watched("b").look([job("b")], workers).headline() == Headline(Severity.WARNING, line)


def test_ranks_of_a_job_that_failed_before_they_were_started_do_not_start() -> None:
    view = Watched("b").look([failed("b")], [])

    assert [row.state for row in view.ranks([0, 1])] == [RankState.ENDED] * 2
    assert summary_lines(summary_object(view))[-2:] == ["  rank 0 on n0: not started", "  rank 1 on n0: not started"]


def test_several_other_jobs_are_one_line_and_those_that_ended_long_ago_are_not_in_it() -> None:
    watched = Watched("a")
    others = [job(name, 10.0 + number) for number, name in enumerate("bcdef")]

    view = watched.look([failed("old", 900.0, 800.0), job("a"), *others], [])

    assert view.other_jobs_text == (
        "job a is shown; also on these nodes: job b, starting; job c, starting; job d, starting; 2 more; "
        "rankdeck attach JOB"
    )
    assert [row.job_id for row in view.other_jobs()] == ["b", "c", "d", "e", "f", "old"]


def test_a_job_beside_the_one_that_is_shown_is_an_event_at_each_change_and_at_its_end() -> None:
    watched, log = Watched("a"), EventLog()
    for number in range(200):
        age_s = number * 0.2
        how: dict[str, Any] = {"state": JobState.STOPPED, "state_s": age_s - 20} if age_s > 20 else {}
        ranks = [*well("a"), *([] if how else frozen("b") if age_s > 10 else well("b"))]
        log.observe(watched.look([job("a"), job("b", age_s, **how), job("old", 900.0, **ENDED)], ranks))

    found = [event for event in reversed(list(log.latest_first())) if event.kind is EventKind.BESIDE]
    told = [("running", Severity.OK), ("frozen rank 1", Severity.CRITICAL), ("stopped", Severity.QUIET)]
    assert [(event.text, event.job_id, event.severity) for event in found] == [
        (f"job b, {how}, beside job a; rankdeck attach b", "b", severity) for how, severity in told
    ]


def test_shorter_lines_about_other_jobs_keep_the_whole_command() -> None:
    two = Watched("a").look([job("a"), job("b")], [])
    assert two.company_texts == [
        "also on these nodes: job b, starting; rankdeck attach b",
        "also job b, starting; rankdeck attach b",
        "also job b: rankdeck attach b",
        "also rankdeck attach b",
    ]
    three = Watched("a").look([job("a"), job("b"), job("c")], [])
    assert three.company_texts[1:] == ["also 2 jobs: rankdeck attach JOB", "also rankdeck attach JOB"]
    assert Watched("a").look([job("a")], []).company_texts == []


def test_a_job_that_failed_while_the_one_that_is_shown_ran_is_in_the_line() -> None:
    view = Watched("a").look([failed("b", 50.0, 2.0), job("a", 60.0)], [])

    assert "also on these nodes: job b, failed" in view.other_jobs_text


def test_the_one_that_was_started_last_is_shown_whichever_was_heard_first() -> None:
    for jobs in ([job("old", 500.0), job("new", 5.0)], [job("new", 5.0), job("old", 500.0)]):
        assert shown(Watched().look(jobs, [])) == "new"
    ended = job("old", 500.0, state=JobState.SUCCEEDED, state_s=1.0, exit_code=0)
    sooner = job("new", 50.0, state=JobState.SUCCEEDED, state_s=40.0, exit_code=0)
    assert shown(Watched().look([sooner, ended], [])) == "old", "by its end, once none is under way"


def test_one_under_way_is_shown_before_one_that_has_ended() -> None:
    assert shown(Watched().look([failed("late", 5.0), job("early", 500.0)], [])) == "early"


def test_where_none_is_under_way_the_one_that_ended_last_is_shown_and_two_ends_at_once_do_not_alternate() -> None:
    watched = Watched()
    first = watched.look([failed("early", 500.0, 5.0), failed("late", 50.0, 20.0), failed("old", 900.0, 800.0)], [])
    assert shown(first) == "early", "which had begun before the other"

    for early_s, late_s in ((9.0, 8.9), (9.4, 9.6), (9.8, 9.5)):
        assert shown(watched.look([failed("early", 500.0, early_s), failed("late", 50.0, late_s)], [])) == "early"
    assert shown(watched.look([failed("early", 500.0, 9.0), failed("late", 50.0, 2.0)], [])) == "late"


def test_nodes_on_which_no_job_runs_name_those_that_have_ended() -> None:
    stopped = job("gpt", 900.0, state=JobState.STOPPED, exit_code=-15, is_past=True)
    well_ended = job("good", 900.0, state=JobState.SUCCEEDED, exit_code=0, is_past=True)
    past = [well_ended, stopped, failed("boom", 900.0, is_past=True)]

    view = Watched().look(past, [])
    ended = "ended: good, gpt (stopped), boom (failed); rankdeck status JOB"
    assert (shown(view), view.headline().text) == ("", f"1 node up; no job runs; {ended}")
    one = Watched().look([failed("boom", 900.0, is_past=True)], [])
    assert one.headline().text.endswith("ended: boom (failed); rankdeck status boom")
    asked = Watched("nosuch").look([*past, job("other")], [])
    assert asked.headline().text == "1 node up, no job yet", "one runs"
    names = [f"j{number}" for number in range(11)]
    many = Watched().look([job(name, 900.0, state=JobState.SUCCEEDED, is_past=True) for name in names], [])
    assert many.headline().text.endswith("ended: j0, j1, j2, j3, j4, j5, j6, j7 and 3 more; rankdeck status JOB")


def test_the_status_of_a_job_that_has_ended_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(view: View, attach: str = "rankdeck attach JOB --host h1") -> list[str]:
        _print_status(view, is_json=False, attach=attach)
        return [line for line in capsys.readouterr().out.splitlines() if "ended: " in line]

    others = [failed("gpt", 500.0, 100.0), failed("boom", 900.0, 800.0)]
    line = "also ended: gpt (failed), boom (failed); rankdeck status JOB --host h1"

    assert printed(Watched().look([*others, failed("late", 50.0, 5.0)], [])) == [line]
    assert printed(Watched("late").look([*others, failed("late", 50.0, 5.0)], []), attach="") == []
    assert printed(Watched().look([*others, job("late")], [])) == [], "it runs"
    assert printed(Watched().look([failed("late", 50.0, 5.0)], [])) == []


def test_a_job_that_is_only_prepared_hides_nothing_and_is_not_shown() -> None:
    left = job("left", None, state=JobState.PREPARED, state_s=300.0)

    view = Watched().look([job("train", 500.0), left], frozen("train"))

    assert (shown(view), exit_code(view)) == ("train", ExitCode.VERDICT_STANDS)
    assert "job left, prepared" in view.other_jobs_text
    alone = Watched().look([left], [])
    assert (shown(alone), exit_code(alone)) == ("", ExitCode.WELL)
    assert alone.other_jobs_text == "on these nodes: job left, prepared; rankdeck attach left"
    assert shown(Watched("left").look([left], [])) == "left", "who asks for it sees it"


def test_what_had_ended_before_the_agent_began_is_no_alarm_unless_it_is_asked_for() -> None:
    old = failed("old", 900.0, is_past=True)
    dead = [dead_worker(1, code=3, age_s=9.0, job_id="old")]

    view = Watched().look([old], dead)
    assert (shown(view), view.verdicts(), exit_code(view)) == ("", [], ExitCode.WELL)
    assert view.headline().severity is Severity.QUIET

    asked = Watched("old").look([old], dead)
    assert (shown(asked), exit_code(asked)) == ("old", ExitCode.VERDICT_STANDS)


def test_before_an_attempt_has_begun_its_console_shows_no_earlier_one_and_no_other_job() -> None:
    watched = Watched()
    watched.choice = JobChoice("a", NEVER)
    dead = [dead_worker(1, code=3, age_s=9.0, job_id="a")]
    assert shown(watched.look([failed("a"), job("b")], dead)) == ""

    watched.choice = JobChoice("a", 1)
    assert shown(watched.look([failed("a"), job("b")], dead)) == ""
    assert shown(watched.look([job("a", 0.5, attempt=1), job("b")], [])) == "a"


def test_who_looks_on_stays_with_a_job_while_it_runs_and_until_another_is_started_after_it() -> None:
    watched = Watched()
    assert shown(watched.look([job("a", 60.0), job("b", 50.0)], [])) == "b"
    later = job("c", 1.0)
    ended = failed("b", 50.0)
    assert shown(watched.look([job("a", 60.0), ended], [])) == "b", "how it ended is not hidden by an earlier one"
    assert shown(watched.look([job("a", 60.0), ended, later], [])) == "b", "its end is seen for a while"
    ended = failed("b", 50.0, LEAVES_S + 0.1)
    assert shown(watched.look([job("a", 60.0), ended, later], [])) == "c"
    assert shown(watched.look([job("a", 60.0), ended, later, job("d", 0.1)], [])) == "c", "it runs"

    watched = Watched()
    watched.choice.stays = True
    assert shown(watched.look([job("b", 50.0)], [])) == "b"
    ended = failed("b", 50.0, LEAVES_S + 0.1)
    assert shown(watched.look([ended, later], [])) == "b", "a printed console ends with its job"


def test_events_have_the_end_of_a_job_and_then_those_of_the_one_that_was_started_beside_it() -> None:
    watched, log = Watched(), EventLog()
    begun_s = watched.now_s
    log.observe(watched.look([job("a", 20.0, state_s=20.0)], well("a")))
    while watched.now_s < begun_s + 10:
        age_s = watched.now_s - begun_s
        log.observe(watched.look([job("a", 20.0 + age_s, state_s=20.0 + age_s), job("b", age_s, state_s=age_s)], []))
    while watched.now_s < begun_s + 14:
        age_s = watched.now_s - begun_s
        log.observe(watched.look([failed("a", 20.0 + age_s, age_s - 10), job("b", age_s, state_s=age_s)], well("b")))

    told = [(event.text, round(event.at_s - begun_s)) for event in log.latest_first() if event.kind is EventKind.JOB]
    assert told[::-1] == [("job a: started", -20), ("job b: started", 0), ("job a: failed, exit code 1", 10)]
    change = next(event for event in log.latest_first() if event.text.startswith("from here on"))
    assert change.text == "from here on events are of job b, no longer of job a"
    assert change.at_s == pytest.approx(begun_s + 10 + LEAVES_S, abs=0.5)


def test_the_first_look_does_not_hold_what_only_one_node_has_told_of() -> None:
    watched = Watched()
    watched.cluster = Cluster(["n0", "n1"])
    assert shown(watched.look([job("early", 60.0)], [])) == "early"
    watched.cluster.apply("n1", node_report(1, [job("late", 5.0)], [], epoch="f"), watched.now_s)
    assert shown(watched.look([job("early", 60.0)], [])) == "late"


def test_a_verdict_of_a_job_that_is_no_longer_shown_is_not_told_as_over() -> None:
    watched = Watched("a")
    log = EventLog()
    jobs = [job("a"), job("b", 5.0)]
    log.observe(watched.look(jobs, frozen("a")))
    log.observe(watched.look(jobs, frozen("a"), job_id="b"))

    assert [event.kind for event in log.latest_first() if event.kind is EventKind.OVER] == []
    view = watched.look(jobs, frozen("a"), job_id="b")
    assert "job a, frozen rank 1, beside job b; rankdeck attach a" in view.beside()


def test_a_printed_line_has_the_severity_how_many_more_there_are_and_what_to_do() -> None:
    view = Watched("a").look([job("a")], [*frozen("a")[1:], dead_worker(0, signal=9, job_id="a")])

    assert headline_text(view).startswith("CRITICAL  rank 0 on n0 ")
    assert headline_text(view).endswith("(and 1 more)")
    assert headline_hint(view) == view.verdicts()[0].hint
    assert headline_hint(view)
    verdicts = [line for line in summary_lines(summary_object(view)) if line.startswith("verdict: ")]
    assert [line.split()[1] for line in verdicts] == ["CRITICAL", "CRITICAL"]
    assert headline_hint(Watched("a").look([job("a")], well("a"))) == ""
