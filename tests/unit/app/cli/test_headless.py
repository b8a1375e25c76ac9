"""What the demo prints for scripts and for people."""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import click
import msgspec
import pytest

from agent.wire.jobs import JobState
from app.cli import headless, hosts
from app.cli.headless import Headless, asking, print_line, waiting_for, with_progress
from app.cli.hosts import _print_status, status
from app.cli.presenting import show_session
from app.diagnosis.causes import Severity
from app.diagnosis.diagnoser import Diagnoser
from app.errors import ExitCode, UsageError
from app.fleet.start_progress import Milestones, NodeStage, StartProgress
from app.model.cluster import Cluster
from app.settings.schema import ConsoleSettings
from app.text import own_color
from app.view.summary import exit_code, is_over, summary_lines, summary_object
from app.view.view import View
from tests.support.consoles import SimSource
from tests.support.node_reports import node_report
from tests.support.sim import SimCluster
from tests.support.typist import Typist
from tests.support.waiting import until, until_async

if TYPE_CHECKING:
    from pathlib import Path

    from app.session.remote_session import RemoteSession


class Starting(SimSource):
    """Starts a job over two nodes as fast as it is looked at."""

    started_at_s = 0.0
    watched_job = "gpt"

    def __init__(self) -> None:
        super().__init__(SimCluster().view)
        self.starting = StartProgress("job gpt", ["h1", "h2"])
        self._milestones = Milestones()

    async def start(self) -> None:
        assert self.starting is not None
        for stage in (NodeStage.ASKED, NodeStage.PREPARED, NodeStage.BEGINNING, NodeStage.BEGUN):
            for node in ("h1", "h2"):
                self.starting.move(node, stage)
                self._milestones.take(self.starting)
            await asyncio.sleep(0.15)
        self.starting = None

    def drain_notices(self) -> list[str]:
        return self._milestones.drain_notices()


class SlowStart(SimSource):
    """What is followed shows a job that has ended, as one of the same name did before, until it has begun."""

    started_at_s = 0.0
    watched_job = "demo"

    def __init__(self) -> None:
        sim = SimCluster(num_nodes=1, ranks_per_node=2)
        super().__init__(sim.view)
        self.begun = asyncio.Event()
        self.num_looks = 0
        sim.run_to_step(3)
        sim.stop()
        sim.run_until(lambda: (job := sim.view().job()) is not None and job.state == "stopped", 60)

    async def start(self) -> None:
        await self.begun.wait()

    def view(self) -> View:
        self.num_looks += 1
        return super().view()


async def test_a_job_that_has_not_begun_yet_has_not_ended_whatever_became_of_the_one_before_it() -> None:
    followed = SlowStart()
    following = asyncio.create_task(Headless(followed).run())
    await until_async(lambda: followed.num_looks > 3, 30, "it looks")
    assert not following.done()

    followed.begun.set()
    view, is_unnamed = await asyncio.wait_for(following, 30)

    assert (view.job() is not None, is_unnamed) == (True, False)


class SuddenEnd(SimSource):
    """What is followed trains at the first look, and has ended at the second."""

    started_at_s = 0.0
    watched_job = "demo"

    def __init__(self) -> None:
        self.sim = SimCluster(num_nodes=1, ranks_per_node=2)
        super().__init__(self.sim.view)
        self.sim.run_until(lambda: "training" in self.sim.view().headline().text, 60)
        self.num_looks = 0

    async def start(self) -> None:
        pass

    def view(self) -> View:
        self.num_looks += 1
        if self.num_looks == 2:
            self.sim.stop()
            self.sim.run_until(lambda: (job := self.sim.view().job()) is not None and job.state == "stopped", 60)
        return super().view()


async def test_how_a_job_has_ended_is_printed_however_soon_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    view, _ = await asyncio.wait_for(Headless(SuddenEnd()).run(), 30)

    first, last = capsys.readouterr().err.splitlines()
    assert "2 ranks training" in first
    assert "job demo was stopped" in last
    assert "exit code" not in summary_lines(summary_object(view))[0]


