"""One model over many ranks: DistributedDataParallel with chosen defaults, checked before it starts.

    model = wrap(model.to(device), device=device)        # the model itself when alone
    for micro, batch in enumerate(split_samples(batch, 4)):
        with accumulate(model, is_last=micro == 3):
            loss_of(model(batch)).backward()

For one process with several devices there is `ddpcore.parallel.balanced`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Unpack, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ddpcore.arguments import check_flag, check_is, refuse
from ddpcore.errors import WrapError
from ddpcore.parallel.comm_hooks import CommHook, PowerSGD, parse_comm_hook, register
from ddpcore.parallel.ddp_arguments import DdpArguments, construct, shared_settings, supported
from ddpcore.parallel.fully_sharded import check_sharding, is_fully_sharded
from ddpcore.parallel.model_check import agree, check_group, check_model, listing_of
from ddpcore.parallel.unused_parameters import explain_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class WrapOptions(DdpArguments, total=False):
    """Arguments of `wrap`, for whoever passes them on with a device of its own."""

    sync_batchnorm: bool
    comm_hook: CommHook | PowerSGD


def wrap(
    model: nn.Module | Callable[..., Any],
    *,
    device: torch.device | str | None = None,
    sync_batchnorm: bool = False,
    comm_hook: CommHook | PowerSGD = "none",
    **arguments: Unpack[DdpArguments],
) -> nn.Module:
    """Return the model with its gradients averaged over all ranks in every backward.

    Alone (no process group, or a group of one) it is the model itself. Every rank of the group must call, in the same
    order for several models; blocks until all have. The optimizer may be made before or after.

    A model that `torch.distributed.fsdp.fully_shard` has sharded is checked and returned as it is: it averages its
    gradients itself. One that `torch.compile` has compiled is compiled around DDP, as torch recommends: so that
    reductions begin within backward, bucket by bucket. A model whose class is torch's own (`nn.Sequential`) is compiled
    within DDP: behind DDP torch 2.13 compiles no code of its own.

    Args:
        model: On its device already; not wrapped yet. Compiled or not: torch gives what `torch.compile` returns the
            type of a function.
        device: Where this rank trains: a model that is elsewhere is refused. None: wherever the model is.
        sync_batchnorm: Replace BatchNorm layers by torch's SyncBatchNorm, whose statistics are over all ranks' samples:
            worth its two collectives a layer where a rank has few samples. Accelerators only. The model is changed.
        comm_hook: What gradients travel as: see `ddpcore.parallel.comm_hooks` for what each does to results.
        arguments: See `DdpArguments`.

    Raises:
        WrapError: Something about the model or an argument is wrong, on any rank: all raise it, with the same text.
        ModelMismatchError: The ranks' models or settings differ.
        BarrierTimeoutError: Some ranks did not come.

    Source: https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer
    """
    group = _group_of(arguments)
    if _group_size(group) < 1:
        raise WrapError("this rank is not a member of the process group that wrap was given: do not call wrap here")
    is_alone = _group_size(group) == 1
    try:
        if not isinstance(model, nn.Module):
            raise refuse(WrapError, "model", model, "a torch.nn.Module")
        check_flag(WrapError, "sync_batchnorm", sync_batchnorm)
        hook = parse_comm_hook(comm_hook)
        given = supported(arguments)
        inner, shells = _taken_out(model)
        asked = {
            *arguments,
            *(["sync_batchnorm"] if sync_batchnorm else []),
            *(["comm_hook"] if hook != "none" else []),
        }
        is_sharded = check_sharding(inner, asked)
        check_model(inner, _parsed(device))
        if not is_alone:
            check_group(inner, group, sync_batchnorm=sync_batchnorm)
    except WrapError as error:
        agree(str(error), {}, group)
        raise
    settings = shared_settings(given) | {"comm_hook": repr(hook), "sync_batchnorm": str(sync_batchnorm)}
    settings |= {"fully sharded": str(is_sharded), "compiled": str(bool(shells))}
    agree("", listing_of(inner, settings, has_buffers=given.get("broadcast_buffers") is not False), group)
    if is_alone or is_sharded:
        return model
    if sync_batchnorm:
        inner = nn.SyncBatchNorm.convert_sync_batchnorm(inner, group)  # type: ignore[no-untyped-call]
    is_inside = bool(shells) and type(inner).__module__.partition(".")[0] == "torch"
    ddp = construct(_compiled_as(shells, inner) if is_inside else inner, given)
    register(ddp, hook)
    explain_unused(ddp)
    return ddp if is_inside else _compiled_as(shells, ddp)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model as it was built: without DistributedDataParallel, DataParallel and `torch.compile`'s shell.

    What to evaluate (DDP's forward may communicate), to save, and to make an average of.
    """
    check_is(WrapError, "model", model, nn.Module, "a torch.nn.Module")
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel | nn.DataParallel) else _compiled(model)
        if inner is None:
            return model
        model = cast("nn.Module", inner)


