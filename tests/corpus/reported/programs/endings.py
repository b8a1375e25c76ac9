"""Ranks that end, and hangs that do: `torchrun endings.py MODE`."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from tests.corpus.reported.programs.training import fault_begins, make_model, train

TIMEOUTS_S = {"missing_20": 20, "mismatch_20": 20, "stopped_20": 20, "missing_5": 5}


def missing_20() -> None:
    """Rank 1 does not come, until torch's time-out ends the wait."""
    if rank == 1:
        fault_begins()
        time.sleep(60)  # culprit: missing_20 missing_5
    dist.barrier()  # victims: missing_20 missing_5


missing_5 = missing_20


def mismatch_20() -> None:
    """Rank 1 of three goes to a barrier, the others reduce, until torch's time-out."""
    if rank == 1:
        fault_begins()
        dist.barrier()  # culprit: mismatch_20
    train(model, 100)


def stopped_20() -> None:
    """Rank 1 is stopped, until torch's time-out."""
    if rank == 1:
        fault_begins()
        os.kill(os.getpid(), signal.SIGSTOP)
    train(model, 100)


def exception() -> None:
    """Rank 1 does not find its shard."""
    if rank == 1:
        fault_begins()
        open("/data/shard-00001.tar")  # noqa: PTH123, SIM115  # culprit: exception
    train(model, 100)


def exception_and_cleanup() -> None:
    """Rank 1 fails, and its cleanup waits for the others."""
    try:
        if rank == 1:
            fault_begins()
            raise ValueError("a corrupt sample")
        train(model, 100)
    finally:
        dist.barrier()  # culprit: exception_and_cleanup


def out_of_budget() -> None:
    """Rank 0 finds that its time is over, and leaves."""
    if rank == 0:
        fault_begins()
        sys.exit(0)
    train(model, 100)


def exception_and_upload() -> None:
    """Rank 1 fails, and its tracker's exit handler waits for a server."""
    if rank == 1:
        atexit.register(time.sleep, 60)
        fault_begins()
        raise ValueError("the loss is not a number")  # culprit: exception_and_upload
    train(model, 100)


def logged_exit() -> None:
    """Rank 1 logs its exception, and leaves with code 1."""
    if rank == 1:
        fault_begins()
        sys.stderr.write("fatal: shard 17 is corrupt\n")
        sys.exit(1)
    train(model, 100)


def interrupted() -> None:
    """Somebody interrupts rank 1 alone."""
    if rank == 1:
        fault_begins()
        os.kill(os.getpid(), signal.SIGINT)
    train(model, 100)


def killed() -> None:
    """Somebody kills rank 1."""
    if rank == 1:
        fault_begins()
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, 100)


def segmentation_fault() -> None:
    """An extension of rank 1 reads where nothing is."""
    if rank == 1:
        fault_begins()
        ctypes.string_at(0)
    train(model, 100)


def monitored_barrier() -> None:
    """Rank 1 does not come to a monitored barrier, which gives up after 15 s."""
    if rank == 1:
        fault_begins()
        time.sleep(60)  # culprit: monitored_barrier
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=15))  # victims: monitored_barrier


def cancelled() -> None:
    """Rank 1 hangs, and after 16 s the scheduler ends the launcher."""
    if rank == 1:
        fault_begins()
        time.sleep(16)  # culprit: cancelled
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(60)
    dist.barrier()  # victims: cancelled


def out_of_memory() -> None:
    """Rank 1 wants more memory than it may have."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        fault_begins()
        torch.zeros(1 << 40)  # culprit: out_of_memory
    train(model, 100)


def thread_left() -> None:
    """Rank 1 is done, and a thread of its metrics is not."""
    if rank == 1:
        threading.Thread(target=send_metrics, name="metrics").start()
        fault_begins()


def send_metrics() -> None:
    while True:
        time.sleep(0.5)  # culprit: thread_left


def full_queue() -> None:
    """Rank 0 is done, and what it has put into a queue for its evaluation is taken by nobody."""
    if rank == 0:
        results: multiprocessing.Queue[bytes] = multiprocessing.Queue()
        for _ in range(1000):
            results.put(bytes(10_000))
        fault_begins()


def interrupted_hang() -> None:
    """Rank 1 hangs, and after 14 s somebody presses Ctrl-C."""
    if rank == 1:
        fault_begins()
        time.sleep(14)  # culprit: interrupted_hang
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    dist.barrier()  # victims: interrupted_hang


def exit_handler() -> None:
    """Rank 0 is done, and its exit handler waits for a queue that nobody empties."""
    if rank == 0:
        uploads: queue.Queue[str] = queue.Queue()
        uploads.put("model.pt")
        atexit.register(uploads.join)
        fault_begins()


if __name__ == "__main__":
    mode = sys.argv[1]
    limit = datetime.timedelta(seconds=TIMEOUTS_S[mode]) if mode in TIMEOUTS_S else None
    dist.init_process_group("gloo", timeout=limit)
    rank = dist.get_rank()
    model = make_model()
    train(model, 40)
    globals()[mode]()
    dist.destroy_process_group()
