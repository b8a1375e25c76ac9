"""Which samples this rank takes in each step: a batch sampler for an unmodified DataLoader that can resume anywhere.

Three things are kept apart: the order of the samples (`order.py`), who takes which of them (`shares.py`), and how far
training has come (`cursor.py`). The cursor is global and moves when the trainer reports a step as finished, not when
a worker of the DataLoader fetches ahead. A run therefore resumes in the middle of an epoch with any number of ranks,
any batch size and any shares, and no sample of the epoch is lost, repeated or padded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from ddpcore.arguments import check_flag
from ddpcore.errors import SamplerArgumentError, SamplerUseError
from ddpcore.samplers.arguments import check_order, resolve_replica
from ddpcore.samplers.cursor import Cursor, Steps, cursor_state, parse_cursor_state
from ddpcore.samplers.order import BLOCK, BLOCK_GROWTH, FIRST_BLOCK, checked_epoch, checked_int
from ddpcore.samplers.shares import Share, checked_weights, split

if TYPE_CHECKING:
    from ddpcore.samplers.order import Order


class ElasticBatchSampler(Sampler[list[int]]):
    """Batches of an order, a share of each for this rank.

        order = ShuffledOrder(len(dataset), seed=0)
        sampler = ElasticBatchSampler(order, global_batch_size=256)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        if resuming:
            sampler.load_state_dict(state["sampler"])           # from any world size and batch size
        while sampler.cursor.epoch < 3:
            for x, y in loader:
                share = sampler.share
                loss = F.cross_entropy(model(x), y)             # a mean
                (loss * loss_factor(share.num_local, share.num_global, sampler.num_replicas)).backward()
                ...
                sampler.finish_step()                           # from here on the step counts as done

    All ranks make the same number of steps. A rank whose share of a step is empty (the last step of an epoch, or weight
    0) gets the first sample of the global batch as a stand-in, so that it takes part in the collectives; `loss_factor`
    makes its loss count nothing. The epoch advances by itself with its last step; `len()` is what is left of it.

    It can be pickled at any time. Not for use by several threads.

    Args:
        order: The same on every rank.
        global_batch_size: Samples of a step over all ranks.
        rank: This replica; None asks the process group, then torchrun's variables, then it is alone.
        num_replicas: How many replicas; None likewise.
        weights: Proportions of the ranks' shares, one for each; None means equal ones. 0 gives a rank nothing.
        drop_last: Leave out a last step that is not full.

    Raises:
        SamplerArgumentError: An argument makes no sense, or ranks would have nothing to train on in every step.
    """

    def __init__(
        self,
        order: Order,
        global_batch_size: int,
        *,
        rank: int | None = None,
        num_replicas: int | None = None,
        weights: Sequence[int] | None = None,
        drop_last: bool = False,
    ) -> None:
        check_order(order)
        check_flag(SamplerArgumentError, "drop_last", drop_last)
        self.order = order
        self.rank, self.num_replicas = resolve_replica(rank, num_replicas)
        self.global_batch_size = checked_int("global_batch_size", global_batch_size)
        self.drop_last = drop_last
        self.steps = Steps(order.num_samples, self.global_batch_size, self.drop_last)
        self._weights = self._checked(weights)
        self._cursor = Cursor()
        self._progress: _Progress | None = None
        if self.drop_last and order.num_samples < self.global_batch_size:
            raise SamplerArgumentError(
                f"drop_last leaves no step: the data set has {order.num_samples} samples, "
                f"a batch {self.global_batch_size}; take a smaller batch"
            )

    @property
    def cursor(self) -> Cursor:
        """Where the next unfinished step begins."""
        return self._cursor

    @property
    def share(self) -> Share:
        """This rank's part of the step at the cursor."""
        progress = self._progress
        weights = self._weights if progress is None or progress.is_finished else progress.weights
        num_global = self.steps.num_positions(self._cursor)
        if num_global == self.global_batch_size and progress is not None and weights is progress.weights:
            return progress.full_share
        return self._share(num_global, weights)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch."""
        return self.steps.num_left(Cursor())

    def __len__(self) -> int:
        """Return how many steps are left in the cursor's epoch."""
        return self.steps.num_left(self._cursor)

    def __iter__(self) -> _Pass:
        """Return this rank's samples of each step, from the cursor to the end of its epoch.

        Raises:
            SamplerUseError: The epoch has been read to its end already, and not one step of it was finished.
        """
        if self._progress is not None and self._progress.is_read and not self._progress.num_finished:
            raise SamplerUseError(
                f"epoch {self._cursor.epoch} was read to its end and would now be read again: call "
                "sampler.finish_step() after each step (to read without training, use an EvaluationSampler)"
            )
        self._progress = _Progress(self._cursor, self._weights, self._share(self.global_batch_size, self._weights))
        return _Pass(self, self._progress)

    def finish_step(self) -> None:
        """Count the step at the cursor as done. Call it once for each batch taken, on every rank.

        Raises:
            SamplerUseError: All batches that were taken are finished already.
        """
        if self._progress is None or self._progress.is_finished:
            raise SamplerUseError(
                "finish_step() was called more often than batches were taken from iter(sampler) or its DataLoader: "
                "call it once for each batch, after the optimizer's step; not for each micro-batch"
            )
        self._progress.num_finished += 1
        self._cursor = self.steps.after(self._cursor)

    def set_weights(self, weights: Sequence[int] | None) -> None:
        """Share out differently from the next `iter()` on; the same weights on every rank.

        Raises:
            SamplerArgumentError: As of the constructor; the weights stay as they were.
        """
        self._weights = self._checked(weights)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the cursor is in it. Nobody has to call this.

        Raises:
            SamplerArgumentError: The epoch is negative or no integer.
        """
        epoch = checked_epoch(epoch)
        if epoch != self._cursor.epoch:
            self._cursor, self._progress = Cursor(epoch, 0), None

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and what it is a cursor of: JSON-able, the same on every rank and for every world size."""
        return cursor_state(self.order, self._cursor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another run has finished its last step; takes effect at the next `iter()`.

        Raises:
            SamplerStateError: It is no such state, or of another data set, seed or order; the sampler is as it was.
        """
        self._cursor = self.steps.settle(parse_cursor_state(state_dict, self.order))
        self._progress = None

    def plan(self) -> dict[str, Any]:
        """Return what all ranks must agree on, and this one's rank (see `sampler_agreement.check_same_everywhere`)."""
        return {
            **self.state_dict(),
            "global_batch_size": self.global_batch_size,
            "weights": list(self._weights),
            "drop_last": self.drop_last,
            "num_replicas": self.num_replicas,
            "rank": self.rank,
        }

    def _share(self, num_global: int, weights: tuple[int, ...]) -> Share:
        begin, end = split(num_global, weights)[self.rank : self.rank + 2]
        return Share(end - begin, num_global)

    def _checked(self, weights: Sequence[int] | None) -> tuple[int, ...]:
        """Return the weights, if every rank that has one gets a sample of a full batch."""
        checked = (1,) * self.num_replicas if weights is None else checked_weights(weights)
        if len(checked) != self.num_replicas:
            raise SamplerArgumentError(f"{len(checked)} weights for {self.num_replicas} ranks: give one for each")
        if self.global_batch_size < 1:
            raise SamplerArgumentError(f"global_batch_size={self.global_batch_size}: a step needs a sample at least")
        num = min(self.global_batch_size, self.order.num_samples)
        bounds = split(num, checked)
        idle = [rank for rank, weight in enumerate(checked) if weight and bounds[rank] == bounds[rank + 1]]
        if idle:
            what = "a batch" if num == self.global_batch_size else "a data set"
            raise SamplerArgumentError(
                f"{what} of {num} samples leaves {len(idle)} of {len(checked)} ranks without any in every step "
                f"(such as rank {idle[0]}): use more samples, start fewer ranks, or give a rank weight 0 on purpose"
            )
        return checked


@dataclass
class _Progress:
    """Progress of one pass over the rest of an epoch.

    `weights` are the shares it was begun with. `full_share` is this rank's of a full step: with thousands of ranks too
    much to compute in every step. `num_taken` are batches handed to the loader, which may be ahead of training;
    `num_finished` are steps that the trainer has finished. With `is_read` the loader has read it to its end.
    """

    begin: Cursor
    weights: tuple[int, ...]
    full_share: Share
    num_taken: int = 0
    num_finished: int = 0
    is_read: bool = False

    @property
    def is_finished(self) -> bool:
        """Every batch that was taken is finished."""
        return self.num_finished >= self.num_taken


class _Pass(Iterator[list[int]]):
    """This rank's batches from the cursor to the end of its epoch.

    It has a state of its own for torchdata's StatefulDataLoader, which keeps for each batch the state from when it was
    fetched: there the sampler's cursor is behind by what the workers were ahead, but this one is right.
    """

    def __init__(self, sampler: ElasticBatchSampler, progress: _Progress) -> None:
        self.progress = progress
        self.batches = _batches(sampler, progress)
        self._sampler = sampler

    def __next__(self) -> list[int]:
        try:
            batch = next(self.batches)
        except StopIteration:
            self.progress.is_read = self.progress.num_taken > 0
            raise
        self.progress.num_taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor behind the last batch taken."""
        cursor, steps = self.progress.begin, self._sampler.steps
        return cursor_state(self._sampler.order, steps.after(cursor, self.progress.num_taken))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin this pass, and with it the sampler's cursor, at that point."""
        self._sampler.load_state_dict(state_dict)
        begun = iter(self._sampler)
        self.progress, self.batches = begun.progress, begun.batches


def _batches(sampler: ElasticBatchSampler, progress: _Progress) -> Iterator[list[int]]:
    """Yield this rank's share of each step, computed in blocks that grow, so that the first comes at once."""
    order, (epoch, position), batch_size = sampler.order, progress.begin, sampler.global_batch_size
    begin, end = _bounds(batch_size, progress.weights, sampler.rank)
    num_full_steps = (order.num_samples - position) // batch_size
    num_done, num_indices = 0, FIRST_BLOCK
    while num_done < num_full_steps:
        num_steps = min(max(1, num_indices // (end - begin)), num_full_steps - num_done)
        steps = np.arange(num_done, num_done + num_steps, dtype=np.int64)
        positions = (position + begin + batch_size * steps)[:, np.newaxis] + np.arange(end - begin)
        yield from order.take(epoch, positions).tolist()
        num_done += num_steps
        num_indices = min(num_indices * BLOCK_GROWTH, BLOCK)
    position += num_full_steps * batch_size
    num_left = order.num_samples - position
    if num_left and not sampler.drop_last:
        begin, end = _bounds(num_left, progress.weights, sampler.rank)
        yield order.indices(epoch, position + begin, position + end).tolist()


def _bounds(num: int, weights: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Return this rank's bounds within a step of `num` samples: those of the first sample if its share is empty."""
    begin, end = split(num, weights)[rank : rank + 2]
    return (begin, end) if end > begin else (0, 1)