def _parsed(device: torch.device | str | None) -> torch.device | None:
    if device is None:
        return None
    check_is(WrapError, "device", device, torch.device | str, "a torch.device, its name, or None")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise refuse(WrapError, "device", device, "a torch.device, its name, or None") from error


def accumulate(*models: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Keep gradients on this rank until the last micro-batch of a step, whose backward averages them all at once.

    The forward must be inside as well as the backward: DDP decides in the forward. Gradients add up; divide each
    micro-batch's loss so that the sum is what you mean. Models that are not wrapped are passed over. Of a fully sharded
    model every rank needs equally many micro-batches.

    With `static_graph` the first micro-batch of all is averaged too (torch 2.13 fails an internal assertion if it is
    not); the result is the same, since an average of averages and local rests is the average. So every rank needs more
    than one micro-batch in that step, or none does: else they reduce differently often, and hang.

    Args:
        models: All models whose gradients the backward reaches.
        is_last: Whether this is the last micro-batch of the step.

    Raises:
        WrapError: One is no model, or `is_last` is not True or False.
    """
    check_flag(WrapError, "is_last", is_last)
    for model in models:
        check_is(WrapError, "model", model, nn.Module, "a torch.nn.Module")
        sharded, _ = _taken_out(model)
        if is_fully_sharded(sharded):
            sharded.set_requires_gradient_sync(is_last)
    wrapped = [ddp for model in models if (ddp := _ddp_of(model)) is not None]
    if is_last and not any(ddp.static_graph for ddp in wrapped):
        return nullcontext()
    return _accumulating(wrapped, is_last=is_last)


@contextmanager
def _accumulating(wrapped: list[DistributedDataParallel], *, is_last: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for ddp in wrapped:
            if not is_last and not (ddp.static_graph and ddp not in _begun):
                stack.enter_context(ddp.no_sync())
        yield
    _begun.update(ddp for ddp in wrapped if ddp.static_graph)


_begun: WeakSet[DistributedDataParallel] = WeakSet()
"""Models with a static graph that have been through a backward."""


@contextmanager
def joined(
    *models: nn.Module, divide_by_initial_world_size: bool = True, throw_on_early_termination: bool = False
) -> Iterator[None]:
    """Let ranks have different numbers of batches: who is through takes part in the others' collectives with zeros.

    For loaders of other making: `ddpcore.samplers` gives every rank equally many steps, without this. Only DDP's own
    collectives are shadowed; any other one in the block (a metric's all_reduce, a named barrier) hangs. At its end all
    ranks have the parameters of one that was last. In the console, a rank that is through stands in `Join.__exit__`.

    Args:
        models: Wrapped models; others are passed over, and with none of them the block runs as it is.
        divide_by_initial_world_size: Divide gradients by all ranks also when some are through: each sample weighs as
            much as before. False divides by those that still have batches: late samples weigh more.
        throw_on_early_termination: Raise on every rank as soon as one is through, at the price of a collective a step.

    Raises:
        WrapError: One is no model, or an option is not True or False.

    Source: https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """
    check_flag(WrapError, "divide_by_initial_world_size", divide_by_initial_world_size)
    check_flag(WrapError, "throw_on_early_termination", throw_on_early_termination)
    for model in models:
        check_is(WrapError, "model", model, nn.Module, "a torch.nn.Module")
    wrapped = [ddp for model in models if (ddp := _ddp_of(model)) is not None]
    with ExitStack() as stack:
        if wrapped:
            stack.enter_context(
                Join(
                    [*wrapped],
                    throw_on_early_termination=throw_on_early_termination,
                    divide_by_initial_world_size=divide_by_initial_world_size,
                )
            )
        yield


def _group_of(arguments: DdpArguments) -> dist.ProcessGroup | None:
    mesh = arguments.get("device_mesh")
    return mesh.get_group() if mesh is not None else arguments.get("process_group")


def _group_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _compiled(model: nn.Module) -> nn.Module | None:
    """Return what torch.compile has put its shell around. The shell's class costs a second to import."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def _taken_out(model: nn.Module) -> tuple[nn.Module, list[Any]]:
    """Return a model without torch.compile's shells, and these, the outermost first."""
    shells = []
    while (inner := _compiled(model)) is not None:
        shells.append(model)
        model = inner
    return model, shells


def _compiled_as(shells: list[Any], model: nn.Module) -> nn.Module:
    """Return a model in shells like these: the same compiler with the same options, nothing compiled yet."""
    for shell in reversed(shells):
        model = type(shell)(model, shell.dynamo_ctx)
    return model


def _ddp_of(model: nn.Module) -> DistributedDataParallel | None:
    inner, _ = _taken_out(model)
    return inner if isinstance(inner, DistributedDataParallel) else None
