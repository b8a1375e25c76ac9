"""Programs that know nothing of rankdeck, on real ranks: what is seen of them, and that they notice nothing."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from agent.wire.commands import Accepted, InjectFault, RefusalReason, Refused
from app.diagnosis.causes import Cause, RankState
from app.diagnosis.rank_facts import Thresholds
from ddpcore.wire import FaultKind
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR
from tests.support.agent_console import AgentConsole
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.programs.unmodified import ENOUGH, STEPS
from tests.support.ranks import RealRanks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.view.view import View

pytestmark = pytest.mark.ranks

PROGRAM = Path(__file__).parents[1] / "support" / "programs" / "unmodified.py"
START_S = 60.0
END_S = 60.0
LONG_S = 180.0
"""For programs that start more processes with torch."""
STALL_S = 6.0
"""Longer than a busy machine lets a rank stand still, which is no verdict that these tests want."""

OLD_TORCH = """
import importlib.metadata
found = importlib.metadata.entry_points
def entry_points(**wanted):
    if wanted.get("group") == "torch.backends":
        import torch
        for name in [name for name in dir(torch._C._distributed_c10d) if name.startswith("_dump_")]:
            delattr(torch._C._distributed_c10d, name)
    return found(**wanted)
importlib.metadata.entry_points = entry_points
"""


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


def start(agent: RunningAgent, directory: Path, what: str, **changes: Any) -> AgentConsole:
    """Start two ranks of the program."""
    spec = make_local_spec(directory, command=[str(PROGRAM), what], allow_faults=True, **changes)
    reply = agent.start_job(spec)
    assert isinstance(reply, Accepted), reply
    patience = Thresholds(stall_s=STALL_S, silent_s=STALL_S, deadlock_s=STALL_S, lost_s=3 * STALL_S)
    return AgentConsole(agent, patience)


def enough(directory: Path) -> None:
    """Let a program end that goes on until then."""
    (directory / ENOUGH).touch()


def printed(agent: RunningAgent, rank: int = 0, stream: str = "stdout") -> str:
    (log,) = agent.directory.rglob(f"rank-{rank}.{stream}.log")
    return log.read_text()


def notes(view: View) -> str:
    job = view.job()
    return "" if job is None else "\n".join(job.notes)


def causes(view: View) -> list[Cause]:
    return [verdict.cause for verdict in view.verdicts()]


def states(view: View) -> set[RankState]:
    return {row.state for row in view.ranks()}


@pytest.mark.slow
def test_steps_are_counted_and_the_loss_is_read_from_the_log(agent: RunningAgent, tmp_path: Path) -> None:
    console = start(agent, tmp_path, "ddp", metrics=["loss=([0-9.e+-]+)", r"step (?P<line>\d+)"])

    def is_under_way(view: View) -> bool:
        # Steps come from the probe and the loss from the log, each at its own pace.
        job = view.job()
        is_training = view.headline().text.startswith("2 ranks training, optimizer step ")
        return job is not None and (job.step or 0) > 5 and job.loss is not None and is_training

    view = console.wait_until(is_under_way, START_S, "step 5 and a loss")
    job = view.job()
    assert job is not None
    assert job.is_step_counted
    assert notes(view) == ""

    enough(tmp_path)
    job = console.wait_for_end(END_S).job()
    assert job is not None
    assert (job.state, job.exit_code, job.step) == ("succeeded", 0, STEPS)
    assert [row.metrics["line"] for row in view.ranks()] != [None, None]
    last_loss = float(printed(agent).splitlines()[-1].partition("loss=")[2])
    assert job.loss == pytest.approx(last_loss)
    assert console.verdicts == {}


@pytest.mark.timeout(3 * LONG_S)
@pytest.mark.parametrize(
    ("what", "exit_code"),
    [("fail", 1), pytest.param("load", 0, marks=pytest.mark.slow), pytest.param("exit", 1, marks=pytest.mark.slow)],
)
def test_a_program_says_and_does_the_same_as_under_plain_torchrun(
    agent: RunningAgent, tmp_path: Path, what: str, exit_code: int
) -> None:
    with RealRanks([PROGRAM, what], 2, is_watched=False, env={"PYTHONPATH": os.environ.get("PYTHONPATH", "")}) as plain:
        assert plain.wait_for_end(LONG_S) == exit_code
        expected = {
            (path.parent.name, path.stem): path.read_text() for path in plain.directory.rglob("logs/*/*/*/*.log")
        }
    assert len(expected) == 4

    # torchrun's own end is wanted, and not that the agent has killed it meanwhile.
    job = start(agent, tmp_path, what, grace_s=LONG_S).wait_for_end(LONG_S).job()

    assert job is not None
    assert job.exit_code == exit_code
    for (rank, stream), text in expected.items():
        assert without_search_path(printed(agent, int(rank), stream)) == without_search_path(text)


def without_search_path(text: str) -> list[str]:
    """Leave out what differs on purpose: the probe is found through PYTHONPATH."""
    return [line for line in text.splitlines() if not line.startswith("search path:")]


def test_without_a_probe_ranks_are_untouched_and_watched_from_outside(agent: RunningAgent, tmp_path: Path) -> None:
    console = start(agent, tmp_path, "idle", is_probed=False, metrics=[r"loss (\S+)"])

    view = console.wait_until(lambda view: states(view) == {RankState.UNPROBED}, START_S, "both ranks run")
    view = console.wait_until(lambda view: all(row.loss is not None for row in view.ranks()), START_S, "a loss of each")

    assert notes(view) == "ranks 0-1 have no probe (as asked): watched from outside, by process and output"
    assert view.headline().text.startswith("2 ranks running; watched from outside, without a probe: last output ")
    assert all(row.detail.startswith("watched from outside: printed ") for row in view.ranks())
    assert f"search path: {os.environ.get('PYTHONPATH', '')}\n" in printed(agent)
    assert str(LAUNCH_PLUGIN_DIR) not in printed(agent)

    agent.ask(InjectFault("train", FaultKind.FREEZE, 1))
    view = console.wait_until(lambda view: Cause.FROZEN in causes(view), START_S, "the frozen rank is named")
    (verdict,) = view.verdicts()
    assert verdict.culprits == [1]


@pytest.mark.parametrize(
    ("what", "env", "said"),
    [
        ("meet", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "no probe (TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it out)"),
        pytest.param(
            "meet", {"TORCH_FR_BUFFER_SIZE": "0"}, "the flight recorder is switched off", marks=pytest.mark.slow
        ),
        pytest.param(
            "meet", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "the flight recorder is switched off", marks=pytest.mark.slow
        ),
        pytest.param(
            "meet", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "TORCH_DISTRIBUTED_DEBUG=DETAIL", marks=pytest.mark.slow
        ),
        pytest.param("alone", {}, "training without a process group, each on its own", marks=pytest.mark.slow),
        pytest.param(
            "spawn",
            {},
            "own ranks started (by a launcher, spawn or multiprocessing), which are not watched",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_limits_the_view_is_said_once_and_does_no_harm(
    agent: RunningAgent, tmp_path: Path, what: str, env: dict[str, str], said: str
) -> None:
    console = start(agent, tmp_path, what, env=env)

    view = console.wait_until(lambda view: said in notes(view) and "ranks 0-1" in notes(view), START_S, said)
    assert notes(view).count(said) == 1

    enough(tmp_path)
    job = console.wait_for_end(END_S).job()
    assert job is not None
    assert (job.state, job.exit_code) == ("succeeded", 0)
    assert console.verdicts == {}
    assert agent.report().malformed_reports == 0


@pytest.mark.slow
def test_a_torch_without_a_recorder_is_told_and_lines_are_seen(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_TORCH)
    search_path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    console = start(agent, tmp_path, "meet", env={"PYTHONPATH": search_path})

    view = console.wait_until(
        lambda view: "ranks 0-1: this torch has no flight recorder" in notes(view), START_S, "the note"
    )
    view = console.wait_until(lambda view: "unmodified.py" in view.ranks()[0].where, START_S, "a line")
    assert states(view) <= {RankState.STARTING, RankState.RUNNING}

    enough(tmp_path)
    job = console.wait_for_end(END_S).job()
    assert job is not None
    assert job.exit_code == 0
    assert console.verdicts == {}


@pytest.mark.slow
def test_under_debug_detail_lines_are_seen_and_a_frozen_rank_is_named(agent: RunningAgent, tmp_path: Path) -> None:
    console = start(agent, tmp_path, "meet", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    console.wait_until(lambda view: " in meet" in view.ranks()[0].where, START_S, "a line")

    agent.ask(InjectFault("train", FaultKind.FREEZE, 1))

    view = console.wait_until(lambda view: Cause.FROZEN in causes(view), START_S, "the frozen rank is named")
    assert view.verdicts()[0].culprits == [1]


@pytest.mark.slow
def test_a_process_group_opened_twice_counts_anew_and_the_late_rank_is_named(
    agent: RunningAgent, tmp_path: Path
) -> None:
    console = start(agent, tmp_path, "meet-twice")

    view = console.wait_until(lambda view: bool(view.verdicts()), START_S, "a verdict")
    (verdict,) = view.verdicts()
    assert (verdict.cause, verdict.culprits, verdict.seq) == (Cause.STRAGGLER, [1], 1)

    (tmp_path / "come").touch()
    job = console.wait_for_end(END_S).job()
    assert job is not None
    assert job.exit_code == 0
    assert not any("does not complete" in text for text in console.verdicts)


@pytest.mark.slow
def test_a_rank_that_launches_ranks_of_its_own_is_said_to(agent: RunningAgent, tmp_path: Path) -> None:
    console = start(agent, tmp_path, "launch")

    view = console.wait_until(lambda view: "ranks 0-1: own ranks started" in notes(view), START_S, "the note")
    assert "own ranks started" in view.headline().text
    assert {row.state for row in view.ranks()} <= {RankState.STARTING, RankState.RUNNING}

    enough(tmp_path)
    job = console.wait_for_end(END_S).job()
    assert job is not None
    assert job.exit_code == 0
    assert agent.report().malformed_reports == 0, "nobody else speaks in the name of a rank"
    assert console.verdicts == {}


@pytest.mark.slow
def test_a_program_without_torch_has_no_probe_in_time(
    agent: RunningAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.model.job_model.PROBE_PATIENCE_S", 2.0)
    console = start(agent, tmp_path, "idle")

    view = console.wait_until(lambda view: states(view) == {RankState.UNPROBED}, START_S, "both are unprobed")
    assert "no probe (torch not imported, or one that loads no probe)" in notes(view)

    for process in psutil.process_iter(["pid"]):
        if process.pid == view.ranks()[1].pid:
            process.send_signal(signal.SIGKILL)
    view = console.wait_until(lambda view: Cause.EXITED in causes(view), START_S, "the killed rank is named")
    assert view.verdicts()[0].culprits == [1]


def test_a_pattern_that_is_none_is_refused_in_one_line(agent: RunningAgent, tmp_path: Path) -> None:
    spec = make_local_spec(tmp_path, command=[str(PROGRAM), "idle"], metrics=["loss=("])

    reply = agent.start_job(spec)

    assert isinstance(reply, Refused)
    assert reply.reason is RefusalReason.MALFORMED
    assert reply.message == "the metric pattern 'loss=(' is not one that RE2 takes: missing ): loss=("
    assert agent.report().jobs == []


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_sync", "test_ops"])
def test_accelerate_s_own_scripts_run_under_it(agent: RunningAgent, tmp_path: Path, script: str) -> None:
    pytest.importorskip("accelerate", reason="a third party, not among what the tests install")
    command = ["-m", f"accelerate.test_utils.scripts.{script}"]
    agent.start_job(make_local_spec(tmp_path, command=command, python=sys.executable))
    console = AgentConsole(agent)

    job = console.wait_for_end(END_S).job()

    assert job is not None
    assert (job.state, job.exit_code) == ("succeeded", 0)
    assert console.verdicts == {}
