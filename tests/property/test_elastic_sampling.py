"""Training that stops anywhere and goes on with other ranks, batches and shares sees each epoch exactly once."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.cursor import Cursor
from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
from ddpcore.samplers.evaluation import EvaluationSampler
from ddpcore.samplers.length_order import LengthGroupedOrder
from ddpcore.samplers.order import Order, SequentialOrder, ShuffledOrder


@dataclass(frozen=True)
class Stretch:
    """A part of a run, between two restarts."""

    batch_size: int
    weights: list[int]
    num_steps: int
    num_ahead: int
    """Batches that the loader has taken beyond those that are trained on."""

    def samplers(self, order: Order, drop_last: bool) -> list[ElasticBatchSampler]:
        world_size = len(self.weights)
        return [
            ElasticBatchSampler(
                order, self.batch_size, rank=rank, num_replicas=world_size, weights=self.weights, drop_last=drop_last
            )
            for rank in range(world_size)
        ]


@dataclass
class Run:
    """What a run has trained on, and where it stands."""

    order: Order
    drop_last: bool = False
    state: dict[str, object] | None = None
    seen: dict[int, list[int]] = field(default_factory=dict)
    batches: list[list[int]] = field(default_factory=list)

    def train(self, stretch: Stretch) -> None:
        samplers = stretch.samplers(self.order, self.drop_last)
        if self.state is not None:
            for sampler in samplers:
                sampler.load_state_dict(json.loads(json.dumps(self.state)))
        num_left = stretch.num_steps
        while num_left:
            num_left -= self.train_in_epoch(samplers, num_left, stretch.num_ahead)
        states = [sampler.state_dict() for sampler in samplers]
        assert all(state == states[0] for state in states)
        self.state = states[0]

    def train_in_epoch(self, samplers: list[ElasticBatchSampler], num_steps: int, num_ahead: int) -> int:
        """Train for so many steps or to the end of the epoch, and return for how many."""
        epoch, lengths = samplers[0].cursor.epoch, {len(sampler) for sampler in samplers}
        iterators = [iter(sampler) for sampler in samplers]
        fetched: list[list[list[int]]] = [[] for _ in samplers]
        num_done = 0
        while num_done < num_steps:
            for batches, iterator in zip(fetched, iterators, strict=True):
                while len(batches) <= num_ahead and (batch := next(iterator, None)) is not None:
                    batches.append(batch)
            assert len({len(batches) for batches in fetched}) == 1, "ranks do not make the same number of steps"
            if not fetched[0]:
                break
            self.step(samplers, [batches.pop(0) for batches in fetched])
            num_done += 1
        assert num_done == num_steps or lengths == {num_done}
        assert samplers[0].cursor.epoch == epoch + ({num_done} == lengths)
        return num_done

    def step(self, samplers: list[ElasticBatchSampler], batches: list[list[int]]) -> None:
        epoch, position = samplers[0].cursor
        together: list[int] = []
        for sampler, batch in zip(samplers, batches, strict=True):
            share = sampler.share
            if share.num_local:
                assert len(batch) == share.num_local
                together += batch
            else:
                assert batch == self.order.indices(epoch, position, position + 1).tolist()
        assert len(together) == samplers[0].share.num_global
        self.seen.setdefault(epoch, []).extend(together)
        self.batches.append(together)
        for sampler in samplers:
            sampler.finish_step()


def whole_epoch(order: Order, epoch: int) -> list[int]:
    samples: list[int] = order.indices(epoch, 0, order.num_samples).tolist()
    return samples


def check_seen(run: Run) -> None:
    """Epochs in their order, each exactly once; of the one under way the beginning."""
    last = max(run.seen)
    for epoch, samples in run.seen.items():
        expected = whole_epoch(run.order, epoch)
        assert samples == (expected if epoch < last else expected[: len(samples)])


@st.composite
def orders(draw: st.DrawFn) -> Order:
    num_samples, seed = draw(st.integers(8, 200)), draw(st.integers(0, 2**64 - 1))
    kind = draw(st.sampled_from(["shuffled", "sequential", "grouped"]))
    if kind == "grouped":
        return LengthGroupedOrder([(index * 7) % 13 for index in range(num_samples)], draw(st.integers(1, 9)), seed, 3)
    return ShuffledOrder(num_samples, seed) if kind == "shuffled" else SequentialOrder(num_samples)


@st.composite
def stretches(draw: st.DrawFn) -> Stretch:
    """World sizes 1 to 8, shares from even to extreme, also none at all for a rank."""
    weights = draw(st.lists(st.integers(0, 4), min_size=1, max_size=8).filter(any).filter(lambda ws: sum(ws) <= 8))
    batch_size = sum(weights) * draw(st.integers(1, 4))
    return Stretch(batch_size, weights, draw(st.integers(0, 30)), draw(st.integers(0, 5)))


@settings(max_examples=200)
@given(orders(), st.lists(stretches(), min_size=1, max_size=5))
def test_each_epoch_is_seen_exactly_once_over_any_sequence_of_world_and_batch_sizes(
    order: Order, run_of: list[Stretch]
) -> None:
    run = Run(order)

    for stretch in run_of:
        run.train(stretch)

    if run.seen:
        check_seen(run)
    taken = sum(len(samples) for samples in run.seen.values())
    assert run.state is not None
    assert (run.state["epoch"], run.state["position"]) == divmod(taken, order.num_samples)


@settings(max_examples=100)
@given(orders(), st.integers(4, 8), st.lists(st.integers(0, 30), min_size=2, max_size=2), st.booleans(), st.data())
def test_a_resumed_run_makes_the_batches_of_an_uninterrupted_one(
    order: Order, batch_size: int, num_steps: list[int], drop_last: bool, data: st.DataObject
) -> None:
    straight, resumed = Run(order, drop_last), Run(order, drop_last)

    straight.train(Stretch(batch_size, [1], sum(num_steps), num_ahead=0))
    for num in num_steps:
        world_size = data.draw(st.integers(1, 4))
        resumed.train(Stretch(batch_size, [1] * world_size, num, data.draw(st.integers(0, 5))))

    assert resumed.batches == straight.batches
    assert resumed.state == straight.state


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20), st.data())
def test_a_cursor_where_drop_last_leaves_no_step_moves_on_to_the_next_epoch(
    num_samples: int, first_batch: int, second_batch: int, data: st.DataObject
) -> None:
    order = ShuffledOrder(num_samples)
    first_batch, second_batch = min(first_batch, num_samples), min(second_batch, num_samples)
    sampler = ElasticBatchSampler(order, second_batch, drop_last=True)
    position = first_batch * data.draw(st.integers(0, num_samples // first_batch))

    sampler.load_state_dict({**sampler.state_dict(), "position": position})

    assert len(list(sampler)) >= 1
    fits = num_samples - position >= second_batch
    assert sampler.cursor == (Cursor(0, position) if fits else Cursor(1, 0))


@given(st.integers(1, 300), st.integers(1, 40))
def test_evaluation_takes_every_sample_once_in_order_with_shares_that_differ_by_one(
    num_samples: int, num_ranks: int
) -> None:
    shares = [list(EvaluationSampler(range(num_samples), num_ranks, rank)) for rank in range(num_ranks)]

    assert [index for share in shares for index in share] == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=200)
@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_the_drop_in_resumed_at_any_world_size_loses_nothing_and_repeats_only_its_padding(
    num_samples: int, stretches_of: list[tuple[int, int]], shuffle: bool, drop_last: bool
) -> None:
    dataset, state, epoch = range(num_samples), None, 0
    seen: list[int] = []
    for world_size, num_each in stretches_of:
        if drop_last and world_size > num_samples:
            return
        samplers = [
            ElasticDistributedSampler(dataset, world_size, rank, shuffle, 5, drop_last) for rank in range(world_size)
        ]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(sampler) for sampler in samplers]
        for _ in range(num_each):
            row = [next(iterator, None) for iterator in iterators]
            assert None not in row or set(row) == {None}, "ranks yield differently often"
            if samplers[0].epoch > epoch:
                # A state at the end of an epoch, or with too little left for this world: it goes on with the next.
                assert len(seen) + (world_size - 1) * drop_last >= num_samples
                seen, epoch = [], samplers[0].epoch
            seen += [index for index in row if index is not None]
        assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
        state = pickle.loads(pickle.dumps(samplers[0])).state_dict()

    order = whole_epoch(ShuffledOrder(num_samples, 5) if shuffle else SequentialOrder(num_samples), epoch)
    assert seen[:num_samples] == order[: len(seen)]
    padding = seen[num_samples:]
    assert padding == (order * 8)[: len(padding)]
    assert len(padding) < max(world_size for world_size, _ in stretches_of)
