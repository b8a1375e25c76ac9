"""The memory into which a checkpoint is copied, and the copies from accelerators into it.

`Snapshot` is a memfd, laid out as the finished file. Its pages belong to it from the first save on, and to no file
system: it needs no room in /dev/shm, and vanishes with the last process that has it open.

`CudaCopies` queues all copies from accelerators into the host's memory before it waits for the first.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor

_log = logging.getLogger(__name__)

TOUCH_BYTES = 16 << 20
"""Bytes touched at a time, about 15 ms: a save that begins then does not wait longer for it."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Tensors are copied as integers of their elements' size: some dtypes have no copy, and a NaN keeps its bits."""


class Snapshot:
    """One rank's share of a state, in memory that a writer can read while training goes on.

    A first save into fresh memory takes ten times as long as the next: the kernel has to find and clear every page (1.1
    to 3.6 s for 1.2 GB here, 0.08 s once they are there). So `prepare` touches them in the background.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("rankdeck-checkpoint", os.MFD_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._pinned_by: torch.device | None = None
        self._is_unpinnable = False
        self._cuda = CudaCopies()
        self._touching: threading.Thread | None = None
        self._enough = threading.Event()

    @property
    def num_bytes(self) -> int:
        """The room there is."""
        return self._bytes.numel()

    def prepare(self, num_bytes: int, cuda_device: torch.device | None = None) -> None:
        """Make room, and touch its pages in a thread.

        `cuda_device` is where copies will come from; None is the host.
        """
        old_bytes = self.num_bytes
        self.reserve(num_bytes)
        if self.num_bytes == old_bytes:
            return
        self._enough.clear()
        self._touching = threading.Thread(
            target=self._touch, args=(old_bytes, cuda_device), name="rankdeck-checkpoint", daemon=True
        )
        self._touching.start()

    def settle(self) -> None:
        """Wait until a `prepare` is through."""
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def reserve(self, num_bytes: int) -> None:
        """Make room and keep the content; raise OSError if the system has not so much memory."""
        self._stop_touching()
        if num_bytes <= self.num_bytes:
            return
        # Some more, so that a state that grows a little finds room.
        rounded = -(-(num_bytes + num_bytes // 64) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is None:
            os.ftruncate(self.fd, rounded)
            self._map = mmap.mmap(self.fd, rounded)
        else:
            self._map.resize(rounded)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def write(self, begin: int, content: bytes) -> None:
        """Put some bytes at an offset."""
        assert self._map is not None
        self._map[begin : begin + len(content)] = content

    def copy(self, items: Iterable[tuple[int, Tensor]]) -> None:
        """Copy tensors to their offsets, from any device; blocks until all of them are there."""
        on_cuda = []
        for begin, tensor in items:
            if tensor.numel() == 0:
                continue
            # What is conjugate or negative only by a flag is written out first.
            source = tensor.detach().resolve_conj().resolve_neg().view(BITS[tensor.element_size()])
            end = begin + source.numel() * source.element_size()
            target = self._bytes[begin:end].view(source.dtype).view(source.shape)
            if source.is_cuda:
                on_cuda.append((target, source))
            else:
                target.copy_(source)
        if on_cuda:
            self._pin(on_cuda[0][1].device)
            self._cuda.copy(on_cuda)

    def close(self) -> None:
        """Give the memory back."""
        self._stop_touching()
        self._unpin()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _touch(self, begin: int, cuda_device: torch.device | None) -> None:
        for first in range(begin, self.num_bytes, TOUCH_BYTES):
            if self._enough.is_set():
                return
            # torch releases the interpreter while it writes, which an assignment to the map would not.
            self._bytes[first : first + TOUCH_BYTES : mmap.PAGESIZE].zero_()
        if cuda_device is not None:
            self._pin(cuda_device)

    def _stop_touching(self) -> None:
        self._enough.set()
        self.settle()

    def _pin(self, device: torch.device) -> None:
        if self._pinned_by is not None or self._is_unpinnable or not self.num_bytes:
            return
        if pin(self._bytes.data_ptr(), self.num_bytes, device):
            self._pinned_by = device
        else:
            self._is_unpinnable = True
            _log.warning("a checkpoint's memory could not be pinned: copies from the device will take longer")

    def _unpin(self) -> None:
        if self._pinned_by is not None:
            unpin(self._bytes.data_ptr(), self._pinned_by)
            self._pinned_by = None


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
    """Copies tensors of CUDA devices on streams of their own, one for each device, kept between calls."""

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

    `device` is whose context to do it in: a new thread's own would be one on device 0, for every rank of the node.
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
