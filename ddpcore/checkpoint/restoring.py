"""A loaded state put back into the objects it came from: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn, optim

from ddpcore.checkpoint.sharded import as_placed, is_sharded
from ddpcore.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.tensor import DTensor

_WRAPPER = "module."
"""What DistributedDataParallel puts before every name of its model."""


class Stateful(Protocol):
    """A model, an optimizer, a schedule: whatever can be saved and set back."""

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Set it back."""


def restore(state: object, objects: Mapping[str, Stateful]) -> None:
    """Load each object's part of a checkpoint into it, on whatever device it is. Blocks, needs no other rank.

    Everything that can be compared is compared first: names, shapes and dtypes of modules, sizes and kinds of
    optimizers' groups. So a checkpoint of another model changes nothing. Objects that only check their state themselves
    are loaded before modules and optimizers.

    A module may be wrapped in DistributedDataParallel here, there or both, and its parameters be sharded (DTensor)
    here, there, differently, or not at all: each rank takes its rows of them and of the optimizer's moments.

    Args:
        state: What was saved, a dict.
        objects: By their keys in the state. Parts of the state that are not asked for stay out.

    Raises:
        CheckpointMismatchError: The state is of other objects; nothing has been loaded.
    """
    if not isinstance(state, dict):
        raise CheckpointMismatchError([f"it is of type {type(state).__name__} instead of named parts"])
    if not isinstance(objects, Mapping):
        raise CheckpointMismatchError([f"the objects are of type {type(objects).__name__} instead of named ones"])
    differences, parts = [], {}
    for name, target in objects.items():
        if name not in state:
            differences.append(f"{name} is not in it (it holds {', '.join(map(str, state)) or 'nothing'})")
            continue
        parts[name] = _unwrapped(state[name], target) if isinstance(target, nn.Module) else state[name]
        differences += _compare(name, parts[name], target)
    if differences:
        raise CheckpointMismatchError(differences)
    parts = {name: _fitted(part, objects[name]) for name, part in parts.items()}
    for name, target in sorted(objects.items(), key=lambda item: isinstance(item[1], nn.Module | optim.Optimizer)):
        target.load_state_dict(parts[name])


def _compare(name: str, part: Any, target: Stateful) -> Iterator[str]:
    if isinstance(target, nn.Module):
        yield from _compare_module(name, part, target)
    elif isinstance(target, optim.Optimizer):
        yield from _compare_optimizer(name, part, target)


def _fitted(part: Any, target: Stateful) -> Any:
    if isinstance(target, nn.Module):
        return _placed(part, target)
    return _own_copy(part, target) if isinstance(target, optim.Optimizer) else part


