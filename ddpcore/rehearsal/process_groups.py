"""Process groups of a rehearsal: `nccl` is gloo, and nothing is bound to a GPU."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddpcore.rehearsal.device_arguments import on_cpu, translate_constructor
from ddpcore.torch_names import replace

if TYPE_CHECKING:
    from collections.abc import Callable

GLOO = "gloo"
_C10D = "torch.distributed.distributed_c10d"
_OF_GPUS = ("device_id", "pg_options", "device_ids", "output_device")
"""Arguments that bind a group, a barrier or a model to a GPU, or tune NCCL."""


def put_in_place() -> None:
    """Replace NCCL by gloo, wherever a process group is asked for."""
    backend: Any = dist.Backend
    named = backend.__new__
    backend.__new__ = lambda cls, name: named(cls, _backend_on_cpu(name))
    replace(_C10D, "is_nccl_available", lambda _original: lambda: True)
    for name in ("init_process_group", "new_group", "barrier"):
        replace(_C10D, name, _unbound)
    replace("torch.distributed.device_mesh", "init_device_mesh", _on_cpu_mesh)
    translate_constructor(DeviceMesh, "device_type")
    ddp: Any = DistributedDataParallel
    ddp.__init__ = _unbound(ddp.__init__)  # torch refuses GPUs for a model on the CPU
    # `DataParallel` calls its module itself where it finds no device.
    vars(sys.modules["torch.nn.parallel.data_parallel"])["_get_available_device_type"] = lambda: None
    # torch synchronizes batch norms of GPUs alone: each rank keeps its own.
    norm: Any = torch.nn.SyncBatchNorm
    norm.convert_sync_batchnorm = _itself


def _backend_on_cpu(name: object) -> object:
    """Return gloo for NCCL, also where it is one of several backends, as in `cpu:gloo,cuda:nccl`."""
    return GLOO if isinstance(name, str) and "nccl" in name.lower() else name


def _unbound(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves out the arguments of `_OF_GPUS`, wherever they stand."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def unbound(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # which raises it
        for name in _OF_GPUS:
            given.arguments.pop(name, None)
        return original(*given.args, **given.kwargs)  # what stands behind one that is left out goes by its name

    return unbound


def _on_cpu_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(on_cpu(device_type), *args, **kwargs)

    return mesh


def _itself(module: torch.nn.Module, *_process_group: object, **_named: object) -> torch.nn.Module:
    return module
