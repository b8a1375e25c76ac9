"""Evidence is kept beside the frames: stacks at once, the file later, and what is under way when the session ends."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zipfile
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from app.cli.terminal import DESK
from app.diagnosis.causes import Cause, Severity
from app.errors import SessionError
from app.recording import incident_recorder
from app.recording.bundle import Evidence, encode_bundle
from app.recording.evidence import write_evidence
from app.recording.incident_recorder import SETTLE_S, IncidentRecorder
from app.recording.records import StacksRecord
from app.session import session as app_session
from app.session.remote_session import RemoteSession
from tests.support.doors import Door
from tests.support.plain_hosts import these
from tests.support.recordings import opening, verdict
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from pathlib import Path

    from app.recording.evidence import Answers


WAIT_S = 30.0
LIVE = [("demo", 0)]


class Session:
    """A session that notes what it is asked, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stacks_come, self.agents_answer = asyncio.Event(), asyncio.Event()
        self.stacks_come.set()
        self.agents_answer.set()
        self.failure: Exception | None = None

    async def take_stacks(self, job_id: str, into: Answers) -> None:
        self.asked.append(f"stacks of {job_id}")
        await self.stacks_come.wait()
        into.stacks.append(StacksRecord(1.0, "demo-0", None, "none"))

    async def ask_agents(self, job_id: str, into: Answers) -> None:
        self.asked.append(f"past of {job_id}")
        into.jobs["demo-0"] = {}
        await self.agents_answer.wait()
        into.jobs["demo-1"] = {}

    async def evidence(self, job_id: str, why: str, answers: Answers) -> Evidence:
        self.asked.append(f"evidence of {job_id}")
        if self.failure is not None:
            raise self.failure
        return Evidence(opening("demo-0", why=why), [*answers.stacks], {}, [], answers.jobs)


@pytest.fixture
def session() -> Session:
    return Session()


def struck(session: Session, directory: Path) -> IncidentRecorder:
    """Return a keeper that has just become certain of an incident."""
    reconnector = IncidentRecorder(session, directory)
    reconnector.observe([verdict()], LIVE, 10.0)
    reconnector.observe([verdict()], LIVE, 10.0 + SETTLE_S)
    return reconnector


def kept_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*"))


async def test_stacks_are_taken_at_once_and_the_file_is_written_later(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.2)
    began_s = time.monotonic()
    reconnector = struck(session, tmp_path)

    await until_async(lambda: bool(session.asked), WAIT_S, "stacks are asked for")
    notices = await until_async(reconnector.drain_notices, WAIT_S, "it is kept")

    assert time.monotonic() - began_s >= 0.2
    (path,) = kept_in(tmp_path)
    assert notices == [f"evidence of job demo (rank 2) is kept; look at it again: rankdeck replay {path}"]
    assert session.asked == ["stacks of demo", "past of demo", "evidence of demo"]
    await reconnector.close()
    assert len(kept_in(tmp_path)) == 1


async def test_one_hang_has_one_file_however_many_consoles_come(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.0)
    first = struck(session, tmp_path)
    await until_async(first.drain_notices, WAIT_S, "it is kept")
    (path,) = kept_in(tmp_path)
    session.asked.clear()

    second = IncidentRecorder(session, tmp_path)
    for now_s in (50.0, 50.0 + SETTLE_S):
        second.observe([verdict(for_s=60.0)], LIVE, now_s)
    notices = await until_async(second.drain_notices, WAIT_S, "it is found")

    assert notices == [f"evidence of job demo (rank 2) was kept before; look again: rankdeck replay {path}"]
    assert (kept_in(tmp_path), session.asked) == ([path], [])

    later = IncidentRecorder(session, tmp_path)
    os.utime(path, (time.time() - 90.0,) * 2)  # noqa: TID251 - as the file system dates it
    for now_s in (50.0, 50.0 + SETTLE_S):
        later.observe([verdict(for_s=60.0)], LIVE, now_s)
    await until_async(later.drain_notices, WAIT_S, "another hang is kept")
    assert len(kept_in(tmp_path)) == 2


