"""Dumps that torch's own recorder wrote, here that of gloo, are read by `rankdeck inspect --dumps`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from app.inspect.dump_files import read_dumps
from app.inspect.dumps import compared

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import os, pathlib, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, directory = dist.get_rank(), pathlib.Path(sys.argv[1])
for _ in range(5):
    dist.all_reduce(torch.ones(4))
def until_there(pattern, number):
    while len([*directory.glob(pattern)]) < number:
        time.sleep(0.05)
def dump():
    until_there("../calls-*", 2)
    time.sleep(0.5)
    from torch._C._distributed_c10d import _dump_fr_trace
    (directory / f"nccl_trace_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    until_there("nccl_trace_rank_*", 3)
    os._exit(0)
threading.Thread(target=dump).start()
if rank == 2:
    time.sleep(600)
(directory.parent / f"calls-{rank}").touch()
dist.all_reduce(torch.ones(7))
"""


@pytest.mark.ranks
def test_the_rank_that_has_not_come_is_named_after_the_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    subprocess.run([*torchrun, str(tmp_path / "train.py"), str(dumps)], capture_output=True, timeout=240, check=False)

    finding = compared(read_dumps(dumps))

    assert (finding.culprits, finding.waiting, finding.without_dump) == ([2], [0, 1], [])
    assert "rank 2 has not come to all_reduce #6" in finding.text
    argv = [sys.executable, "-P", "-m", "app", "inspect", "--dumps", str(dumps)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (10, f"CRITICAL  {finding.text}\n")
