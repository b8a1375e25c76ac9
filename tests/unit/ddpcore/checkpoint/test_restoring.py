"""A state goes back into the objects it came from whole, or the differences are named and nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ddpcore.checkpoint import restore
from ddpcore.errors import ArgumentError, CheckpointMismatchError
from tests.support.training_states import is_same


class Schedule:
    """Like a scheduler, a scaler, a sampler: it checks its state itself, or not at all."""

    def __init__(self) -> None:
        self.loaded: Any = None
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def load_state_dict(self, state_dict: Any) -> None:
        if self.refuses:
            raise ValueError("a state of other data")
        self.loaded = state_dict


class Wrapped(nn.Module):
    """Names its model's parts as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Scaled(nn.Module):
    """Keeps scales as bytes from its first forward on, like TransformerEngine's layers."""

    def __init__(self, num_bytes: int, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), float(num_bytes)))
        self.scales = torch.ones(num_bytes, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor:
        return self.scales

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scales = state


class Factored(torch.optim.Optimizer):
    """Keeps a number for each row where torch's Adam keeps one for each element."""


def model(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width, dtype=dtype), nn.BatchNorm1d(width, dtype=dtype))


def trained(kind: Any = torch.optim.AdamW, width: int = 4) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    net = model(width)
    optimizer = kind(net.parameters(), lr=0.1)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def state_of(**objects: Any) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in objects.items()}


def differences(state: object, **objects: Any) -> list[str]:
    before = [
        (part, {k: v.clone() for k, v in part.state_dict().items()})
        for part in objects.values()
        if isinstance(part, nn.Module)
    ]
    with pytest.raises(CheckpointMismatchError) as told:
        restore(state, objects)
    for part, old in before:
        assert is_same(dict(part.state_dict()), old), "something has been loaded"
    return told.value.differences


def test_all_parts_come_back() -> None:
    net, optimizer = trained()
    state = {**state_of(model=net, optimizer=optimizer), "schedule": {"epoch": 3}, "step": 7}
    other, other_optimizer, schedule = model(), None, Schedule()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)

    restore(state, {"model": other, "optimizer": other_optimizer, "schedule": schedule})

    assert is_same(dict(other.state_dict()), dict(net.state_dict()))
    assert is_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert schedule.loaded == {"epoch": 3}


def test_a_state_is_as_good_the_second_time() -> None:
    net, optimizer = trained()
    state = copy.deepcopy(state_of(model=net, optimizer=optimizer))
    wanted = copy.deepcopy(state)

    restore(state, {"model": net, "optimizer": optimizer})
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()

    assert is_same(state, wanted), "training has changed what was loaded"


@pytest.mark.parametrize("saved_wrapped", [True, False])
@pytest.mark.parametrize("restored_wrapped", [True, False])
def test_the_wrapper_of_data_parallel_training_makes_no_difference(saved_wrapped: bool, restored_wrapped: bool) -> None:
    net, _ = trained()
    other = model()

    restore(
        state_of(model=Wrapped(net) if saved_wrapped else net), {"model": Wrapped(other) if restored_wrapped else other}
    )

    assert is_same(dict(other.state_dict()), dict(net.state_dict()))


def test_another_model_is_told_by_names_shapes_and_dtypes() -> None:
    net, _ = trained()
    state = state_of(model=net)
    state["model"]["extra"] = torch.zeros(1)
    del state["model"]["1.bias"]
    state["model"]["0.bias"] = state["model"]["0.bias"].double()

    assert differences(state, model=model(width=5)) == [
        "model.1.bias is missing from it",
        "model.extra is not in this model",
        "model.0.weight is float32 [4, 3] there and float32 [5, 3] here",
        "model.0.bias is float64 [4] there and float32 [5] here",
        "model.1.weight is float32 [4] there and float32 [5] here",
        "model.1.running_mean is float32 [4] there and float32 [5] here",
        "model.1.running_var is float32 [4] there and float32 [5] here",
    ]


def test_an_error_about_many_differences_stays_short() -> None:
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))

    with pytest.raises(
        CheckpointMismatchError, match=r"nothing has been loaded: .*; and 35 more\. Build the model as"
    ) as told:
        restore(state_of(model=model()), {"model": net})
    assert len(str(told.value)) < 700