HELD_OUT_S = 0.5
"""Seconds that a writer waits for one that a lock holds."""


async def test_two_consoles_that_are_about_to_write_at_the_same_time_keep_one_file(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked for the other's file before, and found none; the first writes once the other is about to."""
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.0)
    both_found_none, both_are_there = threading.Barrier(2), threading.Barrier(2)

    def encoded_together(evidence: Evidence) -> bytes:
        both_found_none.wait(WAIT_S)
        return encode_bundle(evidence)

    def write_slowly(path: Path, content: bytes) -> Path:
        with suppress(threading.BrokenBarrierError):
            both_are_there.wait(HELD_OUT_S)  # the other comes only where no lock holds it
        return write_evidence(path, content)

    monkeypatch.setattr(incident_recorder, "encode_bundle", encoded_together)
    monkeypatch.setattr(incident_recorder, "write_evidence", write_slowly)
    consoles = [IncidentRecorder(one, tmp_path) for one in (session, Session())]
    for one in consoles:
        one.observe([verdict(for_s=60.0)], LIVE, 50.0)
        one.observe([verdict(for_s=60.0)], LIVE, 50.0 + SETTLE_S)
    notices = [await until_async(one.drain_notices, WAIT_S, "it is kept") for one in consoles]

    (path,) = kept_in(tmp_path)
    assert notices == [[f"evidence of job demo (rank 2) is kept; look at it again: rankdeck replay {path}"]] * 2


async def test_a_file_from_before_the_clock_was_set_back_is_not_of_a_later_hang(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.0)
    first = struck(session, tmp_path)
    await until_async(first.drain_notices, WAIT_S, "it is kept")
    os.utime(kept_in(tmp_path)[0], (time.time() + 3600.0,) * 2)  # noqa: TID251 - as the file system dates it

    await until_async(struck(session, tmp_path).drain_notices, WAIT_S, "the later one is kept")

    assert len(kept_in(tmp_path)) == 2


async def test_that_none_is_kept_because_there_were_too_many_is_said_once(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "MAX_INCIDENTS", 1)
    reconnector = struck(session, tmp_path)
    for now_s in (30.0, 30.0 + SETTLE_S, 35.0):
        reconnector.observe([verdict(attempt=1)], [("demo", 1)], now_s)

    assert reconnector.drain_notices() == ["no evidence of more incidents is kept: 1 within an hour are the limit"]
    await reconnector.close()
    assert len(kept_in(tmp_path)) == 1


async def test_a_file_about_two_incidents_is_named_once_at_the_end(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.0)
    keeper = struck(session, tmp_path)
    (kept,) = await until_async(keeper.drain_notices, WAIT_S, "it is kept")
    for now_s in (20.0, 20.0 + SETTLE_S):
        keeper.observe([verdict(cause=Cause.EXITED, for_s=60.0)], LIVE, now_s)
    (again,) = await until_async(keeper.drain_notices, WAIT_S, "the second incident is in that file")

    assert again == kept.replace("is kept; look at it", "was kept before; look"), "the events name it for each incident"
    assert keeper.sentences == [kept]


async def test_two_consoles_that_see_a_hang_begin_write_one_file(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.1)
    session.agents_answer.clear()
    slow = IncidentRecorder(session, tmp_path)
    for now_s in (10.0, 10.0 + SETTLE_S):
        slow.observe([verdict(for_s=60.0)], LIVE, now_s)
    await until_async(lambda: "past of demo" in session.asked, WAIT_S, "agents are asked")
    path = tmp_path / "demo-20261121-031245.zip"
    path.write_bytes(b"")
    session.agents_answer.set()

    notices = await until_async(slow.drain_notices, WAIT_S, "it is found")

    assert (len(notices), kept_in(tmp_path)) == (1, [path])


async def test_a_session_that_ends_writes_what_there_is(session: Session, tmp_path: Path) -> None:
    reconnector = struck(session, tmp_path)

    await asyncio.wait_for(reconnector.close(), WAIT_S)

    assert len(kept_in(tmp_path)) == 1
    assert len(reconnector.drain_notices()) == 1


