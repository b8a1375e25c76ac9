"""Dumps that torch's own recorder wrote, here that of gloo, are read by `rankdeck inspect --dumps`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    _dump_fr_trace,
    _dump_fr_trace_json,
)

from app.inspect.dump_files import read_dumps
from app.inspect.dumps import compared
from tests.support.waiting import until
from tests.support.warm_ranks import try_ranks

if TYPE_CHECKING:
    from pathlib import Path

DUMPS = "dumps/nccl_trace_rank_*"


def leave_dumps(directory: Path) -> None:
    """Meet five times; the sixth time rank 2 does not come, and each rank leaves its dump."""
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    rank = dist.get_rank()
    threading.Thread(target=dump, args=(directory, rank)).start()
    if rank == 2:
        threading.Event().wait()
    (directory / f"calls-{rank}").touch()
    dist.all_reduce(torch.ones(7))


def dump(directory: Path, rank: int) -> None:
    """Write this rank's dump once the others stand in their call, and end once all have."""
    until(lambda: len([*directory.glob("calls-*")]) == 2, 60, "two ranks have come")
    until(lambda: len(json.loads(_dump_fr_trace_json(True, False))["entries"]) == 5 + (rank != 2), 60, "all calls")
    (directory / f"dumps/nccl_trace_rank_{rank}").write_bytes(_dump_fr_trace(True, True, False))
    until(lambda: len([*directory.glob(DUMPS)]) == 3, 60, "all dumps")
    os._exit(0)


def test_the_rank_that_has_not_come_is_named_after_the_end(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    assert [outcome.status for outcome in try_ranks(leave_dumps, 3, tmp_path)] == [0, 0, 0]

    finding = compared(*read_dumps(dumps))

    assert (finding.culprits, finding.waiting, finding.without_dump) == ([2], [0, 1], [])
    assert "rank 2 has not come to all_reduce #6" in finding.text
    argv = [sys.executable, "-P", "-m", "app", "inspect", "--dumps", str(dumps)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (10, f"CRITICAL  {finding.text}\n")
