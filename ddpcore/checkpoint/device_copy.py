"""Copies from accelerators into the host's memory, all queued before the first is waited for."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
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
    return _in_thread(device, lambda cuda: int(cuda.cudaHostRegister(address, num_bytes, PORTABLE))) == 0


def unpin(address: int, device: torch.device) -> None:
    """Undo `pin`."""
    _in_thread(device, lambda cuda: int(cuda.cudaHostUnregister(address)))


def _in_thread(device: torch.device, call: Callable[[Any], int]) -> int | None:
    """Return what a call of the CUDA runtime returns; None if it cannot be made.

    In a thread of its own: the runtime remembers a failure for the thread it came in, and torch would raise it there at
    the next kernel.
    """
    results: list[int] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError), torch.cuda.device(device):
            results.append(call(torch.cuda.cudart()))  # type: ignore[no-untyped-call]

    thread = threading.Thread(target=run, name="rankdeck-pin")
    thread.start()
    thread.join()
    return results[0] if results else None