@pytest.mark.parametrize(("must_succeed", "code"), [(True, ExitCode.JOB_FAILED), (False, ExitCode.WELL)])
async def test_a_stopped_job_is_no_success_for_the_command_that_started_it(must_succeed: bool, code: ExitCode) -> None:
    view, _ = await asyncio.wait_for(Headless(SuddenEnd()).run(), 30)

    assert exit_code(view, must_succeed=must_succeed) is code


class FailsOnOneNode(SuddenEnd):
    """What is followed fails on its second node; on the first one it ends while it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = SimCluster(num_nodes=2, ranks_per_node=2)
        SimSource.__init__(self, self.sim.view)
        self.sim.run_to_step(5)
        for rank in (0, 1):
            self.sim.freeze(rank)
        self.sim.kill(3)
        self.sim.run_until(lambda: self.sim.nodes[1].state is JobState.FAILED, 60)
        self.states: list[str] = []

    def view(self) -> View:
        if len(self.states) == 9:
            for rank in (0, 1):
                self.sim.thaw(rank)
        self.sim.run(0.5)
        self.states.append(str(self.sim.nodes[0].state))
        return self._make_view()


async def test_a_job_that_failed_on_one_node_is_summed_up_when_it_has_ended_on_all() -> None:
    followed = FailsOnOneNode()
    view, _ = await asyncio.wait_for(Headless(followed).run(), 30)

    assert (followed.states[0], followed.states[-1]) == ("running", "failed"), "there it was under way at first"
    assert {row.state for row in view.ranks()} == {"exited"}


async def test_without_a_terminal_a_start_is_told_by_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    source = Starting()

    await with_progress(source.start(), source)

    assert capsys.readouterr().err.splitlines() == [
        "rankdeck: job gpt: prepared on h1 and h2, 2 of 2 nodes",
        "rankdeck: job gpt: begun on h1 and h2, 2 of 2 nodes",
    ]


async def test_a_start_that_fails_is_told_before_the_failure_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    source = Starting()

    async def refuse() -> None:
        assert source.starting is not None
        source.starting.move("h1", NodeStage.ASKED)
        source.starting.move("h1", NodeStage.REFUSED, "it is busy")
        source._milestones.take(source.starting)
        raise UsageError("h1 refused")

    with pytest.raises(UsageError, match="h1 refused"):
        await with_progress(refuse(), source)

    assert capsys.readouterr().err == "rankdeck: job gpt: h1: refused: it is busy\n"


@pytest.mark.parametrize(("terminal", "is_updated"), [("xterm", True), ("dumb", False)])
def test_on_a_terminal_one_line_says_how_far_it_is_and_leaves_nothing_behind(terminal: str, is_updated: bool) -> None:
    program = (
        "import asyncio\n"
        "from app.cli.headless import with_progress\n"
        "from tests.unit.app.cli.test_headless import Starting\n"
        "source = Starting()\n"
        "asyncio.run(with_progress(source.start(), source))\n"
    )

    with Typist([sys.executable, "-c", program], {**os.environ, "TERM": terminal}) as local_user:
        assert local_user.exit_code() == 0
        assert ("\r\x1b[Kstarting job gpt: 0 of 2 prepared" in local_user.said) is is_updated
        written = [line.rpartition("\x1b[K")[2] for line in local_user.said.replace("\r\n", "\n").split("\n")]
        assert [line for line in written if line] == [
            "rankdeck: job gpt: prepared on h1 and h2, 2 of 2 nodes",
            "rankdeck: job gpt: begun on h1 and h2, 2 of 2 nodes",
        ]


def test_a_verdict_whose_figures_alone_change_is_printed_once_in_half_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=3)
    source = SlowStart()
    headless = Headless(source)
    sim.run_to_step(10)
    sim.freeze(2)
    sim.run_until(lambda: bool(sim.verdicts()), within_s=60)
    for _ in range(200):
        sim.run(0.2)
        headless._print_view(sim.view(), sim.now_s)
    sim.thaw(2)
    sim.run_until(lambda: not sim.verdicts(), within_s=60)
    headless._print_view(sim.view(), sim.now_s)

    lines = capsys.readouterr().err.splitlines()
    assert ["CRITICAL" in line for line in lines if " rank" in line] == [True, True, False], lines


class NoJob(SimSource):
    """What is followed shows two nodes without a job."""

    started_at_s = 0.0
    watched_job = ""

    def __init__(self) -> None:
        cluster, diagnoser = Cluster(["h1", "h2"]), Diagnoser()
        for node in ("h1", "h2"):
            cluster.apply(node, node_report(1, workers=[], jobs=[]), 100.0)
        super().__init__(lambda: View(cluster, diagnoser.observe(cluster, 100.0), 100.0))

    async def start(self) -> None:
        """There is nothing to start."""


def test_without_a_job_a_line_is_printed_once_and_how_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    source = NoJob()
    headless, view = Headless(source), source.view()
    for now_s in range(600):
        headless._print_view(view, float(now_s))
        headless._print_how_it_ends(view, float(now_s))

    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" s ")[2].strip() for line in lines] == [
        "INFO  2 nodes up, no job yet",
        "waiting for a job; Ctrl-C ends",
    ]
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)
    headless._print_view(sim.view(), 600.0)
    assert "waiting for rank 1 " in capsys.readouterr().err


async def test_who_follows_what_has_no_job_reads_how_that_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.headless.LINE_GAP_S", 0.0)

    following = asyncio.create_task(Headless(NoJob()).run())
    written = []

    def is_printed() -> bool:
        written.append(capsys.readouterr().err)
        return "waiting for a job; Ctrl-C ends" in written[-1]

    await until_async(is_printed, 30, "it is printed")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_a_healthy_job_is_exit_code_0_and_a_short_summary() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run_to_step(50)
    sim.run(2)

    summary = summary_object(sim.view())

    assert exit_code(sim.view()) is ExitCode.WELL
    assert list(summary) == [
        "schema", "job", "steps", "loss_first", "loss_last", "nodes", "other_jobs", "gpus", "ranks", "barriers",
        "verdicts",
    ]  # fmt: skip
    assert summary["schema"] == 1
    assert summary["steps"] >= 50
    assert summary["loss_first"] > summary["loss_last"]
    assert summary["verdicts"] == []
    assert msgspec.json.decode(msgspec.json.encode(summary)) == summary


def test_a_standing_verdict_is_exit_code_10_and_told_with_what_to_do() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.freeze(2, at_step=10)
    sim.run_until(lambda: bool(sim.verdicts()), within_s=60)
    sim.run(2)

    lines = summary_lines(summary_object(sim.view()))

    assert exit_code(sim.view()) is ExitCode.VERDICT_STANDS
    verdict = next(line for line in lines if line.startswith("verdict: "))
    assert "rank 2" in verdict
    assert "frozen" in verdict
    assert lines[lines.index(verdict) + 1].startswith("  thaw it")


def test_status_prints_a_verdict_once_with_what_to_do_below(capsys: pytest.CaptureFixture[str]) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.freeze(2, at_step=10)
    sim.run_until(lambda: bool(sim.verdicts()), within_s=60)
    view = sim.view()

    _print_status(view, is_json=False)

    lines = capsys.readouterr().out.splitlines()
    (verdict,) = view.verdicts()
    assert lines[0].endswith(verdict.text)
    assert lines[1] == f"  {verdict.hint}"
    assert sum(verdict.text in line for line in lines) == 1
    assert "  rank 2 on demo-1: frozen" in "\n".join(lines)


class TypedTerminal(io.StringIO):
    """Standard error of a terminal."""

    def isatty(self) -> bool:
        return True


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> TypedTerminal:
    """Make standard output and error those of a terminal; call it in the test, since pytest replaces them before."""
    written = TypedTerminal()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(sys, "stdout", TypedTerminal())
    monkeypatch.setenv("TERM", "xterm")
    return written


def test_who_waits_at_a_terminal_reads_for_what_until_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = at_a_terminal(monkeypatch)

    with waiting_for(lambda: "going to h1 and h2"):
        until(lambda: "\r\x1b[Kgoing to h1 and h2" in typed.getvalue(), 30, "it is shown")
        print_line("rankdeck: h2 is unreachable")
        assert typed.getvalue().endswith("\r\x1b[Krankdeck: h2 is unreachable\n"), "no line stands before it"
        until(lambda: typed.getvalue().endswith("going to h1 and h2"), 30, "it is shown again")

    assert typed.getvalue().endswith("going to h1 and h2\r\x1b[K")


def test_what_is_waited_for_is_not_written_into_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = at_a_terminal(monkeypatch)

    looks: list[str] = []

    def what() -> str:
        looks.append(typed.getvalue())
        return "going to h1"

    with waiting_for(what):
        until(lambda: "going to h1" in typed.getvalue(), 30, "it is shown")
        with asking():
            before, num_looks = typed.getvalue(), len(looks)
            until(lambda: len(looks) > num_looks + 2, 30, "it would have been shown")
            assert typed.getvalue() == before
        until(lambda: typed.getvalue() != before, 30, "it is shown again")


@pytest.mark.parametrize("reader", ["json", "pipe", "dumb", "a file for what is said"])
def test_where_no_line_can_be_overwritten_a_long_wait_is_a_line_of_its_own(
    reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = at_a_terminal(monkeypatch)
    if reader == "pipe":
        monkeypatch.setattr(sys, "stdout", io.StringIO())
    elif reader == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    elif reader != "json":
        typed = cast("TypedTerminal", io.StringIO())
        monkeypatch.setattr(sys, "stderr", typed)
    context = click.Context(status)
    context.params["is_json"] = reader == "json"

    looks: list[str] = []

    def what() -> str:
        looks.append(typed.getvalue())
        return "going to h1"

    with context, waiting_for(what):
        if reader == "json":
            assert "rankdeck-waiting" not in [thread.name for thread in threading.enumerate()]
        else:
            until(lambda: len(looks) > 2, 30, "it is looked at")
    assert typed.getvalue() == "", "a short wait"

    monkeypatch.setattr(headless, "LONG_WAIT_S", 0.0)
    looks.clear()
    with context, waiting_for(what):
        if reader != "json":
            until(lambda: len(looks) > 2, 30, "it is looked at")
    assert typed.getvalue() == ("" if reader == "json" else "rankdeck: going to h1\n"), "once, as nothing has changed"


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
async def test_a_start_that_takes_long_is_a_line_where_none_can_be_overwritten(
    wait_s: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(headless, "LONG_WAIT_S", wait_s)
    progress = StartProgress("job gpt", ["h1"])
    looks = 0

    class Slow(Ended):
        @property
        def starting(self) -> StartProgress:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return progress

    await with_progress(until_async(lambda: looks > 2, 30, "it is looked at"), Slow(SimCluster().view))

    line = "rankdeck: starting job gpt: 0 of 1 prepared\n"
    assert capsys.readouterr().err == (line if wait_s == 0.0 else "")


async def test_a_look_at_hosts_names_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = at_a_terminal(monkeypatch)

    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)

    class Slow(Ended):
        away = frozenset[str]()
        title = "rankdeck on h1"

        async def connect(self) -> None:
            await until_async(lambda: "rankdeck on h1: asking the agents" in typed.getvalue(), 30, "it is shown")

        async def check_job(self) -> None:
            """It is there."""

        async def replay_history(self) -> None:
            what = "rankdeck on h1: reading what the agents remember"
            await until_async(lambda: what in typed.getvalue(), 30, "it is shown")

    await hosts.look(cast("RemoteSession", Slow(sim.view)), lambda _view: None, is_watching=False)

    assert "rankdeck on h1: waiting for the first reports" in typed.getvalue()
    assert typed.getvalue().endswith("\r\x1b[K")


class ClosedConsole:
    """A console whose user has left at once, after one look."""

    def __init__(self, session: Ended, settings: ConsoleSettings) -> None:  # noqa: ARG002 - as the console
        self.ui = SimpleNamespace(own_view=session.view())
        self.failure = None
        self.printed: list[str] = []

    async def run_async(self) -> None:
        await asyncio.sleep(0)


class Ended(SimSource):
    """A session that has nothing to report when the user leaves."""

    evidence_notices = ()
    started_at_s = 0.0
    watched_job = ""
    must_succeed = False
    cut_off = ""

    async def start(self) -> None:
        """It was started before."""

    def farewell(self) -> str:
        return ""


@pytest.mark.parametrize("ending", ["stop", "kill", "none", "freeze"])
async def test_who_leaves_the_console_reads_how_the_job_ended_or_which_verdict_stands(
    ending: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run_to_step(3)
    if ending == "freeze":
        sim.freeze(1, at_step=4)
        sim.run_until(lambda: bool(sim.view().verdicts()), 60)
    elif ending != "none":
        sim.stop() if ending == "stop" else sim.kill(1)
        sim.run_until(lambda: is_over(sim.view()), 60)
        sim.run(2)
    monkeypatch.setattr("app.tui.console.Console", ClosedConsole)

    session = Ended(sim.view)
    code = await show_session(session, ConsoleSettings())
    session.cut_off = "no agent on h1"

    assert await show_session(session, ConsoleSettings()) is (code or ExitCode.UNREACHABLE)
    headline = sim.view().headline().text
    assert (
        capsys.readouterr().err.splitlines()
        == 2
        * {
            "stop": [f"rankdeck: INFO  {headline}"],
            "kill": ["rankdeck: job demo: failed, exit code 1", f"rankdeck: CRITICAL  {headline}"],
            "none": [],
            "freeze": [f"rankdeck: exit code 10: CRITICAL  {headline}"],
        }[ending]
    )


def test_a_warning_that_is_no_verdict_yet_is_exit_code_0_and_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run(15)
    sim.ranks[2].slow_factor = 10_000.0
    sim.run_until(lambda: max((wait.waited_s for wait in sim.view().barriers()), default=0.0) > 6.0, within_s=60)

    _print_status(sim.view(), is_json=False)

    first = capsys.readouterr().out.splitlines()[0]
    assert "WARNING  ranks 0-1, 3 wait" in first
    assert first.endswith("; no alarm before 10 s")
    assert exit_code(sim.view()) is ExitCode.WELL
    sim.run(10)
    assert "no alarm" not in sim.view().headline().text
    assert exit_code(sim.view()) is ExitCode.VERDICT_STANDS


def test_a_training_is_not_ok_before_its_ranks_were_compared_for_some_seconds() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run_to_step(20)
    early = sim.view().headline()
    assert (early.severity, early.text.endswith("; not judged yet")) == (Severity.QUIET, True)
    sim.cluster.awaits_past = True
    early = sim.view().headline()
    assert (early.severity, early.text.endswith("; reading the last minutes")) == (Severity.QUIET, True)
    sim.cluster.awaits_past = False

    sim.run_until(lambda: sim.view().headline().severity is Severity.OK, within_s=30)
    assert "judged" not in sim.view().headline().text
    assert sim.view().headline().text.startswith("4 ranks training, step")


def test_a_fault_that_was_not_named_is_a_failure_whatever_else_stands() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run(5)

    assert exit_code(sim.view(), is_fault_unnamed=True) is ExitCode.JOB_FAILED


def test_before_anything_is_known_the_summary_says_that_the_job_did_not_start() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)

    summary = summary_object(sim.view())

    assert summary["job"] is None
    assert summary_lines(summary) == ["the job did not start"]
    assert exit_code(sim.view()) is ExitCode.WELL


@pytest.mark.parametrize(
    ("variables", "color"),
    [({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": ""}, None)],
)
def test_colours_are_those_that_are_wished(variables: dict[str, str], color: bool | None) -> None:
    assert own_color(variables) is color


def test_a_character_that_an_encoding_lacks_ends_no_command() -> None:
    program = "from app.cli import main; main._make_streams_usable(); print('100% \u2588 \xe9')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout) == (0, b"100% \\u2588 \xe9\n")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_end_no_command_and_get_no_text_of_others(closed: str, tmp_path: Path) -> None:
    program = (
        "import sys, os, click; from app.cli import main; main._make_streams_usable(); "
        "click.echo('out'); print('err', file=sys.stderr); sys.stdin.read(); sys.stderr.isatty(); "
        "os.write(os.open('well', os.O_CREAT | os.O_WRONLY), b'yes')"
    )
    line = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(program)} {closed}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False
    )

    assert (tmp_path / "well").read_text() == "yes", done.stderr
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else b"out\n")
    assert done.stderr == (b"" if "2>&-" in closed else b"err\n")
