"""On a real GPU: batches are whole although everything is slow, and are not when one call is left out.

What is slow are sleeping kernels, so that a missing order shows every time.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddpcore.prefetch import AcceleratorCopyStream, Prefetcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NUM_BATCHES = 8
NUM_VALUES = 1 << 20
SLEEP_CYCLES = 100_000_000
"""50 to 100 ms, far more than anything else here takes."""


def sleep() -> None:
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class SlowCopies(AcceleratorCopyStream):
    """A copy begins late: who does not wait for it reads what was there before."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        with super().copying():
            sleep()
            yield


class WithoutWaitEvent(SlowCopies):
    def compute_waits(self, mark: Any) -> None:
        pass


class WithoutRecordStream(AcceleratorCopyStream):
    def compute_uses(self, tensor: Tensor) -> None:
        pass


class WithoutWaitStream(AcceleratorCopyStream):
    def wait_for_compute(self) -> None:
        pass


def batches() -> list[dict[str, list[Tensor]]]:
    return [{"x": [torch.full((NUM_VALUES,), index + 1.0)]} for index in range(NUM_BATCHES)]


def is_whole(batch: dict[str, list[Tensor]], index: int) -> Tensor:
    return (batch["x"][0] == index + 1.0).all()


def use_on_the_computing_stream(prefetcher: Prefetcher[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for index, batch in enumerate(prefetcher):
        sleep()
        found.append(is_whole(batch, index))
        # Memory that is given back too early is taken and written here.
        torch.full((NUM_VALUES,), -1.0, device="cuda")
    return found


def use_from_streams_in_turn(prefetcher: Prefetcher[Any]) -> list[Tensor]:
    streams = [new_stream(), new_stream()]
    iterator = iter(prefetcher)
    found: list[Tensor] = []
    for index in range(NUM_BATCHES):
        with torch.cuda.stream(streams[index % 2]):
            batch = next(iterator)
            sleep()
            found.append(is_whole(batch, index))
            del batch
    return found


def use_on_a_third_stream_that_compute_waits_for(prefetcher: Prefetcher[Any]) -> list[Tensor]:
    compute, third = torch.cuda.current_stream(), new_stream()
    found: list[Tensor] = []
    for batch in prefetcher:  # not enumerate, which keeps its last item
        third.wait_stream(compute)
        with torch.cuda.stream(third):
            sleep()
            found.append(is_whole(batch, len(found)))
        del batch
        # The allocator sees that compute is through, and third is not.
        compute.synchronize()
        compute.wait_stream(third)
    return found


def all_whole(use: Callable[[Prefetcher[Any]], list[Tensor]], copy_stream: type[AcceleratorCopyStream]) -> bool:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    device = torch.device("cuda", torch.cuda.current_device())
    found = use(Prefetcher(batches(), device, 2, copy_stream=copy_stream(device)))
    torch.cuda.synchronize()
    assert len(found) == NUM_BATCHES
    return all(bool(whole) for whole in found)


USES = [use_on_the_computing_stream, use_from_streams_in_turn, use_on_a_third_stream_that_compute_waits_for]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("copy_stream", [AcceleratorCopyStream, SlowCopies])
def test_batches_are_whole(
    use: Callable[[Prefetcher[Any]], list[Tensor]], copy_stream: type[AcceleratorCopyStream]
) -> None:
    assert all_whole(use, copy_stream)


@pytest.mark.parametrize(
    ("use", "broken"),
    [
        (use_on_the_computing_stream, WithoutWaitEvent),
        (use_from_streams_in_turn, WithoutRecordStream),
        (use_on_a_third_stream_that_compute_waits_for, WithoutWaitStream),
    ],
)
def test_leaving_one_call_out_shows(
    use: Callable[[Prefetcher[Any]], list[Tensor]], broken: type[AcceleratorCopyStream]
) -> None:
    assert not all_whole(use, broken)


def test_all_prefetchers_of_a_device_share_its_one_stream() -> None:
    one, other = (Prefetcher(batches(), name) for name in ("cuda", f"cuda:{torch.cuda.current_device()}"))

    assert one._stream is other._stream
    assert [int(batch["x"][0][0]) for batch in one] == list(range(1, NUM_BATCHES + 1))


def test_pinned_batches_are_not_copied_on_the_cpu_once_more() -> None:
    stream = AcceleratorCopyStream(torch.device("cuda", torch.cuda.current_device()))
    plain, pinned = torch.ones(4), torch.ones(4).pin_memory()

    assert stream.pin(plain).is_pinned()
    assert stream.pin(pinned) is pinned
    on_gpu = plain.cuda()
    assert stream.pin(on_gpu) is on_gpu
