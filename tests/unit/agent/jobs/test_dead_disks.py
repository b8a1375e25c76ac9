"""A job whose files are not there, or on a disk that does not answer: it is refused, and the agent goes on."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from agent.cli import EXIT_REFUSED, status
from agent.jobs import preflight
from agent.jobs.all_jobs import Jobs
from agent.jobs.job import Job
from agent.jobs.launch import Launch
from agent.jobs.lifecycle import AttemptFailed, CommitReceived, LauncherStarted
from agent.node_state.node_state import NodeState
from agent.state_dir import StateDir
from agent.wire.commands import RefusalReason, Refused, decode_reply
from agent.wire.jobs import JobState
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

DEAD, STALE = Path("/mnt/dead"), Path("/mnt/stale")


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    """Jobs on a node with a disk on which a look takes until the end of the test."""
    is_dir, is_over = Path.is_dir, threading.Event()

    def hang(path: Path) -> bool:
        if path == DEAD:
            assert threading.current_thread() is not threading.main_thread(), "the event loop hangs"
            is_over.wait(60)
        if path == STALE:
            raise OSError(116, "Stale file handle")
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", hang)
    monkeypatch.setattr(preflight, "LOOK_S", 0.1)
    jobs = Jobs(StateDir(tmp_path), NodeState("n", "e", "h", 1, 1), lambda: None, frozenset(), die_with_us=False)
    yield jobs
    is_over.set()
    jobs.close()


async def test_a_job_is_refused_at_a_disk_that_does_not_answer_and_another_is_looked_at_meanwhile(
    jobs: Jobs, tmp_path: Path
) -> None:
    dead, again, stale, other = await asyncio.gather(
        *(jobs.prepare(make_local_spec(path)) for path in (DEAD, DEAD, STALE, tmp_path / "none"))
    )

    assert isinstance(dead, Refused) and isinstance(stale, Refused) and isinstance(other, Refused)  # noqa: PT018
    assert {dead.reason, stale.reason, other.reason} == {RefusalReason.NO_WORKDIR}
    assert dead == again
    assert dead.message.startswith(f"{DEAD} does not answer after 0 s: see dmesg there")
    assert stale.message == f"{STALE} cannot be looked at: Stale file handle"
    assert "create it there" in other.message
    assert len(jobs._reads._running) == 1, "a thread hangs, not one for each look"


async def test_a_job_restarts_not_at_a_disk_that_does_not_answer(jobs: Jobs, tmp_path: Path) -> None:
    job = Job(make_local_spec(DEAD, max_restarts=1), 0.0)
    for event in (CommitReceived(), LauncherStarted(), AttemptFailed(1)):
        job.handle(event, 0.0)
    launch = Launch(job, tmp_path / "0", None)
    assert job.state is JobState.RESTARTING

    for _ in range(100):
        jobs._restart(launch, 1)
        await asyncio.sleep(0.01)
        if job.has_ended:
            break

    assert job.cause.startswith(f"the job could not restart: {DEAD} does not answer after")


@pytest.mark.parametrize(
    ("workdir", "reason", "why"),
    [
        ("", "no_script", "train.py is not a file (seen from {0})"),
        ("nope", "no_workdir", "{0}/nope is not a directory that can be entered: create it there"),
    ],
)
def test_a_program_that_is_not_there_is_told_from_a_directory_that_is_not_there(
    workdir: str, reason: str, why: str, tmp_path: Path
) -> None:
    answer = CliRunner().invoke(status, ["--script", "train.py", "--workdir", str(tmp_path / workdir)])
    refused = decode_reply(answer.stdout_bytes)
    assert answer.exit_code == EXIT_REFUSED
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.message) == (reason, why.format(tmp_path))
