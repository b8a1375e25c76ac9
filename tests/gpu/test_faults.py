"""A fault on a real GPU: its memory runs out for one rank, and is there again afterwards."""

from __future__ import annotations

import pytest
import torch

from ddpcore.probe.torch_faults import HOARD_BYTES, strike
from ddpcore.wire import FaultKind
from tests.support.gpus import needs_gpu
from tests.support.warm_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]


def run_out_of_gpu_memory() -> str:
    torch.ones(1, device="cuda")
    before_frac = torch.cuda.get_per_process_memory_fraction()
    try:
        strike(FaultKind.OOM)
    except torch.OutOfMemoryError as error:
        assert torch.cuda.get_per_process_memory_fraction() == before_frac
        assert torch.ones(2 * HOARD_BYTES, dtype=torch.uint8, device="cuda")[0] == 1
        return str(error)
    raise AssertionError("there was memory enough")


def test_memory_of_a_gpu_that_runs_out_is_told_by_torch_and_is_there_again_afterwards() -> None:
    (told,) = run_ranks(run_out_of_gpu_memory, 1, has_group=False)

    assert "CUDA out of memory" in told