def test_another_optimizer_is_told() -> None:
    net, optimizer = trained()
    two_groups = torch.optim.AdamW([{"params": [p]} for p in net.parameters()], lr=0.1)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    fewer = torch.optim.AdamW(list(net.parameters())[:3], lr=0.1)
    state = state_of(optimizer=optimizer)

    assert differences(state, optimizer=two_groups) == ["optimizer has 1 parameter groups there and 4 here"]
    assert differences(state, optimizer=fewer) == ["optimizer has 4 parameters in group 0 there and 3 here"]
    assert differences(state, optimizer=plain)[0].startswith(
        "optimizer is another kind of optimizer: group 0 has amsgrad, betas, "
    )
    wider = torch.optim.AdamW(model(width=6).parameters(), lr=0.1)
    assert differences(state, optimizer=wider)[0] == "optimizer keeps [4, 3] for parameter 0, which is [6, 3] here"
    malformed: list[Any] = [3, {"param_groups": [3], "state": {}}, {"param_groups": [{}], "state": {}}]
    for other in malformed:
        assert differences({"optimizer": other}, optimizer=plain) == ["optimizer is no optimizer's state"]


def test_what_cannot_be_loaded_into_is_refused() -> None:
    with pytest.raises(ArgumentError, match="net=3 makes no sense: give an object with state_dict"):
        restore({"net": {}}, {"net": 3})  # type: ignore[dict-item] # that is the point


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.RAdam, {}),
    ],
)
def test_what_any_optimizer_keeps_for_parameters_of_other_shapes_is_told(kind: Any, options: dict[str, float]) -> None:
    def updated(parameter: nn.Parameter) -> torch.optim.Optimizer:
        parameter.grad = torch.ones_like(parameter)
        optimizer: torch.optim.Optimizer = kind([parameter], lr=0.1, **options)
        optimizer.step()
        return optimizer

    state = state_of(optimizer=updated(nn.Parameter(torch.ones(4, 3))))
    other = updated(nn.Parameter(torch.ones(6, 2)))
    assert differences(state, optimizer=other) == ["optimizer keeps [4, 3] for parameter 0, which is [6, 2] here"]


def test_an_optimizer_that_is_not_torch_s_keeps_what_it_likes() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    optimizer, other = (Factored([parameter], {"lr": lr}) for lr in (0.1, 0.5))
    optimizer.state[parameter]["exp_avg"] = torch.ones(4, 1)

    assert restore(state_of(optimizer=optimizer), {"optimizer": other}).is_whole

    assert is_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_module_keeps_besides_tensors_may_have_another_size(strict: bool) -> None:
    net = nn.Sequential(Scaled(5), Scaled(0))

    assert restore(state_of(model=nn.Sequential(Scaled(0), Scaled(7))), {"model": net}, strict=strict).is_whole

    assert [len(part.scales) for part in net] == [0, 7]  # type: ignore[arg-type]
    assert net[1].weight.tolist() == [7.0] * 3  # type: ignore[operator]


def test_what_a_module_keeps_besides_tensors_makes_no_other_model_fit() -> None:
    with pytest.raises(CheckpointMismatchError, match="has nothing that model here could take"):
        restore(state_of(model=Scaled(7, width=4)), {"model": Scaled(0)}, strict=False)


def test_settings_that_a_newer_torch_has_added_are_no_difference() -> None:
    net, optimizer = trained()
    state = state_of(optimizer=optimizer)
    del state["optimizer"]["param_groups"][0]["foreach"]

    restore(state, {"optimizer": torch.optim.AdamW(net.parameters(), lr=0.1)})


def test_parts_that_are_not_there_are_named_with_what_is() -> None:
    assert differences({"net": {}, "step": 3}, model=model()) == ["model is not in it (it holds net, step)"]
    assert differences([1], model=model()) == ["it is of type list instead of named parts"]
    assert differences({"model": 3}, model=model()) == ["model is of type int, not a module's state"]
    assert differences({"model": {**model().state_dict(), "0.bias": 3}}, model=model()) == [
        "model.0.bias is of type int there and a tensor here"
    ]


def test_an_object_that_refuses_its_state_does_so_before_the_model_is_touched() -> None:
    net, _ = trained()
    schedule, other = Schedule(), model()
    schedule.refuses = True
    before = {key: value.clone() for key, value in other.state_dict().items()}

    with pytest.raises(ValueError, match="other data"):
        restore({**state_of(model=net), "schedule": {}}, {"model": other, "schedule": schedule})

    assert is_same(dict(other.state_dict()), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_objects_on_an_accelerator_stay_there() -> None:
    net, optimizer = trained()
    other = model().cuda()
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)

    restore(state_of(model=net, optimizer=optimizer), {"model": other, "optimizer": other_optimizer})

    assert all(parameter.is_cuda for parameter in other.parameters())
    assert all(kept["exp_avg"].is_cuda for kept in other_optimizer.state.values())
