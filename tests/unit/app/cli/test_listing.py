"""What the verbs that print rows refuse, and what makes a shell complete them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import click
import pytest
from click.testing import CliRunner

from agent.wire.jobs import JobState
from agent.wire.logs import LogLine
from app.cli import chosen_hosts, hosts, listing
from app.cli.listing import _LineWish, logs
from app.cli.main import rankdeck
from app.diagnosis.causes import Severity
from app.diagnosis.diagnoser import Diagnoser
from app.errors import UsageError
from app.fleet.fleet import Fleet
from app.model.cluster import Cluster
from app.recording.events import EventKind
from app.session.log_pulls import Begun
from app.view.summary import is_over
from app.view.view import View
from tests.support.consoles import SimSource
from tests.support.node_reports import job_status, node_report
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.wire.jobs import JobStatus
    from app.session.log_pulls import DatedLine
    from app.session.remote_session import RemoteSession


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["logs", "--grep", "("], "unterminated subpattern"),
        (["logs", "--rank", "two"], "'--rank': 'two' is no rank: numbers and ranges, as in 0,3-5 or launcher"),
        (["ranks", "--rank", "a"], "'--rank': 'a' is no rank: numbers and ranges, as in 0,3-5"),
        (["ranks", "--rank", "1 node=x"], "as in 0,3-5"),
        (["memory", "--rank", ""], "as in 0,3-5"),
        (["events", "--watch"], "--watch"),
        (["logs", "-n", "-1"], "-1"),
        (["logs", "--since", "10"], "as 90s, 10m"),
        (["logs", "--since", "10min"], "as 90s, 10m"),
        (["logs", "--since", ""], "as 90s, 10m"),
        (["events", "--since", "10min"], "as 90s, 10m"),
        (["events", "--since", "24:00"], "2d or 14:05"),
        (["events", "--since", "9:60"], "2d or 14:05"),
        (["completion", "tcsh"], "tcsh"),
        (["record"], "FILE"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_right(argv: list[str], words: str) -> None:
    with pytest.raises(click.ClickException) as caught:
        rankdeck.main(argv, standalone_mode=False)

    assert words in caught.value.format_message()


@pytest.mark.parametrize(
    "argv",
    [["status"], ["logs"], ["events"], ["stop"], ["stacks"], ["evidence"], ["fault", "kill", "--rank", "0", "--job"]],
)
def test_a_name_that_no_job_can_have_is_refused_before_a_relay_is_connected_to(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_arguments: object) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(chosen_hosts, "through_relay", connect)

    with pytest.raises(UsageError, match="cannot be a job's name"):
        rankdeck.main([*argv, "No job", "--relay", "login1"], standalone_mode=False)


@pytest.mark.parametrize(
    ("since", "found"),
    [
        (None, ["new", "old", "no age", "of the node"]),
        ("90s", ["new", "no age", "of the node"]),
        ("1m31s", ["new", "old", "no age", "of the node"]),
        ("0s", ["no age"]),
    ],
)
def test_lines_are_wanted_by_how_old_they_are(since: str | None, found: list[str]) -> None:
    (option,) = [one for one in logs.params if one.name == "max_age_s"]
    context = click.Context(logs)
    max_age_s = option.process_value(context, since)
    lines = [
        LogLine(1, 0, "stdout", "new", "gpt", age_s=1.0),
        LogLine(2, 0, "stdout", "old", "gpt", age_s=90.1),
        LogLine(3, 0, "stdout", "no age", "gpt"),
        LogLine(4, -1, "stderr", "of the node", age_s=90.0),
        LogLine(5, 0, "stdout", "another job", "bert", age_s=1.0),
    ]
    wish = _LineWish(is_json=False, ranks=None, pattern=None, max_age_s=max_age_s, untimed=set())

    assert [line.text for _, _, line in wish.among([(0.0, "gpu1", line) for line in lines], "gpt")] == found
    assert wish.untimed == {"gpu1"}


@pytest.mark.parametrize("ago_s", [0, 1, 61, 3_599, 43_200, 86_399])
def test_a_time_of_the_clock_is_the_last_one(ago_s: int) -> None:
    (option,) = [one for one in logs.params if one.name == "max_age_s"]
    now = datetime.now().astimezone()

    max_age_s = option.process_value(click.Context(logs), f"{now - timedelta(seconds=ago_s):%H:%M:%S}")

    assert max_age_s == pytest.approx(ago_s + now.microsecond / 1e6, abs=0.5)


class Looked(SimSource):
    """A session on some hosts."""

    title = "rankdeck on h1"
    attach_command = "rankdeck attach JOB"


class Printed(Looked):
    """A session of a job that has restarted since its first lines."""

    has_all_lines = True
    fleet = Fleet({})

    def __init__(self, sim: SimCluster | None = None) -> None:
        if sim is None:
            sim = SimCluster(num_nodes=1, ranks_per_node=2)
            sim.run_to_step(3)
        super().__init__(sim.view)
        self._begun_s = time.monotonic() - 60.0
        texts = {-30.0: "loss 5", -20.0: "loss 4", 10.0: "loss 3"}
        self._dated = [
            (self._begun_s + at_s, "h1", LogLine(number, 0, "stdout", text, "demo", age_s=60.0 - at_s))
            for number, (at_s, text) in enumerate(texts.items(), 1)
        ]

    def drain_dated_logs(self) -> list[DatedLine]:
        lines, self._dated = self._dated, []
        return lines

    def assignments(self) -> list[dict[str, JobStatus]]:
        return []

    def later_attempts(self) -> list[Begun]:
        other = Begun("other", 3, "h1", self._begun_s, "12:03:04", is_live=True)
        return [other, Begun("demo", 1, "h1", self._begun_s, "12:03:04", is_live=True)]


RESTART = "h1:launcher  --- restart 1 began 12:03:04"
OLD, NEW = ["h1:r0  loss 5", "h1:r0  loss 4"], ["h1:r0  loss 3"]


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ({}, [*OLD, RESTART, *NEW]),
        ({"num_last": 2}, [OLD[1], RESTART, *NEW]),
        ({"num_last": 1}, [RESTART, *NEW]),
        ({"num_last": 0}, []),
        ({"max_age_s": 55.0}, NEW),
        ({"pattern": re.compile("loss")}, OLD + NEW),
    ],
)
async def test_a_line_marks_where_a_restart_began(
    options: dict[str, Any], printed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def first_view(session: Printed, *, replays: bool) -> View:
        return session.view()

    monkeypatch.setattr(listing, "first_view", first_view)
    wish = _LineWish(False, None, options.get("pattern"), options.get("max_age_s"), set())

    await listing._logs(cast("RemoteSession", Printed()), wish, num_last=options.get("num_last"), is_following=False)

    assert capsys.readouterr().out.splitlines() == printed


async def test_rows_of_json_are_lines_of_ranks_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def first_view(session: Printed, *, replays: bool) -> View:
        return session.view()

    monkeypatch.setattr(listing, "first_view", first_view)
    wish = _LineWish(True, None, None, None, set())

    await listing._logs(cast("RemoteSession", Printed()), wish, num_last=None, is_following=False)

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["loss 5", "loss 4", "loss 3"]


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda sim: sim.kill(1), "CRITICAL  rank 1 on demo-0 was killed by SIGKILL"),
        (lambda sim: sim.stop(), "INFO  job demo was stopped: 2 ranks"),
    ],
)
async def test_the_lines_of_a_job_that_did_not_end_by_itself_end_with_why(
    end: Callable[[SimCluster], None], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def first_view(session: Printed, *, replays: bool) -> View:
        return session.view()

    monkeypatch.setattr(listing, "first_view", first_view)
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)
    end(sim)
    sim.run_until(lambda: is_over(sim.view()), 60.0, "its end")
    for is_json in (False, True):
        wish = _LineWish(is_json, None, None, None, set())
        await listing._logs(cast("RemoteSession", Printed(sim)), wish, num_last=None, is_following=False)

        is_told = f"rankdeck: {text}" in capsys.readouterr().err
        assert is_told is not is_json


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimSource], None]:
    """Return a function that puts a session in the place of the one that a command makes."""

    async def first_view(session: SimSource, *, replays: bool = True) -> View:
        return session.view()

    def put(session: SimSource) -> None:
        for module in (hosts, listing):
            monkeypatch.setattr(module, "first_view", first_view)
        monkeypatch.setattr(listing, "looking_on", lambda *_arguments: nullcontext(session))

    return put


@pytest.mark.parametrize("verb", ["ranks", "memory", "stragglers", "logs"])
@pytest.mark.parametrize("chosen", ["9", "2-"])
def test_ranks_that_the_job_does_not_have_are_a_wrong_option(
    verb: str, chosen: str, looked_at: Callable[[SimSource], None]
) -> None:
    looked_at(Printed())

    with pytest.raises(UsageError, match="job demo has ranks 0-1"):
        rankdeck.main([verb, "--rank", chosen], standalone_mode=False)


@pytest.mark.parametrize("argv", [["ranks", "--rank", "1,9"], ["logs", "--rank", "launcher"], ["logs", "--rank", "1-"]])
def test_ranks_of_which_the_job_has_one_and_its_launcher_are_right(
    argv: list[str], looked_at: Callable[[SimSource], None]
) -> None:
    looked_at(Printed())

    assert CliRunner().invoke(rankdeck, argv, standalone_mode=False).exception is None


def idle_view(*jobs: JobStatus) -> View:
    """Return a view of a node whose agent has begun after its jobs had ended."""
    cluster = Cluster(["h1"])
    cluster.apply("h1", node_report(1, list(jobs), []), 1_000.0)
    return View(cluster, Diagnoser().observe(cluster, 1_000.0), 1_000.0)


@pytest.mark.parametrize("verb", ["barriers", "memory", "ranks", "stragglers", "logs"])
def test_where_no_job_runs_those_that_have_ended_are_named(verb: str, looked_at: Callable[[SimSource], None]) -> None:
    past: dict[str, Any] = {"num_nodes": 1, "is_past": True, "age_s": 900.0, "state_s": 600.0}
    gpt = job_status(job_id="gpt", state=JobState.STOPPED, **past)
    chaos = job_status(job_id="chaos", state=JobState.FAILED, exit_code=1, **past)
    found = []
    for jobs in ([gpt, chaos], [gpt], []):
        looked_at(Looked(partial(idle_view, *jobs)))
        result = CliRunner().invoke(rankdeck, [verb], standalone_mode=False, catch_exceptions=False)
        assert result.exit_code == 0
        found.append(result.output.removeprefix("rankdeck: "))

    assert found == [
        f"no job runs; ended: gpt (stopped), chaos (failed); rankdeck {verb} JOB\n",
        f"no job runs; ended: gpt (stopped); rankdeck {verb} gpt\n",
        "no job is known there\n",
    ]


@pytest.mark.parametrize("verb", ["barriers", "memory", "ranks", "stragglers"])
def test_an_exit_code_that_is_not_0_comes_with_the_sentence_that_it_stands_for(
    verb: str, looked_at: Callable[[SimSource], None]
) -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)
    looked_at(Looked(sim.view))
    well = CliRunner().invoke(rankdeck, [verb], standalone_mode=False)
    sim.freeze(1)
    sim.run_until(lambda: bool(sim.verdicts()), 60.0, "a verdict")

    printed = CliRunner().invoke(rankdeck, [verb], standalone_mode=False)
    as_json = CliRunner().invoke(rankdeck, [verb, "--json"], standalone_mode=False)

    (sentence,) = (verdict.text for verdict in sim.verdicts())
    above = "rankdeck: not enough undisturbed training has been seen yet\n" if verb == "stragglers" else ""
    assert (well.exit_code, well.stderr) == (0, above)
    assert printed.exit_code == 10
    assert printed.stderr == f"{above}rankdeck: exit code 10: CRITICAL  {sentence}\n"
    assert sentence not in printed.stdout
    assert (as_json.exit_code, as_json.stderr) == (10, "")


def test_above_the_stragglers_is_who_holds_the_others_up_and_of_which_time_the_shares_are(
    looked_at: Callable[[SimSource], None],
) -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run(20.0)
    looked_at(Looked(sim.view))
    well = CliRunner().invoke(rankdeck, ["stragglers"], standalone_mode=False)
    sim.freeze(1)
    sim.run(8.0)

    frozen = CliRunner().invoke(rankdeck, ["stragglers"], standalone_mode=False)

    of = r"; shares of the last \d+ s of undisturbed training\n"
    assert re.fullmatch(
        rf"rankdeck: nobody holds the others up: a typical rank waits \d+ % of the time{of}", well.stderr
    )
    assert re.match(rf"rankdeck: rank 1 holds the others up for [\d.]+ s now{of}", frozen.stderr), frozen.stderr
    assert "CRITICAL" in frozen.stderr.splitlines()[1]


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda sim: sim.kill(1), "job demo failed: "),
        (lambda sim: sim.stop(), "job demo was stopped: "),
        (lambda _: None, "no rank waits long for another; rankdeck stragglers "),
    ],
    ids=["failed", "stopped", "running"],
)
def test_of_a_job_that_has_ended_barriers_says_so(
    end: Callable[[SimCluster], None], how: str, looked_at: Callable[[SimSource], None]
) -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)
    end(sim)
    if how.startswith("job"):
        sim.run_until(lambda: is_over(sim.view()), 60.0, "its end")
    looked_at(Looked(sim.view))

    printed = CliRunner().invoke(rankdeck, ["barriers"], standalone_mode=False).stdout

    assert printed.startswith(how)
    assert ("no rank waits any more; rankdeck events demo shows what happened" in printed) is how.startswith("job")


OTHERS = "job boom, starting, beside job demo; rankdeck attach boom"


class Remembered(SimSource):
    """A session of a job whose nodes remember some events; with each later view something more happens."""

    def __init__(self, num_later: int = 0) -> None:
        self._sim = SimCluster(num_nodes=1, ranks_per_node=2)
        self._sim.run_to_step(3)
        super().__init__(self._sim.view)
        self._later = [f"later {number}" for number in range(num_later)]
        self.has_asked_for_all: bool | None = None

    def view(self) -> View:
        self.num_views += 1
        if self.num_views > 1 and self._later:
            self.events.add_event(self._later.pop(0), time.monotonic())
        elif self.num_views > 1 and self._sim.view().job() is not None:
            self._sim.stop()
            self._sim.run_until(lambda: is_over(self._sim.view()), 60.0, "its end")
        return self._make_view()

    async def reach_back(self, _until_s: float, *, is_of_all: bool) -> None:
        """Remember."""
        self.has_asked_for_all = is_of_all
        now_s = time.monotonic()
        for text, age_s, kind in (
            ("old", 90.0, EventKind.NOTE),
            (OTHERS, 60.0, EventKind.BESIDE),
            ("new", 5.0, EventKind.NOTE),
        ):
            job_id = "demo" if kind is EventKind.NOTE else "boom"
            self.events.add_event(text, now_s - age_s, kind, Severity.QUIET, job_id=job_id)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ([], ["job demo: old", OTHERS, "job demo: new"]),
        (["--since", "1m10s"], [OTHERS, "job demo: new"]),
        (["demo"], ["old", "new"]),
        (["demo", "--since", "1m"], ["new"]),
    ],
)
def test_events_are_of_the_job_that_is_named_and_as_old_as_wanted(
    argv: list[str], found: list[str], looked_at: Callable[[SimSource], None]
) -> None:
    session = Remembered()
    looked_at(session)

    printed = CliRunner().invoke(rankdeck, ["events", *argv], standalone_mode=False, catch_exceptions=False).stdout

    assert session.has_asked_for_all is ("demo" not in argv)
    assert [re.split(r"  INFO +", line)[1] for line in printed.splitlines()] == found


def test_where_no_event_is_recent_enough_that_is_printed(looked_at: Callable[[SimSource], None]) -> None:
    looked_at(Remembered())

    result = CliRunner().invoke(rankdeck, ["events", "--since", "1s"], standalone_mode=False, catch_exceptions=False)

    assert (result.stdout, result.stderr) == ("", "rankdeck: no event in the last 1.0 s\n")


def test_events_are_followed_to_the_end_of_the_job(
    looked_at: Callable[[SimSource], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "CAUSE_PATIENCE_S", 0.0)
    monkeypatch.setattr(listing, "follow_one_job", lambda _session: None)
    looked_at(Remembered(num_later=2))

    argv = ["events", "demo", "--since", "10s", "-f", "--json"]
    printed = CliRunner().invoke(rankdeck, argv, standalone_mode=False, catch_exceptions=False).stdout

    pieces = [[event["text"] for event in json.loads(line)["events"]] for line in printed.splitlines()]
    assert pieces == [["new"], ["later 0"], ["later 1"]]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str) -> None:
    printed = CliRunner().invoke(rankdeck, ["completion", shell], catch_exceptions=False).stdout

    assert f"_RANKDECK_COMPLETE={shell}_complete" in printed


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("rankdeck st", {"stacks", "start", "status", "stop", "stragglers"}),
        ("rankdeck logs --gr", {"--grep"}),
        ("rankdeck logs --si", {"--since"}),
        ("rankdeck events --si", {"--since"}),
        ("rankdeck logs --since 1", {"1s", "1m", "1h", "1d"}),
        ("rankdeck run train.py --config co", {"co"}),
        ("rankdeck exec -- ./lau", {"./lau"}),
        ("rankdeck trian st", {"stacks", "start", "status", "stop", "stragglers"}),
    ],
)
def test_commands_options_and_files_are_completed(typed: str, found: set[str]) -> None:
    environment = os.environ | {
        "_RANKDECK_COMPLETE": "bash_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    program = "import sys; sys.argv[0] = 'rankdeck'; from app.cli.main import main; main()"

    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert ({line.partition(",")[2] for line in done.stdout.split()}, done.stderr) == (found, "")
