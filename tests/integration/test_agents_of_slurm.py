"""Agents in a Slurm step, and agents that follow a relay: they stop their jobs before they end."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from agent.relay.dialer import AWAY_S, Dialer
from agent.wire.commands import Prepare, Refused
from agent.wire.jobs import ENDED_STATES, JobState
from agent.wire.relay import Farewell, encode_relay_message
from tests.support.agents import END_S, RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec
from tests.support.relays import RunningRelay
from tests.support.waiting import until
from tests.unit.agent.wire.test_slurm_step import STEP

if TYPE_CHECKING:
    from pathlib import Path

    from agent.transport.subscribers import NodeReports

START_S = 120.0
SAVES = """
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(2)
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("here").touch()
time.sleep(600)
"""


def saving(agent: RunningAgent, directory: Path) -> None:
    """Start a rank that takes two seconds to write something when it is asked to end."""
    (directory / "train.py").write_text(SAVES)
    agent.start_job(make_local_spec(directory, 1, command=["train.py"], grace_s=60.0))
    until((directory / "here").exists, START_S, "the rank is there")


def stops_first(agent: RunningAgent, directory: Path) -> None:
    """Assert that an agent stops its job, starts no other, and ends after it."""
    agent.wait_until(lambda report: report.jobs[0].state is JobState.STOPPING, END_S, "its job is stopped")
    spec = make_local_spec(directory, 1, command=["train.py"])
    refused = agent.ask(Prepare(msgspec.structs.replace(spec, job_id="other")))
    assert isinstance(refused, Refused)
    assert "nothing is started any more" in refused.message
    last = agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, START_S, "it has ended")
    assert last.jobs[0].state is JobState.STOPPED
    assert agent.process.wait(END_S) == 0
    assert (directory / "saved").exists()


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGUSR1,)], ids=["doubled", "usr1"])
def test_slurm_s_notice_stops_the_jobs_and_then_ends_the_agent(
    tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    with RunningAgent(environment=STEP) as agent:
        saving(agent, tmp_path)
        for number in numbers:
            agent.process.send_signal(number)
        stops_first(agent, tmp_path)


def test_the_end_of_the_relay_is_that_of_the_jobs_and_of_the_agent(tmp_path: Path) -> None:
    with RunningRelay() as relay, RunningAgent("--relay", str(relay.invitation), "--until-relay-ends") as agent:
        saving(agent, tmp_path)
        relay.process.terminate()
        stops_first(agent, tmp_path)


def test_a_relay_that_is_only_away_ends_no_job(tmp_path: Path) -> None:
    dialer = Dialer(tmp_path / "invitation.json", tmp_path, "a", "epoch", cast("NodeReports", None), {})
    told: list[str] = []
    dialer.on_relay_end = told.append
    dialer._away_since_s = time.monotonic() - 2 * AWAY_S

    dialer.is_busy = lambda: True
    assert not dialer._reported_end()
    dialer.is_busy = lambda: False
    assert dialer._reported_end()
    dialer.is_busy = lambda: True
    dialer._take_frame(encode_relay_message(Farewell()))
    assert dialer._reported_end()
    assert len(told) == 2


@pytest.mark.parametrize("options", [(), ("--daemon", "--relay", "invitation.json")])
def test_following_a_relay_wants_one_and_the_foreground(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run_agent_verb("serve", "--dir", str(tmp_path / "agent"), "--until-relay-ends", *options)

    assert (done.returncode, "--until-relay-ends is for an agent in the foreground" in done.stderr) == (2, True)
    assert not (tmp_path / "agent").exists()


def test_ranks_see_the_gpus_that_srun_has_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; open('seen', 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])")
    with RunningAgent(environment={**STEP, "CUDA_VISIBLE_DEVICES": "2,3"}) as agent:
        agent.start_job(make_local_spec(tmp_path, 1, command=["train.py"]))
        agent.wait_until(lambda report: report.jobs[0].state is JobState.SUCCEEDED, START_S, "it has ended")

    assert (tmp_path / "seen").read_text() == "2,3"


def test_an_agent_outside_of_a_step_leaves_its_jobs_running(tmp_path: Path) -> None:
    batch_script = {name: text for name, text in STEP.items() if name != "SLURM_STEP_ID"}
    with RunningAgent(environment=batch_script) as agent:
        saving(agent, tmp_path)
        agent.processes()  # remembers what is to be killed at the end
        agent.process.terminate()
        assert agent.process.wait(END_S) == 0
        assert not (tmp_path / "saved").exists()
