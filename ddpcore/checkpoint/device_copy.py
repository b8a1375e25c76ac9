"""Copies from accelerators into the host's memory, all queued before the first is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""


class Streams(Protocol):
    """What is needed of `torch.cuda`."""

    Stream: Any
    Event: Any

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream that training queues its work on."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one."""


class CudaCopies:
    """Copies tensors of CUDA devices on streams of their own, one for each device, kept between calls.

    Args:
        cuda: `torch.cuda`.
    """

    def __init__(self, cuda: Streams = torch.cuda) -> None:
        self._cuda = cuda
        self._stream_of: dict[torch.device, Any] = {}

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each source into its target in host memory; blocks until all have arrived.

        A copy begins when all that is queued on its device's current stream is done, the optimizer's step above all.
        The caller's tensors are not touched before this returns, so no `record_stream` is needed.
        """
        began = set()
        for target, source in pairs:
            stream = self._stream_of.get(source.device)
            if stream is None:
                stream = self._stream_of[source.device] = self._cuda.Stream(source.device)
            if source.device not in began:
                began.add(source.device)
                stream.wait_stream(self._cuda.current_stream(source.device))
            with self._cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        events = []
        for device in began:
            event = self._cuda.Event()
            event.record(self._stream_of[device])
            events.append(event)
        for event in events:
            event.synchronize()


def pin(address: int, num_bytes: int, device: torch.device) -> bool:
    """Lock memory for the devices' copy engines; return whether it worked. Without it copies are slower, not wrong.

    Args:
        address: Where the memory begins.
        num_bytes: How much.
        device: Whose context to do it in: a new thread's own would be one on device 0, for every rank of the node.
    """
    try:
        with torch.cuda.device(device):
            return int(_runtime().cudaHostRegister(address, num_bytes, PORTABLE)) == 0
    except RuntimeError:
        return False


def unpin(address: int, device: torch.device) -> None:
    """Undo `pin`."""
    with torch.cuda.device(device):
        _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
