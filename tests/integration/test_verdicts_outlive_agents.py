"""The verdict on a job that has ended is the same after its node's agent has been replaced."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent.state_dir import RANKS_NAME
from app.fleet.local_link import LocalLink
from app.recording.events import Event, EventKind
from app.session.remote_job import RunRequest
from app.session.remote_session import RemoteSession
from tests.support.commands import run_rankdeck
from tests.support.plain_hosts import these
from tests.support.waiting import until, until_async

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ranks

START_S = 90.0
COME_S = 30.0
HERE = ("--host", "localhost")
ONE_MORE = """
from datetime import timedelta
import torch, torch.distributed as dist
import ddpcore
dist.init_process_group("gloo")
rank, grad = dist.get_rank(), torch.ones(8)
for step in range(1, 1000):
    ddpcore.report_step(step)
    dist.all_reduce(grad)
    if step == 30:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4))
    if step == 40 and rank == 0:
        dist.all_reduce(grad)
    dist.broadcast(grad, 1)
"""
HANGS = """
import time
from datetime import timedelta
import torch, torch.distributed as dist
import ddpcore
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
grad = torch.ones(8)
for step in range(1, 100_000):
    ddpcore.report_step(step)
    time.sleep(0.02)
    dist.all_reduce(grad)
"""
CALLS = (
    "rank 0 called all_reduce #80 at train.py:13 in <module>, rank 1 called broadcast #80 at train.py:14 in <module>"
)


@pytest.fixture
def agent_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of an agent of its own, whose job runs where the program is."""
    (tmp_path / "train.py").write_text(ONE_MORE)
    with tempfile.TemporaryDirectory(prefix="rdv-", dir="/tmp") as home:
        for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
            monkeypatch.setenv(name, home)
        try:
            yield Path(home, "rankdeck", socket.gethostname())
        finally:
            rankdeck(tmp_path, "down", "localhost", "--kill-jobs")


def rankdeck(directory: Path, *arguments: str) -> tuple[int, str, str]:
    return run_rankdeck(*arguments, cwd=directory, environ=os.environ)


def without_times(text: str) -> str:
    """Return a text without times of day and durations: two looks differ by rounding."""
    return re.sub(r"\d\d:\d\d:\d\d|[\d.]+ (?:ms|s)\b", "TIME", text)


def of_job(session: RemoteSession) -> list[Event]:
    """Return the events of the job and its verdicts."""
    kinds = {EventKind.JOB, EventKind.VERDICT, EventKind.OVER, EventKind.CAUSE}
    return [event for event in session.events.latest_first() if event.kind in kinds]


def test_a_console_that_comes_later_gets_the_verdict_of_the_agent_that_saw_the_end(
    agent_dir: Path, tmp_path: Path
) -> None:
    def looked_at() -> tuple[dict[str, Any], list[str]]:
        """Return the status and the grave events, as after the ten minutes for which agents keep their reports."""
        for path in (agent_dir / "history").glob("*.reports"):
            path.unlink()
        _, printed, _ = rankdeck(tmp_path, "status", "mix", *HERE, "--json")
        _, events, _ = rankdeck(tmp_path, "events", "mix", *HERE)
        return json.loads(printed), [without_times(line) for line in events.splitlines() if "CRITICAL" in line]

    code, _, _ = rankdeck(
        tmp_path, "run", *HERE, "--nproc-per-node", "2", "--name", "mix", "--headless", "--", "train.py"
    )
    assert code == 10
    before, events = looked_at()
    sentence, ranks = before["verdicts"][0]["text"], [place_of(rank) for rank in before["ranks"]]
    assert sentence.startswith(CALLS)
    assert [rank["step"] for rank in before["ranks"]] == [40, 40]

    os.kill(agent_pid(agent_dir), signal.SIGKILL)
    rankdeck(tmp_path, "up", "localhost")
    after, after_events = looked_at()
    assert without_times(after["verdicts"][0]["text"]) == without_times(sentence)
    assert [place_of(rank) for rank in after["ranks"]] == ranks
    assert after_events == events

    rankdeck(tmp_path, "down", "localhost")
    (agent_dir / "jobs/mix/0" / RANKS_NAME).write_bytes(b"\xc1")
    rankdeck(tmp_path, "up", "localhost")
    after, _ = looked_at()
    assert (after["jobs"][0]["state"], [rank["state"] for rank in after["ranks"]]) == ("failed", ["exited", "exited"])
    assert [rank["step"] for rank in after["ranks"]] == [None, None]
    assert "cannot be read, what the ranks of job mix did last is lost" in (agent_dir / "agent.log").read_text()


