"""Data for the examples: points on three arms of a spiral, and which arm each lies on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from torch import Tensor, nn


def spirals(num_points: int, seed: int) -> TensorDataset:
    """Return points, (N, 2), and the arm of each, (N,)."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (num_points,), generator=generator)
    radius = torch.rand(num_points, generator=generator)
    angle = 2 * math.pi * (arm / 3 + radius) + 0.05 * torch.randn(num_points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm)


def is_right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return for each point whether the model knows its arm, (B,)."""
    points, arm = batch
    return {"accuracy": model(points).argmax(dim=1) == arm}
