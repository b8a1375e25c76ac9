"""Which physical GPUs a program sees, from CUDA_VISIBLE_DEVICES: its index 0 may be any of the machine's.

Pure: for tools outside the program, and for programs before they touch CUDA. Inside a program that uses CUDA, ask CUDA
(`ddpcore.process_group.machine.gpu_identity`).

Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#env-vars; what it leaves open (numbers with
text behind them, repeated devices) as `torch.cuda._parse_visible_devices` (2.13) has it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")


@dataclass(frozen=True)
class PhysicalGpu:
    """A GPU of the machine, whoever sees it."""

    index: int
    """Index by nvidia-smi's count: by PCI bus."""
    uuid: str
    """GPU-8932f937-d72c-4106-c12f-20bd9faed9f6."""
    name: str = ""
    mig_uuids: tuple[str, ...] = ()
    """Its MIG instances: MIG-<uuid>, or MIG-<GPU's uuid>/<instance>/<compute instance> of drivers before 470."""


@dataclass(frozen=True)
class VisibleGpu:
    """What a program sees at one index."""

    gpu: PhysicalGpu
    mig_uuid: str = ""
    """Empty for a whole GPU."""

    @property
    def uuid(self) -> str:
        """Name that no other device has."""
        return self.mig_uuid or self.gpu.uuid


def visible_gpus(
    variable: str | None, gpus: Sequence[PhysicalGpu], device_order: str | None = None
) -> list[VisibleGpu]:
    """Return what a program sees, in the order of its own indices.

    As CUDA does, the first entry that makes no sense ends the list ("-1" is the customary one), and a device named
    twice empties it. Of MIG instances a program sees one.

    Args:
        variable: CUDA_VISIBLE_DEVICES; None if it is not set: everything; "": nothing.
        gpus: All of the machine's, by PCI bus.
        device_order: CUDA_DEVICE_ORDER. Without PCI_BUS_ID, numbers count by CUDA's own idea of speed.

    Raises:
        LookupError: Numbers count by speed, and these GPUs are not all alike: only CUDA knows their order.
    """
    if variable is None:
        return [VisibleGpu(gpu) for gpu in _in_cuda_order(gpus, device_order)]
    if variable.startswith("GPU-"):
        whole = [VisibleGpu(gpu) for gpu in gpus]
        return _listed(variable, lambda entry: _by_prefix(entry, "GPU-", whole))
    if variable.startswith("MIG-"):
        parts = [VisibleGpu(gpu, mig) for gpu in gpus for mig in gpu.mig_uuids]
        return _listed(variable, lambda entry: _by_prefix(entry, "MIG-", parts))[:1]
    if not _LEADING_NUMBER.match(variable.strip()):
        return []
    ordered = _in_cuda_order(gpus, device_order)
    return _listed(variable, lambda entry: _by_number(entry, ordered))


def _in_cuda_order(gpus: Sequence[PhysicalGpu], device_order: str | None) -> Sequence[PhysicalGpu]:
    if device_order == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) <= 1:
        return gpus
    raise LookupError("GPUs of different kinds are numbered by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or ask CUDA")


def _listed(variable: str, find: Callable[[str], VisibleGpu | None]) -> list[VisibleGpu]:
    found: list[VisibleGpu] = []
    for entry in variable.split(","):
        device = find(entry.strip())
        if device is None:
            break
        if device in found:
            return []
        found.append(device)
    return found


def _by_number(entry: str, gpus: Sequence[PhysicalGpu]) -> VisibleGpu | None:
    match = _LEADING_NUMBER.match(entry)
    number = int(match.group()) if match else -1
    return VisibleGpu(gpus[number]) if 0 <= number < len(gpus) else None


def _by_prefix(entry: str, kind: str, devices: Sequence[VisibleGpu]) -> VisibleGpu | None:
    """Return the one device whose UUID begins so; an abbreviation that fits several is none."""
    if not entry.startswith(kind):
        return None
    exact = [device for device in devices if device.uuid == entry]
    fitting = exact or [device for device in devices if device.uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None
