"""This machine as a host: the same agent and the same session, without SSH between."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.errors import (
    AgentRefusedError,
    AgentUnreachableError,
    FrozenAgentError,
    HostUnreachableError,
    NoAgentError,
    UsageError,
)
from app.fleet import local_link
from app.fleet.local_link import LocalLink
from app.inventory.program import Program
from app.model.unreachable_reason import UnreachableKind
from app.session.options import SessionOptions
from app.session.reconnector import unreachable_reason_of
from app.session.remote_job import RunRequest
from app.session.remote_session import RemoteSession
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 60.0
FROZEN_S = 10.0
"""A start of Python on a busy machine; on a quiet one it takes 0.3 s."""


@pytest.fixture
def state_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short-named home of states, so that no agent of the person is met."""
    with tempfile.TemporaryDirectory(prefix="rdl-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_STATE_HOME", directory)
        yield Path(directory)


async def test_the_agent_of_this_machine_is_brought_up_watched_and_ended(state_home: Path) -> None:
    with LocalLink() as link:
        link.connect()
        with pytest.raises(AgentUnreachableError, match="nothing is known of jobs there"):
            link.find()
        assert link.bring_up().is_new
        assert not link.bring_up().is_new
        session = RemoteSession(these(link))
        try:
            await session.start()
            assert link.directory.is_relative_to(state_home)
            await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")
            assert [row.node for row in session.view().nodes()] == ["localhost"]
            assert session.title == "rankdeck on localhost"
        finally:
            await session.close()
            assert link.shut_down(kill_jobs=True).num_jobs_left == 0


def test_an_agent_whose_process_is_stopped_is_told_as_that_at_once_with_what_to_type(state_home: Path) -> None:
    with LocalLink() as link:
        link.connect()
        pid = link.bring_up().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            for do in (link.find, link.bring_up, lambda: link.shut_down(kill_jobs=True)):
                began_s = time.monotonic()
                with pytest.raises(FrozenAgentError) as caught:
                    do()
                assert time.monotonic() - began_s < FROZEN_S
                assert str(caught.value) == f"the agent on localhost (pid {pid}) is frozen"
                assert caught.value.hint == f"on localhost: kill -CONT {pid}"
            unreachable_reason = unreachable_reason_of(FrozenAgentError("localhost", pid), "localhost")
            assert unreachable_reason.unreachable_kind is UnreachableKind.ANSWER
            assert unreachable_reason.why == f"its process (pid {pid}) is frozen (on localhost: kill -CONT {pid})"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert link.find().pid == pid
        link.shut_down(kill_jobs=True)
        with pytest.raises(NoAgentError):
            link.find()


