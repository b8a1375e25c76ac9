"""Who takes how much of a batch: pure arithmetic, the same on every rank.

A step takes consecutive positions of the epoch; `split` cuts them into one contiguous share a rank, in proportion to
integer weights. Shares of different size need losses of different weight, or DDP's mean over ranks is wrong (by half
for shares of 3, 5, 7, 9): `loss_factor`. `suggest_weights` finds shares where one GPU is fuller than the others.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.arguments import BELOW_ZERO, MAX_WHOLE, check_has, check_is, check_number, check_whole, refuse
from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.order import checked_int

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_BYTES = float(MAX_WHOLE)


class Share(NamedTuple):
    """One rank's part of one step's batch.

    Attributes:
        num_local: Samples of this rank; 0 means that its batch is a stand-in, whose loss must not count.
        num_global: Samples of all ranks.
    """

    num_local: int
    num_global: int


@dataclass(frozen=True)
class RankMemory:
    """What one rank's device holds, in bytes.

    Attributes:
        capacity_bytes: What the rank may use: the device's memory less what other processes hold of it.
        fixed_bytes: Used whatever the batch: CUDA context, weights, gradients, optimizer state; 0 or more.
        bytes_per_sample: Used for each sample of the rank's batch, mostly activations; 0 or more.

    Raises:
        SamplerArgumentError: A number is out of its range, or none.
    """

    capacity_bytes: int
    fixed_bytes: int
    bytes_per_sample: float

    def __post_init__(self) -> None:
        check_whole(SamplerArgumentError, "capacity_bytes", self.capacity_bytes)
        check_whole(SamplerArgumentError, "fixed_bytes", self.fixed_bytes, least=0)
        check_number(
            SamplerArgumentError,
            "bytes_per_sample",
            self.bytes_per_sample,
            range_=(BELOW_ZERO, _MOST_BYTES),
            wanted="a finite number of bytes, 0 or more",
        )


def split(num: int, weights: Sequence[int]) -> list[int]:
    """Return where to cut `num` consecutive positions: share r is `bounds[r]` to `bounds[r + 1] - 1`.

    Every share differs from its exact proportion by less than one, all together are `num`, and if the weights add up to
    `num` the shares are the weights. There is one weight for each rank, 0 or more, not all 0. Raises
    SamplerArgumentError.
    """
    if checked_int("num", num) < 0:
        raise SamplerArgumentError(f"num={num} is negative: it counts the positions to share out")
    checked = checked_weights(weights)
    total, so_far, bounds = sum(checked), 0, [0]
    for weight in checked:
        so_far += weight
        bounds.append(num * so_far // total)
    return bounds


def loss_factor(num_local: int, num_global: int, world_size: int) -> float:
    """Return what to multiply a rank's mean loss by, so that DDP's mean gradient is that of one process.

        loss = loss_factor(len(x), num_global, world_size) * F.cross_entropy(model(x), y)

    DDP divides the sum over ranks by the world size. With f = world_size * num_local / num_global,

        1/W * sum_r f_r * (1/n_r * sum over share r of l_i)  =  1/m * sum over the batch of l_i

    An empty share runs a stand-in sample through the model, so that the rank takes part in the collectives, and gets
    factor 0. Models with batch statistics (BatchNorm in training) see shares of their own and are not covered.

    Args:
        num_local: Samples in this rank's share.
        num_global: Samples in all shares of this step.
        world_size: Ranks over which DDP takes the mean.

    Raises:
        SamplerArgumentError: The share is larger than the whole, or a number is out of range.
    """
    for name, number in (("num_local", num_local), ("num_global", num_global), ("world_size", world_size)):
        checked_int(name, number)
    if not (0 <= num_local <= num_global and num_global > 0 and world_size > 0):
        raise SamplerArgumentError(f"a share of {num_local} of {num_global} samples over {world_size} ranks is none")
    return world_size * num_local / num_global


def fit_memory(capacity_bytes: int, smaller: tuple[int, int], larger: tuple[int, int]) -> RankMemory:
    """Return a rank's memory from its peaks at two batch sizes: a straight line through both.

        fit_memory(capacity, (4, peak_at_4), (8, peak_at_8))    # torch.cuda.max_memory_reserved after a step each

    Args:
        capacity_bytes: As of `RankMemory`.
        smaller: Samples of a step, and the peak of used bytes.
        larger: The same for a larger batch.

    Raises:
        SamplerArgumentError: The peaks do not grow with the batch, or an argument is none.
    """
    (few, low_bytes), (many, high_bytes) = _checked_peak("smaller", smaller), _checked_peak("larger", larger)
    if few >= many or low_bytes > high_bytes:
        raise SamplerArgumentError(
            f"{low_bytes} bytes at {few} samples and {high_bytes} at {many} give no line that rises: "
            "measure the peak of a whole step at two different batch sizes, the smaller one first"
        )
    bytes_per_sample = (high_bytes - low_bytes) / (many - few)
    return RankMemory(capacity_bytes, max(0, math.ceil(low_bytes - few * bytes_per_sample)), bytes_per_sample)


def suggest_weights(
    memory: Sequence[RankMemory],
    global_batch_size: int,
    *,
    speeds: Sequence[float] | None = None,
    reserve_frac: float = 0.08,
) -> list[int]:
    """Return how many samples each rank should take, so that the batch fits and the step is as short as it can be.

    A step lasts as long as its slowest rank, so shares are as even as memory allows: each sample goes to the rank that
    would be done with it first among those with room for it, and of several to the one that is least full. A GPU whose
    memory is partly taken gets fewer samples only when it could not hold an even share.

    Args:
        memory: One for each rank.
        global_batch_size: Samples of a step over all ranks.
        speeds: Samples a second of each rank; None means equally fast ones.
        reserve_frac: Fraction of each capacity, kept free for fragmentation.

    Returns:
        One weight for each rank; they add up to `global_batch_size`.

    Raises:
        SamplerArgumentError: The batch does not fit, and the message gives how many samples do; or an argument is none.
    """
    _check_list("memory", memory, "a RankMemory for each rank, in a list")
    reserve = "a number from 0 to below 1, of each capacity"
    check_number(SamplerArgumentError, "reserve_frac", reserve_frac, range_=(BELOW_ZERO, 1 - 2**-53), wanted=reserve)
    rooms = [_room(rank, of_rank, reserve_frac) for rank, of_rank in enumerate(memory)]
    rates = _checked_speeds(speeds, len(rooms))
    if checked_int("global_batch_size", global_batch_size) < 1:
        raise SamplerArgumentError(f"global_batch_size={global_batch_size}: a step needs a sample at least")
    num_fitting = sum(min(room, global_batch_size) for room in rooms)
    if num_fitting < global_batch_size:
        advice = f"accumulate gradients over {math.ceil(global_batch_size / num_fitting)} parts" if num_fitting else ""
        raise SamplerArgumentError(
            f"a batch of {global_batch_size} does not fit: {num_fitting} samples do ({rooms} by rank); "
            f"take a smaller batch, {advice or 'a smaller model'}, or free memory"
        )

    def cost(rank: int) -> tuple[float, float, int]:
        of_rank, count = memory[rank], weights[rank] + 1
        filled = of_rank.fixed_bytes + count * of_rank.bytes_per_sample
        return count / rates[rank], filled / of_rank.capacity_bytes, rank

    weights = [0] * len(rooms)
    queue = [cost(rank) for rank, room in enumerate(rooms) if room]
    heapq.heapify(queue)
    for _ in range(global_batch_size):
        rank = queue[0][2]
        weights[rank] += 1
        if weights[rank] < rooms[rank]:
            heapq.heapreplace(queue, cost(rank))
        else:
            heapq.heappop(queue)
    return weights


def checked_weights(weights: Sequence[int]) -> tuple[int, ...]:
    """Return the weights as ints; raise SamplerArgumentError if one is negative or no integer, or none is above 0."""
    _check_list("weights", weights, "a whole number for each rank, in a list")
    checked = tuple(checked_int(f"weights[{rank}]", weight) for rank, weight in enumerate(weights))
    if not checked or min(checked) < 0 or not any(checked):
        raise SamplerArgumentError(
            f"weights={list(checked)}: give one for each rank, 0 or more, and at least one above 0, "
            "such as the samples of each rank's batch"
        )
    return checked


def _check_list(name: str, value: object, wanted: str) -> None:
    check_has(SamplerArgumentError, name, value, ("__len__", "__getitem__"), wanted)
    if isinstance(value, str | bytes | dict):
        raise refuse(SamplerArgumentError, name, value, wanted)


def _checked_peak(name: str, peak: tuple[int, int]) -> tuple[int, int]:
    wanted = "the samples of a step and the peak of used bytes, two whole numbers"
    _check_list(name, peak, wanted)
    if len(peak) != 2:
        raise refuse(SamplerArgumentError, name, peak, wanted)
    for place, number in enumerate(peak):
        check_whole(SamplerArgumentError, f"{name}[{place}]", number, least=0, wanted=wanted)
    return peak


def _checked_speeds(speeds: Sequence[float] | None, num_ranks: int) -> Sequence[float]:
    if speeds is None:
        return [1.0] * num_ranks
    wanted = f"one above 0 for each of the {num_ranks} ranks, in a list"
    _check_list("speeds", speeds, wanted)
    if len(speeds) != num_ranks:
        raise refuse(SamplerArgumentError, "speeds", speeds, wanted)
    for rank, speed in enumerate(speeds):
        check_number(SamplerArgumentError, f"speeds[{rank}]", speed, range_=(0.0, _MOST_BYTES), wanted=wanted)
    return speeds


def _room(rank: int, memory: RankMemory, reserve_frac: float) -> int:
    """Return how many samples this rank can hold."""
    check_is(SamplerArgumentError, f"memory[{rank}]", memory, RankMemory, "a RankMemory for each rank, in a list")
    free_bytes = memory.capacity_bytes * (1 - reserve_frac) - memory.fixed_bytes
    if free_bytes < 0:
        return 0
    # A sample that costs nothing measurable is bounded by the batch alone.
    return math.floor(free_bytes / memory.bytes_per_sample) if memory.bytes_per_sample * 2**53 > free_bytes else 2**53
