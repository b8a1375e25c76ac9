"""What torch sees of devices and backends in this process, and what is known against this torch."""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpcore.errors import TorchFaultError
from ddpcore.process_group.device_choice import DeviceFacts
from ddpcore.process_group.torch_versions import known_faults

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

logger = logging.getLogger(__name__)


def device_facts(environ: Mapping[str, str]) -> DeviceFacts:
    """Return what `device_choice` decides by. Initialises no device."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    built_in = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    registered = {str(name).lower() for name in dist.Backend.backend_list} - {"undefined", *built_in}
    return DeviceFacts(
        torch_version=str(torch.__version__),
        backends=frozenset({name for name, is_there in built_in.items() if is_there} | registered),
        backend_of_type=dict(dist.Backend.default_device_backend_map),
        accelerator=accelerator.type if accelerator is not None else "",
        num_devices=torch.accelerator.device_count() if accelerator is not None else 0,
        visible_variable=environ.get("CUDA_VISIBLE_DEVICES"),
    )


def gpu_identity(device: torch.device) -> str:
    """Return the UUID of the physical GPU behind a CUDA device, as nvidia-smi has it; empty for other devices.

    Of a MIG instance it is the instance's. Initialises CUDA.
    """
    if device.type != "cuda":
        return ""
    mig = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if mig.startswith("MIG-"):
        return mig
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"


def comes_to_rest(device: torch.device, timeout_s: float) -> bool:
    """Wait until all that is queued on a device is done, or the time is over; say whether it is.

    Blocks at most `timeout_s`: a collective that others never join keeps its stream busy for ever.
    """
    if device.type != "cuda":
        return True
    waiting = threading.Thread(target=torch.cuda.synchronize, args=(device,), name="rankdeck-synchronize", daemon=True)
    waiting.start()
    waiting.join(timeout_s)
    return not waiting.is_alive()


def set_device(name: str) -> torch.device:
    """Make a device the current one, before anything is allocated or NCCL is started on another; return it."""
    device = torch.device(name)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    return device


def check_version(backends: Collection[str], *, has_cuda: bool) -> None:
    """Refuse a torch with a known fault; warn of lesser ones, and set what avoids them unless the user has set it.

    Raises:
        TorchFaultError: The fault makes training wrong.
    """
    for finding in known_faults(str(torch.__version__), backends, has_cuda=has_cuda):
        if finding.is_refused:
            raise TorchFaultError(finding.text)
        for name, value in finding.fault.workaround.items():
            os.environ.setdefault(name, value)
        logger.warning(finding.text)
