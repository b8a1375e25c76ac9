"""Ranks that call the same, or about the same, with other arguments: `torchrun arguments.py MODE`."""

from __future__ import annotations

import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.corpus.reported.programs.training import fault_begins, make_batch, make_model, train


def all_reduce_sizes() -> None:
    """Rank 1's vocabulary has one entry more."""
    counts = torch.zeros(1001 if rank == 1 else 1000)
    begin()
    dist.all_reduce(counts)  # culprit: all_reduce_sizes


def all_gather_shapes() -> None:
    """The last rank's last batch is smaller."""
    predictions = torch.zeros(200 if rank == world_size - 1 else 320)
    begin()
    dist.all_gather(
        [torch.zeros_like(predictions) for _ in range(world_size)], predictions
    )  # culprit: all_gather_shapes


def all_reduce_dtypes() -> None:
    """Rank 1 adds up in double."""
    loss = torch.zeros(64, dtype=torch.float64 if rank == 1 else torch.float32)
    begin()
    dist.all_reduce(loss)  # culprit: all_reduce_dtypes


def broadcast_sources() -> None:
    """Rank 1 takes itself for the source."""
    weights = torch.zeros(100_000)
    begin()
    dist.broadcast(weights, src=1 if rank == 1 else 0)  # culprit: broadcast_sources
    train(model, 100)


def object_list_sources() -> None:
    """Each node's first rank was to send the configuration, and each rank thinks that it is first."""
    configuration: list[object] = [{"lr": 0.1}]
    begin()
    dist.broadcast_object_list(configuration, src=rank)  # culprit: object_list_sources
    dist.barrier()


def different_order() -> None:
    """Losses are reduced in the order of a dict that rank 1 has filled in another order."""
    losses = {"box": torch.zeros(10), "mask": torch.zeros(4000)}
    names = sorted(losses, reverse=rank == 1)
    begin()
    for name in names:
        dist.all_reduce(losses[name])  # culprit: different_order


def gather_against_all_reduce() -> None:
    """Rank 0 was changed to gather, the others were not."""
    loss = torch.ones(1000)
    begin()
    if rank == 0:
        dist.gather(loss, [torch.zeros(1000) for _ in range(world_size)])  # culprit: gather_against_all_reduce
    else:
        dist.all_reduce(loss)  # victims: gather_against_all_reduce


def different_models() -> None:
    """Rank 1 counts one class more."""
    begin()
    DistributedDataParallel(nn.Linear(8, 11 if rank == 1 else 10))  # culprit: different_models


def new_group_on_some() -> None:
    """The last rank takes itself for no member of a group, and goes on without making it."""
    begin()
    if rank != world_size - 1:
        dist.new_group(list(range(world_size)))  # victims: new_group_on_some
    train(model, 100)


def groups_in_other_order() -> None:
    """Two groups of both ranks, which rank 1 uses in the other order."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    begin()
    for group in reversed(groups) if rank == 1 else groups:
        dist.all_reduce(torch.ones(4), group=group)  # culprit: groups_in_other_order


def two_models_in_other_order() -> None:
    """Rank 1 trains the critic first, by a draw of its own."""
    models = [DistributedDataParallel(nn.Linear(8, 300)), DistributedDataParallel(nn.Linear(8, 3))]
    for step in range(40):
        time.sleep(0.05)
        if step == 20:
            begin()
        for one in models[::-1] if rank == 1 and step == 20 else models:
            one(make_batch()).sum().backward()


def thread_of_metrics() -> None:
    """A thread reduces metrics beside the training, and comes first on rank 1."""
    lock = threading.Lock()

    def reduce_metrics() -> None:
        time.sleep(0.0 if rank == 1 else 0.4)
        with lock:
            dist.all_reduce(torch.ones(1))

    thread = threading.Thread(target=reduce_metrics)
    begin()
    thread.start()
    time.sleep(0.2)
    with lock:
        train(model, 1)
    thread.join()
    train(model, 100)


def layer_dropped() -> None:
    """Each rank drops layers of its sharded model by its own dice, and its next parameters are those of another."""
    mesh = init_device_mesh("cpu", (world_size,))
    layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 1)])
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(layers.parameters(), 1e-3)
    for step in range(60):
        x = torch.randn(4, 32)
        if rank == 1 and step == 40:
            fault_begins()
        else:
            x = layers[0](x)
        layers[1](x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)


def norm_left_out() -> None:
    """Rank 1's gradients are not finite: it goes on with the next batch, and leaves out the norm that all add up."""
    for step in range(100):
        time.sleep(0.05)
        model(make_batch()).sum().backward()
        if rank == 1 and step == 20:
            fault_begins()
            model.zero_grad()
            continue
        dist.all_reduce(torch.ones(1))
        model.zero_grad()


def begin() -> None:
    if rank == (0 if sys.argv[1] == "gather_against_all_reduce" else world_size - 1):
        fault_begins()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    train(model, 30)
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
