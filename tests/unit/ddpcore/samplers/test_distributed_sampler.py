"""In place of torch's DistributedSampler: torch's sampler index for index, torchdata's state, and what both lack."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from ddpcore.errors import SamplerArgumentError, SamplerStateError
from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
from ddpcore.samplers.order import ShuffledOrder
from ddpcore.samplers.weighted_order import WeightedOrder


class Numbers(Dataset[int]):
    """0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def take(sampler: ElasticDistributedSampler, num: int) -> list[int]:
    return [index for _, index in zip(range(num), sampler, strict=False)]


SHAPES = [(num, world) for num in (1, 2, 5, 9, 10, 100, 103, 300) for world in (1, 2, 3, 4, 7, 10)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num", "world_size"), SHAPES)
def test_without_shuffle_it_is_torch_s_sampler_index_for_index(num: int, world_size: int, drop_last: bool) -> None:
    if drop_last and num < world_size:
        with pytest.raises(SamplerArgumentError, match="drop_last leaves nothing of"):
            ElasticDistributedSampler(Numbers(num), world_size, 0, drop_last=True)
        return
    for rank in range(world_size):
        theirs: DistributedSampler[int] = DistributedSampler(
            Numbers(num), world_size, rank, shuffle=False, drop_last=drop_last
        )
        ours = ElasticDistributedSampler(Numbers(num), world_size, rank, shuffle=False, drop_last=drop_last)

        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)
        assert list(ours) == list(theirs)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num", "world_size"), [shape for shape in SHAPES if shape[0] >= shape[1]])
def test_shuffled_it_has_torch_s_structure_on_its_own_permutation(num: int, world_size: int, drop_last: bool) -> None:
    epoch = ShuffledOrder(num, 3).indices(2, 0, num).tolist()
    for rank in range(world_size):
        theirs: DistributedSampler[int] = DistributedSampler(
            Numbers(num), world_size, rank, shuffle=False, drop_last=drop_last
        )
        ours = ElasticDistributedSampler(Numbers(num), world_size, rank, seed=3, drop_last=drop_last)
        ours.set_epoch(2)

        assert list(ours) == [epoch[position] for position in theirs]


def test_it_takes_torch_s_arguments_in_their_order_and_passes_for_torch_s_sampler() -> None:
    dataset = Numbers(100)

    sampler = ElasticDistributedSampler(dataset, 10, 4, False, 42, True)

    assert isinstance(sampler, DistributedSampler)
    assert (sampler.dataset, sampler.num_replicas, sampler.rank, sampler.shuffle) == (dataset, 10, 4, False)
    assert (sampler.seed, sampler.drop_last, sampler.epoch, sampler.yielded) == (42, True, 0, 0)
    assert sampler.next_yielded is None


@pytest.mark.parametrize("rank", [3, -1])
def test_a_rank_outside_of_the_world_is_a_value_error_as_in_torch(rank: int) -> None:
    with pytest.raises(ValueError, match="Invalid rank"):
        ElasticDistributedSampler(Numbers(10), 3, rank)


def test_full_batches_hold_no_padding() -> None:
    seen: list[int] = []
    for rank in range(4):
        loader = DataLoader(
            Numbers(9), batch_size=2, drop_last=True, sampler=ElasticDistributedSampler(Numbers(9), 4, rank)
        )
        seen += [int(index) for batch in loader for index in batch]

    assert len(seen) == len(set(seen)) == 8


def test_ranks_together_see_everything_and_each_epoch_in_another_order() -> None:
    epochs = []
    samplers = [ElasticDistributedSampler(Numbers(100), 5, rank, seed=1) for rank in range(5)]
    for _ in range(3):
        shares = [list(sampler) for sampler in samplers]
        assert sorted(chain.from_iterable(shares)) == list(range(100))
        epochs.append(shares)

    assert epochs[0] != epochs[1] != epochs[2]
    assert [sampler.epoch for sampler in samplers] == [2] * 5


