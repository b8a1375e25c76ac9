"""Sends and receives that do not meet: `torchrun messages.py MODE`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from tests.corpus.reported.programs.training import fault_begins, make_model, train


def both_receive() -> None:
    """Each rank receives from the other before it sends."""
    theirs = torch.zeros(1000)
    begin(0)
    dist.recv(theirs, src=1 - rank)  # culprit: both_receive
    dist.send(torch.ones(1000), dst=1 - rank)


def send_nobody_receives() -> None:
    """Rank 0 sends its statistics to rank 2, which does not know of that."""
    if rank == 0:
        begin(0)
        dist.send(torch.ones(1_000_000), dst=2)  # culprit: send_nobody_receives
    dist.barrier()  # victims: send_nobody_receives


def ring() -> None:
    """Each rank receives from its left neighbour before it sends to its right one."""
    theirs = torch.zeros(1000)
    begin(0)
    dist.recv(theirs, src=(rank - 1) % world_size)  # culprit: ring
    dist.send(torch.ones(1000), dst=(rank + 1) % world_size)


def one_micro_batch_more() -> None:
    """The second stage of a pipeline expects one micro-batch more than the first one sends."""
    activations = torch.zeros(1000)
    if rank == 0:
        for _ in range(8):
            dist.send(activations, dst=1)
    else:
        for index in range(9):
            if index == 8:
                begin(1)
            dist.recv(activations, src=0)  # culprit: one_micro_batch_more
    dist.barrier()  # victims: one_micro_batch_more


def batch_of_other_order() -> None:
    """Two ranks exchange halos, and each tags them in its own order."""
    mine, theirs = torch.ones(1000), torch.zeros(1000)
    tag = 1 + rank
    operations = [dist.P2POp(dist.isend, mine, 1 - rank, tag=tag), dist.P2POp(dist.irecv, theirs, 1 - rank, tag=tag)]
    begin(0)
    for work in dist.batch_isend_irecv(operations):
        work.wait()  # culprit: batch_of_other_order


def actor_gives_up() -> None:
    """Rank 0 learns from what the others have seen; rank 2 catches an exception of its own and is done."""
    for iteration in range(40):
        weights = [iteration if rank == 0 else None]
        dist.broadcast_object_list(weights, src=0)
        if rank == 0:
            for actor in range(1, world_size):
                dist.recv(torch.zeros(32), src=actor)  # victims: actor_gives_up
            continue
        time.sleep(0.1)
        if rank == 2 and iteration == 15:
            fault_begins()
            break
        dist.send(torch.ones(32), dst=0)
    dist.barrier()  # culprit: actor_gives_up


def begin(by_rank: int) -> None:
    if rank == by_rank:
        fault_begins()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train(make_model(), 30)
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