async def test_a_verdict_that_stood_too_short_when_the_session_ends_is_kept_too(
    session: Session, tmp_path: Path
) -> None:
    reconnector = IncidentRecorder(session, tmp_path)
    reconnector.observe([verdict()], LIVE, 10.0)

    await reconnector.close()

    assert len(kept_in(tmp_path)) == 1


async def test_without_an_incident_nothing_is_asked_and_nothing_written(session: Session, tmp_path: Path) -> None:
    reconnector = IncidentRecorder(session, tmp_path / "never")
    reconnector.observe([verdict(Cause.STRAGGLER, Severity.WARNING)], LIVE, 10.0)
    reconnector.observe([], LIVE, 20.0)

    await reconnector.close()

    assert (session.asked, kept_in(tmp_path)) == ([], [])


async def test_stacks_that_do_not_come_do_not_keep_a_person_from_leaving(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "HURRY_S", 0.1)
    session.stacks_come.clear()
    reconnector = struck(session, tmp_path)
    await until_async(lambda: bool(session.asked), WAIT_S, "stacks are asked for")

    await asyncio.wait_for(reconnector.close(), WAIT_S)

    assert len(kept_in(tmp_path)) == 1


async def test_who_quits_while_agents_are_asked_keeps_what_has_come(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "AFTER_S", 0.0)
    monkeypatch.setattr(incident_recorder, "HURRY_S", 0.1)
    session.agents_answer.clear()
    reconnector = struck(session, tmp_path)
    await until_async(lambda: "past of demo" in session.asked, WAIT_S, "agents are asked")

    await asyncio.wait_for(reconnector.close(), WAIT_S)

    (path,) = kept_in(tmp_path)
    with zipfile.ZipFile(path) as bundle:
        names = {name.partition("/")[2] for name in bundle.namelist()}
    assert {"jobs/demo-0.json", "stacks.txt"} <= names
    assert "jobs/demo-1.json" not in names


async def test_what_takes_too_long_at_the_end_is_said(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incident_recorder, "CLOSING_S", 0.1)
    session.agents_answer.clear()
    reconnector = struck(session, tmp_path)

    await asyncio.wait_for(reconnector.close(), WAIT_S)

    assert reconnector.drain_notices() == ["no evidence of job demo (rank 2) is kept: it took too long to collect"]


async def test_of_a_job_that_ended_before_anybody_looked_nothing_is_kept(session: Session, tmp_path: Path) -> None:
    reconnector = IncidentRecorder(session, tmp_path)
    for second in range(5):
        reconnector.observe([verdict(Cause.EXITED)], [("demo", 1), ("another", 0)], 10.0 + second)

    await reconnector.close()

    assert (session.asked, kept_in(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("failure", "words"),
    [(SessionError("no room"), "no room"), (RuntimeError("a mistake of ours"), "RuntimeError: a mistake of ours")],
)
async def test_why_none_is_kept_is_said(session: Session, tmp_path: Path, failure: Exception, words: str) -> None:
    session.failure = failure
    reconnector = struck(session, tmp_path)

    await reconnector.close()

    assert reconnector.drain_notices() == [f"no evidence of job demo (rank 2) is kept: {words}"]


async def test_who_leaves_an_ended_job_is_told_of_the_evidence_that_is_waited_for(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteSession(these(Door("h1", DESK, ("", "", False))))
    job = SimpleNamespace(job_id="demo", state="running", allow_faults=False, loss=None)
    monkeypatch.setattr(app_session.Session, "view", lambda _: SimpleNamespace(job=lambda: job))
    remote.view()
    assert remote.leaving == "the job goes on"
    job.state = "failed"
    remote.view()
    assert remote.leaving == "the job has ended"
    remote._incident_recorder = struck(session, tmp_path)
    assert remote.leaving == "the job has ended, its evidence is being written"
    await remote.close()
    assert remote.leaving == "the job has ended"
    assert len(kept_in(tmp_path)) == 1
