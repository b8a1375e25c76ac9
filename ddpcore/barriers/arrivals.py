"""What a store barrier keeps in the job's store: its keys, its result, and the count of the ranks that have come.

Only `ArrivalCounter` calls the store. A store barrier is one passage: the n-th call of a label. `go_key` is set once,
when the barrier is decided: its value (`BarrierResult`) holds how.

`ArrivalCounter` counts exactly who has come, with one round trip to the store for up to 60 ranks. Every rank adds a bit
of its own to a shared counter: the sum shows who is there, and the addition that completes it shows its caller that it
is the last. Above 60 ranks counters form a tree: the rank that completes one adds its bit to the next. So a job of
16,000 ranks takes 280 counters and three round trips of the last to come, where a key for each rank would have every
rank wait for 16,000 keys.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.rank_status import BarrierKind

MAX_LABEL_IN_KEY = 200
"""Longest label in a key; longer ones stand there as their hash: torch 2.13's TCPStore closes the connection on a key
of over 8 KiB."""

MAX_RESULT_BYTES = 4 << 20
"""Bytes of all texts of an exchange together: over 8 MiB in one value TCPStore closes the connection."""


class Reason(StrEnum):
    """Reason why nobody passes a barrier."""

    NEVER = "never"
    """Some ranks can never arrive."""
    RAISED = "raised"
    """The rank that went first has raised."""
    DIED = "died"
    """The rank that goes first has ended, or never arrives."""
    TOO_LARGE = "too large"
    """The texts of an exchange do not fit into the store."""


class BarrierResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a barrier: passed, with the ranks' texts; or not, with a reason."""

    values: list[str] = []
    reason: Reason | None = None
    text: str = ""
    missing: list[int] = []
    """Ranks that have not arrived."""
    ended: list[int] = []
    """Ranks among these that have died, or left."""
    trace: str = ""
    """Traceback of the rank that went first."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(BarrierResult)
PASSED = BarrierResult()
PASSED_TEXT = _encoder.encode(PASSED).decode()
"""Not empty: a store's `compare_set(key, "", text)` replaces an empty value too, and would make a pass a failure."""


def barrier_key(kind: BarrierKind, scope: str, label: str) -> tuple[str, str]:
    """Return what stands before and after its number in the start of all keys of a barrier.

    `scope` is the name of a node, or empty for the whole job; `label` is as `journal.reported_label` returns it.
    """
    if not label.isascii() or len(label) > MAX_LABEL_IN_KEY:
        digest = sha256(label.encode()).hexdigest()
        label = f"{label[:32]!a}~{digest[:24]}"
    return f"rankdeck/{kind}/{scope}/", f"/{label}"


def go_key(name: str) -> str:
    """Return the key that exists once a barrier is decided; its text is never empty, see `PASSED_TEXT`."""
    return f"{name}|go"


def value_key(name: str, rank: int) -> str:
    return f"{name}|value {rank}"


def readers_key(name: str) -> str:
    """Return the key of the counter of ranks that have read a first-block's end."""
    return f"{name}|readers"


def heartbeat_key(rank: int) -> str:
    return f"rankdeck/beat/{rank}"


def gone_key(rank: int) -> str:
    """Return the key that a neighbour sets when a rank's process has ended without a notice."""
    return f"rankdeck/gone/{rank}"


def failure_key(session: int) -> str:
    """Return the key of the first failure in the n-th process group of a store."""
    return f"rankdeck/failure/{session}"


def passed_with(values: Sequence[str]) -> str:
    """Return the text of a passed barrier; an exchange too large for the store is not passed."""
    text = _encoder.encode(BarrierResult(values=list(values)))
    if len(text) <= MAX_RESULT_BYTES:
        return text.decode()
    largest = max(range(len(values)), key=lambda rank: len(values[rank]))
    problem = (
        f"the ranks' texts have {len(text):,} bytes together, at most {MAX_RESULT_BYTES:,} can be exchanged; "
        f"the largest, of rank {largest}, has {len(values[largest]):,} characters"
    )
    return encode_result(BarrierResult(reason=Reason.TOO_LARGE, text=problem))


def encode_result(result: BarrierResult) -> str:
    return _encoder.encode(result).decode()


def decode_result(text: str | bytes) -> BarrierResult:
    return _decoder.decode(text)


ARITY = 60
"""Bits of one counter that stand for ranks; a store adds signed numbers of 64 bits."""

FAILED = 1 << ARITY
"""Added to a counter: the barrier cannot be passed any more, and later ranks read why. Several that find this out
at one time may each add it; there is room for seven."""


class Arrival(Enum):
    """Result of an arrival."""

    EARLY = auto()
    LAST = auto()
    FAILED = auto()


class ArrivalCounter:
    """Counts this rank at the barriers of a job; each method blocks for a round trip or a few."""

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
        """Count this rank at a barrier; call it once for each."""
        for counter, bit, full in self._steps:
            value = store.add(key + counter, bit)
            if value >= FAILED:
                return Arrival.FAILED
            if value != full:
                return Arrival.EARLY
        return Arrival.LAST

    def missing(self, store: Store, key: str) -> Iterator[int]:
        """Yield the ranks that have not arrived, ascending: a round trip, and one more for every 60 with a gap."""
        return self._missing_below(store, key, len(self._widths) - 1, 0)

    def mark_failed(self, store: Store, key: str, missing: list[int]) -> None:
        """Let ranks that arrive from now on fail immediately; `missing` are the ranks that have not arrived."""
        for chunk in sorted({rank // ARITY for rank in missing}):
            counter = _counter(key, 0, chunk)
            if store.add(counter, 0) < FAILED:
                store.add(counter, FAILED)

    def keys_to_delete(self, key: str, turn: int) -> list[str]:
        """Return the counters that this rank deletes.

        `turn` is a number that all ranks know; over many turns the ranks share the work.
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
    """Return the number of counters at each level of the tree: `[16384, 274, 5]`."""
    found = [world_size]
    while found[-1] > ARITY:
        found.append(-(-found[-1] // ARITY))
    return found


def _counter(key: str, level: int, chunk: int) -> str:
    return f"{key}|{level}.{chunk}"


def _full(chunk: int, width: int) -> int:
    """Return the value of a complete counter."""
    return (1 << min(ARITY, width - chunk * ARITY)) - 1
