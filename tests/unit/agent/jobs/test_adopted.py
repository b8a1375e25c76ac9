"""Jobs of launchers under `rankdeck exec` none of whose ranks reports: taken in by their processes."""

from __future__ import annotations

import asyncio
import subprocess
from typing import TYPE_CHECKING

import pytest

from agent.jobs.adopted import AdoptedJobs
from agent.node_state.node_state import NodeState
from agent.processes.mute_ranks import MuteRank
from agent.processes.shim import stat_fields
from ddpcore.wire_launch import ADOPTED_DIR
from tests.support.node_reports import rank_report

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


async def test_a_rank_that_was_seen_without_a_probe_and_reports_under_another_name_is_of_that_job_alone(
    rank: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(launcher_pid: int, reporting: Container[int]) -> list[MuteRank]:
        assert launcher_pid == rank.pid
        return [] if rank.pid in reporting else [MuteRank("seen", 0, 2, 1, 1, rank.pid, "python -I")]

    monkeypatch.setattr("agent.jobs.adopted.FIRST_LOOK_S", 0.0)
    monkeypatch.setattr("agent.jobs.adopted.unreported_ranks", found)
    marks = tmp_path / ADOPTED_DIR
    marks.mkdir()
    mark = marks / f"{rank.pid}-{stat_fields(rank.pid)[19].decode()}.exec"
    for path in (mark, marks / f"{rank.pid}-1.exec", marks / "no-mark.exec"):
        path.touch()
    jobs = AdoptedJobs(NodeState("node", "epoch", "host", 1, 1), tmp_path, (), lambda *_: None, lambda: None)

    jobs.tick()
    (status,) = jobs.statuses(0.0)
    assert (status.job_id, status.ranks, status.world_size, status.unprobed) == ("seen", [1], 2, "python -I")
    assert list(marks.iterdir()) == [mark]

    report = rank_report(1, 2, job_id="reported", pid=rank.pid, is_adopted=True)
    assert jobs.take(report, rank.pid) is not None
    jobs.tick()
    (status,) = jobs.statuses(0.0)
    assert (status.job_id, status.unprobed) == ("reported", "")

    rank.kill()
    rank.wait()
    async with asyncio.timeout(10.0):
        while jobs.are_moving:
            await asyncio.sleep(0.01)
            jobs.tick()
    assert list(marks.iterdir()) == []
    jobs.close()
