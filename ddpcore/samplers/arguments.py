"""What the samplers' constructors have in common: which replica this process is, and how long a data set is."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed as dist
from torch.utils.data import IterableDataset

from ddpcore.arguments import check_has, check_whole, refuse
from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.order import checked_int, checked_num_samples
from ddpcore.samplers.weighted_order import WeightedOrder

MAX_REPLICAS = 1 << 24


class Replica(NamedTuple):
    """Which of how many equal processes this one is."""

    rank: int
    num_replicas: int


def resolve_replica(rank: int | None, num_replicas: int | None) -> Replica:
    """Return both numbers; one that is None comes from the process group, else from torchrun's variables, else alone.

    Raises SamplerArgumentError if they do not fit each other, or are no integers.
    """
    default = _default_replica() if rank is None or num_replicas is None else Replica(0, 1)
    replica = Replica(
        default.rank if rank is None else checked_int("rank", rank),
        default.num_replicas if num_replicas is None else checked_int("num_replicas", num_replicas),
    )
    if replica.num_replicas > MAX_REPLICAS:
        check_whole(SamplerArgumentError, "num_replicas", replica.num_replicas, most=MAX_REPLICAS)
    if replica.num_replicas < 1:
        raise SamplerArgumentError(f"num_replicas={replica.num_replicas}: there is one at least, this process")
    if not 0 <= replica.rank < replica.num_replicas:
        raise SamplerArgumentError(
            f"Invalid rank {replica.rank} for {replica.num_replicas} replicas, which count from 0 to "
            f"{replica.num_replicas - 1}: give both rank and num_replicas, or neither under torchrun"
        )
    return replica


def num_samples_of_dataset(dataset: object) -> int:
    """Return the length of a map-style data set; raise SamplerArgumentError if it has none above 0."""
    if isinstance(dataset, IterableDataset):
        raise SamplerArgumentError(
            f"{type(dataset).__name__} is an IterableDataset, which no sampler can order: "
            "let it shard itself by rank and worker, or give it __getitem__ and __len__ as a Dataset"
        )
    if isinstance(dataset, str | bytes | type):
        raise refuse(SamplerArgumentError, "dataset", dataset, "a data set, with samples by index and a length")
    try:
        length = len(dataset)  # type: ignore[arg-type] # what has no length raises TypeError
    except (TypeError, NotImplementedError) as error:
        raise SamplerArgumentError(
            f"{type(dataset).__name__} has no length ({error}): give it __len__, make an order of known length, "
            "or give its files and their lengths to ShardedDataset"
        ) from error
    return checked_num_samples(length)


def check_order(order: object, num_samples: int | None = None) -> None:
    """Raise SamplerArgumentError for what is no order, or one of a data set of another length.

    An order that draws samples by weights may be shorter or longer, but needs a weight for each; any other would leave
    samples out, or ask for some that are not there.
    """
    check_has(
        SamplerArgumentError,
        "order",
        order,
        ("num_samples", "take", "indices", "fingerprint"),
        "one of ddpcore.samplers",
    )
    own = checked_num_samples(order.num_samples)  # type: ignore[attr-defined] # looked at just now
    if isinstance(order, WeightedOrder):
        if num_samples not in (None, order.num_weights):
            raise SamplerArgumentError(
                f"the order has weights of {order.num_weights} samples, the data set has {num_samples}: give a weight "
                "for each sample; weights of classes become weights of samples by class_weights[labels]"
            )
    elif num_samples not in (None, own):
        raise SamplerArgumentError(
            f"the order has {own} samples, the data set {num_samples}: an epoch would not hold each sample once; make "
            "the order of this data set, or draw by weights (WeightedOrder)"
        )


def _default_replica() -> Replica:
    if dist.is_available() and dist.is_initialized():
        return Replica(dist.get_rank(), dist.get_world_size())
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None and world_size is None:
        return Replica(0, 1)
    try:
        return Replica(int(rank or ""), int(world_size or ""))
    except ValueError:
        raise SamplerArgumentError(
            f"RANK={rank} and WORLD_SIZE={world_size} in the environment are not two numbers: "
            "start with torchrun, which sets both, or give rank and num_replicas"
        ) from None
