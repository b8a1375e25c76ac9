"""On a real GPU: batches are whole although everything is slow, and are not when one call is left out.

What is slow are sleeping kernels, so that a missing order shows every time.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ddpcore.prefetch import AcceleratorCopyStream, Prefetcher
from tests.support.gpus import needs_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

pytestmark = [pytest.mark.gpu, needs_gpu]

NUM_BATCHES = 8
NUM_VALUES = 1 << 20
SLEEP_CYCLES = 100_000_000
"""50 to 100 ms, far more than anything else here takes."""
Batches = list[dict[str, Any]]
_next_value = itertools.count(1)


def sleep(times: int = 1) -> None:
    torch.cuda._sleep(times * SLEEP_CYCLES)  # type: ignore[no-untyped-call]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class SlowCopies(AcceleratorCopyStream):
    """A copy begins late, also for a reader that sleeps once: who does not wait reads what was there before."""

    @contextmanager
    def copying(self) -> Iterator[None]:
        with super().copying():
            sleep(3)
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


def batches() -> Batches:
    """Return batches of values that memory cannot still hold from other batches."""
    values = [float(next(_next_value)) for _ in range(NUM_BATCHES)]
    return [{"x": [torch.full((NUM_VALUES,), value)], "value": value} for value in values]


def is_whole(batch: dict[str, Any]) -> Tensor:
    whole: Tensor = (batch["x"][0] == batch["value"]).all()
    return whole


def use_on_the_computing_stream(prefetcher: Prefetcher[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for batch in prefetcher:
        sleep()
        found.append(is_whole(batch))
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
            found.append(is_whole(batch))
            del batch
    return found


def use_on_a_third_stream_that_compute_waits_for(prefetcher: Prefetcher[Any]) -> list[Tensor]:
    compute, third = torch.cuda.current_stream(), new_stream()
    found: list[Tensor] = []
    for batch in prefetcher:
        third.wait_stream(compute)
        with torch.cuda.stream(third):
            sleep()
            found.append(is_whole(batch))
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
    assert all(float(batch["x"][0][0]) == batch["value"] for batch in one)


def test_pinned_batches_are_not_copied_on_the_cpu_once_more() -> None:
    stream = AcceleratorCopyStream(torch.device("cuda", torch.cuda.current_device()))
    plain, pinned = torch.ones(4), torch.ones(4).pin_memory()

    assert stream.pin(plain).is_pinned()
    assert stream.pin(pinned) is pinned
    on_gpu = plain.cuda()
    assert stream.pin(on_gpu) is on_gpu
