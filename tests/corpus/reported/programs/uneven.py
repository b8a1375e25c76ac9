"""A rank that makes a call fewer or more than the others: `torchrun uneven.py MODE`."""

from __future__ import annotations

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.corpus.reported.programs.training import fault_begins, make_batch, make_model, train, train_step


def rank_0_evaluates() -> None:
    """Rank 0 evaluates through the wrapped module, whose forward broadcasts the buffers."""
    model = make_model(has_buffers=True)
    for epoch in range(3):
        train(model, 20)
        if rank == 0 and epoch == 1:
            fault_begins()
            evaluate(model)  # culprit: rank_0_evaluates
        dist.barrier()  # victims: rank_0_evaluates


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            model(make_batch())  # culprit: rank_0_evaluates
    model.train()


def sanity_check() -> None:
    """Rank 0 looks whether the model runs at all, before training begins."""
    model = make_model(has_buffers=True)
    train(model, 10)
    if rank == 0:
        fault_begins()
        for _ in range(3):
            model(make_batch())  # culprit: sanity_check
    train(model, 100)


def early_return() -> None:
    """All ranks but the one that saves return before the barrier."""
    model = make_model()
    for epoch in range(3):
        train(model, 20)
        save(model, epoch)


def save(model: nn.Module, epoch: int) -> None:
    if epoch != 1:
        return
    if rank != 0:
        return
    time.sleep(0.2)
    fault_begins()
    dist.barrier()  # culprit: early_return


def fewer_batches_and_out() -> None:
    """Rank 1's shard has three batches fewer, and it ends."""
    model = make_model()
    num_batches = 37 if rank == 1 else 40
    train(model, num_batches)
    if rank == 1:
        fault_begins()


def fewer_batches_and_barrier() -> None:
    """Rank 1's shard has one batch fewer, and it goes to the end of the epoch."""
    model = make_model()
    train(model, 39 if rank == 1 else 40)
    if rank == 1:
        fault_begins()
    dist.barrier()  # culprit: fewer_batches_and_barrier


def early_stop() -> None:
    """The last rank's own validation loss tells it to stop."""
    model = make_model()
    local_loss = 1.0
    for epoch in range(10):
        train(model, 15)
        local_loss = 1.0 if rank == world_size - 1 else 1.0 / (epoch + 1)
        if epoch == 2 and local_loss >= 1.0:
            fault_begins()
            break
    losses: list[object] = [None] * world_size
    dist.all_gather_object(losses, local_loss)  # culprit: early_stop


def skipped_batch() -> None:
    """Rank 1 skips a batch whose loss is not a number; nothing hangs until its loop is over."""
    model = make_model()
    for step in range(40):
        if rank == 1 and step == 20:
            continue
        train_step(model)
    if rank == 1:
        fault_begins()
    dist.barrier()  # culprit: skipped_batch


def swallowed_exception() -> None:
    """Rank 1 runs out of memory in backward's place, catches that and goes on with the next batch."""
    model = make_model()
    for step in range(60):
        try:
            time.sleep(0.05)
            loss = model(make_batch()).sum()
            if rank == 1 and step == 30:
                fault_begins()
                raise torch.OutOfMemoryError("CUDA out of memory")  # noqa: TRY301 - as programs do
            loss.backward()
        except torch.OutOfMemoryError:
            model.zero_grad()
        mean = torch.ones(1)
        dist.all_reduce(mean)  # culprit: swallowed_exception


def accumulation() -> None:
    """Rank 1 was started with twice as many micro-batches between two updates."""
    model = make_model()
    every = 4 if rank == 1 else 2
    for step in range(1, 81):
        time.sleep(0.02)
        if step % every:
            with model.no_sync():
                model(make_batch()).sum().backward()
        else:
            model(make_batch()).sum().backward()
    if rank == 1:
        fault_begins()
    dist.barrier()  # culprit: accumulation


def empty_shard() -> None:
    """Rank 2's share of the validation set is empty, so that it skips the metric's all_gather."""
    model = make_model()
    num_samples = torch.tensor([0 if rank == 2 else 5])
    for _ in range(3):
        train(model, 15)
    if rank == 2:
        fault_begins()
    if num_samples.item():
        dist.all_gather([torch.zeros(3) for _ in range(world_size)], torch.ones(3))  # victims: empty_shard
    train(model, 15)  # culprit: empty_shard


class Branching(nn.Module):
    """Uses its second layer unless told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, batch: torch.Tensor, *, is_short: bool) -> torch.Tensor:
        output: torch.Tensor = self.first(batch)
        return output if is_short else output + self.second(batch)


def unused_parameters() -> None:
    """Rank 1 takes a branch that leaves parameters unused, without find_unused_parameters."""
    model = DistributedDataParallel(Branching())
    for step in range(60):
        time.sleep(0.05)
        is_short = rank == 1 and step == 30
        if is_short:
            fault_begins()
        model(make_batch(), is_short=is_short).sum().backward()  # culprit: unused_parameters


def no_sync_once() -> None:
    """Rank 1 takes one micro-batch more for one without an update, once; each step ends with the mean of the losses."""
    model = make_model()
    for step in range(60):
        time.sleep(0.05)
        is_without = rank == 1 and step == 30
        if is_without:
            fault_begins()
        with model.no_sync() if is_without else contextlib.nullcontext():
            model(make_batch()).sum().backward()
        dist.all_reduce(torch.ones(1))


def reduced_on_condition() -> None:
    """Rank 1 reduces a metric that only its own batch has."""
    model = make_model()
    for step in range(60):
        if rank == 1 and step == 25:
            fault_begins()
            dist.all_reduce(torch.ones(1))
        train_step(model)


def gather_on_main() -> None:
    """Rank 0 alone gathers the predictions; the others are done."""
    train(make_model(), 30)
    if rank == 0:
        fault_begins()
        dist.all_gather([torch.zeros(3) for _ in range(world_size)], torch.ones(3))  # victims: gather_on_main


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
