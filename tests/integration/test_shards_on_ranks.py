"""Training on files that are read forward: exact, and resumed by position at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import ddpcore
from ddpcore.samplers import ShardedDataset, ShardedOrder
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = [30, 7, 22, 16]
GLOBAL_BATCH = 6


def read(path: Path, start: int) -> Iterator[Tensor]:
    with path.open() as file:
        for number, line in enumerate(file):
            if number >= start:
                yield torch.tensor([float(line)])


def train(directory: str, until: str, num_workers: int) -> list[tuple[int, int]]:
    """Return (epoch, sample) of everything that this rank has trained on."""
    seen = []
    paths = sorted(Path(directory).glob("*.txt"))
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        dataset = ShardedDataset(paths, LENGTHS, read)
        order = ShardedOrder(dataset.lengths, GLOBAL_BATCH, num_streams=3, seed=5)
        batches = engine.loader(dataset, global_batch_size=GLOBAL_BATCH, order=order, num_workers=num_workers)
        engine.checkpoint(f"{directory}/checkpoints", every="100 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until=until):
            for inputs in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            seen += [(batches.epoch, int(sample)) for sample in batch.content[: batch.num_samples]]
    return seen


def test_each_sample_of_all_files_counts_once_over_interruptions_and_ranks(tmp_path: Path) -> None:
    numbers = iter(range(sum(LENGTHS)))
    for shard, length in enumerate(LENGTHS):
        (tmp_path / f"{shard}.txt").write_text("".join(f"{next(numbers)}\n" for _ in range(length)))

    seen = []
    for world_size, until, num_workers in [(2, "5 steps", 0), (3, "17 steps", 2), (1, "2 epochs", 0)]:
        for rank in run_ranks(train, world_size, str(tmp_path), until, num_workers, has_group=False):
            seen += rank

    assert sorted(seen) == [(epoch, sample) for epoch in range(2) for sample in range(sum(LENGTHS))]
