"""What an agent costs beside a running job, how fast it tells, and what torchrun's own agent costs in the same run.

    python -m tests.bench.bench_agent [--ranks 8] [--seconds 600] [--freezes 100]

A job of gloo ranks that mostly sleep runs under a real agent, with a subscriber. Memory is PSS, CPU a share of one core
over the whole time; a line a minute shows whether memory or descriptors grow, so that an hour of it is a soak. How fast
it tells: a rank is frozen and thawed again and again, each time until a published report says so.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from agent.processes.shim_process import SHIM_PATH
from agent.wire.commands import Commit, Prepare
from agent.wire.reports import ProcessState
from ddpcore.wire import FaultKind
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.subscriber import Subscriber

PROGRAM = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.5)
"""
START_S = 180.0
LINE_S = 60.0


class Cost(NamedTuple):
    """What a process has cost so far."""

    cpu_s: float
    pss_bytes: int
    num_fds: int


def cost(pid: int) -> Cost:
    """Look at a process."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    return Cost(times.user + times.system, process.memory_full_info().pss, process.num_fds())


def until_state(reports: Subscriber, rank: int, state: ProcessState) -> float:
    """Return how long it takes until a report has a rank in this state."""
    began_s = time.perf_counter()
    while next(worker.process for worker in reports.report().workers if worker.rank == rank) is not state:
        pass
    return time.perf_counter() - began_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--freezes", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as workdir:
        Path(workdir, "program.py").write_text(PROGRAM)
        began_s = time.perf_counter()
        with RunningAgent() as agent:
            print(f"ready {1000 * (time.perf_counter() - began_s):.0f} ms after the start of its process")
            measure(agent, workdir, args)


def measure(agent: RunningAgent, workdir: str, args: argparse.Namespace) -> None:
    """Run the job and watch."""
    spec = make_local_spec(Path(workdir), args.ranks, command=["program.py"])
    agent.ask(Prepare(spec))
    agent.ask(Commit(spec.job_id))
    reports = Subscriber(agent.directory)
    agent.wait_until(lambda report: sum(1 for one in report.workers if one.report) == args.ranks, START_S, "ranks")
    run = msgspec.json.decode((agent.directory / "jobs" / spec.job_id / "0" / "run.json").read_bytes())
    pids = {"agent": agent.process.pid, SHIM_PATH.name: run["shim_pid"], "torchrun": run["launcher_pid"]}
    for child in psutil.Process(agent.process.pid).children():
        if child.pid != run["shim_pid"]:
            pids[f"child of the agent {child.pid}"] = child.pid
    before = {name: cost(pid) for name, pid in pids.items()}
    began_s = next_line_s = time.perf_counter()
    while (now_s := time.perf_counter()) < began_s + args.seconds:
        reports.report()
        if now_s >= next_line_s:
            next_line_s += LINE_S
            words = [f"{name} {cost(pid).pss_bytes >> 10} KiB {cost(pid).num_fds} fds" for name, pid in pids.items()]
            print(f"{now_s - began_s:6.0f} s  {', '.join(words)}", flush=True)
    elapsed_s = time.perf_counter() - began_s
    for name, pid in pids.items():
        after = cost(pid)
        share = (after.cpu_s - before[name].cpu_s) / elapsed_s
        print(f"{name}: {after.pss_bytes / 2**20:.1f} MiB PSS, {100 * share:.2f} % of a core, {after.num_fds} fds")
    times = []
    for number in range(args.freezes):
        rank = number % args.ranks
        for kind, state in ((FaultKind.FREEZE, ProcessState.FROZEN), (FaultKind.THAW, ProcessState.RUNNING)):
            pid = psutil.Process(next(one.pid for one in reports.report().workers if one.rank == rank))
            # By signal, not by command: the agent has to find out by itself.
            pid.suspend() if kind is FaultKind.FREEZE else pid.resume()
            times.append(until_state(reports, rank, state))
    times.sort()
    print(
        f"from a rank's freeze or thaw to a published report: p50 {1000 * statistics.median(times):.0f} ms, "
        f"p99 {1000 * times[int(len(times) * 0.99)]:.0f} ms, n {len(times)}"
    )
    reports.close()


if __name__ == "__main__":
    main()
