"""Batches arrive in order and whole; on a device, every access to their memory is ordered with every other."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ddpcore.prefetch import Prefetcher, copy_stream_of, with_index
from tests.support.stream_sim import Clock, SimDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


def batches(num: int) -> list[dict[str, Any]]:
    return [{"index": index, "pair": Pair(torch.full((4,), index), [f"{index}"])} for index in range(num)]


def numbers(prefetcher: Prefetcher[Any]) -> list[int]:
    return [int(batch["pair"].x[0]) for batch in prefetcher]


def sim_prefetcher(source: Any, depth: int = 2) -> tuple[Prefetcher[Any], SimDevice]:
    device = SimDevice(lagging=set())
    return Prefetcher(source, "cpu", depth, copy_stream=device), device


def test_on_the_cpu_batches_come_through_untouched_one_by_one() -> None:
    source = batches(3)
    taken: list[int] = []

    def watched() -> Iterator[dict[str, Any]]:
        for batch in source:
            taken.append(batch["index"])
            yield batch

    prefetcher = Prefetcher(watched(), "cpu")
    for index, batch in enumerate(prefetcher):
        assert batch is source[index]
        assert taken == list(range(index + 1))
        assert prefetcher.consumed == index + 1


@given(st.integers(0, 8), st.integers(1, 4))
def test_on_a_device_every_batch_arrives_once_in_order_and_whole(num: int, depth: int) -> None:
    prefetcher, device = sim_prefetcher(batches(num), depth)

    for _ in range(2):
        assert numbers(prefetcher) == list(range(num))
        assert prefetcher.consumed == num
    for index, batch in enumerate(prefetcher):
        assert (batch["index"], batch["pair"].names) == (index, [str(index)])
    assert device.races == []


def test_the_next_batches_are_under_way_before_one_is_handed_out() -> None:
    prefetcher, device = sim_prefetcher(batches(5), depth=2)

    under_way = [device.calls.count("copy") - prefetcher.consumed for _ in prefetcher]

    assert under_way == [2, 2, 2, 1, 0]


def test_a_batch_s_calls_come_in_the_order_that_makes_it_right() -> None:
    prefetcher, device = sim_prefetcher(batches(1))

    numbers(prefetcher)

    assert device.calls == ["wait_for_compute", "pin", "copy", "mark", "compute_waits", "compute_uses"]


@pytest.mark.parametrize("is_on_device", [False, True])
def test_an_error_is_raised_in_its_own_turn(is_on_device: bool) -> None:
    def faulty() -> Iterator[dict[str, Any]]:
        yield from batches(3)
        raise OSError("no such image")

    prefetcher = sim_prefetcher(faulty())[0] if is_on_device else Prefetcher(faulty(), "cpu")
    seen: list[int] = []

    with pytest.raises(OSError, match="no such image"):
        seen.extend(batch["index"] for batch in prefetcher)

    assert seen == [0, 1, 2]
    assert prefetcher.consumed == 3
    assert list(prefetcher) == []


def test_an_error_while_a_batch_is_copied_is_raised_after_those_before_it() -> None:
    prefetcher, device = sim_prefetcher(batches(4))
    copy = device.copy
    seen: list[int] = []

    def refuse_the_third(tensor: Tensor) -> Tensor:
        if tensor[0] == 2:
            raise RuntimeError("out of memory")
        return copy(tensor)

    device.copy = refuse_the_third  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        seen.extend(batch["index"] for batch in prefetcher)

    assert seen == [0, 1]


def test_an_interrupt_is_not_kept_waiting() -> None:
    def interrupted() -> Iterator[dict[str, Any]]:
        yield from batches(2)
        raise KeyboardInterrupt

    prefetcher, _ = sim_prefetcher(interrupted())

    with pytest.raises(KeyboardInterrupt):
        next(iter(prefetcher))


@pytest.mark.parametrize("num_taken", [1, 3, 4])
def test_a_loop_may_be_left_early_and_begun_again(num_taken: int) -> None:
    prefetcher, device = sim_prefetcher(batches(5))
    device.lagging.add("side")

    for batch in prefetcher:
        if batch["index"] == num_taken - 1:
            break

    assert prefetcher.consumed == num_taken
    del batch
    gc.collect()
    assert numbers(prefetcher) == [0, 1, 2, 3, 4]
    assert device.races == []


def test_two_loops_at_once_get_each_their_own() -> None:
    prefetcher, device = sim_prefetcher(batches(6))

    pairs = [(one["index"], other["index"]) for one, other in zip(prefetcher, prefetcher, strict=True)]

    assert pairs == [(index, index) for index in range(6)]
    assert device.races == []


def test_it_is_as_long_as_its_source() -> None:
    assert len(Prefetcher(batches(3), "cpu")) == 3
    with pytest.raises(TypeError):
        len(Prefetcher(iter(batches(3)), "cpu"))


def test_a_depth_without_prefetch_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=0 makes no sense"):
        Prefetcher(batches(1), "cpu", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has that device")
def test_a_device_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="device='cuda:0' makes no sense: give a torch"):
        Prefetcher(batches(1), "cuda:0")


def test_a_data_loader_goes_through() -> None:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)

    prefetcher, _ = sim_prefetcher(loader)

    assert [batch[0].tolist() for batch in prefetcher] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_sparse_tensors_come_along_without_the_side_stream() -> None:
    source = [{"x": torch.ones(2), "s": torch.eye(3).to_sparse()} for _ in range(3)]

    prefetcher, device = sim_prefetcher(source)

    assert [batch["s"].to_dense().sum().item() for batch in prefetcher] == [3.0] * 3
    assert device.calls.count("copy") == 3


def test_devices_without_streams_get_their_batches_one_by_one() -> None:
    assert copy_stream_of(torch.device("cpu")) is None
    assert with_index(torch.device("cpu")) == torch.device("cpu")
    assert [batch["pair"].x.device.type for batch in Prefetcher(batches(2), "meta")] == ["meta", "meta"]


# What a training program may do with a batch. Each is right on its own: with the prefetcher nothing may race.


def use_on_the_computing_stream(prefetcher: Prefetcher[Any], device: SimDevice) -> None:
    for batch in prefetcher:
        device.read(batch["pair"].x)


def use_from_streams_in_turn(prefetcher: Prefetcher[Any], device: SimDevice) -> None:
    iterator = iter(prefetcher)
    for index in range(len(prefetcher)):
        with device.on(f"compute {index % 2}"):
            batch = next(iterator)
            device.read(batch["pair"].x)
            del batch


def use_on_a_third_stream_that_compute_waits_for(prefetcher: Prefetcher[Any], device: SimDevice) -> None:
    for batch in prefetcher:
        device.wait("third", device.current)
        with device.on("third"):
            device.read(batch["pair"].x)
        del batch
        device.wait(device.current, "third")


USES: dict[Callable[[Prefetcher[Any], SimDevice], None], set[str]] = {
    use_on_the_computing_stream: {"side", "compute"},
    use_from_streams_in_turn: {"compute 0"},
    use_on_a_third_stream_that_compute_waits_for: {"third"},
}
"""Each with the streams that get nothing done meanwhile, where mistakes show."""


def races(use: Callable[[Prefetcher[Any], SimDevice], None], device: SimDevice) -> set[str]:
    prefetcher = Prefetcher(batches(8), "cpu", 2, copy_stream=device)
    use(prefetcher, device)
    return set(device.races)


@pytest.mark.parametrize("use", USES)
def test_no_accesses_race(use: Callable[[Prefetcher[Any], SimDevice], None]) -> None:
    for lagging in ({"side"}, {"compute"}, {"third"}, {"compute 0"}, {"compute 1", "side"}, set[str]()):
        assert races(use, SimDevice(lagging)) == set()


class WithoutWaitStream(SimDevice):
    def wait_for_compute(self) -> None:
        pass


class WithoutWaitEvent(SimDevice):
    def compute_waits(self, mark: Clock) -> None:
        pass


class WithoutRecordStream(SimDevice):
    def compute_uses(self, tensor: Tensor) -> None:
        pass


class WithSourcesDroppedAtOnce(SimDevice):
    def finish(self, mark: Clock) -> None:
        pass


@pytest.mark.parametrize(
    ("use", "broken", "race"),
    [
        (use_on_a_third_stream_that_compute_waits_for, WithoutWaitStream, "third reads while side writes"),
        (use_on_the_computing_stream, WithoutWaitEvent, "side writes while compute reads"),
        (use_from_streams_in_turn, WithoutRecordStream, "compute 0 reads while side writes"),
        (use_on_the_computing_stream, WithSourcesDroppedAtOnce, "pinned memory is freed while side reads"),
    ],
)
def test_leaving_one_call_out_is_found(
    use: Callable[[Prefetcher[Any], SimDevice], None], broken: type[SimDevice], race: str
) -> None:
    assert race in races(use, broken(USES[use]))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_host_that_runs_ahead_does_not_fill_the_device(depth: int) -> None:
    device = SimDevice(lagging={"side", "compute"})

    use_on_the_computing_stream(Prefetcher(batches(50), "cpu", depth, copy_stream=device), device)

    assert device.num_blocks <= 2 * depth + 3
