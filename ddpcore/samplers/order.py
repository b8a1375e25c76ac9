"""The order in which the samples of an epoch come: a pure function from a position in the epoch to a sample.

Nothing is stored for each sample. `ShuffledOrder` is a keyed bijection on 0..n-1, computed for a block of positions at
a time: it starts in microseconds and takes the same memory for a thousand samples and for a trillion. Since an order
knows neither ranks nor batches, who takes which positions (`shares.py`) and how far training has come (`cursor.py`) can
change at any step without a sample lost or repeated.

The bijection ("xm8-v1") works on b = bit_length(n - 1) bits. Eight rounds, each with an odd factor and an addend of its
own, of

    x = (x * factor + addend) mod 2^b;  x = x xor (x >> ceil(b / 2))

Each half of a round can be undone, so the whole is a permutation of 0..2^b-1. A value that is n or more is sent through
again until it is below n ("cycle walking"), which leaves a permutation of 0..n-1; fewer than half of the values walk.
It passes the statistical tests of `torch.randperm` (test_order_quality.py of its unit tests); it is no cipher.
Checkpoints carry the tag: numbers in this file never change, a better bijection gets a new tag.

Source: the multiply and xor-shift rounds follow A. Kensler, Correlated Multi-Jittered Sampling, Pixar TM 13-01, 2013;
keys come from SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014); for cycle walking see J. Black and P. Rogaway,
Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ddpcore.arguments import refuse
from ddpcore.errors import SamplerArgumentError, SamplerIndexError

if TYPE_CHECKING:
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]
    RandomBits = npt.NDArray[np.uint64]

MAX_NUM_SAMPLES = 1 << 62
"""Sums of two positions still fit into an int64."""

BLOCK = 16_384
"""Positions computed at once: 128 KiB twice, which fits into a core's L2 cache (tests/bench/bench_samplers.py)."""

FIRST_BLOCK = 256
BLOCK_GROWTH = 4
"""An iterator's first block is small, so that its first index is there in a fraction of a millisecond."""

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NUM_ROUNDS = 8


