"""What of a checkpoint fits the objects here, and what does not, object by object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn, optim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_SHAPED_AS_PARAMETER = ("exp_avg", "momentum_buffer", "square_avg", "sum", "prev", "ax")
"""What torch's optimizers keep in the shape of a parameter, one name for each kind of optimizer."""


class Fit(NamedTuple):
    """How a checkpoint's parts fit the objects that they are loaded into.

    Attributes:
        missing: Places of the objects that the checkpoint lacks, "model.head.weight" or a whole object's name.
        unexpected: Places of the checkpoint's parts that the objects lack.
        mismatched: What is of another shape, dtype or kind there and here, a sentence each.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if every part of the checkpoint has its place, and the other way round."""
        return not any(self)

    @property
    def differences(self) -> list[str]:
        """All that does not fit, a sentence each."""
        return [
            *(f"{place} is missing from it" for place in self.missing),
            *(f"{place} is not in this model" for place in self.unexpected),
            *self.mismatched,
        ]


def fit_object(name: str, part: object, target: object) -> Fit:
    """Return how an object's part of a checkpoint fits it; objects that are no module or optimizer check themselves."""
    if isinstance(target, nn.Module):
        return _fit_module(name, part, target)
    if isinstance(target, optim.Optimizer):
        return Fit(mismatched=tuple(_compare_optimizer(name, part, target)))
    return Fit()


def join_fits(fits: Sequence[Fit]) -> Fit:
    """Return the fits of several objects as one."""
    missing, unexpected, mismatched = (tuple(place for fit in fits for place in fit[kind]) for kind in range(3))
    return Fit(missing, unexpected, mismatched)


def is_same_kind(saved: object, wanted: object) -> bool:
    """Say whether a module can take what was saved in place of what it has."""
    if not isinstance(wanted, Tensor):
        return True
    # What is loaded into a meta tensor is lost without an error.
    is_alike = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (wanted.shape, wanted.dtype)
    return is_alike and not wanted.is_meta


def parameters_of(optimizer: optim.Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def order_in(part: Mapping[str, Any]) -> list[Any]:
    """Return the keys of an optimizer's saved state in the order of its parameters."""
    return [index for group in part["param_groups"] for index in group.get("params", ())]


def _fit_module(name: str, part: object, module: nn.Module) -> Fit:
    if not isinstance(part, dict):
        return Fit(mismatched=(f"{name} is of type {type(part).__name__}, not a module's state",))
    wanted = module.state_dict()
    return Fit(
        tuple(f"{name}.{key}" for key in wanted if key not in part),
        tuple(f"{name}.{key}" for key in part if key not in wanted),
        tuple(
            _difference(f"{name}.{key}", part[key], tensor)
            for key, tensor in wanted.items()
            if key in part and not is_same_kind(part[key], tensor)
        ),
    )


def _difference(place: str, saved: object, wanted: Tensor) -> str:
    if not isinstance(saved, Tensor):
        return f"{place} is of type {type(saved).__name__} there and a tensor here"
    if wanted.is_meta:
        return f"{place} is a meta tensor here, which takes no values (module.to_empty gives it memory)"
    return f"{place} is {_kind(saved)} there and {_kind(wanted)} here"


def _compare_optimizer(name: str, part: object, optimizer: optim.Optimizer) -> list[str]:
    if not (
        isinstance(part, dict) and isinstance(part.get("param_groups"), list) and isinstance(part.get("state"), dict)
    ):
        return [f"{name} is no optimizer's state"]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in part["param_groups"]):
        return [f"{name} is no optimizer's state"]
    saved, own = part["param_groups"], optimizer.state_dict()["param_groups"]
    if len(saved) != len(own):
        return [f"{name} has {len(saved)} parameter groups there and {len(own)} here"]
    found = []
    for number, (there, here) in enumerate(zip(saved, own, strict=True)):
        sizes = len(there["params"]), len(here["params"])
        if sizes[0] != sizes[1]:
            found.append(f"{name} has {sizes[0]} parameters in group {number} there and {sizes[1]} here")
        # A newer torch may know more settings, or fewer. Each having what the other lacks, they are different
        # optimizers.
        lacking, unknown = here.keys() - there.keys(), there.keys() - here.keys()
        if lacking and unknown:
            found.append(
                f"{name} is another kind of optimizer: group {number} has {', '.join(sorted(unknown))} there, "
                f"{', '.join(sorted(lacking))} here"
            )
    return [*found, *_compare_moments(name, part, optimizer)]


def _compare_moments(name: str, part: Mapping[str, Any], optimizer: optim.Optimizer) -> list[str]:
    """Compare the shape of what one of torch's optimizers keeps for each parameter."""
    found = []
    for index, parameter in zip(order_in(part), parameters_of(optimizer), strict=False):
        kept = part["state"].get(index, {})
        for key in _SHAPED_AS_PARAMETER if isinstance(kept, dict) else ():
            moment = kept.get(key)
            if isinstance(moment, Tensor) and moment.shape != parameter.shape:
                found.append(
                    f"{name} keeps {list(moment.shape)} for parameter {index}, which is {list(parameter.shape)} here"
                )
                break
    return found


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
