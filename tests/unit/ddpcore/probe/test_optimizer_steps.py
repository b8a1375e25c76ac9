"""Steps of programs that report none: what counts as one."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.probe import progress
from ddpcore.probe.bootstrap import watch_optimizers
from ddpcore.probe.progress import OptimizerSteps

if TYPE_CHECKING:
    from collections.abc import Iterator


def counted(*optimizers: int) -> int:
    steps = OptimizerSteps()
    for optimizer in optimizers:
        steps.note(optimizer)
    return steps.num_steps


@pytest.mark.parametrize(
    ("optimizers", "num_steps"),
    [
        ((1, 1, 1), 3),
        ((1, 2, 1, 2, 1, 2), 3),
        ((1, 1, 1, 2, 1, 1, 1, 2), 6),
        ((1, 2, 3, 3, 2, 1), 2),
        ((1, 1, 7, 7, 7), 4),
    ],
    ids=["one optimizer", "two in turns", "one three times as often", "any order", "one replaces another"],
)
def test_a_step_begins_when_an_optimizer_comes_round_again(optimizers: tuple[int, ...], num_steps: int) -> None:
    assert counted(*optimizers) == num_steps


@given(st.integers(1, 20), st.permutations(range(6)))
def test_optimizers_that_all_step_once_make_one_step_a_round(num_rounds: int, order: list[int]) -> None:
    assert counted(*order * num_rounds) == num_rounds


@given(st.lists(st.integers(0, 5)))
def test_never_more_steps_than_any_optimizer_has_made_together_and_never_fewer_than_the_busiest(
    order: list[int],
) -> None:
    busiest = max((order.count(optimizer) for optimizer in order), default=0)

    assert min(busiest, 1) <= counted(*order) <= len(order)
    if len(set(order)) == 1:
        assert counted(*order) == busiest


def test_a_program_that_makes_optimizers_without_end_costs_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_OPTIMIZERS", 10)
    steps = OptimizerSteps()

    for optimizer in range(1000):
        steps.note(optimizer)

    assert len(steps._stepped) <= 10


@pytest.fixture
def heard() -> Iterator[list[int]]:
    module: Any = sys.modules["torch.optim.optimizer"]
    before = dict(module._global_optimizer_post_hooks)
    ids: list[int] = []
    assert watch_optimizers(ids.append)
    yield ids
    module._global_optimizer_post_hooks.clear()
    module._global_optimizer_post_hooks.update(before)


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.ones(2)
    return made


def test_every_kind_of_step_is_heard_and_nothing_is_kept_alive(heard: list[int]) -> None:
    weights = parameter()
    sgd = torch.optim.SGD([weights], lr=0.1)
    lbfgs: Any = torch.optim.LBFGS([parameter()])

    sgd.step()
    lbfgs.step(lambda: 1.0)

    assert heard == [id(sgd), id(lbfgs)]
    gone: list[weakref.ref[Any]] = [weakref.ref(sgd), weakref.ref(weights)]
    del sgd, weights
    gc.collect()
    assert not any(one() for one in gone)


def test_a_scaler_that_skips_a_step_is_not_heard(heard: list[int]) -> None:
    weights = parameter()
    sgd = torch.optim.SGD([weights], lr=0.1)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0)

    for gradient in (1.0, float("inf"), 1.0):
        loss: Any = (weights * gradient).sum()
        sgd.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()

    assert len(heard) == 2


class Plain(torch.optim.Optimizer):
    """An optimizer that torch.compile can trace whole."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in group["params"]:
                weights.data.add_(weights.grad, alpha=-0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_step_inside_a_compiled_program_is_not_heard_and_not_disturbed(heard: list[int]) -> None:
    weights = parameter()
    plain = Plain([weights])
    step = torch.compile(plain.step, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()

    for _ in range(20):
        step()

    assert weights.tolist() == pytest.approx([-1.0, -1.0])
    assert heard == []
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_torch_without_such_hooks_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.optim.optimizer")

    assert not watch_optimizers(lambda _: None)
