"""The elastic batch sampler: what it hands out, what it counts, and what it refuses."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import chain

import pytest
from torch.utils.data import DataLoader

from ddpcore.errors import SamplerArgumentError, SamplerUseError
from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.cursor import Cursor
from ddpcore.samplers.order import SequentialOrder, ShuffledOrder
from ddpcore.samplers.shares import Share


def sampler_of(rank: int = 0, **options: object) -> ElasticBatchSampler:
    """10 samples in batches of 4 over 2 ranks."""
    settings = {"rank": rank, "num_replicas": 2, **options}
    return ElasticBatchSampler(SequentialOrder(10), 4, **settings)  # type: ignore[arg-type]


def finish(sampler: ElasticBatchSampler, num_steps: int) -> None:
    iterator = iter(sampler)
    for _ in range(num_steps):
        next(iterator)
        sampler.finish_step()


def test_ranks_take_neighbouring_shares_of_each_batch() -> None:
    assert list(sampler_of(0)) == [[0, 1], [4, 5], [8]]
    assert list(sampler_of(1)) == [[2, 3], [6, 7], [9]]


def test_shares_follow_the_weights_and_an_empty_one_gets_a_stand_in() -> None:
    assert list(sampler_of(0, weights=[1, 3])) == [[0], [4], [8]]
    assert list(sampler_of(1, weights=[1, 3])) == [[1, 2, 3], [5, 6, 7], [8, 9]]
    assert list(sampler_of(0, weights=[0, 1])) == [[0], [4], [8]]

    first, second = sampler_of(0, weights=[1, 3]), sampler_of(1, weights=[1, 3])
    finish(first, 2)
    finish(second, 2)

    assert (first.share, second.share) == (Share(0, 2), Share(2, 2))


def test_drop_last_leaves_out_the_step_that_is_not_full() -> None:
    sampler = sampler_of(drop_last=True)

    assert (list(sampler), len(sampler), sampler.steps_per_epoch) == ([[0, 1], [4, 5]], 2, 2)


def test_length_is_what_is_left_of_the_epoch() -> None:
    sampler = sampler_of()
    finish(sampler, 1)

    assert (len(sampler), sampler.steps_per_epoch, sampler.cursor) == (2, 3, Cursor(0, 4))


def test_the_epoch_advances_with_its_last_step() -> None:
    sampler = ElasticBatchSampler(ShuffledOrder(10), 4)
    epochs = []
    for epoch in range(3):
        assert sampler.cursor == Cursor(epoch, 0)
        batches = []
        for batch in sampler:
            batches.append(batch)
            sampler.finish_step()
        epochs.append(batches)

    assert len({str(batches) for batches in epochs}) == 3
    assert all(sorted(chain.from_iterable(batches)) == list(range(10)) for batches in epochs)


def test_steps_that_were_taken_but_not_finished_come_again() -> None:
    sampler = sampler_of()
    iterator = iter(sampler)
    assert [next(iterator), next(iterator)] == [[0, 1], [4, 5]]
    sampler.finish_step()

    assert list(sampler) == [[4, 5], [8]]


def test_new_weights_hold_from_the_next_iteration_on() -> None:
    sampler = sampler_of()
    iterator = iter(sampler)
    next(iterator)

    sampler.set_weights([3, 1])

    assert (sampler.share, next(iterator)) == (Share(2, 4), [4, 5])
    sampler.finish_step()
    assert next(iter(sampler)) == [4, 5, 6]
    assert sampler.share == Share(3, 4)


def test_new_weights_hold_at_once_where_no_step_is_under_way() -> None:
    sampler = sampler_of()
    finish(sampler, 1)

    sampler.set_weights([3, 1])

    assert sampler.share == Share(3, 4)


def test_weights_that_do_not_fit_leave_the_old_ones() -> None:
    sampler = sampler_of()

    with pytest.raises(SamplerArgumentError, match="3 weights for 2 ranks"):
        sampler.set_weights([1, 2, 3])

    assert next(iter(sampler)) == [0, 1]


def test_set_epoch_goes_to_another_epoch_and_stays_in_its_own() -> None:
    sampler = sampler_of()
    finish(sampler, 1)

    sampler.set_epoch(0)
    assert sampler.cursor == Cursor(0, 4)
    sampler.set_epoch(5)
    assert sampler.cursor == Cursor(5, 0)
    with pytest.raises(SamplerArgumentError, match="epochs count from 0"):
        sampler.set_epoch(-1)


def test_finishing_more_steps_than_were_taken_is_said() -> None:
    sampler = sampler_of()
    with pytest.raises(SamplerUseError, match="more often than batches were taken"):
        sampler.finish_step()
    finish(sampler, 1)
    with pytest.raises(SamplerUseError, match="not for each micro-batch"):
        sampler.finish_step()

    assert sampler.cursor == Cursor(0, 4)


def test_an_epoch_that_would_be_read_twice_is_said() -> None:
    sampler = sampler_of()
    list(sampler)

    with pytest.raises(SamplerUseError, match=r"call sampler.finish_step\(\) after each step"):
        iter(sampler)

    sampler.set_epoch(1)
    assert next(iter(sampler)) == [0, 1]


def test_a_sampler_can_be_pickled_in_the_middle_of_a_pass() -> None:
    sampler = sampler_of()
    iterator = iter(sampler)
    next(iterator)
    sampler.finish_step()

    copy = pickle.loads(pickle.dumps(sampler))

    assert (copy.cursor, list(copy)) == (Cursor(0, 4), [[4, 5], [8]])
    assert next(iterator) == [4, 5]


def test_an_unmodified_loader_takes_it_as_its_batch_sampler() -> None:
    sampler = sampler_of(1)
    loader: DataLoader[int] = DataLoader(range(100, 110), batch_sampler=sampler)  # type: ignore[arg-type]

    assert [batch.tolist() for batch in loader] == [[102, 103], [106, 107], [109]]


def test_the_first_batches_of_a_trillion_samples_take_next_to_no_memory() -> None:
    sampler = ElasticBatchSampler(ShuffledOrder(10**12), 256, rank=3, num_replicas=8)
    tracemalloc.start()
    try:
        iterator = iter(sampler)
        first = next(iterator)
        at_first_bytes = tracemalloc.get_traced_memory()[1]
        for _ in range(5000):
            next(iterator)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(first) == 32
    assert at_first_bytes < 100_000
    assert peak_bytes < 4_000_000


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "options", "message"),
    [
        (10, 3, {}, "a batch of 3 samples leaves 1 of 4 ranks without any in every step"),
        (3, 8, {}, "a data set of 3 samples leaves 1 of 4 ranks .* start fewer ranks, or give a rank weight 0"),
        (100, 8, {"weights": [1, 1, 1, 97]}, "leaves 3 of 4 ranks .*such as rank 0"),
        (10, 8, {"weights": [1, 1]}, "2 weights for 4 ranks"),
        (10, 8, {"weights": [0] * 4}, "at least one above 0"),
        (10, 16, {"drop_last": True}, "drop_last leaves no step: the data set has 10 samples, a batch 16"),
        (10, 0, {}, "a step needs a sample at least"),
        (10, 2.5, {}, "global_batch_size=2.5 is not an integer"),
        (10, 8, {"rank": 4}, "Invalid rank 4 for 4 replicas"),
    ],
)
def test_what_would_leave_ranks_without_work_is_refused(
    num_samples: int, batch_size: int, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SamplerArgumentError, match=message):
        ElasticBatchSampler(SequentialOrder(num_samples), batch_size, **{"rank": 0, "num_replicas": 4, **options})  # type: ignore[arg-type]


def test_fewer_samples_than_ranks_are_fine_where_some_ranks_are_told_to_idle() -> None:
    weights = [1, 1, 0, 0]
    batches = [
        list(ElasticBatchSampler(SequentialOrder(2), 8, rank=r, num_replicas=4, weights=weights)) for r in range(4)
    ]

    assert batches == [[[0]], [[1]], [[0]], [[0]]]
