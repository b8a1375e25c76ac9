from __future__ import annotations

import pytest
import torch
from torch import nn

from ddpcore.engine.updates import moving_average


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("index", torch.arange(5000))
        self.register_buffer("mean", torch.zeros(2))


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_numbers_are_averaged_and_whole_ones_copied(decay: float) -> None:
    model = Indexed()
    average = moving_average(model, decay)
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(1.0)
        model.get_buffer("mean").add_(2.0)
    average.update_parameters(model)

    state = average.module.state_dict()
    assert state["weight"].tolist() == pytest.approx([1 - decay] * 3, rel=1e-3)
    assert state["mean"].tolist() == pytest.approx([2 * (1 - decay)] * 2, rel=1e-3)
    assert torch.equal(state["index"], model.get_buffer("index"))
