"""Three gloo ranks that meet at ddpcore's named barriers, and lose each other there."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ddpcore
from ddpcore.errors import BarrierTimeoutError

GATES = Path.cwd()


def linger(name: str) -> None:
    """Wait for the test."""
    while not (GATES / name).exists():
        time.sleep(0.02)


def main() -> None:
    ddpcore.barrier("before there is a process group")
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    if rank == 1:
        linger("arrive")  # MISSING AT LOAD
    ddpcore.barrier("load data")  # WAITS AT LOAD

    if rank == 0:
        try:
            ddpcore.barrier("only rank 0 comes", timeout_s=0.3)
        except BarrierTimeoutError as error:
            print(f"missing {error.missing}: {error}", flush=True)
    ddpcore.barrier("together again")

    durations_us = []
    for _ in range(200):
        began_s = time.perf_counter()
        ddpcore.barrier("measured")
        durations_us.append(1e6 * (time.perf_counter() - began_s))
    print(f"barrier {statistics.median(durations_us):.0f} us", flush=True)

    ddpcore.report_step(7, torch.tensor(1.5, requires_grad=True), epoch=2)
    with ddpcore.phase("checkpoint"):
        linger("checkpoint")
    pid = os.fork()
    if pid == 0:
        # A child has no probe and no mark of its own reaches the agent.
        ddpcore.report_step(99)
        os._exit(0)
    os.waitpid(pid, 0)
    ddpcore.report_step(8, epoch=2)
    linger("never")


if __name__ == "__main__":
    main()
