"""Counts who has come to a gate: exactly, with one round trip to the store for up to 60 ranks.

Every rank adds a bit of its own to a shared counter: the sum says who is there, and the addition that completes it
tells its caller that he is the last. Above 60 ranks counters form a tree: whoever completes one adds its bit to the
next. So a job of 16,000 ranks takes 280 counters and three round trips of the last to come, where a key for each rank
would have every rank wait for 16,000 keys.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch._C._distributed_c10d import Store

ARITY = 60
"""Bits of one counter that stand for ranks; a store adds signed numbers of 64 bits."""

CONDEMNED = 1 << ARITY
"""Added to a counter: the gate cannot be passed any more, whoever comes now is to read why. Several that find this out
at one time may each add it; there is room for seven."""


class Arrival(Enum):
    """What a rank learns by coming."""

    EARLY = auto()
    LAST = auto()
    CONDEMNED = auto()


class Tally:
    """How a rank is counted at any gate of a job; each method blocks for a round trip or a few.

    Args:
        rank: Who is counted.
        world_size: Ranks that are to come.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._widths = widths(world_size)
        self._steps = []
        index = rank
        for level, width in enumerate(self._widths):
            chunk, bit = divmod(index, ARITY)
            self._steps.append((_counter("", level, chunk), 1 << bit, _full(chunk, width)))
            index = chunk

    def arrive(self, store: Store, key: str) -> Arrival:
        """Count this rank at a gate; call it once for each."""
        for counter, bit, full in self._steps:
            value = store.add(key + counter, bit)
            if value >= CONDEMNED:
                return Arrival.CONDEMNED
            if value != full:
                return Arrival.EARLY
        return Arrival.LAST

    def missing(self, store: Store, key: str) -> Iterator[int]:
        """Yield the ranks that have not come, ascending: a round trip, and one more for every 60 with a gap."""
        return self._missing_below(store, key, len(self._widths) - 1, 0)

    def condemn(self, store: Store, key: str, missing: list[int]) -> None:
        """Let whoever comes from now on learn at once that it is in vain.

        Args:
            store: Where the counters are.
            key: Of the gate.
            missing: The ranks that have not come.
        """
        for chunk in sorted({rank // ARITY for rank in missing}):
            counter = _counter(key, 0, chunk)
            if store.add(counter, 0) < CONDEMNED:
                store.add(counter, CONDEMNED)

    def keys_to_delete(self, key: str, turn: int) -> list[str]:
        """Return the counters whose deletion falls to this rank; over many turns all ranks have their share.

        Args:
            key: Of the gate.
            turn: A number that all ranks know, such as the gate's own.
        """
        keys = []
        chunk, size = self._rank, 1
        for level in range(len(self._widths)):
            chunk, size = chunk // ARITY, size * ARITY
            num_below = min(size, self._widths[0] - chunk * size)
            if self._rank == chunk * size + turn % num_below:
                keys.append(_counter(key, level, chunk))
        return keys

    def _missing_below(self, store: Store, key: str, level: int, chunk: int) -> Iterator[int]:
        value = store.add(_counter(key, level, chunk), 0)
        absent = _full(chunk, self._widths[level]) & ~value
        for bit in range(absent.bit_length()):
            if absent >> bit & 1:
                index = chunk * ARITY + bit
                if level == 0:
                    yield index
                else:
                    yield from self._missing_below(store, key, level - 1, index)


def widths(world_size: int) -> list[int]:
    """Return how many things each level of the tree counts: `[16384, 274, 5]`."""
    found = [world_size]
    while found[-1] > ARITY:
        found.append(-(-found[-1] // ARITY))
    return found


def _counter(key: str, level: int, chunk: int) -> str:
    return f"{key}|{level}.{chunk}"


def _full(chunk: int, width: int) -> int:
    """Return the value of a complete counter."""
    return (1 << min(ARITY, width - chunk * ARITY)) - 1
