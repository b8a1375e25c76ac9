"""Programs in which all is well, though it may not look so: `torchrun healthy.py MODE`."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import random
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from tests.corpus.reported.programs.training import make_batch, make_model, train, train_step


def plain() -> None:
    """Train."""
    train(make_model(has_buffers=True), 300)


def rank_0_evaluates_alone() -> None:
    """Rank 0 evaluates the module itself while the others wait, once for five seconds."""
    model = make_model(has_buffers=True)
    for epoch in range(2):
        train(model, 150)
        if rank == 0 and epoch == 0:
            model.module.eval()
            for _ in range(50):
                model.module(make_batch())
                time.sleep(0.1)
            model.module.train()
        dist.barrier()


def sanity_check() -> None:
    """Rank 0 evaluates through the wrapped module: its broadcast is the one that the others' next forward makes."""
    model: nn.Module = make_model(has_buffers=True)
    train(model, 40)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(5):
                model(make_batch())
        model.train()
    train(model, 200)


def checkpoints() -> None:
    """Rank 0 saves for a second each 150 steps."""
    model = make_model()
    for _ in range(4):
        train(model, 150)
        if rank == 0:
            time.sleep(1.0)
        dist.barrier()


def uneven_with_join() -> None:
    """Rank 1 has far fewer batches, and all are in join()."""
    model = make_model()
    with model.join():
        train(model, 60 if rank == 1 else 200)


def accumulation() -> None:
    """Gradients are reduced at each fourth micro-batch."""
    model = make_model()
    for step in range(240):
        if step % 4 < 3:
            with model.no_sync():
                train_step(model)
        else:
            train_step(model)


def late_start() -> None:
    """Rank 1's imports take seven seconds longer."""
    train(make_model(), 200)


def sub_groups() -> None:
    """Two halves that reduce among themselves, and all once in a while."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(150):
        time.sleep(0.05 + 0.03 * (rank // 2))
        dist.all_reduce(torch.ones(4), group=halves[rank // 2])
        if step % 10 == 0:
            dist.all_reduce(torch.ones(4))


def pipeline() -> None:
    """Three stages hand activations on."""
    activations = torch.zeros(1000)
    for _ in range(100):
        for _ in range(4):
            if rank > 0:
                dist.recv(activations, src=rank - 1)
            time.sleep(0.02)
            if rank < world_size - 1:
                dist.send(activations, dst=rank + 1)
        dist.barrier()


class Samples(Dataset[torch.Tensor]):
    """The first ones take long."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1.0 if index < 4 else 0.01)
        return torch.ones(8)


def slow_first_batch() -> None:
    """Workers of each DataLoader warm up."""
    for _ in range(2):
        for batch in DataLoader(Samples(), batch_size=4, num_workers=1):
            dist.all_reduce(batch)
            time.sleep(0.05)


def first_downloads() -> None:
    """The first rank downloads, in front of a monitored barrier, while the others wait."""
    if rank == 0:
        time.sleep(6.0)
    dist.monitored_barrier(timeout=datetime.timedelta(minutes=5))
    train(make_model(), 150)


def late_end() -> None:
    """Rank 0 writes its report for seven seconds after the others have left."""
    train(make_model(), 150)
    dist.destroy_process_group()
    if rank == 0:
        time.sleep(7.0)
    sys.exit(0)


def uneven_work() -> None:
    """Sequences of random lengths: each rank is the last one at times."""
    model = make_model()
    lengths = random.Random(rank)
    for _ in range(150):
        train_step(model, 0.05 + 0.1 * lengths.random())


def pauses() -> None:
    """All ranks pause between epochs, seven seconds, as when data is shuffled."""
    model = make_model()
    for _ in range(3):
        train(model, 60)
        time.sleep(7.0)


def checkpoint_in_background() -> None:
    """A thread of rank 0 writes while training goes on, and memory grows until a cache is full."""
    model = make_model()
    cache: list[torch.Tensor] = []
    for step in range(250):
        train_step(model)
        if step % 50 == 49 and rank == 0:
            threading.Thread(target=time.sleep, args=(3.0,)).start()
        if len(cache) < 100:
            cache.append(torch.ones(200_000))


def evaluator_waits() -> None:
    """The last rank evaluates weights that it receives now and then, while the others train in a group of their own."""
    trainers = dist.new_group(range(world_size - 1))
    weights = torch.zeros(32)
    if rank == world_size - 1:
        for _ in range(2):
            dist.recv(weights, src=0)
            time.sleep(2.0)
    else:
        model = DistributedDataParallel(nn.Linear(8, 1), process_group=trainers)
        for _ in range(2):
            train(model, 220)
            if rank == 0:
                dist.send(weights, dst=world_size - 1)
    dist.barrier()


def ends_one_after_another() -> None:
    """Exceptions are caught, printed by the hook, or a thread's; ranks end apart, one of them slowly."""
    model = make_model()
    for step in range(150):
        train_step(model)
        if rank == 1 and step % 20 == 10:
            threading.Thread(target=fail, daemon=True).start()
            try:
                fail()
            except ValueError:
                sys.excepthook(*sys.exc_info())
            with contextlib.suppress(SystemExit):
                sys.exit(2)
    dist.barrier()
    if rank == 0:
        atexit.register(time.sleep, 4.0)
    else:
        time.sleep(3.0)


def fail() -> None:
    raise ValueError("a sample without a label")


if __name__ == "__main__":
    if sys.argv[1] == "late_start" and os.environ["RANK"] == "1":
        time.sleep(7.0)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