@pytest.mark.ranks
async def test_another_program_is_started_where_no_job_runs_followed_and_told(
    state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wait.py").write_text("import signal\nsignal.sigwait({signal.SIGTERM})\n")
    program = Program(("wait.py", "--name", "a b"), 1, workdir=str(tmp_path))
    with LocalLink() as link:
        link.bring_up()
        session = RemoteSession(these(link))
        try:
            await session.start()
            starter = session.starter
            assert starter is not None
            assert await starter.past() == []
            await until_async(lambda: session.view().nodes()[0].state == "up", 60, "reports come")
            assert session.how_to_begin == "rankdeck run --host localhost train.py"
            with pytest.raises(AgentRefusedError, match="is not a file"):
                await starter.start(Program(("missing.py",), 1, workdir=str(tmp_path)))
            assert (session.watched_job, session.farewell()) == ("", "")

            told = await starter.start(program)
            job_id = session.watched_job
            assert told == f"job {job_id} started on localhost with 1 rank: wait.py --name 'a b'"
            assert any(event.text == f"on request: {told}" for event in session.events.latest_first())
            assert session.how_to_begin == ""
            await until_async(lambda: shown_job(session) == (job_id, "running"), START_S, "the job runs")
            assert f"job {job_id} goes on" in session.farewell()
            with pytest.raises(UsageError, match=f"job {job_id} runs on localhost"):
                await starter.start(program)

            await session.job_control.kill(job_id)
            await until_async(lambda: shown_job(session) == (job_id, "stopped"), START_S, "the job ends")
            assert (session.farewell(), await starter.past()) == ("", [program])
            monkeypatch.chdir(tmp_path)
            await starter.start(Program(("wait.py",), 1, 3, "."))
            assert (await starter.past())[0].workdir == str(tmp_path)
            second = session.watched_job
            assert second != job_id
            await until_async(lambda: shown_job(session) == (second, "running"), START_S, "the next one is followed")

            other = RemoteSession(these(link), None, SessionOptions(is_read_only=True))
            assert (other.starter, other.control) == (None, None)
            assert other.how_to_begin == "rankdeck run --host localhost train.py"
        finally:
            await session.close()
            assert link.shut_down(kill_jobs=True).num_jobs_left == 0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("metrics", [("loss ([0-9.]+)",), ()])
async def test_an_attached_console_knows_whether_patterns_find_the_loss(
    metrics: tuple[str, ...], state_home: Path, tmp_path: Path
) -> None:
    (tmp_path / "wait.py").write_text("import signal\nsignal.sigwait({signal.SIGTERM})\n")
    request = RunRequest(("wait.py",), "first", 1, workdir=str(tmp_path), metrics=metrics)
    with LocalLink() as link:
        link.bring_up()
        starting, attached = RemoteSession(these(link), request), RemoteSession(these(link))
        attached.backfills = True
        try:
            await starting.start()
            await attached.start()
            await until_async(lambda: shown_job(attached) == ("first", "running"), START_S, "the job runs")
            if metrics:
                await until_async(lambda: attached.view() is not None and attached.reads_loss, 10, "the node answers")
            else:
                await asyncio.sleep(1)
                assert attached.view().job() is not None
                assert not attached.reads_loss
        finally:
            await attached.close()
            await starting.close()
            assert link.shut_down(kill_jobs=True).num_jobs_left == 0


@pytest.mark.slow
@pytest.mark.ranks
async def test_what_another_console_started_is_known_with_its_secrets_hidden(state_home: Path, tmp_path: Path) -> None:
    (tmp_path / "end.py").touch()
    request = RunRequest(("end.py", "--token", "hush"), "first", 1, workdir=str(tmp_path), max_restarts=2)
    with LocalLink() as link:
        link.bring_up()
        try:
            assert await past_of(RemoteSession(these(link), request)) == [Program(request.command, 1, 2, str(tmp_path))]
            hidden = Program(("end.py", "--token", "***"), 1, 2, str(tmp_path))
            assert await past_of(RemoteSession(these(link))) == [hidden]
        finally:
            link.shut_down(kill_jobs=True)


async def past_of(session: RemoteSession) -> list[Program]:
    """Return what a session can start again, once the job `first` has ended."""
    try:
        await session.start()
        await until_async(lambda: shown_job(session) == ("first", "succeeded"), START_S, "it ends")
        assert session.starter is not None
        return await session.starter.past()
    finally:
        await session.close()


def shown_job(session: RemoteSession) -> tuple[str, str]:
    """Return the job that is shown, and how it stands; `starting` is running, too."""
    job = session.view().job()
    return ("", "") if job is None else (job.job_id, "running" if job.state == "starting" else job.state)


def test_a_python_without_rankdeck_and_none_at_all_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachableError, match="/no/python does not run there"):
        LocalLink("/no/python").find()
    (tmp_path / "file").touch()
    with pytest.raises(AgentUnreachableError, match="file does not run there"):
        LocalLink(str(tmp_path / "file")).find()
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec {sys.executable} -S -P -c 'import sys; sys.exit(\"No module named agent\")'\n")
    bare.chmod(0o700)
    with pytest.raises(AgentUnreachableError, match="has no rankdeck"):
        LocalLink(str(bare)).find()


def test_a_python_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(local_link, "VERB_TIMEOUT_S", 0.2)
    with pytest.raises(HostUnreachableError, match="does not end"):
        LocalLink(str(hanging)).find()
