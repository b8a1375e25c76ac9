"""Trains on lines of text of different lengths, padded: every byte counts the same, in whatever batch its line lands.

    torchrun --nproc-per-node 4 lines.py --steps 300

A mean over the padded batch, or a mean of the ranks' means, would give bytes of short lines another weight than those
of long ones, and other weights again with another number of ranks. Here each loss is a mean over its micro-batch's
bytes and gives `backward` their number: the gradient is that of the mean over all bytes of the global batch.

Shape suffixes: B lines of a rank, S bytes of the longest line, T = S - 1 predicted bytes, V byte values.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import ddpcore
from ddpcore.errors import DdpcoreError

V, WIDTH = 256, 32
PADDING = -100
GLOBAL_BATCH = 24


class Lines(Dataset[Tensor]):
    """The lines of a file of Python's standard library, from a line feed to the next."""

    def __init__(self) -> None:
        text = Path(argparse.__file__).read_bytes()
        self._lines = [
            torch.frombuffer(bytearray(b"\n" + line + b"\n"), dtype=torch.uint8) for line in text.split(b"\n")
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Tensor:
        return self._lines[index].long()


class NextByte(nn.Module):
    """Predicts each byte of a line from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, WIDTH), nn.Linear(WIDTH, V)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, lines_BS: Tensor) -> Tensor:  # noqa: N803 - shape suffixes
        """Return logits, BTV."""
        seen_BTD = self.embed(lines_BS[:, :-1].clamp(min=0))  # noqa: N806
        logits_BTV: Tensor = self.head(self.memory(seen_BTD)[0])  # noqa: N806
        return logits_BTV


def padded(lines: list[Tensor]) -> Tensor:
    """Put lines of different lengths into one tensor, BS."""
    return pad_sequence(lines, batch_first=True, padding_value=PADDING)


def train(engine: ddpcore.Engine, num_steps: int, num_parts: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Train for some steps, in so many micro-batches each; return the model. Every rank runs this."""
    model = engine.wrap(NextByte().to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = engine.loader(Lines(), global_batch_size=GLOBAL_BATCH, collate_fn=padded)
    loss = torch.zeros(())
    for batch in engine.steps(batches, until=f"{num_steps} steps"):
        for lines_BS in batch.micro_batches(num_parts):  # noqa: N806
            targets_BT = lines_BS[:, 1:]  # noqa: N806
            loss = cross_entropy(model(lines_BS).flatten(0, 1), targets_BT.flatten(), ignore_index=PADDING)
            engine.backward(loss, weight=(targets_BT != PADDING).sum())
        engine.update(optimizer, clip_norm=1.0)
        if engine.is_first and (engine.step + 1) % 50 == 0:
            print(f"step {engine.step + 1}: {loss.item():.3f} nats per byte in its last micro-batch", flush=True)
    return model


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description="Train on lines of different lengths with DDP.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default 300)")
    args = parser.parse_args()
    try:
        with ddpcore.Engine(seed=0) as engine:
            train(engine, args.steps)
    except DdpcoreError as error:
        raise SystemExit(f"lines: {error}") from None


if __name__ == "__main__":
    main()
