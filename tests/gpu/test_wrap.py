"""A wrapped model whose ranks share a GPU, by gloo: NCCL wants a GPU for each."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpcore.parallel.wrapping import wrap
from tests.support.gpus import needs_gpu
from tests.support.warm_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]


def synchronise_batchnorm() -> tuple[float, list[int], str]:
    torch.manual_seed(0)
    x = torch.randn(24, 3)
    alone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).cuda()
    model = copy.deepcopy(alone)
    alone(x.cuda()).square().mean().backward()
    ddp = wrap(model, device="cuda", sync_batchnorm=True)
    # DDP moves its inputs to the model's device.
    ddp(x.chunk(2)[dist.get_rank()]).square().mean().backward()
    pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
    error = max((cast("Any", one.grad) - other.grad).abs().max().item() for one, other in pairs)
    return error, cast("Any", ddp).device_ids, type(model[1]).__name__


def test_synchronised_batchnorm_makes_gradients_those_of_the_whole_batch() -> None:
    for error, device_ids, kind in run_ranks(synchronise_batchnorm, 2):
        assert error < 1e-5
        assert device_ids == [0]
        assert kind == "SyncBatchNorm"
