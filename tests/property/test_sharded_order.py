"""Orders over shards: every sample once, shards read forward, and the same batches for all numbers of ranks."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers import ElasticBatchSampler, ShardedDataset, ShardedOrder
from ddpcore.samplers.shares import split

if TYPE_CHECKING:
    from collections.abc import Iterator

lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
sizes = st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))


@given(lengths_lists, sizes, st.integers(0, 3), st.integers(0, 9))
def test_an_epoch_holds_every_sample_once_and_reads_forward(
    lengths: list[int], size: tuple[int, int], epoch: int, seed: int
) -> None:
    order = ShardedOrder(lengths, size[0], size[1], seed)
    num = sum(lengths)

    taken = order.indices(epoch, 0, num)

    assert sorted(taken.tolist()) == list(range(num)) == list(range(order.num_samples))
    middle = num // 2
    assert (
        np.concatenate([order.indices(epoch, 0, middle), order.indices(epoch, middle, num)]).tolist() == taken.tolist()
    )
    shard_of = np.repeat(np.arange(len(lengths)), lengths)
    bounds = split(size[0], [1] * size[1])
    full = taken[: num // size[0] * size[0]].reshape(-1, size[0])
    for begin, end in pairwise(bounds):
        stream = full[:, begin:end].reshape(-1).tolist()
        for one, following in pairwise(stream):
            assert following == one + 1 or shard_of[following] != shard_of[one]


class Counted:
    """Reads shards of numbered samples, and counts."""

    def __init__(self, lengths: list[int]) -> None:
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_opened = self.num_read = 0

    def __call__(self, shard: int, start: int) -> Iterator[int]:
        self.num_opened += 1
        for sample in range(self.starts[shard] + start, self.starts[shard + 1]):
            self.num_read += 1
            yield sample


@given(lengths_lists, st.lists(st.integers(0, 10**6), max_size=40))
def test_samples_are_found_by_their_numbers_in_any_order(lengths: list[int], numbers: list[int]) -> None:
    dataset = ShardedDataset(range(len(lengths)), lengths, Counted(lengths), max_open=2)
    assert len(dataset) == sum(lengths)
    for number in numbers:
        assert dataset[number % len(dataset)] == number % len(dataset)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_reads_its_streams_forward_and_nothing_else(num_ranks: int) -> None:
    lengths = [1000, 700, 1300, 1000]
    order = ShardedOrder(lengths, 40, num_streams=4, seed=1)
    seen, num_opened, num_read = [], 0, 0
    for rank in range(num_ranks):
        reader = Counted(lengths)
        dataset = ShardedDataset(range(4), lengths, reader, max_skip=40)
        for batch in ElasticBatchSampler(order, 40, rank=rank, num_replicas=num_ranks):
            seen += [dataset[index] for index in batch]
        num_opened, num_read = num_opened + reader.num_opened, num_read + reader.num_read

    assert sorted(seen) == list(range(4000))
    # Four shards cut into four pieces are seven parts at most.
    assert num_opened <= 7
    assert num_read == 4000


def test_a_reader_that_cannot_seek_skips() -> None:
    dataset = ShardedDataset([range(5), range(5, 9)], [5, 4], lambda shard, start: islice(shard, start, None))
    assert [dataset[index] for index in (3, 4, 0, 8)] == [3, 4, 0, 8]


def test_epochs_come_in_other_orders_and_a_cursor_is_of_its_shards() -> None:
    order = ShardedOrder([3] * 20, 6, 2)
    assert order.indices(0, 0, 60).tolist() != order.indices(1, 0, 60).tolist()
    assert order.fingerprint() == ShardedOrder([3] * 20, 6, 2).fingerprint()
    others = [ShardedOrder([3] * 20, 6, 3), ShardedOrder([4, 2] * 10, 6, 2), ShardedOrder([3] * 20, 6, 2, seed=1)]
    assert all(other.fingerprint() != order.fingerprint() for other in others)


def test_a_shard_that_is_shorter_than_was_said_is_named() -> None:
    dataset = ShardedDataset(["a.bin", "b.bin"], [2, 4], lambda _, start: range(start, 3))
    with pytest.raises(SamplerArgumentError, match=r"shard 'b\.bin' ends after 3 samples, and lengths has 4 for it"):
        dataset[5]
    with pytest.raises(SamplerArgumentError, match="2 shards and 1 lengths"):
        ShardedDataset(["a", "b"], [2], lambda _, start: [start])
    with pytest.raises(SamplerArgumentError, match="each stream gives a sample of every batch"):
        ShardedOrder([9], 2, num_streams=3)
