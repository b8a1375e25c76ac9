"""Exact evaluation: every sample once, whatever the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler

from ddpcore.samplers.arguments import num_samples_of_dataset, resolve_replica
from ddpcore.samplers.order import SequentialOrder
from ddpcore.samplers.shares import split

if TYPE_CHECKING:
    from collections.abc import Iterator


class EvaluationSampler(Sampler[int]):
    """This rank's contiguous part of a data set, in order, with nothing padded and nothing dropped.

        loader = DataLoader(dataset, batch_size=64, sampler=EvaluationSampler(dataset))
        module = model.module                       # not the DDP wrapper, see below
        module.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in loader:
                sums += torch.tensor([F.cross_entropy(module(x), y, reduction="sum"), len(y)])
        dist.all_reduce(sums)                       # every rank, also one that had no sample
        mean_loss = sums[0] / sums[1]

    Parts differ in size by one at most; with fewer samples than ranks some are empty. The results of the ranks, one
    after the other, are in the order of the data set. Evaluate the wrapped module itself: DDP's forward broadcasts
    buffers, also in `eval()`, and a rank without a batch would leave the others waiting in it.

    Args:
        dataset: Map-style, with a length; the same on every rank.
        num_replicas: How many ranks; None asks the process group, then torchrun's variables, then it is alone.
        rank: This one; None likewise.

    Raises:
        SamplerArgumentError: The data set is empty or has no length, or the rank does not fit.
    """

    def __init__(self, dataset: object, num_replicas: int | None = None, rank: int | None = None) -> None:
        self.num_total = num_samples_of_dataset(dataset)
        self.rank, self.num_replicas = resolve_replica(rank, num_replicas)
        self._begin, self._end = split(self.num_total, [1] * self.num_replicas)[self.rank : self.rank + 2]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._begin, self._end))

    def __len__(self) -> int:
        return self._end - self._begin

    def plan(self) -> dict[str, Any]:
        """Return what all ranks must agree on, and this one's rank (see `sampler_agreement.check_same_everywhere`)."""
        order = SequentialOrder(self.num_total).fingerprint()
        return {"order": order, "num_replicas": self.num_replicas, "rank": self.rank}