def test_a_frozen_rank_that_its_launcher_ends_once_the_others_have_timed_out_stays_the_cause(
    agent_dir: Path, tmp_path: Path
) -> None:
    def status() -> dict[str, Any]:
        _, printed, said = rankdeck(tmp_path, "status", "hang", *HERE, "--json")
        assert printed, said
        found: dict[str, Any] = json.loads(printed)
        return found

    (tmp_path / "train.py").write_text(HANGS)
    here = (*HERE, "--nproc-per-node", "2", "--name", "hang", "--detach")
    assert rankdeck(tmp_path, "run", *here, "--", "train.py")[0] == 0
    pid = until(lambda: (status()["ranks"][1]["step"] or 0) > 5 and status()["ranks"][1]["pid"], START_S, "it trains")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: status()["ranks"][1]["detail"].startswith("killed by SIGKILL"), START_S, "its launcher ends it")
    until(lambda: status()["jobs"][0]["state"] == "failed", COME_S, "the job has failed")
    before = status()
    assert [verdict["cause"] for verdict in before["verdicts"]] == ["frozen"]
    assert before["verdicts"][0]["culprits"] == [1]
    assert re.search(r"the job ended when rank 0 timed out after 6.0 s$", before["verdicts"][0]["text"])
    events = rankdeck(tmp_path, "events", "hang", *HERE)[1]
    assert "was frozen" in events
    assert not re.search("SIGKILL|held the others up", events), events

    for path in (agent_dir / "history").glob("*.reports"):
        path.unlink()
    os.kill(agent_pid(agent_dir), signal.SIGKILL)
    rankdeck(tmp_path, "up", "localhost")
    (after,) = status()["verdicts"]
    assert after["culprits"] == [1]
    assert re.match(r"rank 1 on localhost held the others up; rank 0 waited for it in all_reduce #\d+ ", after["text"])


@pytest.mark.slow
async def test_a_console_that_stays_sees_the_verdict_unchanged_and_no_new_event(
    agent_dir: Path, tmp_path: Path
) -> None:
    with LocalLink() as link:
        link.bring_up()
        session = RemoteSession(these(link), RunRequest(("train.py",), "mix", 2, workdir=str(tmp_path)))
        session.patience_s = math.inf
        await session.start()
        try:

            def verdicts() -> list[str]:
                session.drain_notices()
                return [verdict.text for verdict in session.view().verdicts()]

            def has_ended() -> bool:
                job = session.view().job()
                return job is not None and job.state == "failed" and "the job ended when" in "".join(verdicts())

            await until_async(has_ended, START_S, "the job has ended")
            await until_async((agent_dir / "jobs/mix/0" / RANKS_NAME).exists, COME_S, "its ranks are kept")
            (before,) = verdicts()
            assert before.startswith(CALLS)
            events = of_job(session)
            pid = (await session.fleet.report("localhost")).agent_pid

            os.kill(pid, signal.SIGKILL)
            await until_async(lambda: session.away == {"localhost"}, COME_S, "the agent is missed")
            await asyncio.to_thread(rankdeck, tmp_path, "up", "localhost")
            await until_async(lambda: not session.away, COME_S, "the next agent is found")

            def agent_pid() -> int:
                session.view()
                node = session._cluster.nodes["localhost"]
                return 0 if node.report is None else node.report.agent_pid

            await until_async(lambda: agent_pid() not in {0, pid}, COME_S, "it reports")

            assert [without_times(text) for text in verdicts()] == [without_times(before)]
            assert of_job(session) == events
        finally:
            await session.close()


def place_of(rank: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(rank[name] for name in ("rank", "state", "step", "where", "op", "seq", "phase"))


def agent_pid(agent_dir: Path) -> int:
    return int((agent_dir / "agent.lock").read_text())
