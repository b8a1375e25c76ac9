"""Whatever the weights, their kinds and the number of micro-batches: an update's gradient is their weighted mean."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.engine.batches import MicroBatch
from ddpcore.engine.loss_weights import LossWeights

weights = st.one_of(st.integers(0, 10**6), st.floats(1e-6, 1e9))
kinds = st.sampled_from([float, torch.tensor, lambda value: torch.tensor(value, dtype=torch.float64)])
micro_batches = st.lists(st.tuples(weights, kinds, st.floats(-10, 10), st.booleans()), min_size=1, max_size=6)
dtypes = st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])


@pytest.mark.parametrize("is_on_host", [True, False], ids=["host", "as on an accelerator"])
@given(updates=st.lists(micro_batches, min_size=1, max_size=4), dtype=dtypes)
def test_an_updates_gradient_is_the_weighted_mean(
    updates: list[list[tuple[float, type, float, bool]]], dtype: tuple[torch.dtype, float], *, is_on_host: bool
) -> None:
    own = LossWeights(torch.device("cpu"), 1, None, 1.0, is_on_host=is_on_host)
    kind, accuracy = dtype
    for parts in updates:
        parameter = torch.zeros(2, dtype=kind, requires_grad=True)
        total = magnitude = weight_sum = 0.0
        for number, (given_weight, as_kind, given_slope, is_stand_in) in enumerate(parts):
            slope = float(torch.tensor(given_slope, dtype=kind))
            brought = as_kind(given_weight)
            weight = 0.0 if is_stand_in else float(brought)
            loss = (parameter * slope).sum()
            part = MicroBatch(None, 1.0, int(not is_stand_in), is_last=number == len(parts) - 1)
            own.apply(loss.float() if kind == torch.bfloat16 else loss, brought, part).backward()  # type: ignore[no-untyped-call]
            total, magnitude, weight_sum = total + weight * slope, magnitude + weight * abs(slope), weight_sum + weight
        assert parameter.grad is not None
        own.scale_gradients([parameter.grad])
        own.finish_step(has_updated=True, has_stepped=True)
        expected = total / weight_sum if weight_sum else 0.0
        tolerance = accuracy * (magnitude / weight_sum if weight_sum else 0.0) + 1e-30
        assert abs(float(parameter.grad[0]) - expected) <= tolerance
