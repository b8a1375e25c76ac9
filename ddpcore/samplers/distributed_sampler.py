"""Replaces torch's DistributedSampler and torchdata's StatefulDistributedSampler: at once, and at any world size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DistributedSampler

from ddpcore.arguments import check_flag
from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.arguments import check_order, num_samples_of_dataset, resolve_replica
from ddpcore.samplers.cursor import Cursor, checked_count, cursor_state, parse_cursor_state
from ddpcore.samplers.order import BLOCK, BLOCK_GROWTH, FIRST_BLOCK, SequentialOrder, ShuffledOrder, checked_epoch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpcore.samplers.order import Order


class ElasticDistributedSampler(DistributedSampler[int]):
    """torch's DistributedSampler without its lists, with a state, and with epochs that cannot be forgotten.

        sampler = ElasticDistributedSampler(dataset)                 # rank and world size from the process group
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        if resuming:
            sampler.load_state_dict(state["sampler"])                # from any world size
        for epoch in range(sampler.epoch, 3):                        # set_epoch() may be called, but need not be
            for batch in loader:
                ...

    Which rank gets which position is as in torch: rank, rank + world size, and so on, padded from the beginning or,
    with `drop_last`, cut off, so that all ranks get equally many. Without shuffle it is torch's sampler index for
    index in every epoch. On purpose, the permutation is that of `ShuffledOrder`, a pass that was read to its end is
    followed by the next epoch, and a state of another data set, seed or order is refused; ddpcore/README.md lists all
    differences.

    `yielded` counts what was handed to the loader, as in torchdata: workers of a plain DataLoader are ahead of training
    by their prefetch. torchdata's StatefulDataLoader puts that right; without it, use an `ElasticBatchSampler`.

    Args:
        dataset: Map-style, with a length that stays; the same on every rank.
        num_replicas: How many ranks; None asks the process group, then torchrun's variables, then it is alone.
        rank: This one; None likewise.
        shuffle: Another permutation each epoch; False is the data set's own order.
        seed: Seed of the permutations, the same on every rank.
        drop_last: Cut the rest off instead of padding it.
        order: In place of `shuffle` and `seed`: another order, such as a weighted one.

    Raises:
        SamplerArgumentError: The data set is empty, has no length or is too small for `drop_last`; a number is wrong.

    Source: https://github.com/pytorch/data/blob/main/torchdata/stateful_dataloader/sampler.py
    """

    _YIELDED = "yielded"

    def __init__(  # noqa: PLR0913 - torch's own signature
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
        seed: int = 0,
        drop_last: bool = False,  # noqa: FBT001, FBT002 - torch's own signature
        *,
        order: Order | None = None,
    ) -> None:
        num_samples = num_samples_of_dataset(dataset)
        check_flag(SamplerArgumentError, "shuffle", shuffle)
        check_flag(SamplerArgumentError, "drop_last", drop_last)
        if order is not None:
            check_order(order, num_samples)
        replica = resolve_replica(rank, num_replicas)
        super().__init__(dataset, replica.num_replicas, replica.rank, shuffle, seed, drop_last)
        if order is None:
            order = ShuffledOrder(num_samples, seed) if shuffle else SequentialOrder(num_samples)
        self.order: Order = order
        self._offset = 0
        """Positions at the beginning of the epoch that `yielded` does not count: left by another world size."""
        self.num_samples = len(self)
        self.total_size = self.num_samples * self.num_replicas
        self.yielded = 0
        self.next_yielded: int | None = None
        self._has_loaded_epoch = False
        self._asked_epoch: int | None = None
        self._completed: tuple[int, int, int] | None = None
        """Epoch, `yielded` and offset of a loaded state whose pass was complete, until the next one begins."""
        if not self.num_samples:
            raise SamplerArgumentError(
                f"drop_last leaves nothing of {order.num_samples} samples for {self.num_replicas} ranks: "
                "start fewer ranks, or let drop_last be False"
            )

    def __len__(self) -> int:
        """Return the samples of this rank in the epoch under way, those already yielded among them."""
        num_positions = self.order.num_samples - self._offset
        return num_positions // self.num_replicas if self.drop_last else -(-num_positions // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self._begin_pass()
        epoch, num_samples, end = self.epoch, self.order.num_samples, len(self)
        begin, num_indices = self.yielded, FIRST_BLOCK
        first = self._offset + self.rank
        while begin < end:
            block_end = min(begin + num_indices, end)
            positions = first + self.num_replicas * np.arange(begin, block_end, dtype=np.int64)
            if positions[-1] >= num_samples:
                # Padding starts over at the first position, as often as a data set smaller than the world needs it.
                positions %= num_samples
            for index in self.order.take(epoch, positions).tolist():
                self.yielded += 1
                yield index
            begin, num_indices = block_end, min(num_indices * BLOCK_GROWTH, BLOCK)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; within the epoch that a state was loaded for, stay there.

        Nobody has to call this: after a pass that was read to its end comes the next epoch.

        Raises:
            SamplerArgumentError: The epoch is negative or no integer.
        """
        epoch = checked_epoch(epoch)
        if self._completed is not None and epoch == self._completed[0]:
            self.epoch, self.yielded, self._offset = self._completed
            self.next_yielded = self.yielded
        self._completed = None
        is_elsewhere = epoch != self.epoch
        if is_elsewhere and self._has_loaded_epoch:
            self.next_yielded = None
        if self.next_yielded is None and (is_elsewhere or self._is_over):
            self.yielded = self._offset = 0
        self.epoch = self._asked_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return how far this pass is: JSON-able, the same on ranks that have yielded equally often."""
        epoch, yielded, offset = self._completed or (self.epoch, self.yielded, self._offset)
        position = min(offset + yielded * self.num_replicas, self.order.num_samples)
        return {self._YIELDED: yielded, **cursor_state(self.order, Cursor(epoch, position))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the pass of a state at the next `iter()`, also if it was saved by more or fewer ranks.

        A state that has only `yielded`, as torchdata's, is taken to be of this world size and of the epoch of
        `set_epoch`. After the state of a pass that was complete comes the next epoch, and `epoch` is that one at once;
        if `set_epoch` asks for that very epoch, the rest of it, which is nothing.

        Raises:
            SamplerStateError: It is no such state, or of another data set, seed or order; the sampler is as it was.
        """
        state: object = state_dict
        if isinstance(state, dict) and state.keys() == {self._YIELDED}:
            yielded, offset = checked_count(self._YIELDED, state[self._YIELDED], self.num_samples), 0
            self._has_loaded_epoch = False
        else:
            self.epoch, position = parse_cursor_state(state, self.order)
            yielded, offset = divmod(position, self.num_replicas)
            self._has_loaded_epoch = True
        self.yielded = self.next_yielded = yielded
        self._offset, self._completed = offset, None
        if self._has_loaded_epoch and self._is_over and self._asked_epoch != self.epoch:
            self._completed = (self.epoch, yielded, offset)
            self.epoch += 1
            self.yielded = self.next_yielded = self._offset = 0

    def plan(self) -> dict[str, Any]:
        """Return what all ranks must agree on, and this one's rank (see `sampler_agreement.check_same_everywhere`)."""
        facts = {"drop_last": self.drop_last, "num_replicas": self.num_replicas, "rank": self.rank}
        return {**self.state_dict(), **facts}

    @property
    def _is_over(self) -> bool:
        return self.yielded >= len(self)

    def _begin_pass(self) -> None:
        """Go to a loaded state's place, else to the beginning: of the next epoch if this one was read to its end."""
        resumed_at, self.next_yielded, self._completed = self.next_yielded, None, None
        asked_epoch, self._asked_epoch = self._asked_epoch, None
        if resumed_at is not None:
            self.yielded = resumed_at
            if not self._is_over or asked_epoch == self.epoch:
                return
        if self._is_over:
            self.epoch += 1
        self.yielded = self._offset = 0