def test_setting_the_epoch_each_time_gives_the_same_as_never_setting_it() -> None:
    set_each_time, never_set = (ElasticDistributedSampler(Numbers(30), 2, 0) for _ in range(2))
    for epoch in range(4):
        set_each_time.set_epoch(epoch)
        assert list(set_each_time) == list(never_set)


def test_setting_the_same_epoch_again_repeats_it() -> None:
    sampler = ElasticDistributedSampler(Numbers(30), 2, 0)
    first = list(sampler)

    sampler.set_epoch(0)

    assert list(sampler) == first
    with pytest.raises(SamplerArgumentError, match="epochs count from 0"):
        sampler.set_epoch(-1)


def test_a_pass_that_was_left_begins_anew_as_in_torch() -> None:
    sampler = ElasticDistributedSampler(Numbers(30), 2, 0)

    assert take(sampler, 5) == take(sampler, 5)


def test_the_state_counts_what_was_yielded_as_in_torchdata() -> None:
    sampler = ElasticDistributedSampler(Numbers(100), 10, 0)
    iterator = iter(sampler)
    next(iterator)
    assert (sampler.yielded, sampler.next_yielded, sampler.state_dict()["yielded"]) == (1, None, 1)

    sampler.load_state_dict({"yielded": 5})
    pending: int | None = sampler.next_yielded
    assert pending == 5

    iterator = iter(sampler)
    next(iterator)
    pending = sampler.next_yielded
    assert (sampler.yielded, pending) == (6, None)
    sampler.yielded = 3
    assert sampler.state_dict()["yielded"] == 3


@pytest.mark.parametrize("state", [{"yielded": -1}, {"yielded": 11}, {"yielded": "5"}, {"yielded": None}, {}, None])
def test_a_count_that_cannot_be_is_a_value_error_as_in_torchdata(state: Any) -> None:
    sampler = ElasticDistributedSampler(Numbers(100), 10, 0)

    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict(state)

    assert sampler.next_yielded is None


def test_torchdata_s_state_is_of_the_epoch_that_is_set() -> None:
    sampler = ElasticDistributedSampler(Numbers(30), 2, 0)
    sampler.set_epoch(3)
    epoch_3 = list(sampler)

    for calls in ("load, set", "set, load"):
        resumed = ElasticDistributedSampler(Numbers(30), 2, 0)
        for call in calls.split(", "):
            if call == "set":
                resumed.set_epoch(3)
            else:
                resumed.load_state_dict({"yielded": 4})
        assert list(resumed) == epoch_3[4:]


@pytest.mark.parametrize("num_taken", [1, 7, 14])
def test_a_resumed_pass_yields_the_rest_and_then_the_next_epoch(num_taken: int) -> None:
    straight, stopped = (ElasticDistributedSampler(Numbers(30), 2, 1, seed=4) for _ in range(2))
    first, second = list(straight), list(straight)
    take(stopped, num_taken)

    resumed = ElasticDistributedSampler(Numbers(30), 2, 1, seed=4)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict()
    resumed.set_epoch(0)

    assert list(resumed) == first[num_taken:]
    assert list(resumed) == second


def test_after_the_state_of_a_complete_pass_comes_the_next_epoch() -> None:
    straight = ElasticDistributedSampler(Numbers(30), 2, 1)
    list(straight)
    state = straight.state_dict()
    second = list(straight)

    for epoch_asked in (None, 1):
        resumed = ElasticDistributedSampler(Numbers(30), 2, 1)
        resumed.load_state_dict(state)
        if epoch_asked is not None:
            resumed.set_epoch(epoch_asked)
        assert list(resumed) == second


