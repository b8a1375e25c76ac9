"""What an agent and its GPU sampler cost a node: memory (PSS) and CPU of each.

    python -m tests.bench.bench_agent_cost [--gpus 8] [--seconds 20] [--stub | --real]

NVML is replayed in Python unless a library without GPUs (`--stub`) or the driver's own (`--real`) is to be called; its
code is part of the sampler's cost then.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agent.wire.reports import encode_node_report
from tests.support.agents import RunningAgent
from tests.support.nvml.stub import Stub, h100
from tests.support.nvml_recordings import GIB, Replay, a100, recording

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLER = "agent.machine.gpu_sampler"
START_S = 120.0


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, shared pages split among their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process's threads; psutil counts in hundredths of a second.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat: time on the CPU in nanoseconds.
    """
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(seconds: float) -> None:
    """Print the figures of an agent that has nothing else to do."""
    with RunningAgent("--private") as agent:
        report = agent.wait_until(lambda report: bool(report.gpus.gpus), START_S, "the GPUs")
        parent = psutil.Process(agent.process.pid)
        processes = [parent, *(child for child in parent.children() if SAMPLER in child.cmdline())]
        before = [cpu_s(process) for process in processes]
        time.sleep(seconds)
        total = 0
        for process, began_s in zip(processes, before, strict=True):
            size = pss_bytes(process.pid)
            total += size
            name = "agent" if process is parent else "GPU sampler"
            share = (cpu_s(process) - began_s) / seconds
            print(f"{name:12} {size / 1e6:6.1f} MB PSS  {100 * share:6.3f} % of a core")
        print(f"{'together':12} {total / 1e6:6.1f} MB PSS")
        print(f"{len(report.gpus.gpus)} GPUs, a node report of {len(encode_node_report(agent.report()))} bytes")


@contextlib.contextmanager
def programs(number: int) -> Iterator[list[int]]:
    """Start programs that hold a GPU each, for NVML; give their pids."""
    running = [subprocess.Popen(["sleep", "inf"]) for _ in range(number)]
    try:
        yield [program.pid for program in running]
    finally:
        for program in running:
            program.kill()
            program.wait()


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    library = parser.add_mutually_exclusive_group()
    library.add_argument("--stub", action="store_true")
    library.add_argument("--real", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, programs(options.gpus) as pids:
        processes = [[{"pid": pid, "usedGpuMemory": GIB}] for pid in pids]
        if options.stub:
            gpus = [h100(index, processes[index]) for index in range(options.gpus)]
            os.environ.update(Stub(Path(directory) / "gpus", recording(*gpus)).environ())
        elif not options.real:
            busy = [a100(index, processes[index]) for index in range(options.gpus)]
            os.environ.update(Replay(Path(directory) / "nvml.json", recording(*busy)).environ())
        measure(options.seconds)


if __name__ == "__main__":
    main()
