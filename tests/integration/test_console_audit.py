"""What the command `rankdeck` writes down of what is done from this machine, over an agent of this machine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.fleet.local_link import LocalLink
from app.inventory.program import Program
from app.session.audit import AuditLog
from app.session.options import SessionOptions
from app.session.remote_session import RemoteSession
from tests.support.commands import run_rankdeck
from tests.support.plain_hosts import these

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT = "import signal\nsignal.sigwait({signal.SIGTERM})\n"


class Desk:
    """A person with a short-named home of states, so that no agent of the one who tests is met."""

    def __init__(self, state_home: Path, workdir: Path) -> None:
        self.path = state_home / "rankdeck" / "audit.jsonl"
        self._workdir = workdir
        self._environ = {**os.environ, "XDG_STATE_HOME": str(state_home)}

    def type(self, *words: str) -> tuple[int, str]:
        code, _, said = run_rankdeck(*words, cwd=self._workdir, environ=self._environ)
        return code, said

    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def told(self) -> list[tuple[str, str, str]]:
        return [(entry["action"], entry.get("job_id", ""), entry["outcome"]) for entry in self.entries()]


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Desk]:
    (tmp_path / "wait.py").write_text(WAIT)
    with tempfile.TemporaryDirectory(prefix="rda-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_STATE_HOME", directory)
        desk = Desk(Path(directory), tmp_path)
        try:
            yield desk
        finally:
            desk.type("down", "localhost", "--kill-jobs")


@pytest.mark.slow
@pytest.mark.ranks
def test_all_that_is_done_to_a_job_and_an_agent_is_written_down(desk: Desk) -> None:
    here = ("--host", "localhost")
    run = ("run", *here, "--detach", "--no-evidence", "--nproc-per-node", "1", "--name")
    assert desk.type(*run, "wait", "--", "wait.py", "--token", "hush")[0] == 0
    assert desk.type(*run, "lost", "--beside", "--", "missing.py")[0] == 4
    assert desk.type("fault", "freeze", *here, "--rank", "0")[0] == 4
    assert desk.type("kill", "wait", *here)[0] == 0
    assert desk.type("restart", "wait", *here)[0] == 0
    assert desk.type("stop", "wait", "--now", *here)[0] == 0
    assert desk.type("status", *here)[0] == 0
    assert desk.type("down", "localhost")[0] == 0

    assert desk.told() == [
        ("up", "", "done"),
        ("start", "wait", "done"),
        ("start", "lost", "failed"),
        ("fault", "wait", "failed"),
        ("kill", "wait", "done"),
        ("restart", "wait", "done"),
        ("stop", "wait", "done"),
        ("down", "", "done"),
    ]
    entries = desk.entries()
    assert {tuple(entry["hosts"]) for entry in entries} == {("localhost",)}
    assert entries[1]["program"] == "wait.py --token '***'"
    assert "missing.py" in entries[2]["sentence"]
    assert "does not allow faults" in entries[3]["sentence"]
    assert entries[4]["sentence"] == "job wait was killed on localhost"
    assert "hush" not in desk.path.read_text()


def test_each_answer_of_up_and_down_is_written_down_also_that_of_a_host_that_gives_none(desk: Desk) -> None:
    config = desk.path.parent.parent / "config"
    config.write_text("Host nowhere\n  HostName 127.0.0.1\n  Port 1\n")

    assert desk.type("up", "localhost", "nowhere", "--ssh-config", str(config))[0] == 3
    assert desk.type("down", "localhost")[0] == 0

    told = [(*entry["hosts"], entry["action"], entry["outcome"]) for entry in desk.entries()]
    assert told == [("localhost", "up", "done"), ("nowhere", "up", "failed"), ("localhost", "down", "done")]


def test_a_log_that_cannot_be_written_is_one_line_and_hinders_nothing(desk: Desk) -> None:
    desk.path.mkdir(parents=True)

    for words in (("up", "localhost"), ("down", "localhost")):
        code, said = desk.type(*words)
        assert code == 0
        assert said.count("is not written down") == len(said.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.ranks
async def test_another_program_that_is_started_from_the_console_is_written_down(desk: Desk, tmp_path: Path) -> None:
    with LocalLink() as link:
        link.bring_up()
        session = RemoteSession(these(link), None, SessionOptions(audit=AuditLog(desk.path)))
        try:
            await session.start()
            assert session.starter is not None
            await session.starter.start(Program(("wait.py", "--api-key=hush"), 1, workdir=str(tmp_path)))
            await session.job_control.kill(session.watched_job)
        finally:
            await session.close()

    assert desk.told() == [("start", session.watched_job, "done"), ("kill", session.watched_job, "done")]
    assert desk.entries()[0]["program"] == "wait.py '--api-key=***'"
