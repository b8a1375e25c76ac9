"""A checkpoint of a state in a GPU's memory, of which each rank writes its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.checkpoint import Checkpointer, restore
from tests.support.gpus import needs_gpu
from tests.support.warm_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, 1024, device="cuda")).square().mean().backward()
    optimizer.step()


def save_and_restore(directory: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    make_step(model, optimizer)
    saved = [value.clone() for value in model.state_dict().values()]
    moments = [value["exp_avg"].clone() for value in optimizer.state.values()]
    with Checkpointer(directory) as checkpointer:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.cuda.get_rng_state()}
        checkpointer.save(1, state)
        make_step(model, optimizer)  # while it is written
        drawn = torch.rand(4, device="cuda")
        differs = not torch.equal(model.state_dict()["0.weight"], saved[0])
        found = checkpointer.load_latest()
        assert found is not None
        restore(found.state, {"model": model, "optimizer": optimizer})
        torch.cuda.set_rng_state(found.state["random"])
    restored = list(model.state_dict().values())
    return {
        "differs": differs,
        "on_gpu": all(value.is_cuda for value in restored),
        "model": all(map(torch.equal, restored, saved)),
        "optimizer": all(map(torch.equal, (value["exp_avg"] for value in optimizer.state.values()), moments)),
        "random": torch.equal(torch.rand(4, device="cuda"), drawn),
        "step": found.step,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_comes_back_into_the_gpu_s_memory(tmp_path: Any, world_size: int) -> None:
    for told in run_ranks(save_and_restore, world_size, str(tmp_path)):
        assert told == {"differs": True, "on_gpu": True, "model": True, "optimizer": True, "random": True, "step": 1}
