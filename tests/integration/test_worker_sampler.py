"""The look at workers from outside: what it costs them, and how long its figures count."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from agent.processes import worker_sampler
from agent.processes.worker_sampler import WorkerSampler
from agent.wire.ends import EndFacts
from ddpcore.wire import ENV_JOB_ID
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.node_state.observations import WorkerEnded

PATIENCE_S = 20.0
MB = 10**6


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    worker = subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, "RANK": "0", ENV_JOB_ID: "job"})
    yield worker
    worker.kill()
    worker.communicate()


async def test_a_worker_that_is_rarely_weighed_keeps_its_figure_until_the_next_time(
    worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_sampler, "PSS_PERIOD_S", 0.0)
    monkeypatch.setattr(worker_sampler, "PSS_STALE_S", 0.0)
    monkeypatch.setattr(worker_sampler, "PSS_TIME_FRAC", 1e-9)  # any look is a slow one
    sampler = WorkerSampler(lambda _: None)
    sampler.watch("job", range(1), os.getpid)
    until(lambda: sampler.discover("job"), PATIENCE_S, "the worker")

    (first,) = until(lambda: [sample for sample in sampler.sample("job") if sample.pss_bytes], PATIENCE_S, "its PSS")

    assert first.rss_bytes > 0
    assert worker.stdin is not None
    assert [sampler.sample("job")[0].pss_bytes for _ in range(50)] == [first.pss_bytes] * 50
    sampler.close()


HUNGRY = """
import sys
sys.stdin.read(1)
hoard = []
while True:
    hoard.append(bytearray(1 << 20))
"""


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup without a limit, in one that kills what grows beyond 60 MB."""
    path = Path("/sys/fs/cgroup/memory", f"rankdeck-{uuid4().hex[:8]}")
    try:
        (path / "step_0").mkdir(parents=True)
        (path / "memory.limit_in_bytes").write_text(f"{60 * MB}")
    except OSError:
        pytest.skip("this machine lets nobody make memory cgroups (version 1)")
    yield path
    (path / "step_0").rmdir()
    path.rmdir()


def started(code: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-S", "-c", code]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, "RANK": "0", ENV_JOB_ID: "job"})


async def end_of(rank: subprocess.Popen[bytes], cgroup: Path, end: Callable[[], None]) -> WorkerEnded:
    """Return what the sampler reports of the end of a rank in a cgroup."""
    ended: asyncio.Future[WorkerEnded] = asyncio.get_running_loop().create_future()
    sampler = WorkerSampler(ended.set_result)
    try:
        (cgroup / "cgroup.procs").write_text(f"{rank.pid}")
        sampler.watch("job", range(1), os.getpid)
        until(lambda: sampler.discover("job"), PATIENCE_S, "the worker")
        until(lambda: sampler.sample("job")[0].memory, PATIENCE_S, "its memory")
        end()
        return await asyncio.wait_for(ended, PATIENCE_S)
    finally:
        sampler.close()
        rank.kill()
        rank.communicate()


async def test_a_rank_that_outgrows_a_cgroup_is_reported_with_the_limit(memory_cgroup: Path) -> None:
    rank = started(HUNGRY)

    def feed() -> None:
        assert rank.stdin is not None
        rank.stdin.write(b"x")
        rank.stdin.flush()

    ended = await end_of(rank, memory_cgroup / "step_0", feed)

    assert (ended.exit.signal, ended.exit.oom_kills, ended.cgroup_kills) == (9, 1, 1)
    assert ended.exit.facts.cgroup.endswith(f"/{memory_cgroup.name}")
    limit = ended.exit.facts.memory_limit
    assert limit is not None
    assert 59 * MB < limit.limit_bytes <= 60 * MB


async def test_a_rank_that_is_killed_while_another_program_runs_out_of_memory_did_not(memory_cgroup: Path) -> None:
    rank, other = started("import sys; sys.stdin.read()"), started(HUNGRY)
    beside = memory_cgroup / "step_0"
    (memory_cgroup / "cgroup.procs").write_text(f"{other.pid}")

    def end() -> None:
        other.communicate(b"x")
        assert other.returncode == -9
        rank.kill()

    ended = await end_of(rank, beside, end)

    assert ended.exit.signal == 9
    assert (ended.exit.oom_kills, ended.cgroup_kills, ended.exit.facts) == (0, 0, EndFacts())
