"""Ranks killed at random moments of a training that saves in every step: the others name the one that was killed.

Twice in every run. RANKDECK_RANK_KILLS says how often with `-m chaos`, RANKDECK_SEED which.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from tests.support.warm_ranks import WarmRanks

NUM_KILLS = int(os.environ.get("RANKDECK_RANK_KILLS", "10"))
NUM_RANKS = 3
LONGEST_S = 0.5


def train(directory: str, every: str) -> None:
    with ddpcore.Engine(seed=1) as engine:
        model = engine.wrap(nn.Sequential(nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Linear(40, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        batches = engine.loader(TensorDataset(torch.randn(600, 20)), global_batch_size=12)
        engine.checkpoint(directory, every=every, model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until="100000 epochs"):
            for (inputs,) in batch.micro_batches(2):
                engine.backward(model(inputs).square().mean())
            engine.update(optimizer)
            Path(f"training-{engine.placement.rank}").touch()


@pytest.mark.fault(row=4)
@pytest.mark.timeout(120 + 20 * NUM_KILLS)
@pytest.mark.parametrize("num_kills", [2, pytest.param(NUM_KILLS, marks=pytest.mark.chaos)])
def test_a_rank_that_is_killed_at_any_moment_is_named_by_all_others(tmp_path: Path, num_kills: int) -> None:
    seed = int(os.environ.get("RANKDECK_SEED", "0"))
    dice = random.Random(seed)
    slowest_s = 0.0
    for number in range(num_kills):
        every = dice.choice(["1 step", "7 steps", "1000 steps"])
        with WarmRanks(train, NUM_RANKS, str(tmp_path / str(number)), every, has_group=False) as ranks:
            for rank in range(NUM_RANKS):
                ranks.wait_for_file(f"training-{rank}")
            time.sleep(dice.random() * LONGEST_S)  # a random moment is the point here
            victim = number % NUM_RANKS
            ranks.kill(victim, signal.SIGKILL)
            killed_s = time.monotonic()
            outcomes = ranks.outcomes()
            slowest_s = max(slowest_s, time.monotonic() - killed_s)
        for rank, outcome in enumerate(outcomes):
            if rank != victim:
                where = f"kill {number} of rank {victim}, saving every {every}, seed {seed}: {outcome.error}"
                assert outcome.error.startswith(f"RankFailedError: rank {victim} has died"), where
    sys.stdout.write(f"{num_kills} kills, the slowest named after {slowest_s:.1f} s\n")
