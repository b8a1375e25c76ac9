"""How far the weights of a training on several ranks are from those of one process: losses over tokens.

    python -m tests.bench.bench_exactness

A language model on sentences of different lengths (tests/support/token_language.py), three epochs of AdamW with clipped
gradients. One process takes each global batch in one backward of the mean over its tokens. Beside it the same ranks
without weights: means of each micro-batch, averaged by samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.token_language import train, train_plainly
from tests.support.warm_ranks import run_ranks

SHAPES: list[tuple[str, int, dict[str, Any]]] = [
    ("1 rank, 1 micro-batch", 1, {}),
    ("1 rank, 5 micro-batches", 1, {"num_parts": 5}),
    ("2 ranks", 2, {}),
    ("4 ranks, 3 micro-batches", 4, {"num_parts": 3}),
    ("3 ranks with shares 1:4:7, 2 micro-batches", 3, {"rank_weights": [1, 4, 7], "num_parts": 2}),
    ("4 ranks with shares 0:1:1:1", 4, {"rank_weights": [0, 1, 1, 1]}),
    ("2 ranks, float32", 2, {"dtype": torch.float32}),
    ("2 ranks, float32, 10^7 tokens each", 2, {"dtype": torch.float32, "factor": 10**7}),
    ("2 ranks, float32, gradients travel as fp16", 2, {"dtype": torch.float32, "wrap": {"comm_hook": "fp16"}}),
    ("2 ranks, float32, gradients travel as bf16", 2, {"dtype": torch.float32, "wrap": {"comm_hook": "bf16"}}),
]


def main() -> None:
    """Measure and print."""
    alone = train_plainly()
    print(
        "| ranks and micro-batches | gradients | final weights | final weights without `weight=` |\n|---|---|---|---|"
    )
    for name, world_size, options in SHAPES:
        ranks = run_ranks(train, world_size, {"kind": Tensor, **options}, has_group=False)
        plain = run_ranks(train, world_size, {**options, "kind": None}, has_group=False)
        norms = max(abs(a / b - 1) for rank in ranks for a, b in zip(rank["norms"], alone["norms"], strict=True))
        print(f"| {name} | {norms:.1e} | {_worst(ranks, alone):.1e} | {_worst(plain, alone):.1e} |")


def _worst(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    expected: Tensor = alone["weights"]
    return max(float((rank["weights"] - expected).norm() / expected.norm()) for rank in ranks)


if __name__ == "__main__":
    main()
