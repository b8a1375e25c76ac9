"""The look at workers from outside: what it costs them, and how long its figures count."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agent.processes import worker_sampler
from agent.processes.worker_sampler import WorkerSampler
from ddpcore.wire import ENV_JOB_ID
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20.0


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
