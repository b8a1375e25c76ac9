"""Ranks that stand still outside of collectives: `torchrun standing.py MODE`."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.corpus.reported.programs.training import fault_begins, make_model, train


def all_in_open() -> None:
    """A file system has died: every rank opens its next shard, and none comes back."""
    begin(0)
    dead_file().read_bytes()  # culprit: all_in_open


def one_in_open() -> None:
    """Rank 1 alone opens a file that never comes."""
    if rank == 1:
        begin(1)
        dead_file().read_bytes()  # culprit: one_in_open
    train(model, 100)


def dead_file() -> Path:
    """Return a file whose open() does not return, as on a file server that has gone."""
    path = Path(tempfile.mkdtemp()) / "shard"
    os.mkfifo(path)
    return path


def lock() -> None:
    """Rank 1's logger waits for a lock that another thread of it holds for ever."""
    if rank == 1:
        log_lock = threading.Lock()
        threading.Thread(target=hold, args=(log_lock,), daemon=True).start()
        time.sleep(0.5)
        begin(1)
        with log_lock:  # culprit: lock
            pass
    train(model, 100)


def hold(lock: threading.Lock) -> None:
    with lock:
        time.sleep(3600)


class Samples(Dataset[torch.Tensor]):
    """Twenty that come, and one at which a worker stops."""

    def __init__(self, stop: str) -> None:
        self.stop = stop

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40 and rank == 1 and self.stop == "sleep":
            fault_begins()
            time.sleep(3600)
        if index == 40 and rank == 1 and self.stop == "kill":
            fault_begins()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return torch.ones(8)


def loader_worker_stuck() -> None:
    """A worker of rank 1's DataLoader does not come back from a read."""
    for _ in DataLoader(Samples("sleep"), batch_size=2, num_workers=1):  # culprit: loader_worker_stuck
        dist.all_reduce(torch.ones(4))  # victims: loader_worker_stuck


def loader_worker_killed() -> None:
    """A worker of rank 1's DataLoader is killed."""
    for _ in DataLoader(Samples("kill"), batch_size=2, num_workers=1):  # culprit: loader_worker_killed
        dist.all_reduce(torch.ones(4))


def child() -> None:
    """Rank 0 unpacks the data set with a tool that does not end."""
    if rank == 0:
        begin(0)
        subprocess.run(["sleep", "3600"], check=True)  # culprit: child
    dist.barrier()  # victims: child


def gil() -> None:
    """Rank 1 matches a pattern that backtracks without end, and holds the GIL in it."""
    if rank == 1:
        begin(1)
        re.match(r"(a+)+$", "a" * 60 + "b")  # culprit: gil
    train(model, 100)


def stopped() -> None:
    """Somebody has stopped rank 1 with Ctrl-Z or a debugger."""
    if rank == 1:
        begin(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    train(model, 100)


def tracker() -> None:
    """Rank 0 waits for the answer of an experiment tracker."""
    if rank == 0:
        server = socket.create_server(("127.0.0.1", 0))
        connection = socket.create_connection(server.getsockname())
        begin(0)
        connection.recv(1)  # culprit: tracker
    dist.barrier()  # victims: tracker


def lock_across_ranks() -> None:
    """Rank 0 prepares a cache under a file's lock, and meets the others in a barrier before it lets go of it."""
    if rank != 0:
        time.sleep(1.0)
    with Path(tempfile.gettempdir(), "cache.lock").open("w", encoding="utf-8") as file:
        begin(1)
        fcntl.flock(file, fcntl.LOCK_EX)  # culprit: lock_across_ranks
        dist.barrier()  # victims: lock_across_ranks


def begin(by_rank: int) -> None:
    if rank == by_rank:
        fault_begins()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    train(model, 40)
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
