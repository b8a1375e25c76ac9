"""Ranks that train, and store a sample over the network in the `data` phase of each step.

python over_network.py DIRECTORY

DIRECTORY/store has the address and the port of `store.py`. A file `program` in DIRECTORY slows rank 1 by itself.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ddpcore

SAMPLE = bytes(64 * 1024)
WORK_S = 0.05
directory = Path(sys.argv[1])
dist.init_process_group("gloo")
address, port = (directory / "store").read_text().split()
with socket.create_connection((address, int(port))) as store:
    for step in range(1, 1_000_000):
        with ddpcore.phase("data"):
            store.sendall(SAMPLE)
            store.recv(1)
        time.sleep(WORK_S)
        if dist.get_rank() == 1 and (directory / "program").exists():
            time.sleep(WORK_S / 2)
        dist.all_reduce(torch.ones(100))
        ddpcore.report_step(step)
