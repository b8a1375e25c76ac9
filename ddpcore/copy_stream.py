"""The side stream that batches reach a device on, and how it is ordered with the stream that computes.

An accelerator's queues ("streams") run beside each other; a program only puts work into them. What must come after
what has to be said to the device, and to the allocator, which gives freed memory to the next tensor of the stream it
was allocated on at once, trusting that stream's order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

_WITHOUT_NUMBERS = ("cpu", "meta")


class CopyStream(Protocol):
    """One side stream of one device. "Compute" is the device's current stream at the time of the call."""

    def wait_for_compute(self) -> None:
        """Have what comes next on the side stream come after all that compute has been given so far."""

    def copying(self) -> AbstractContextManager[object]:
        """Put work, and the memory it allocates, onto the side stream."""

    def pin(self, tensor: Tensor) -> Tensor:
        """Return the tensor in page-locked memory, from which the device copies by itself."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device; within `copying`, it does not wait for the copy."""

    def mark(self) -> Any:
        """Return a mark behind all that the side stream has been given so far."""

    def compute_waits(self, mark: Any) -> None:
        """Have what compute is given next come after the mark."""

    def compute_uses(self, tensor: Tensor) -> None:
        """Keep the allocator from giving the tensor's memory away before compute is through with it."""

    def finish(self, mark: Any) -> None:
        """Wait, on the host, until the side stream has passed the mark."""


class AcceleratorCopyStream:
    """The side stream of a CUDA, ROCm or XPU device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._side = self._module.Stream(device)
        # A host that waits for a CUDA event spins on a core otherwise.
        self._event_options = {"blocking": True} if device.type == "cuda" else {}

    def wait_for_compute(self) -> None:
        """See `CopyStream`."""
        self._side.wait_stream(self._compute())

    def copying(self) -> AbstractContextManager[object]:
        """See `CopyStream`."""
        stream: AbstractContextManager[object] = self._module.stream(self._side)
        return stream

    def pin(self, tensor: Tensor) -> Tensor:
        """See `CopyStream`. A tensor that is not pinned yet is copied, on the CPU and at once."""
        return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """See `CopyStream`."""
        return tensor.to(self._device, non_blocking=True)

    def mark(self) -> Any:
        """See `CopyStream`."""
        event = self._module.Event(**self._event_options)
        event.record(self._side)
        return event

    def compute_waits(self, mark: Any) -> None:
        """See `CopyStream`."""
        self._compute().wait_event(mark)

    def compute_uses(self, tensor: Tensor) -> None:
        """See `CopyStream`."""
        tensor.record_stream(self._compute())

    def finish(self, mark: Any) -> None:
        """See `CopyStream`."""
        mark.synchronize()

    def _compute(self) -> Any:
        return self._module.current_stream(self._device)


def with_index(device: torch.device) -> torch.device:
    """Return the device with its number: "cuda" means the current one."""
    number = cast("int | None", device.index)
    if number is not None or device.type in _WITHOUT_NUMBERS:
        return device
    module: Any = torch.get_device_module(device)
    return torch.device(device.type, module.current_device()) if hasattr(module, "current_device") else device


def copy_stream_of(device: torch.device) -> CopyStream | None:
    """Return the process's one side stream of a device, None for devices without streams (the CPU, Apple's GPU).

    One for all prefetchers and epochs: the allocator keeps freed memory for the stream that it was allocated on, a new
    stream each epoch would leave the last one's memory stranded.
    """
    if device.type in _WITHOUT_NUMBERS:
        return None
    module: Any = torch.get_device_module(device)
    has_streams = hasattr(module, "Stream") and hasattr(module, "current_stream")
    return _side_stream(with_index(device)) if has_streams else None


@cache
def _side_stream(device: torch.device) -> CopyStream:
    return AcceleratorCopyStream(device)
