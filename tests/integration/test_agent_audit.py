"""What a real agent writes down of what is done to it."""

from __future__ import annotations

import json
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest

from agent.wire.commands import Abort, Accepted, Claim, Commit, Kill, Prepare, RefusalReason, Refused, Shutdown
from agent.wire.jobs import ENDED_STATES
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec


def entries(agent: RunningAgent) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (agent.directory / "audit.jsonl").read_text().splitlines()]


def outcomes(agent: RunningAgent) -> list[tuple[str, str]]:
    return [(entry["command"], entry.get("reason", entry["outcome"])) for entry in entries(agent)]


@pytest.mark.ranks
def test_a_job_s_whole_life_is_written_down_with_who_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nsignal.sigwait({signal.SIGTERM})\n")
    spec = make_local_spec(tmp_path, 1, command=["wait.py", "--token", "hush"], env={"WHISPER": "softly"})
    with RunningAgent() as agent:
        agent.ask(Prepare(spec))
        agent.ask(Commit("train"))
        assert isinstance(agent.ask(Prepare(spec)), Refused)
        agent.ask(Kill("train"))
        agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, 30, "the job ends")
        assert outcomes(agent) == [
            ("prepare", "accepted"),
            ("commit", "accepted"),
            ("prepare", "job_exists"),
            ("kill", "accepted"),
        ]
        who = {(entry["uid"], entry["user"], entry["pid"], entry["process"]) for entry in entries(agent)}
        name = pwd.getpwuid(os.geteuid()).pw_name
        assert who == {(os.geteuid(), name, os.getpid(), Path("/proc/self/comm").read_text().strip())}
        path = agent.directory / "audit.jsonl"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "hush" not in path.read_text()
        assert "softly" not in path.read_text()


def test_refusals_a_claim_a_verb_by_hand_and_the_shutdown_are_written_down_and_looks_are_not() -> None:
    with RunningAgent() as agent:
        agent.report()
        agent.ask(Claim(2, "me@desk"))
        agent.ask(Abort("train", generation=1))
        run_agent_verb("kill", "--dir", str(agent.directory), "--job", "train")
        agent.ask(Shutdown())
        agent.process.wait(10)

        assert outcomes(agent) == [
            ("claim", "accepted"),
            ("abort", "old_generation"),
            ("kill", "unknown_job"),
            ("shutdown", "accepted"),
        ]
        assert entries(agent)[2]["pid"] not in {os.getpid(), agent.process.pid}
        assert {entry["node"] for entry in entries(agent)} == {"here"}


def test_a_log_that_cannot_be_written_hinders_no_command() -> None:
    with RunningAgent() as agent:
        (agent.directory / "audit.jsonl").mkdir()

        assert agent.ask(Claim(1, "me@desk")) == Accepted()
        reply = agent.ask(Kill("train"))
        agent.process.terminate()
        _, said = agent.process.communicate(timeout=10)

    assert isinstance(reply, Refused)
    assert reply.reason is RefusalReason.UNKNOWN_JOB
    assert said.count("is not written down") == 1


def test_a_private_agent_writes_nothing_down() -> None:
    with RunningAgent("--private") as agent:
        agent.ask(Claim(1, "me@desk"))

        assert not (agent.directory / "audit.jsonl").exists()
