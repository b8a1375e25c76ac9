"""Evidence is kept beside the frames: stacks at once, the file later, and what is under way when the session ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from app.errors import SessionError
from app.evidence import keeper as keeping
from app.evidence.bundle import Evidence
from app.evidence.incidents import SETTLE_S
from app.evidence.keeper import EvidenceKeeper
from app.rows import Cause, Severity
from tests.support.recordings import opening, verdict
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from pathlib import Path


class Session:
    """A session that notes what it is asked, and answers as it is told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.stacks_come = asyncio.Event()
        self.stacks_come.set()
        self.failure: Exception | None = None
        self.patience_s: list[float] = []

    async def keep_stacks(self, job_id: str) -> None:
        self.asked.append(f"stacks of {job_id}")
        await self.stacks_come.wait()

    async def evidence(self, job_id: str, why: str, patience_s: float) -> Evidence:
        self.asked.append(f"evidence of {job_id}")
        self.patience_s.append(patience_s)
        if self.failure is not None:
            raise self.failure
        return Evidence(opening("demo-0", why=why), [], {}, [], {})


@pytest.fixture
def session() -> Session:
    return Session()


def struck(session: Session, directory: Path) -> EvidenceKeeper:
    """Return a keeper that has just become certain of an incident."""
    keeper = EvidenceKeeper(session, directory)
    keeper.observe([verdict()], 10.0)
    keeper.observe([verdict()], 10.0 + SETTLE_S)
    return keeper


def kept_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*"))


async def test_stacks_are_taken_at_once_and_the_file_is_written_later(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "AFTER_S", 0.2)
    began_s = time.monotonic()
    keeper = struck(session, tmp_path)

    await until_async(lambda: session.asked == ["stacks of demo"], 5, "stacks are asked for")
    notices = await until_async(keeper.drain_notices, 5, "it is kept")

    assert time.monotonic() - began_s >= 0.2
    (path,) = kept_in(tmp_path)
    assert notices == [f"evidence of this is kept; look at it again: rankdeck replay {path}"]
    assert session.patience_s == [keeping.PATIENCE_S]
    await keeper.close()
    assert len(kept_in(tmp_path)) == 1


async def test_a_session_that_ends_writes_what_there_is(session: Session, tmp_path: Path) -> None:
    keeper = struck(session, tmp_path)

    await asyncio.wait_for(keeper.close(), 5)

    assert len(kept_in(tmp_path)) == 1
    assert session.patience_s == [keeping.HURRY_S]
    assert len(keeper.drain_notices()) == 1


async def test_a_verdict_that_stood_too_short_when_the_session_ends_is_kept_too(
    session: Session, tmp_path: Path
) -> None:
    keeper = EvidenceKeeper(session, tmp_path)
    keeper.observe([verdict()], 10.0)

    await keeper.close()

    assert len(kept_in(tmp_path)) == 1


async def test_without_an_incident_nothing_is_asked_and_nothing_written(session: Session, tmp_path: Path) -> None:
    keeper = EvidenceKeeper(session, tmp_path / "never")
    keeper.observe([verdict(Cause.STRAGGLER, Severity.WARNING)], 10.0)
    keeper.observe([], 20.0)

    await keeper.close()

    assert (session.asked, kept_in(tmp_path)) == ([], [])


async def test_stacks_that_do_not_come_do_not_keep_a_person_from_leaving(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "HURRY_S", 0.1)
    session.stacks_come.clear()
    keeper = struck(session, tmp_path)
    await until_async(lambda: bool(session.asked), 5, "stacks are asked for")

    await asyncio.wait_for(keeper.close(), 5)

    assert len(kept_in(tmp_path)) == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [(SessionError("no room"), "no room"), (RuntimeError("a mistake of ours"), "RuntimeError: a mistake of ours")],
)
async def test_why_none_is_kept_is_said(session: Session, tmp_path: Path, failure: Exception, words: str) -> None:
    session.failure = failure
    keeper = struck(session, tmp_path)

    await keeper.close()

    assert keeper.drain_notices() == [f"no evidence of this is kept: {words}"]
