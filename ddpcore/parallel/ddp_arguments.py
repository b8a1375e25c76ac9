"""DistributedDataParallel's arguments: typed, with chosen defaults, on whichever torch is installed."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcore.arguments import check_flag, check_number, check_whole, refuse
from ddpcore.errors import WrapError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

_KNOWN = {name: it for name, it in inspect.signature(DistributedDataParallel).parameters.items() if name != "module"}
"""What the installed torch takes: asked of itself, since versions are patched and built by others."""

_PER_RANK = frozenset({"device_ids", "output_device", "process_group", "device_mesh"})
"""What may differ between ranks, or cannot be written down."""

MAX_BUCKET_MB = 1e9

_FLAGS = frozenset(
    {
        "init_sync",
        "find_unused_parameters",
        "check_reduction",
        "gradient_as_bucket_view",
        "static_graph",
        "skip_all_reduce_unused_params",
        "batched_grad_copy",
    }
)
_OPTIONAL_FLAGS = frozenset({"broadcast_buffers", "forward_sync_buffers"})


class DdpArguments(TypedDict, total=False):
    """DistributedDataParallel's arguments as of torch 2.13, with what `wrap` gives where the caller gives nothing.

    An argument that the installed torch does not have is refused by name.

    Attributes:
        device_ids: The model's device if it is on one accelerator (inputs are then moved there), else None.
        output_device: `device_ids[0]`.
        dim: 0.
        broadcast_buffers: Not given: the old name of forward_sync_buffers, deprecated in 2.13, where False also leaves
            buffers out of the first synchronisation. Give one of the two.
        init_sync: True: ranks begin with rank 0's parameters and buffers. False only where something else has seen to
            equal weights, such as a loaded checkpoint: DDP never compares values again.
        process_group: All ranks.
        bucket_cap_mb: 25: bigger buckets are fewer collectives, smaller ones overlap earlier with backward.
        find_unused_parameters: False: True walks the graph in every step. Without it a parameter without a gradient
            is an error in the next forward, to which `wrap` adds the names.
        check_reduction: Not given: without effect for years, deprecated.
        gradient_as_bucket_view: True, unlike torch's: gradients live in the buckets that are sent. It saves one copy
            of all gradients in memory and time. A program that calls `detach_()` on gradients must turn it off.
        static_graph: False: True is faster with unused parameters and allows re-entrant checkpointing, but every step
            must use the same parameters in the same way. `_get_ddp_logging_data()["can_set_static_graph"]` of a run
            without it shows that. `accumulate` sees to it that the first backward is a synchronised one, without which
            torch 2.13 fails an internal assertion.
        delay_all_reduce_named_params: None; a pair with the next. DDP itself then ignores these parameters.
        param_to_hook_all_reduce: None.
        mixed_precision: None: torch's private native mixed precision; autocast is the public way.
        device_mesh: None; of one dimension, instead of process_group.
        skip_all_reduce_unused_params: False: True hangs as soon as ranks leave different parameters unused.
        bucket_cap_mb_list: None: a capacity for each bucket, the first to be sent first.
        batched_grad_copy: False: True copies gradients into their bucket in one kernel, for many small parameters.
        forward_sync_buffers: True: rank 0's buffers (BatchNorm's statistics) go to all in the first forward after a
            training step, which evaluation on uneven shares must avoid: evaluate `unwrap(model)`. Costs nothing for
            models without buffers. False lets each rank keep its own; a checkpoint then has rank 0's of at most 64 KiB,
            and of larger ones some rows of each rank's: keep those equal, or save them as `per_rank`.
    """

    device_ids: Sequence[int | torch.device] | None
    output_device: int | torch.device | None
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: dist.ProcessGroup | None
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None
    param_to_hook_all_reduce: nn.Parameter | None
    mixed_precision: object
    device_mesh: DeviceMesh | None
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | list[float] | None
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


def supported(arguments: Mapping[str, Any], known: Collection[str] = _KNOWN) -> dict[str, Any]:
    """Return what to give to DDP's constructor: the caller's arguments over this module's defaults.

    `known` are the names that the constructor of the installed torch has. Raises WrapError if an argument does not
    exist, or two contradict each other.
    """
    for name, value in arguments.items():
        if name in known or name == "forward_sync_buffers":
            _check(name, value)
            continue
        if name in DdpArguments.__annotations__:
            raise WrapError(
                f"DistributedDataParallel of torch {torch.__version__} has no argument {name!r}: leave it out"
            )
        near = difflib.get_close_matches(name, [*known, *DdpArguments.__annotations__], n=1)
        hint = f"; {near[0]!r} is one" if near else ""
        raise WrapError(f"DistributedDataParallel has no argument {name!r}{hint}")
    given = {"gradient_as_bucket_view": True, **arguments}
    if None not in (given.get("broadcast_buffers"), given.get("forward_sync_buffers")):
        raise WrapError("broadcast_buffers is the old name of forward_sync_buffers: give one of them")
    return given


def _check(name: str, value: object) -> None:
    """Refuse what is not of an argument's type: torch would take 1 for True, and fail far from here for others."""
    if name in _FLAGS or (name in _OPTIONAL_FLAGS and value is not None):
        check_flag(WrapError, name, value)
    elif name == "dim":
        check_whole(WrapError, name, value, least=-64, most=64)
    elif name == "bucket_cap_mb" and value is not None:
        check_number(WrapError, name, value, range_=(0.0, MAX_BUCKET_MB), wanted="a number of MB above 0, or None")
    elif name == "bucket_cap_mb_list" and value is not None:
        wanted = "a list of numbers of MB above 0, or None"
        if not isinstance(value, list) or not value:
            raise refuse(WrapError, name, value, wanted)
        for number in value:
            check_number(WrapError, name, number, range_=(0.0, MAX_BUCKET_MB), wanted=wanted)


def construct(model: nn.Module, given: Mapping[str, Any], known: Collection[str] = _KNOWN) -> DistributedDataParallel:
    """Return the model in DDP, with arguments that `supported` has let through. Collective."""
    devices = {parameter.device for parameter in model.parameters()}
    device = next(iter(devices))
    defaults = {"device_ids": [device]} if len(devices) == 1 and device.type != "cpu" else {}
    rest = {name: value for name, value in given.items() if name in known}
    ddp = DistributedDataParallel(model, **{**defaults, **rest})
    if "forward_sync_buffers" not in known and given.get("forward_sync_buffers") is False:
        # Before torch 2.13 the constructor's broadcast_buffers=False leaves buffers out of the first synchronisation
        # too; the attribute says only what a forward does.
        ddp.broadcast_buffers = False
    return ddp


def shared_settings(given: Mapping[str, Any]) -> dict[str, str]:
    """Return DDP's settings that ranks must share, with torch's default where nothing is given."""
    settings = {name: given.get(name, parameter.default) for name, parameter in _KNOWN.items()}
    return {
        name: repr(value)
        for name, value in settings.items()
        if name not in _PER_RANK and isinstance(value, bool | int | list | None)
    }
