"""What the programs have in common: a small model, a step, and the note of the moment at which a fault begins."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEP_S = 0.05


def fault_begins() -> None:
    """Write the moment down: the clock is the same for all processes of a machine."""
    unfinished = Path(f"{os.environ['FAULT_AT']}.{os.getpid()}")
    unfinished.write_text(str(time.monotonic()))
    unfinished.rename(os.environ["FAULT_AT"])


def make_model(*, has_buffers: bool = False) -> DistributedDataParallel:
    """Return a model whose forward broadcasts buffers, or does not."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if has_buffers else nn.ReLU()
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 1)))


def make_batch() -> torch.Tensor:
    """Return some input."""
    return torch.randn(4, 8)


def train_step(model: nn.Module, step_s: float = STEP_S) -> None:
    """Do a step with its own gradients' all_reduce."""
    time.sleep(step_s)
    loss = model(make_batch()).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=1e-4)
            parameter.grad = None


def train(model: nn.Module, num_steps: int, step_s: float = STEP_S) -> None:
    """Do some steps."""
    for _ in range(num_steps):
        train_step(model, step_s)
