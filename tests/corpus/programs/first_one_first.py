"""Row S1: the first rank prepares something while the others wait, and fails at it.

python first_one_first.py raise|raise-and-linger|take
"""

from __future__ import annotations

import atexit
import os
import sys
import time

if sys.argv[1] == "raise-and-linger" and os.environ["RANK"] == "0":
    atexit.register(time.sleep, 30.0)  # the last of all handlers: the launcher ends it before it is out

import torch.distributed as dist

import ddpcore

dist.init_process_group("gloo")
with ddpcore.master_first("corpus"):
    if dist.get_rank() == 0:
        time.sleep(3.0)
        if sys.argv[1].startswith("raise"):
            raise FileNotFoundError("no corpus here")
dist.barrier()
