"""What the stacks of a job's ranks cost: time from the request to the reply, and CPU time of a rank's probe.

    python -m tests.bench.bench_stacks [--ranks 4] [--requests 50]

The ranks all-reduce and compute without a pause, so that every core is busy; then one is frozen.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agent.wire.commands import InjectFault, encode_reply
from agent.wire.stacks import GetStacks, Stacks
from ddpcore.wire import FaultKind
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from agent.wire.reports import NodeReport

START_S = 120.0
QUIET_S = 10.0
PROGRAM = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ddpcore

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))))
for step in range(1_000_000):
    model(torch.ones(32, 256)).sum().backward()
    ddpcore.report_step(step)
"""


def are_stepping(report: NodeReport, num_ranks: int) -> bool:
    """Say whether every rank trains."""
    steps = [worker.report.step for worker in report.workers if worker.report]
    return len(steps) == num_ranks and all(step is not None and step > 20 for step in steps)


def probe_cpu_s(agent: RunningAgent) -> float:
    """Return the CPU time of all probes."""
    return sum(worker.report.probe_cpu_s for worker in agent.report().workers if worker.report)


def ask(agent: RunningAgent, num_requests: int, *, is_native: bool = False) -> tuple[list[float], Stacks]:
    """Return how long each request took, and the last reply."""
    took_s: list[float] = []
    while True:
        began_s = time.perf_counter()
        reply = agent.ask(GetStacks("train", is_native))
        took_s.append(time.perf_counter() - began_s)
        assert isinstance(reply, Stacks), reply
        if len(took_s) == num_requests:
            return took_s, reply


def tell(what: str, took_s: list[float], stacks: Stacks) -> None:
    """Print how long requests took, and what came."""
    ordered = sorted(took_s)
    sources = ", ".join(f"{one.rank} {one.source}" for one in stacks.ranks)
    print(
        f"{what:22} {1000 * statistics.median(ordered):7.1f} ms median, {1000 * ordered[-1]:7.1f} ms at most of "
        f"{len(ordered)}; {len(encode_reply(stacks)) / 1000:.0f} KB; {sources}"
    )


def measure(agent: RunningAgent, num_ranks: int, num_requests: int) -> None:
    """Print the figures of a job that trains, and of one with a frozen rank."""
    before_s, began_s = probe_cpu_s(agent), time.perf_counter()
    time.sleep(QUIET_S)
    usual_frac = (probe_cpu_s(agent) - before_s) / (time.perf_counter() - began_s)
    before_s, began_s = probe_cpu_s(agent), time.perf_counter()
    took_s, stacks = ask(agent, num_requests)
    time.sleep(0.5)  # until the last reports are in
    more_s = probe_cpu_s(agent) - before_s - usual_frac * (time.perf_counter() - began_s)
    tell("all train", took_s, stacks)
    print(f"{'':22} {1e6 * more_s / num_requests / num_ranks:7.0f} us CPU of a rank's probe for one request")
    tell("with native frames", *ask(agent, max(1, num_requests // 10), is_native=True))
    agent.ask(InjectFault("train", FaultKind.FREEZE, num_ranks - 1))
    tell("the last one frozen", *ask(agent, num_requests))


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RunningAgent("--private") as agent:
        Path(name, "train.py").write_text(PROGRAM)
        agent.start_job(make_local_spec(Path(name), options.ranks, command=["train.py"]))
        agent.wait_until(lambda report: are_stepping(report, options.ranks), START_S, "all ranks train")
        measure(agent, options.ranks, options.requests)


if __name__ == "__main__":
    main()
