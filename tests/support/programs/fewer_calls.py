"""Two gloo ranks: rank 0 goes first in a block; then rank 1 calls a barrier once and ends, rank 0 calls it twice."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

import ddpcore


def main() -> None:
    dist.init_process_group("gloo")
    with ddpcore.master_first("corpus") as is_first:  # ENTERS THE BLOCK
        while is_first and not Path("prepared").exists():
            time.sleep(0.02)
    ddpcore.barrier("epoch")  # FIRST CALL
    print("passed once", flush=True)
    if dist.get_rank() == 0:
        ddpcore.barrier("epoch")  # SECOND CALL


if __name__ == "__main__":
    main()
