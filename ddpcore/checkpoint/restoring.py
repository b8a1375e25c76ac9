"""Puts a loaded state back into the objects it came from: all of it, or nothing.

`restore` does it. `Fit` and `fit_object` compare first, object by object: what of a checkpoint fits the objects here,
and what does not.

`Rows` and the functions below it handle tensors of which each rank holds some rows: torch's DTensor, as `fully_shard`
makes it. A checkpoint keeps every tensor as rows in the files of several ranks anyway, so that a sharded one needs no
format of its own: it can be loaded whole, and onto any other number of ranks. torch.distributed.checkpoint would do
this too, but keeps the plan of it as pickle. Only sharding along the first dimension is rows. Importing DTensor takes
as long as the rest of this package: a program without DTensors never imports it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

from torch import Tensor, nn, optim

from ddpcore.arguments import check_flag, check_has
from ddpcore.checkpoint.formats import num_rows
from ddpcore.errors import ArgumentError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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

    `saved` are the names of all parts that were saved, which an error lists; None where `state` has them all.
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
        differences = [
            difference
            for name, part in parts.items()
            if not fits[name].is_whole
            for difference in _refusal(name, part, objects[name])
        ]
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
        if key not in wanted or not _is_loadable(key, part[key], wanted[key]):
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


_SHAPED_AS_PARAMETER = ("exp_avg", "momentum_buffer", "square_avg", "sum", "prev", "ax")
"""What torch's optimizers keep in the shape of a parameter, one name for each kind of optimizer."""


class Fit(NamedTuple):
    """How a checkpoint's parts fit the objects that they are loaded into.

    Attributes:
        missing: Places of the objects that are not in the checkpoint, "model.head.weight" or a whole object's name.
        unexpected: Places of the checkpoint's parts that are not in the objects.
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
    """Return whether a module can take what was saved in place of what it has."""
    if not isinstance(wanted, Tensor):
        return True
    # What is loaded into a meta tensor is lost without an error.
    is_alike = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (wanted.shape, wanted.dtype)
    return is_alike and not wanted.is_meta


def _is_loadable(key: str, saved: object, wanted: object) -> bool:
    """Return whether a module can take what was saved under a name; its own extra state it checks itself."""
    return key.rpartition(".")[2] == "_extra_state" or is_same_kind(saved, wanted)


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
            if key in part and not _is_loadable(key, part[key], tensor)
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
        absent, unknown = here.keys() - there.keys(), there.keys() - here.keys()
        if absent and unknown:
            found.append(
                f"{name} is another kind of optimizer: group {number} has {', '.join(sorted(unknown))} there, "
                f"{', '.join(sorted(absent))} here"
            )
    return [*found, *_compare_moments(name, part, optimizer)]


def _compare_moments(name: str, part: Mapping[str, Any], optimizer: optim.Optimizer) -> list[str]:
    """Compare the shape of what one of torch's optimizers keeps for each parameter; others keep what they like."""
    found: list[str] = []
    if not type(optimizer).__module__.startswith("torch.optim."):
        return found
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


_MODULE = "torch.distributed.tensor"


class Rows(NamedTuple):
    """Rows of a tensor, and a rank that holds them."""

    rank: int
    begin: int
    end: int


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether something is a DTensor: what a rank holds of it is `to_local()`."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def problem_of(tensor: DTensor) -> str:
    """Return why what ranks hold of a tensor is not rows of it, or ""."""
    for placement in tensor.placements:
        if not (placement.is_replicate() or _is_rows(placement)):
            return (
                f"is placed as {placement}: only replicated tensors and ones sharded along dimension 0 can be stored; "
                "gather it first, with full_state_dict=True of torch.distributed.checkpoint.state_dict"
            )
    return ""


def holders(tensor: DTensor, ranks: Sequence[int]) -> list[Rows] | None:
    """Return which rank is to write which rows: all of them once, in order. The same on every rank.

    For each range of rows it is the first of these sorted ranks that holds it; None if some rows are with no such rank.
    """
    mesh = tensor.device_mesh
    cuts = tuple(_is_rows(placement) for placement in tensor.placements)
    return _holders(num_rows(tensor.shape), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), cuts, tuple(ranks))


@lru_cache(maxsize=256)
def _holders(
    num: int, mesh_shape: tuple[int, ...], mesh_ranks: tuple[int, ...], cuts: tuple[bool, ...], ranks: tuple[int, ...]
) -> list[Rows] | None:
    """Return what `holders` does; a model has few different numbers of rows, and a mesh may have thousands of ranks."""
    writers = frozenset(ranks)
    found: dict[tuple[int, int], int] = {}
    for rank, coordinate in zip(mesh_ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        if rank in writers:
            rows = cut_rows(num, mesh_shape, coordinate, cuts)
            found[rows] = min(rank, found.get(rows, rank))
    if not found:
        return None
    wanted = [Rows(rank, *rows) for rows, rank in sorted(found.items()) if rows[0] < rows[1]]
    ends = [0, *(rows.end for rows in wanted)]
    if ends[-1] != num or any(rows.begin != end for rows, end in zip(wanted, ends, strict=False)):
        return None
    return wanted or [Rows(min(found.values()), 0, 0)]


def cut_rows(num: int, mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[bool]) -> tuple[int, int]:
    """Return the first row at a place of a mesh and the one behind its last, where rows are cut as `torch.chunk` does.

    `cuts` has for each dimension of the mesh whether it cuts rows, each cutting what the one before has left.
    """
    begin, end = 0, num
    for size, number, is_cut in zip(mesh_shape, coordinate, cuts, strict=True):
        if is_cut:
            chunk = -(-(end - begin) // size)
            begin, end = min(begin + number * chunk, end), min(begin + (number + 1) * chunk, end)
    return begin, end


def as_placed(whole: Tensor, target: DTensor) -> Tensor:
    """Return this rank's part of a whole tensor, placed and sharded as another one is. Needs no other rank."""
    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None, "the rank has this tensor, and so a place in its mesh"
    local = whole
    if whole.dim():
        cuts = [_is_rows(placement) for placement in target.placements]
        begin, end = cut_rows(num_rows(whole.shape), target.device_mesh.shape, coordinate, cuts)
        local = whole[begin:end]
    placed: Tensor = sys.modules[_MODULE].DTensor.from_local(
        local.to(target.device, copy=True),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
    return placed


def _is_rows(placement: Any) -> bool:
    # A subclass, as of tensor parallelism within a shard, cuts rows in another order.
    return type(placement).__name__ == "Shard" and placement.dim == 0