def _own_copy(part: object, optimizer: optim.Optimizer) -> Any:
    """Return an optimizer's part with tensors of its own, where torch would have it work on the given ones.

    Source: torch.optim.Optimizer.load_state_dict keeps what is on the parameter's device already, and every step count.
    """
    parameters = _parameters_of(optimizer)
    is_on_cpu = any(parameter.device.type == "cpu" for parameter in parameters)

    def copy(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node.clone() if is_on_cpu or node.dim() == 0 else node
        if isinstance(node, dict):
            return {key: copy(value) for key, value in node.items()}
        return [copy(value) for value in node] if isinstance(node, list) else node

    own = copy(part)
    for index, parameter in zip(_order_in(own), parameters, strict=False):
        kept = own["state"].get(index)
        if is_sharded(parameter) and isinstance(kept, dict):
            own["state"][index] = {key: _like(value, parameter) for key, value in kept.items()}
    return own


def _placed(part: Any, module: nn.Module) -> Any:
    """Return a module's part with its tensors sharded as the module's are."""
    wanted = {name: value for name, value in module.state_dict().items() if is_sharded(value)}
    if not wanted:
        return part
    placed = part.copy()
    if hasattr(part, "_metadata"):
        placed._metadata = part._metadata  # noqa: SLF001 - torch keeps the versions of a module's parts there
    for name, target in wanted.items():
        placed[name] = _like(part[name], target)
    return placed


def _like(value: Any, target: DTensor) -> Any:
    """Return a whole tensor of a sharded one's shape as it is sharded; anything else as it is."""
    if isinstance(value, Tensor) and value.shape == target.shape:
        return as_placed(value, target)
    return value


def _parameters_of(optimizer: optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _order_in(part: Mapping[str, Any]) -> list[Any]:
    """Return the keys of an optimizer's saved state in the order of its parameters."""
    return [index for group in part["param_groups"] for index in group.get("params", ())]


def _unwrapped(part: object, module: nn.Module) -> object:
    """Return a module's part with the names that this module gives, where only the wrapper's prefix differs."""
    if not isinstance(part, dict):
        return part
    wanted = list(module.state_dict())
    if not wanted or not part or set(part) == set(wanted):
        return part
    if all(name.startswith(_WRAPPER) for name in wanted) and not any(_is_wrapped(name) for name in part):
        return {f"{_WRAPPER}{name}": value for name, value in part.items()}
    if all(_is_wrapped(name) for name in part) and not any(name.startswith(_WRAPPER) for name in wanted):
        return {name.removeprefix(_WRAPPER): value for name, value in part.items()}
    return part


def _is_wrapped(name: object) -> bool:
    return isinstance(name, str) and name.startswith(_WRAPPER)


def _compare_module(name: str, part: object, module: nn.Module) -> Iterator[str]:
    if not isinstance(part, dict):
        yield f"{name} is of type {type(part).__name__}, not a module's state"
        return
    wanted = module.state_dict()
    yield from (f"{name}.{key} is missing from it" for key in wanted if key not in part)
    yield from (f"{name}.{key} is not in this model" for key in part if key not in wanted)
    for key, tensor in wanted.items():
        saved = part.get(key)
        if not isinstance(tensor, Tensor) or key not in part:
            continue
        if not isinstance(saved, Tensor):
            yield f"{name}.{key} is of type {type(saved).__name__} there and a tensor here"
        elif (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            yield f"{name}.{key} is {_kind(saved)} there and {_kind(tensor)} here"


def _compare_optimizer(name: str, part: object, optimizer: optim.Optimizer) -> Iterator[str]:
    if not (
        isinstance(part, dict) and isinstance(part.get("param_groups"), list) and isinstance(part.get("state"), dict)
    ):
        yield f"{name} is no optimizer's state"
        return
    saved, own = part["param_groups"], optimizer.state_dict()["param_groups"]
    if len(saved) != len(own):
        yield f"{name} has {len(saved)} parameter groups there and {len(own)} here"
        return
    for number, (there, here) in enumerate(zip(saved, own, strict=True)):
        sizes = len(there.get("params", ())), len(here["params"])
        if sizes[0] != sizes[1]:
            yield f"{name} has {sizes[0]} parameters in group {number} there and {sizes[1]} here"
        # A newer torch may know more settings, or fewer. Each having what the other lacks, they are different
        # optimizers.
        lacking, unknown = here.keys() - there.keys(), there.keys() - here.keys()
        if lacking and unknown:
            yield (
                f"{name} is another kind of optimizer: group {number} has {', '.join(sorted(unknown))} there, "
                f"{', '.join(sorted(lacking))} here"
            )
    yield from _compare_moments(name, part, optimizer)


def _compare_moments(name: str, part: Mapping[str, Any], optimizer: optim.Optimizer) -> Iterator[str]:
    """Compare what an optimizer keeps for each parameter, where it has the parameter's number of elements or one."""
    for index, parameter in zip(_order_in(part), _parameters_of(optimizer), strict=False):
        kept = part["state"].get(index, {})
        moment = kept.get("exp_avg") if isinstance(kept, dict) else None
        if isinstance(moment, Tensor) and moment.shape != parameter.shape:
            yield f"{name} keeps {list(moment.shape)} for parameter {index}, which is {list(parameter.shape)} here"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
