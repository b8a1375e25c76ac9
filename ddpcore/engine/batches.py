"""A data set dealt out in global batches: exact, elastic, and on the device when the step wants them.

Order, split and cursor are the sampler's (`ddpcore.samplers`); here they meet torch's DataLoader, the prefetcher and
the division into micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from torch import nn

from ddpcore.arguments import check_whole
from ddpcore.engine.cadence import Cadence, Unit
from ddpcore.engine.loader_options import MAX_COUNT, LoaderOptions, make_loader, whole
from ddpcore.engine.seeds import mix
from ddpcore.errors import EngineUseError
from ddpcore.nested import num_samples_of, split_samples
from ddpcore.parallel.fully_sharded import is_fully_sharded
from ddpcore.prefetch import Prefetcher
from ddpcore.samplers.shares import loss_factor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.utils.data import Dataset

    from ddpcore.placement import Placement
    from ddpcore.samplers.batch_sampler import ElasticBatchSampler


def wants_equal_forwards(model: nn.Module) -> bool:
    """Return whether ranks that run forward differently often hang: its forward, in training, meets other ranks."""
    return is_fully_sharded(model) or any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


class MicroBatch(NamedTuple):
    """A part of a rank's share of a global batch; a stand-in is for a rank or part without samples.

    The mean loss is multiplied with `loss_factor`, so that DDP's mean over ranks is the mean over all samples of the
    global batch: 0 for a stand-in. With `is_last` the gradients of all micro-batches are reduced over ranks.
    """

    content: Any
    loss_factor: float
    num_samples: int
    is_last: bool


class Batches:
    """Global batches of a data set, as one rank sees them.

    `sampler` deals out the indices and holds the cursor. `seed` is of what the DataLoader's workers draw, differently
    on each rank and from each cursor on. `prefetch` batches are on their way to an accelerator while a step computes.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ElasticBatchSampler,
        *,
        device: torch.device,
        placement: Placement,
        seed: int,
        prefetch: int = 2,
        **loader_options: Unpack[LoaderOptions],
    ) -> None:
        check_whole(EngineUseError, "prefetch", prefetch, most=MAX_COUNT)
        self.sampler = sampler
        self._placement = placement
        self._seed = seed
        # A DataLoader without one draws from the generator that dropout uses: a resumed run would leave the old one's
        # sequence.
        self._generator = torch.Generator()
        loader_options.setdefault("pin_memory", device.type == "cuda")
        own = {"batch_sampler": sampler, "generator": self._generator}
        self._loader = make_loader(dataset, own, loader_options)
        self._prefetcher: Prefetcher[Any] = Prefetcher(self._loader, device, depth=prefetch)

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self.sampler.cursor.epoch

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield this rank's batches from the cursor to the end of its epoch."""
        self._generator.manual_seed(mix(self._seed, self._placement.rank, *self.sampler.cursor))
        yield from whole(self._prefetcher, len(self.sampler))

    def micro_batches(self, content: Any, num_parts: int, *, is_static: bool = False) -> Sequence[MicroBatch]:
        """Return the batch at the cursor in `num_parts` parts, or fewer where the share has not so many samples.

        With `is_static` stand-ins fill up the number: DDP with a static graph reduces in the first micro-batch of all
        as well, for which every rank needs one that is not the last.
        """
        num_local, num_global = self.sampler.share
        parts = split_samples(content, num_parts) if num_parts > 1 else [content]
        num_own = len(parts)
        if is_static:
            parts += [parts[-1]] * (num_parts - num_own)
        last = len(parts) - 1
        micro_batches = []
        for number, part in enumerate(parts):
            # An empty share comes with one stand-in: every rank runs backward, or the others would wait for it.
            own_samples = num_local if num_own == 1 else num_samples_of(part)
            num_samples = own_samples if number < num_own else 0
            factor = loss_factor(num_samples, num_global, self._placement.world_size)
            micro_batches.append(MicroBatch(part, factor, num_samples, is_last=number == last))
        return micro_batches

    def last_step(self, step: int, until: Cadence) -> int:
        """Return the step that training ends after, `step` of which are finished."""
        if until.unit is Unit.STEP:
            return int(until.amount)
        epochs_to_come = int(until.amount) - self.epoch - 1
        return step if epochs_to_come < 0 else step + len(self.sampler) + epochs_to_come * self.sampler.steps_per_epoch


class Batch:
    """One rank's share of a global batch, as `Engine.steps` yields it.

    Attributes:
        content: What the samples were collated into, on the device. Of a rank without a share it is a stand-in, whose
            loss counts nothing.
        num_samples: This rank's samples that count; 0 for a stand-in.
    """

    def __init__(
        self,
        content: Any,
        batches: Batches,
        scope: Callable[[MicroBatch], AbstractContextManager[None]],
        *,
        is_static: bool,
    ) -> None:
        self.content = content
        self.num_samples = batches.sampler.share.num_local
        self._batches = batches
        self._scope = scope
        self._is_static = is_static

    def micro_batches(self, num_parts: int = 1) -> Iterator[Any]:
        """Yield the batch in parts, for as many forward and backward passes before one update.

        Gradients are reduced over ranks in the last part's backward only. Forward and backward belong into the loop's
        body.

        Args:
            num_parts: At least 1. A share with fewer samples yields fewer parts, but never none. With a static graph,
                SyncBatchNorm or `fully_shard` it yields as many, of which the last ones repeat samples and count
                nothing.
        """
        check_whole(EngineUseError, "num_parts", num_parts)
        for micro_batch in self._batches.micro_batches(self.content, num_parts, is_static=self._is_static):
            with self._scope(micro_batch):
                yield micro_batch.content
