"""Copies the next batches to the device while the current one computes.

    loader = DataLoader(..., num_workers=4, pin_memory=True)
    for batch in Prefetcher(loader, device):
        ...

DDP does not do this: it moves only its own forward's inputs, and from the CPU it does so in the computing stream.
`Prefetcher` can gain the copy's time, as long as that is shorter than a step; where workers are the bottleneck, it
gains nothing.

`CopyStream` is the side stream on which batches reach a device, ordered with the stream that computes. An accelerator's
queues ("streams") run beside each other; a program only puts work into them. The device must be given every order that
matters, and so must the allocator, which gives freed memory to the next tensor of the stream it was allocated on
immediately, trusting that stream's order.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from ddpcore.arguments import check_has, check_whole, refuse
from ddpcore.errors import ArgumentError
from ddpcore.nested import map_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor

Batch = TypeVar("Batch")


_STREAM_METHODS = ("wait_for_compute", "copying", "pin", "copy", "mark", "compute_waits", "compute_uses", "finish")


class _Flight(NamedTuple):
    """A batch on its way to the device."""

    batch: Any
    """The batch as it will be handed out; not to be read before `landed`."""
    copies: list[Tensor]
    """Its tensors that are being copied."""
    landed: Any
    """Mark behind the copies."""
    has_rest: bool
    """True if some tensors are still where they were."""


class Prefetcher(Generic[Batch]):
    """Iterates over batches that are on the device when they are handed out, with the next ones under way.

    Batches may be nested as in `ddpcore.nested`; their source must not write into one that it has given away. On the
    CPU they come through untouched, one by one. The caller's thread does everything; there are no others. An error in
    making a batch is raised in that batch's turn, after those before it. Each iteration iterates the source again. A
    source that can be iterated only once loses what is under way when its loop is left early: `consumed` counts the
    batches handed out, as a cursor does.

    Batches that are not in pinned memory are copied there first, by the caller's thread: let the DataLoader do it
    (`pin_memory=True`).

    Args:
        batches: Batches on the CPU; a tensor that is on the device already stays.
        device: Where they go.
        depth: How many batches are under way while one is used. 1 hides copies that are shorter than a step; more even
            out steps of different length. A host that runs ahead of its device is held back so that at most
            `2 * depth + 3` batches are in the device's memory.
        copy_stream: What copies; None: the device's own.

    Attributes:
        consumed: Batches handed out since iteration began last.

    Raises:
        ArgumentError: An argument makes no sense: the depth is below 1, there is no such device.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        device: torch.device | str,
        depth: int = 2,
        *,
        copy_stream: CopyStream | None = None,
    ) -> None:
        check_has(ArgumentError, "batches", batches, ("__iter__",), "a DataLoader, or what else can be iterated")
        if isinstance(batches, str | bytes | dict):
            raise refuse(ArgumentError, "batches", batches, "a DataLoader, or what else can be iterated")
        check_whole(ArgumentError, "depth", depth, wanted="how many batches are under way, at least 1")
        if copy_stream is not None:
            check_has(ArgumentError, "copy_stream", copy_stream, _STREAM_METHODS, "a CopyStream, or None")
        self.consumed = 0
        self._batches = batches
        try:
            self._device = with_index(torch.device(device))
            self._stream = copy_stream or copy_stream_of(self._device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise refuse(ArgumentError, "device", device, "a torch.device of this machine, or its name") from error
        self._depth = depth
        self._being_read: deque[tuple[Any, list[Tensor]]] = deque()

    def __len__(self) -> int:
        """Return the source's length.

        Raises:
            TypeError: The source has none.
        """
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        self.consumed = 0
        source = iter(self._batches)
        if self._stream is not None:
            return self._prefetched(source, self._stream)
        return self._plain(source)

    def _plain(self, source: Iterator[Batch]) -> Iterator[Batch]:
        for batch in source:
            arrived = batch if self._device.type == "cpu" else self._copied_now(batch)
            self.consumed += 1
            yield arrived

    def _prefetched(self, source: Iterator[Batch], stream: CopyStream) -> Iterator[Batch]:
        flights: deque[_Flight] = deque()
        try:
            for batch in source:
                flights.append(self._start(batch, stream))
                if len(flights) > self._depth:
                    yield self._hand_out(flights.popleft(), stream)
        except (GeneratorExit, KeyboardInterrupt, SystemExit):
            # The loop has been left, or the program shall end: nobody wants the rest.
            flights.clear()
            raise
        finally:
            # After the last batch, and after an error of the source too, which thereby waits for its turn.
            while flights:
                yield self._hand_out(flights.popleft(), stream)

    def _start(self, batch: Batch, stream: CopyStream) -> _Flight:
        """Begin to copy a batch."""
        copies: list[Tensor] = []
        sources: list[Tensor] = []
        rest: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            if tensor.layout is not torch.strided or tensor.is_nested:
                rest.append(tensor)
                return tensor
            sources.append(stream.pin(tensor))
            copies.append(stream.copy(sources[-1]))
            return copies[-1]

        # Memory that was freed after use on a third stream, which compute has waited for since, is reused safely on
        # compute, and through this also here: a prefetched batch may be used in any way a plain one may.
        stream.wait_for_compute()
        with stream.copying():
            moved = map_tensors(copy, batch)
        landed = stream.mark()
        # Pinned memory must outlive the copy, whether or not this batch is ever handed out.
        self._being_read.append((landed, sources))
        return _Flight(moved, copies, landed, bool(rest))

    def _hand_out(self, flight: _Flight, stream: CopyStream) -> Batch:
        """Return a batch that compute may use: the device, not the caller, waits for its copy."""
        stream.compute_waits(flight.landed)
        for tensor in flight.copies:
            stream.compute_uses(tensor)
        while self._being_read and self._being_read[0][0] is not flight.landed:
            # What was handed out before has long landed, unless the host is several steps ahead. Then it waits here:
            # `record_stream` keeps memory from being used again until the device is through with it, and a host
            # without bounds would fill the device with batches.
            stream.finish(self._being_read[0][0])
            self._being_read.popleft()
        self.consumed += 1
        arrived: Batch = self._copied_now(flight.batch) if flight.has_rest else flight.batch
        return arrived

    def _copied_now(self, batch: Any) -> Any:
        """Return a batch with what is not on the device yet moved there, in the computing stream.

        That is everything on devices without streams, and sparse and nested tensors, which `record_stream` refuses.
        """
        return map_tensors(lambda tensor: tensor.to(self._device), batch)


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