class Order(Protocol):
    """An order of epochs of equal length, the same on every rank. All methods are pure."""

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""

    def take(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions (int64, 0 to num_samples - 1, in any order), in the same shape.

        Raises:
            SamplerArgumentError: The epoch or the positions are none, or one is out of range (SamplerIndexError).
        """

    def indices(self, epoch: int, begin: int, end: int) -> Indices:
        """Return the samples at positions `begin` to `end - 1` of an epoch: `take` of that range.

        Raises:
            SamplerArgumentError: As of `take`, or `begin` is behind `end`.
        """

    def fingerprint(self) -> dict[str, int | str]:
        """Return what a saved cursor must match to mean the same samples: JSON-able, with the kind and its version."""


class OrderByPositions:
    """The part that all orders of this package share."""

    def indices(self: Order, epoch: int, begin: int, end: int) -> Indices:
        """Return the samples at positions `begin` to `end - 1` of an epoch."""
        return self.take(epoch, position_range(begin, end, self.num_samples))


@dataclass(frozen=True)
class SequentialOrder(OrderByPositions):
    """Every epoch is 0, 1, 2, ...

    Args:
        num_samples: Length of the data set.

    Raises:
        SamplerArgumentError: There is no sample, or the number is none.
    """

    num_samples: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", checked_num_samples(self.num_samples))

    def take(self, epoch: int, positions: Indices) -> Indices:
        """Return the positions themselves."""
        checked_epoch(epoch)
        return checked_positions(positions, self.num_samples).copy()

    def fingerprint(self) -> dict[str, int | str]:
        """Return what a saved cursor must match."""
        return {"kind": "sequential-v1", "num_samples": self.num_samples}


@dataclass(frozen=True)
class ShuffledOrder(OrderByPositions):
    """Every epoch is another permutation of 0..num_samples-1, with nothing stored.

        order = ShuffledOrder(10**12, seed=0)
        order.indices(epoch=3, begin=10**9, end=10**9 + 32)     # 32 samples from the middle, in microseconds

    About 15 ns a sample in large requests, a few times as much where num_samples is just above a power of two.

    Args:
        num_samples: Length of the data set, 1 to 2^62.
        seed: 0 to 2^64 - 1; the same on every rank.

    Raises:
        SamplerArgumentError: A number is out of range or none.
    """

    num_samples: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", checked_num_samples(self.num_samples))
        object.__setattr__(self, "seed", checked_seed(self.seed))

    def take(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions of an epoch."""
        flat = checked_positions(positions, self.num_samples).reshape(-1)
        taken = np.empty(flat.shape, np.uint64)
        rounds = _rounds(self.seed, checked_epoch(epoch), self.num_samples)
        for begin in range(0, flat.size, BLOCK):
            block = taken[begin : begin + BLOCK]
            block[:] = flat[begin : begin + BLOCK]
            _permute(block, rounds, self.num_samples)
        return taken.view(np.int64).reshape(positions.shape)

    def fingerprint(self) -> dict[str, int | str]:
        """Return what a saved cursor must match."""
        return {"kind": "xm8-v1", "num_samples": self.num_samples, "seed": self.seed}


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a seed for everything random about one sample in one epoch, such as its augmentation.

    It depends on neither rank, world size nor DataLoader worker, so that a run resumed elsewhere sees the same data:

        def __getitem__(self, index):
            rng = np.random.default_rng(sample_seed(self.seed, self.epoch, index))

    The data set learns its epoch from the sampler before each `iter(loader)`, which copies it into the workers (unless
    they are persistent, which keep their first copy).

    Args:
        seed: Seed of the run.
        epoch: From 0.
        index: Index of the sample in the data set.

    Returns:
        0 to 2^63 - 1: what torch.manual_seed, random.seed and numpy all take.

    Raises:
        SamplerArgumentError: One is negative or no integer.
    """
    if checked_int("index", index) < 0:
        raise SamplerArgumentError(f"index={index} is negative")
    return key_of(checked_seed(seed), checked_epoch(epoch), index) >> 1


def key_of(*numbers: int) -> int:
    """Return 64 bits that depend on all bits of the numbers and on their order."""
    key = 0
    for word in numbers:
        key = _mix(((key ^ (word & _MASK_64)) + _GOLDEN) & _MASK_64)
    return key


def random_bits(key: int, counters: Indices) -> RandomBits:
    """Return 64 random bits for each counter: SplitMix64 with random access."""
    numbers = counters.astype(np.uint64)
    numbers += np.uint64(1)
    numbers *= np.uint64(_GOLDEN)
    numbers += np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def checked_num_samples(num_samples: int) -> int:
    """Return the number as an int; raise SamplerArgumentError if it is none, or out of range."""
    number = checked_int("num_samples", num_samples)
    if number < 1:
        raise SamplerArgumentError(
            f"the data set has {number} samples: there is nothing to iterate over; look at its path and its filters"
        )
    if number > MAX_NUM_SAMPLES:
        raise SamplerArgumentError(f"num_samples={number} is beyond 2^62: give the number of samples of one epoch")
    return number


def checked_seed(seed: int) -> int:
    """Return the seed as an int; raise SamplerArgumentError if it is none, or out of range."""
    number = checked_int("seed", seed)
    if not 0 <= number <= _MASK_64:
        raise SamplerArgumentError(f"seed={number} is out of range: give 0 to 2^64 - 1, the same on every rank")
    return number


def checked_epoch(epoch: int) -> int:
    """Return the epoch as an int; raise SamplerArgumentError if it is none, or negative."""
    number = checked_int("epoch", epoch)
    if not 0 <= number <= MAX_NUM_SAMPLES:
        raise SamplerArgumentError(f"epoch={number}: epochs count from 0")
    return number


def checked_int(name: str, value: object) -> int:
    """Return an integer argument, also numpy's and torch's; raise SamplerArgumentError for any other, also a bool."""
    try:
        if not isinstance(value, bool):
            number = operator.index(value)  # type: ignore[arg-type] # what has no __index__ raises TypeError
            float(number)
            return number
    except TypeError:
        pass
    except OverflowError as error:
        raise refuse(SamplerArgumentError, name, value, "a smaller number") from error
    raise SamplerArgumentError(f"{name}={value!r} is not an integer")


def position_range(begin: int, end: int, num_samples: int) -> Indices:
    """Return positions `begin` to `end - 1`; raise SamplerIndexError if they are not all in the epoch."""
    if not 0 <= checked_int("begin", begin) <= checked_int("end", end) <= num_samples:
        raise SamplerIndexError(f"positions {begin} to {end} - 1 are no part of an epoch of {num_samples}")
    return np.arange(begin, end, dtype=np.int64)


def checked_positions(positions: object, num_samples: int) -> Indices:
    """Return the positions; raise SamplerArgumentError for no integers, SamplerIndexError outside the epoch."""
    if not isinstance(positions, np.ndarray) or positions.dtype.kind not in "iu":
        raise refuse(SamplerArgumentError, "positions", positions, "a numpy array of integers")
    if positions.size and not (positions.min() >= 0 and positions.max() < num_samples):
        lowest, highest = positions.min(), positions.max()
        raise SamplerIndexError(f"positions {lowest} to {highest} are not all within 0 to {num_samples - 1}")
    return positions


@lru_cache(maxsize=256)
def _rounds(seed: int, epoch: int, num_samples: int) -> tuple[tuple[np.uint64, np.uint64], ...]:
    """Return factor and addend of each round: the key depends on n, so that a data set that grows gets a new order."""
    state = key_of(seed, epoch, num_samples)
    numbers = [_mix((state + number * _GOLDEN) & _MASK_64) for number in range(1, 2 * _NUM_ROUNDS + 1)]
    return tuple(
        (np.uint64(factor | 1), np.uint64(addend)) for factor, addend in zip(numbers[::2], numbers[1::2], strict=True)
    )


def _permute(block: RandomBits, rounds: tuple[tuple[np.uint64, np.uint64], ...], num_samples: int) -> None:
    """Send a block of positions through the bijection, in place."""
    limit = np.uint64(num_samples)
    num_bits = (num_samples - 1).bit_length()
    _scramble(block, rounds, num_bits)
    outside = np.flatnonzero(block >= limit)
    while outside.size:
        walking = block[outside]
        _scramble(walking, rounds, num_bits)
        block[outside] = walking
        outside = outside[walking >= limit]


def _scramble(block: RandomBits, rounds: tuple[tuple[np.uint64, np.uint64], ...], num_bits: int) -> None:
    """Permute 0..2^num_bits-1, in place. Arrays of uint64 wrap at 2^64 without a word, which 2^num_bits divides."""
    mask, shift = np.uint64((1 << num_bits) - 1), np.uint64((num_bits + 1) // 2)
    scratch = np.empty_like(block)
    for factor, addend in rounds:
        np.multiply(block, factor, out=block)
        np.add(block, addend, out=block)
        np.bitwise_and(block, mask, out=block)
        np.right_shift(block, shift, out=scratch)
        np.bitwise_xor(block, scratch, out=block)


def _mix(word: int) -> int:
    """Return SplitMix64's output function of a 64-bit word, a bijection."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return word ^ (word >> 31)
