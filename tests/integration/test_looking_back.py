"""A console that attaches to a job that runs: its charts and events reach back to before it came."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from app.fleet.local_link import LocalLink
from app.recording import backfill
from app.recording.events import EventKind
from app.session.options import SessionOptions
from app.session.remote_session import RemoteSession
from app.view.rows import FigureKey
from ddpcore.wire import Fault, FaultKind
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ranks

START_S = 60.0
PROGRAM = """
import time
for step in range(100_000):
    print(f"step {step} loss={1 / (1 + step)}", flush=True)
    time.sleep(0.1)
"""
WATCH = """
import asyncio, sys
from app.session.remote_job import RunRequest
from app.session.remote_session import RemoteSession
from app.fleet.local_link import LocalLink
from tests.support.plain_hosts import these

async def watch():
    figures = (r"step (?P<step>\\d+) loss=(?P<loss>\\S+)",)
    request = RunRequest(("train.py",), "first", 2, workdir=sys.argv[1], allow_faults=True, metrics=figures)
    link = LocalLink()
    link.find()
    session = RemoteSession(these(link), request)
    await session.start()
    while True:
        session.view()
        await asyncio.sleep(0.1)

asyncio.run(watch())
"""
"""A console that starts the job, and is killed: in a process of its own."""


@pytest.fixture
def state_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short-named home of states, so that no agent of the person is met."""
    with tempfile.TemporaryDirectory(prefix="rdb-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_STATE_HOME", directory)
        yield Path(directory)


def found() -> LocalLink:
    """Return a link to the agent that serves."""
    link = LocalLink()
    link.find()
    return link


def steps_of(session: RemoteSession) -> list[float]:
    """Return at which steps the loss of the job is known."""
    session.view()
    job = session.history.shown
    return [] if job is None else [step for step, _ in job.loss.points]


async def watched_and_frozen(session: RemoteSession) -> None:
    """Have rank 1 stand still for some seconds, as long as it takes to be told."""
    await session.start()

    def told() -> list[str]:
        session.drain_notices()
        return [str(verdict.cause) for verdict in session.view().verdicts()]

    await until_async(lambda: len(steps_of(session)) > 20, START_S, "the job gets on")
    await session.inject(Fault(FaultKind.FREEZE, 1))
    await until_async(lambda: told() == ["frozen"], START_S, "it is told that a rank is frozen")
    await asyncio.sleep(2.0)  # such a verdict stands for seconds, where there is something to see
    await session.inject(Fault(FaultKind.THAW, 1))
    await until_async(lambda: not told(), START_S, "it is over")
    await asyncio.sleep(2.0)


@pytest.mark.usefixtures("state_home")
async def test_after_the_console_was_killed_a_new_one_shows_what_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "SETTLE_S", 2.0)
    (tmp_path / "train.py").write_text(PROGRAM)
    with LocalLink() as link:
        link.bring_up()
        first = await asyncio.create_subprocess_exec(sys.executable, "-c", WATCH, str(tmp_path))
        try:
            second = RemoteSession(these(found()))
            await watched_and_frozen(second)
            await second.close()
            first.kill()
            await first.wait()

            await _attached_anew()
        finally:
            with contextlib.suppress(ProcessLookupError):
                first.kill()
            await first.wait()
            link.shut_down(kill_jobs=True)


async def _attached_anew() -> None:
    session = RemoteSession(these(found()), options=SessionOptions(is_read_only=True))
    session.backfills = True
    began_s = time.monotonic()
    try:
        await session.start()
        await until_async(lambda: session.view().job() is not None, 10, "the job is seen")
        assert len(session.events) <= 4, "at first it knows how things stand, and nothing of before"
        await until_async(lambda: len(steps_of(session)) > 0 and steps_of(session)[0] < 20, 30, "charts reach back")

        events = list(session.events.latest_first())[::-1]
        told = [(event.kind, event.ranks) for event in events if event.kind in {EventKind.VERDICT, EventKind.OVER}]
        assert told == [(EventKind.VERDICT, (1,)), (EventKind.OVER, (1,))]
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        assert sum(event.text.startswith("job first") and "running" in event.text for event in events) == 1
        assert session.view().verdicts() == []
        assert session.evidence_notices == []
        assert not any("frozen" in notice for notice in session.drain_notices())
        job = session.history.shown
        assert job is not None
        assert job.begun_s is not None
        assert job.begun_s < began_s - 4
        steps = steps_of(session)
        assert steps == sorted(set(steps))
        await until_async(lambda: steps_of(session)[-1] > steps[-1] + 5, 10, "and they go on")
        window = job.window(FigureKey.LOSS, job.begun_s)
        num_unknown = np.isnan(window.mean).sum()
        assert num_unknown <= 5, "and no hole is left where both meet"
    finally:
        await session.close()
