"""A real DDP program of which one rank leaks, towards a limit of its own: warned of while it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.wire.jobs import ENDED_STATES
from agent.wire.machine import GrowthReport, LimitKind
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.reports import NodeReport

pytestmark = pytest.mark.ranks

START_S = 100.0
LIFE_S = 70.0
FREE_BYTES = 300 * 2**20
LEAK = """
import resource, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
free_bytes, life_s = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = []
step, begun_s = 0, None
while True:
    step += 1
    optimizer.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.1)
    if dist.get_rank() == 1 and step == 5:
        sizes = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("VmSize"))
        limit_bytes = int(sizes["VmSize"].split()[0]) * 1024 + free_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        begun_s = time.monotonic()
    while begun_s is not None and len(kept) << 20 < free_bytes * (time.monotonic() - begun_s) / life_s:
        kept.append(bytearray(b"x" * (1 << 20)))
"""


def growths(report: NodeReport) -> dict[int, GrowthReport]:
    return {
        worker.rank: growth
        for worker in report.workers
        if worker.memory is not None
        for growth in worker.memory.growths
        if growth.is_near
    }


@pytest.mark.slow
def test_a_rank_that_leaks_is_warned_of_before_it_dies_of_it_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "leak.py").write_text(LEAK)
    spec = make_local_spec(tmp_path, command=["leak.py", str(FREE_BYTES), str(LIFE_S)])
    with RunningAgent("--private") as agent:
        agent.start_job(spec)
        report = agent.wait_until(lambda told: bool(growths(told)), START_S + LIFE_S, "a warning")
        assert [worker.exit for worker in report.workers] == [None, None]
        (told,) = growths(report).items()
        rank, growth = told
        assert rank == 1
        assert growth.limit.kind is LimitKind.ADDRESS_SPACE
        assert growth.rate_bytes_hz == pytest.approx(FREE_BYTES / LIFE_S, rel=0.35)
        assert 5.0 < growth.remaining_s < LIFE_S
        report = agent.wait_until(lambda told: told.jobs[0].state in ENDED_STATES, START_S, "the end")
        assert {rank for rank, growth in growths(report).items()} == {1}
        end = next(worker.exit for worker in report.workers if worker.rank == 1)
        assert end is not None
        assert "MemoryError" in end.error_text
