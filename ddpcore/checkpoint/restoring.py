"""A loaded state put back into the objects it came from: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn, optim

from ddpcore.arguments import check_flag, check_has
from ddpcore.checkpoint.fitting import Fit, fit_object, is_same_kind, join_fits, order_in, parameters_of
from ddpcore.checkpoint.sharded import as_placed, is_sharded
from ddpcore.errors import ArgumentError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.distributed.tensor import DTensor

_WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before every name of their model."""


class Stateful(Protocol):
    """A model, an optimizer, a schedule: whatever can be saved and set back."""

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Set it back."""


def restore(state: object, objects: Mapping[str, Stateful], *, strict: bool = True) -> Fit:
    """Load each object's part of a checkpoint into it, on whatever device it is. Blocks, needs no other rank.

    Everything that can be compared is compared first: names, shapes and dtypes of modules, sizes and kinds of
    optimizers' groups. So a checkpoint of another model changes nothing. Objects that only check their state themselves
    are loaded before modules and optimizers.

    A module may be wrapped in DistributedDataParallel or compiled here, there or both, and its parameters be sharded
    (DTensor) here, there, differently, or not at all: each rank takes its rows of them and of the optimizer's moments.

    Args:
        state: What was saved, a dict.
        objects: By their keys in the state. Parts of the state that are not asked for stay out.
        strict: False loads what fits: the tensors of a module that have their name, shape and dtype there, and objects
            that are there. An optimizer is loaded as a whole or not at all.

    Returns:
        What fits and what does not; with `strict` it is whole.

    Raises:
        CheckpointMismatchError: The state is of other objects; or, without `strict`, a module finds none of its tensors
            in its part. Nothing has been loaded.
    """
    if not isinstance(objects, Mapping):
        raise CheckpointMismatchError([f"the objects are of type {type(objects).__name__} instead of named ones"])
    for name, one in objects.items():
        members = ("state_dict", "load_state_dict")
        check_has(ArgumentError, str(name), one, members, "an object with state_dict and load_state_dict")
    check_flag(ArgumentError, "strict", strict)
    return restore_parts(state, objects, strict=strict)


def restore_parts(
    state: object, objects: Mapping[str, Stateful], *, strict: bool, saved: Collection[str] | None = None
) -> Fit:
    """Do as `restore`, with some parts of a state.

    Args:
        state: The parts.
        objects: As of `restore`.
        strict: As of `restore`.
        saved: Names of all parts that were saved, which an error lists; None where `state` has them all.

    Raises:
        CheckpointMismatchError: As of `restore`.
    """
    if not isinstance(state, dict):
        raise CheckpointMismatchError([f"it is of type {type(state).__name__} instead of named parts"])
    parts = {
        name: _unwrapped(state[name], target) if isinstance(target, nn.Module) else state[name]
        for name, target in objects.items()
        if name in state
    }
    fits = {
        name: fit_object(name, parts[name], target) if name in parts else Fit(missing=(str(name),))
        for name, target in objects.items()
    }
    if strict:
        holds = ", ".join(map(str, state if saved is None else saved)) or "nothing"
        differences = [f"{name} is not in it (it holds {holds})" for name in objects if name not in parts]
        differences += [difference for name in parts for difference in fits[name].differences]
    else:
        differences = [difference for name, part in parts.items() for difference in _refusal(name, part, objects[name])]
    if differences:
        raise CheckpointMismatchError(differences)
    loadable = {
        name: _fitted(part, objects[name], is_whole=fits[name].is_whole)
        for name, part in parts.items()
        if fits[name].is_whole or isinstance(objects[name], nn.Module)
    }
    for name in sorted(loadable, key=lambda name: isinstance(objects[name], nn.Module | optim.Optimizer)):
        _load(loadable[name], objects[name], strict=strict)
    return join_fits([*fits.values()])


def _refusal(name: str, part: object, target: Stateful) -> list[str]:
    """Return why nothing of a part can be loaded into a module, which is a wrong name rather than a changed model."""
    wanted = target.state_dict() if isinstance(target, nn.Module) else {}
    if not wanted or (
        isinstance(part, dict) and any(is_same_kind(part[key], wanted[key]) for key in wanted if key in part)
    ):
        return []
    holds = ", ".join(map(str, part)) if isinstance(part, dict) else ""
    return [f"{name} there has nothing that {name} here could take (it holds {holds[:200] or 'nothing'})"]


def _load(part: Any, target: Stateful, *, strict: bool) -> None:
    if isinstance(target, nn.Module) and not strict:
        target.load_state_dict(part, strict=False)
    else:
        target.load_state_dict(part)


def _fitted(part: Any, target: Stateful, *, is_whole: bool) -> Any:
    if isinstance(target, nn.Module):
        return _placed(part if is_whole else _kept(part, target), target)
    return _own_copy(part, target) if isinstance(target, optim.Optimizer) else part


def _kept(part: Any, module: nn.Module) -> Any:
    """Return what a module can take of a part."""
    wanted = module.state_dict()
    kept = part.copy()
    if hasattr(part, "_metadata"):
        kept._metadata = part._metadata  # noqa: SLF001 - torch keeps the versions of a module's parts there
    for key in part:
        if key not in wanted or not is_same_kind(part[key], wanted[key]):
            del kept[key]
    return kept


def _own_copy(part: object, optimizer: optim.Optimizer) -> Any:
    """Return an optimizer's part with tensors of its own, where torch would have it work on the given ones.

    Source: torch.optim.Optimizer.load_state_dict keeps what is on the parameter's device already, and every step count.
    """
    parameters = parameters_of(optimizer)
    devices = {parameter.device for parameter in parameters}

    def copy(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node.clone() if node.device in devices or node.dim() == 0 else node
        if isinstance(node, dict):
            return {key: copy(value) for key, value in node.items()}
        return [copy(value) for value in node] if isinstance(node, list) else node

    own = copy(part)
    for index, parameter in zip(order_in(own), parameters, strict=False):
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
        if name in part:
            placed[name] = _like(part[name], target)
    return placed


def _like(value: Any, target: DTensor) -> Any:
    """Return a whole tensor of a sharded one's shape as it is sharded; anything else as it is."""
    if isinstance(value, Tensor) and value.shape == target.shape:
        return as_placed(value, target)
    return value


def _unwrapped(part: object, module: nn.Module) -> object:
    """Return a module's part with the names that this module gives, where only wrappers' prefixes differ."""
    if not isinstance(part, dict):
        return part
    wanted = module.state_dict()
    saved, own = _prefix_of(part), _prefix_of(wanted)
    if saved == own or not wanted or set(part) == set(wanted):
        return part
    return {own + name.removeprefix(saved): value for name, value in part.items()}


def _prefix_of(names: Collection[object]) -> str:
    """Return what wrappers have put before all of these names."""
    prefix = ""
    while names:
        longer = [f"{prefix}{one}" for one in _WRAPPERS if all(str(name).startswith(prefix + one) for name in names)]
        if not longer:
            break
        prefix = longer[0]
    return prefix
