"""Ranks that are slower than others: `torchrun slow.py MODE`; a step of 0.2 s is mostly asleep."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.corpus.reported.programs.training import fault_begins, make_model, train, train_step

STEP_S = 0.2
NUM_STEPS = 300


def thirty_percent() -> None:
    """Rank 1's processor is throttled."""
    train(model, NUM_STEPS, STEP_S * (1.3 if rank == 1 else 1.0))  # culprit: thirty_percent


def twice() -> None:
    """Rank 2's node is shared with another job."""
    train(model, NUM_STEPS, STEP_S * (2.0 if rank == 2 else 1.0))  # culprit: twice


def in_turns() -> None:
    """Ranks 1 and 2 are slow in turns, as when long samples go around."""
    for step in range(NUM_STEPS):
        is_slow = rank == 1 + step // 5 % 2
        train_step(model, STEP_S * (1.8 if is_slow else 1.0))


def two_of_four() -> None:
    """Ranks 2 and 3 share a slow disk."""
    train(model, NUM_STEPS, STEP_S * (1.5 if rank >= 2 else 1.0))  # culprit: two_of_four


def rank_0_logs() -> None:
    """Rank 0 writes images to its log at each step."""
    for _ in range(NUM_STEPS):
        train_step(model, STEP_S)
        if rank == 0:
            time.sleep(0.1)  # culprit: rank_0_logs


class Samples(Dataset[torch.Tensor]):
    """Rank 1 reads each from a disk that is far away."""

    def __len__(self) -> int:
        return 4 * NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.08 if rank == 1 else 0.01)
        return torch.ones(8)


def loader() -> None:
    """Rank 1's input comes late."""
    for _ in DataLoader(Samples(), batch_size=4):
        train_step(model, 0.1)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model()
    train(model, 25, STEP_S)
    if rank == 0:
        fault_begins()
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