@pytest.mark.parametrize(("world_size", "drop_last"), [(2, False), (4, False), (4, True)])
def test_after_the_state_of_a_complete_pass_a_loop_over_epochs_trains_those_that_are_left(
    world_size: int, drop_last: bool
) -> None:
    straight = ElasticDistributedSampler(Numbers(30), 4, 1, drop_last=drop_last)
    list(straight)
    resumed = ElasticDistributedSampler(Numbers(30), world_size, 1, drop_last=drop_last)

    resumed.load_state_dict(straight.state_dict())

    assert resumed.state_dict()["position"] == straight.state_dict()["position"]
    again = ElasticDistributedSampler(Numbers(30), 4, 1, drop_last=drop_last)
    again.load_state_dict(resumed.state_dict())
    again.set_epoch(0)
    assert list(again) == []
    passes = [(epoch, len(list(resumed)), resumed.epoch) for epoch in range(resumed.epoch, 3)]
    assert passes == [(1, len(resumed), 1), (2, len(resumed), 2)]


@pytest.mark.parametrize("num", [29, 30])
def test_of_a_complete_pass_whose_epoch_is_asked_for_nothing_is_left(num: int) -> None:
    straight = ElasticDistributedSampler(Numbers(num), 2, 1)
    list(straight)

    for calls in ("load, set", "set, load"):
        resumed = ElasticDistributedSampler(Numbers(num), 2, 1)
        for call in calls.split(", "):
            if call == "set":
                resumed.set_epoch(0)
            else:
                resumed.load_state_dict(straight.state_dict())
        assert list(resumed) == []
        assert resumed.epoch == 0
        assert len(list(resumed)) == 15
        assert resumed.epoch == 1


def test_a_state_set_to_another_epoch_begins_that_one() -> None:
    sampler = ElasticDistributedSampler(Numbers(30), 2, 1)
    take(sampler, 5)
    resumed = ElasticDistributedSampler(Numbers(30), 2, 1)
    resumed.load_state_dict(sampler.state_dict())

    resumed.set_epoch(1)

    assert len(list(resumed)) == 15
    assert resumed.epoch == 1


def test_two_ranks_go_on_where_four_have_stopped() -> None:
    four = [ElasticDistributedSampler(Numbers(103), 4, rank) for rank in range(4)]
    seen = [index for sampler in four for index in take(sampler, 10)]

    two = [ElasticDistributedSampler(Numbers(103), 2, rank) for rank in range(2)]
    for sampler in two:
        sampler.load_state_dict(four[3].state_dict())
    rest = [list(sampler) for sampler in two]

    assert len(rest[0]) == len(rest[1]) == 32
    assert [len(sampler) for sampler in two] == [20 + 32] * 2
    assert sorted({*seen, *rest[0], *rest[1]}) == list(range(103))
    assert len(seen) + 64 == 103 + 1


def test_a_state_of_another_seed_is_refused() -> None:
    state = ElasticDistributedSampler(Numbers(30), 2, 1, seed=1).state_dict()

    with pytest.raises(SamplerStateError, match="seed was 1 and is 2"):
        ElasticDistributedSampler(Numbers(30), 2, 1, seed=2).load_state_dict(state)


def test_another_order_can_be_dealt_out_as_torch_deals_the_shuffled_one() -> None:
    order = WeightedOrder([0.0, 1.0, 3.0], num_samples=50)
    shares = [list(ElasticDistributedSampler(Numbers(3), 2, rank, order=order)) for rank in range(2)]

    assert [index for pair in zip(*shares, strict=True) for index in pair] == order.indices(0, 0, 50).tolist()


def test_it_can_be_pickled_in_the_middle_of_a_pass() -> None:
    sampler = ElasticDistributedSampler(Numbers(30), 2, 1)
    take(sampler, 5)

    assert pickle.loads(pickle.dumps(sampler)).state_dict() == sampler.state_dict()


def test_a_trillion_samples_begin_at_once() -> None:
    sampler = ElasticDistributedSampler(Numbers(10**12), 8, 3)

    assert take(sampler, 3) == ShuffledOrder(10**12).take(0, torch.tensor([3, 11, 19]).numpy()).tolist()
    assert len(sampler) == 10**12 // 8


def test_torch_s_batches_of_it_are_those_of_torch_s_sampler() -> None:
    sampler = ElasticDistributedSampler(Numbers(20), 2, 0, shuffle=False)

    assert list(BatchSampler(sampler, 4, drop_last=False)) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
