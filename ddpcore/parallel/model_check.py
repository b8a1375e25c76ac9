"""Is this a model that DDP can take, and is it the same one on every rank? Asked before DDP's constructor.

Torch compares shapes within the constructor: the rank that differs reads two sizes without a name there, the others
"Connection reset by peer". Buffers it does not compare at all, and a different order of equal shapes, or different
settings, go unnoticed until training hangs or learns nothing.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpcore.agreement import common_problem, difference, speakers
from ddpcore.barriers.named_barriers import exchange
from ddpcore.errors import ModelMismatchError, WrapError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_LABEL = "wrap model"


class _Claim(msgspec.Struct):
    """A rank's first message."""

    problem: str
    digest: str


def check_model(model: nn.Module, device: torch.device | None) -> None:
    """Check what this rank can see alone; raise WrapError if DDP could not take the model. `device` None is any."""
    if not isinstance(model, nn.Module):
        raise WrapError(f"it is a {type(model).__name__}, not an nn.Module")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | nn.DataParallel):
            what = f"its part {name!r}" if name else "it"
            raise WrapError(
                f"{what} is already wrapped in {type(module).__name__}: wrap the model once, and as a whole"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WrapError("no parameter of it requires a gradient: nothing is there to average, use it without wrap")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise WrapError(
                f"{name!r} has no shape yet: run one forward before wrap, then lazy modules know their sizes"
            )
        if tensor.is_meta:
            raise WrapError(
                f"{name!r} is on the meta device, without data: call to_empty and initialise it before wrap"
            )
        if device is not None and not _is_on(tensor, device):
            raise WrapError(
                f"{name!r} is on {tensor.device}, this rank trains on {device}: model.to(device) before wrap"
            )


def check_group(model: nn.Module, group: dist.ProcessGroup | None, *, sync_batchnorm: bool) -> None:
    """Raise WrapError if the group serves other devices than the model's, or SyncBatchNorm is wanted on the CPU."""
    served = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    for name, parameter in model.named_parameters():
        if served and parameter.requires_grad and parameter.device.type not in served:
            raise WrapError(
                f"{name!r} is on {parameter.device}, but the process group serves only {', '.join(served)}: "
                "model.to(device) before wrap, or open the process group for that device too"
            )
    if not sync_batchnorm:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and _is_on_cpu(model):  # noqa: SLF001 - no public name
            raise WrapError(
                f"sync_batchnorm: {name!r} is on the CPU, and torch's SyncBatchNorm takes only accelerator tensors: "
                "leave it out there, each rank then keeps the statistics of its own samples"
            )


def listing_of(model: nn.Module, settings: Mapping[str, str], *, has_buffers: bool) -> dict[str, str]:
    """Return what must be the same on every rank, place by place.

    Without `has_buffers` buffers are left out: DDP will not synchronise them.
    """
    ignored = frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    listing = {f"setting {name}": value for name, value in settings.items()}
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        if kind == "buffer" and not has_buffers:
            continue
        shared = ((name, tensor) for name, tensor in named if name not in ignored)
        listing |= {f"{kind} {index}": _describe(name, tensor) for index, (name, tensor) in enumerate(shared)}
    return listing


def agree(problem: str, listing: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if one has a problem, or the listings differ. Every rank of the group calls it; blocks.

    `problem` is this rank's, or "". `group` None is all ranks. Raises WrapError for a problem, ModelMismatchError for
    listings that differ, with the first place, the values and the ranks that have them; the same text on every rank.
    """
    text = json.dumps(listing)
    digest = hashlib.sha256(text.encode()).hexdigest()
    answers = _exchange(msgspec.json.encode(_Claim(problem, digest)).decode(), group)
    claims = [msgspec.json.decode(claim, type=_Claim) for claim in answers]
    if found := common_problem([claim.problem for claim in claims]):
        raise WrapError(f"this model cannot be wrapped: {found}")
    digests = [claim.digest for claim in claims]
    speaking = speakers(digests)
    if not speaking:
        return
    texts = _exchange(text if _own_rank(group) in speaking else "", group)
    found = difference(digests, {rank: json.loads(texts[rank]) for rank in speaking})
    raise ModelMismatchError(
        f"the ranks have not built the same model: {found}. Build it from the same arguments on every rank, and from "
        "nothing that depends on the rank or on its data"
    )


def _exchange(value: str, group: dist.ProcessGroup | None) -> list[str]:
    if group is None or group is dist.group.WORLD:
        return exchange(_LABEL, value)
    # The barrier is for all ranks of the job; a part of them has only its own collectives.
    values = [""] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _is_on_cpu(model: nn.Module) -> bool:
    return any(parameter.device.type == "cpu" for parameter in model.parameters())


def _own_rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _describe(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    notes = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else " frozen"
    if not tensor.is_contiguous():
        notes += f" strides {list(tensor.stride())}"
    return f"{name!r} {dtype} {list(tensor.shape)}{notes}"
