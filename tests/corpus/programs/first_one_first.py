"""Row S1: the first rank prepares something while the others wait, and fails at it.

python first_one_first.py raise|take
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

import ddpcore

dist.init_process_group("gloo")
with ddpcore.master_first("corpus"):
    if dist.get_rank() == 0:
        time.sleep(3.0)
        if sys.argv[1] == "raise":
            raise FileNotFoundError("no corpus here")
dist.barrier()
