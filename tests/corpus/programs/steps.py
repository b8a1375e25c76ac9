"""Two ranks that train: a step is 50 ms, most of it asleep, so that ranks do not compete for cores.

python steps.py NUM_STEPS [slow|gil|oom|return|refuse|input|none] [AT_STEP]
"""

from __future__ import annotations

import ctypes
import resource
import sys
import time

import torch
import torch.distributed as dist

import ddpcore

num_steps, harm = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "none"
at_step = int(sys.argv[3]) if len(sys.argv) > 3 else 100
dist.init_process_group("gloo")
rank = dist.get_rank()


def hoard() -> None:
    """Want more memory than there is."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    torch.zeros(1 << 40)


for step in range(1, num_steps + 1):
    is_struck = rank == 1 and step >= at_step
    with ddpcore.phase("data"):
        time.sleep(0.05 if harm == "input" else 0.005)
    if is_struck and harm == "gil" and step == at_step:
        ctypes.PyDLL(None).sleep(20)
    if is_struck and harm == "oom":
        hoard()
    if is_struck and harm == "return":
        sys.exit(0)
    if is_struck and harm == "refuse":
        sys.exit("steps.py: the data has gone")
    factor = 1.3 if is_struck and harm == "slow" else 1.0
    time.sleep(0.02 * factor)
    first = dist.all_reduce(torch.ones(1000), async_op=True)
    time.sleep(0.025 * factor)
    second = dist.all_reduce(torch.ones(1000), async_op=True)
    first.wait()
    second.wait()
    ddpcore.report_step(step, loss=1.0 / step)
    if step % 100 == 0:
        with ddpcore.phase("eval"):
            time.sleep(1.0)
        if rank == 0:
            with ddpcore.phase("checkpoint"):
                time.sleep(2.0)
        dist.barrier()
