"""Jobs of launchers under `rankdeck exec`: taken in by their ranks' processes, and ended without one another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from agent.jobs.adopted import AdoptedJobs
from agent.jobs.lifecycle import KillReceived
from agent.node_state.node_state import NodeState
from agent.processes.mute_ranks import MuteRank
from agent.processes.shim import stat_fields
from agent.wire.commands import Accepted
from ddpcore.wire_launch import ADOPTED_DIR, ENV_EXEC_PID
from tests.support.node_reports import rank_report
from tests.support.ranks import is_alive
from tests.support.waiting import until

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


SWEEP = f"""
export {ENV_EXEC_PID}=$$
train='sleep 600 >&- & echo $0 $! $$; sleep 600 >&- & echo $0 $! $$; exec >&-; wait'
bash -c "$train" a & bash -c "$train" b & exec >&-; wait
"""


@pytest.fixture
def sweep() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["bash", "-c", SWEEP], stdout=subprocess.PIPE, start_new_session=True) as driver:
        yield driver
        os.killpg(driver.pid, signal.SIGKILL)


async def test_the_end_of_one_job_leaves_the_others_of_its_launcher_and_that(
    sweep: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    jobs = AdoptedJobs(NodeState("node", "epoch", "host", 1, 1), tmp_path, (), lambda *_: None, lambda: None)
    assert sweep.stdout is not None
    pids: dict[str, list[int]] = {"a": [], "b": []}
    launchers: dict[str, int] = {}
    for line in sweep.stdout.read().decode().splitlines():
        name, pid, launcher = line.split()
        launchers[name] = int(launcher)
        report = rank_report(len(pids[name]), 2, job_id=name, pid=int(pid), is_adopted=True)
        pids[name].append(int(pid))
        assert jobs.take(report, int(pid)) is not None
    run = jobs.get("a")
    assert run is not None
    assert jobs.command(run, KillReceived()) == Accepted()
    until(lambda: not any(map(is_alive, [*pids["a"], launchers["a"]])), 10, "it is killed")
    assert all(map(is_alive, [*pids["b"], launchers["b"], sweep.pid]))
    assert "goes on" in run.job.status(0.0).detail
    jobs.close()


async def test_the_jobs_of_a_launcher_that_lives_on_make_room_for_its_next_ones(
    sweep: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.jobs.adopted.MAX_JOBS", 3)
    jobs = AdoptedJobs(NodeState("node", "epoch", "host", 1, 1), tmp_path, (), lambda *_: None, lambda: None)
    assert sweep.stdout is not None
    pids = [int(line.split()[1]) for line in sweep.stdout.read().decode().splitlines()]

    def begin(number: int) -> bool:
        report = rank_report(0, 1, job_id=f"trial-{number}", pid=pids[number], is_adopted=True)
        return jobs.take(report, pids[number]) is not None

    assert [begin(number) for number in range(4)] == [True, True, True, False], "all run"
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10.0):
        while sum(run.job.is_idle for run in jobs) < 2:
            await asyncio.sleep(0.01)
            jobs.tick()
    assert begin(3)
    assert [run.job_id for run in jobs] == ["trial-1", "trial-2", "trial-3"]
    monkeypatch.setattr("agent.jobs.adopted_job.RESTART_S", 0.0)
    jobs.tick()
    assert [run.job.has_ended for run in jobs] == [True, False, False]
    jobs.close()
