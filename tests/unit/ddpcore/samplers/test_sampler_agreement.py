"""What ranks are told when their samplers do not fit together; real ranks are in the integration tests."""

from __future__ import annotations

from typing import Any

import pytest

from ddpcore.errors import SamplerArgumentError, SamplerMismatchError
from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
from ddpcore.samplers.evaluation import EvaluationSampler
from ddpcore.samplers.order import SequentialOrder, ShuffledOrder
from ddpcore.samplers.sampler_agreement import (
    check_same_everywhere,
    find_difference,
    find_untaken,
    make_same_everywhere,
)


def plans(*samplers: Any) -> list[dict[str, Any]]:
    return [sampler.plan() for sampler in samplers]


def rank_of_four(rank: int, num_samples: int = 100, seed: int = 0, **options: Any) -> ElasticBatchSampler:
    return ElasticBatchSampler(ShuffledOrder(num_samples, seed), 8, rank=rank, num_replicas=4, **options)


def test_equal_samplers_agree() -> None:
    together = plans(*(rank_of_four(rank) for rank in range(4)))

    assert find_difference(together) == find_untaken(together) == ""


def test_data_sets_of_different_length_are_named_with_their_ranks() -> None:
    lengths = [1000, 1000, 998, 1000]

    said = find_difference(plans(*(rank_of_four(rank, length) for rank, length in enumerate(lengths))))

    assert "num_samples is 1000 on ranks 0-1, 3, 998 on rank 2" in said
    assert "Give every rank the same data set" in said


def test_everything_that_differs_is_named() -> None:
    elsewhere = rank_of_four(3, weights=[1, 1, 1, 2])
    elsewhere.set_epoch(2)

    said = find_difference(plans(rank_of_four(0), rank_of_four(1, seed=5), rank_of_four(2, drop_last=True), elsewhere))

    for part in (
        "seed is 0 on ranks 0, 2-3, 5 on rank 1",
        "drop_last is false on ranks 0-1, 3, true on rank 2",
        "epoch is 0 on ranks 0-2, 2 on rank 3",
        "weights is [1, 1, 1, 1] on ranks 0-2, [1, 1, 1, 2] on rank 3",
    ):
        assert part in said


def test_many_different_values_are_cut_short() -> None:
    said = find_difference(plans(*(EvaluationSampler(range(rank + 1), 8, rank) for rank in range(8))))

    assert "num_samples is 1 on rank 0, 2 on rank 1, 3 on rank 2, 4 on rank 3 and 4 other values" in said


def test_other_kinds_of_samplers_differ() -> None:
    said = find_difference(plans(rank_of_four(0), ElasticDistributedSampler(range(100), 4, 1)))

    assert "global_batch_size is 8 on rank 0, null on rank 1" in said


def test_shares_that_nobody_takes_are_named() -> None:
    said = find_untaken(plans(rank_of_four(0), rank_of_four(0), rank_of_four(0), rank_of_four(3)))

    assert "nobody takes the samples of ranks 1-2" in said


def test_ranks_that_share_a_replica_are_fine() -> None:
    together = plans(*(EvaluationSampler(range(10), 2, rank // 2) for rank in range(4)))

    assert find_difference(together) == find_untaken(together) == ""


def test_alone_a_sampler_must_be_for_one_replica() -> None:
    check_same_everywhere(ElasticBatchSampler(SequentialOrder(10), 4))

    with pytest.raises(SamplerMismatchError, match="of 1 processes are made for 4 replicas"):
        check_same_everywhere(rank_of_four(0))


def test_alone_what_cannot_be_made_raises_as_it_is() -> None:
    with pytest.raises(SamplerArgumentError, match="0 samples"):
        make_same_everywhere(lambda: ElasticBatchSampler(SequentialOrder(0), 4))
    assert len(make_same_everywhere(lambda: ElasticBatchSampler(SequentialOrder(10), 4))) == 3
