"""A fault on a real GPU: its memory runs out for one rank, and is there again afterwards."""

from __future__ import annotations

import pytest
import torch

from ddpcore.probe.faults import strike
from ddpcore.probe.torch_faults import HOARD_BYTES
from ddpcore.wire import Fault, FaultKind
from tests.support.warm_ranks import run_ranks

# Asked without initialising CUDA in the process that ranks are forked from.
NUM_GPUS = torch.cuda.device_count() if torch.version.cuda else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not NUM_GPUS, reason="this machine has no NVIDIA GPU, or this torch no CUDA"),
]


def run_out_of_gpu_memory() -> str:
    torch.ones(1, device="cuda")
    before_frac = torch.cuda.get_per_process_memory_fraction()
    try:
        strike(Fault(FaultKind.OOM, 0))
    except torch.OutOfMemoryError as error:
        assert torch.cuda.get_per_process_memory_fraction() == before_frac
        assert torch.ones(2 * HOARD_BYTES, dtype=torch.uint8, device="cuda")[0] == 1
        return str(error)
    raise AssertionError("there was memory enough")


def test_memory_of_a_gpu_that_runs_out_is_told_by_torch_and_is_there_again_afterwards() -> None:
    (told,) = run_ranks(run_out_of_gpu_memory, 1, has_group=False)

    assert "CUDA out of memory" in told
