"""Describes a rank at store barriers: what it publishes about itself, how others see it, and that as text.

Pure. A `RankHeartbeat` is a snapshot that a rank's heartbeat thread (`ddpcore.barriers.heartbeat`) leaves in the job's
store; a `Sighting` is what an observer makes of it. No clock crosses between machines: a `RankHeartbeat` carries its
sender's uptime, and an observer compares by how much that has grown since its first look.

`missing_ranks_text`, `wait_text` and the other `..._text` functions put ranks into sentences.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from ddpcore.agreement import ranks_text
from ddpcore.wire import Place  # noqa: TC001 - msgspec resolves annotations at run time

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_CALLS = 16
"""Labels in a heartbeat, the latest: it stays under 4 KB."""

MAX_FRAMES = 8
"""Different states described in one message."""


class BarrierKind(StrEnum):
    """Kind of a barrier."""

    BARRIER = "barrier"
    EXCHANGE = "exchange"
    FIRST = "first"
    """`master_first`: all wait for rank 0."""
    LOCAL_FIRST = "local first"
    """`local_master_first`: all ranks of a node wait for its first one."""
    COLLECTIVE = "collective"
    """A blocking call of torch.distributed; `label` is the operation, `count` its number in the group."""


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """Number of a rank's calls of a barrier, and the line of the last one."""

    kind: BarrierKind
    label: str
    count: int
    place: Place | None = None


class Wait(msgspec.Struct, frozen=True, omit_defaults=True):
    """Wait of a rank's main thread."""

    kind: BarrierKind
    label: str
    count: int
    key: str = ""
    """Key of the barrier in the store; empty for a collective."""
    place: Place | None = None
    timeout_s: float | None = None
    """Time-out as the program gave it; None is no limit."""
    left_s: float | None = None
    master: int | None = None
    """Rank that a first-block waits for."""
    group: str = ""
    """c10d's name of a collective's group."""
    ranks: tuple[int, ...] = ()
    """Members of a collective; empty means every rank."""
    needed: tuple[int, ...] = ()
    """Ranks that have to call a broadcast before it ends here; empty where that is not known."""


class RankHeartbeat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Description of a rank by itself."""

    uptime_s: float
    """Seconds since its heartbeat thread began; grows only while that runs."""
    period_s: float
    host: str
    machine: str
    """Name that is equal on two ranks that see the same process numbers."""
    pid: int
    started_ticks: int
    """Start of the process, in the kernel's ticks: a pid is used again, this pair is not."""
    place: Place | None = None
    """Line of the main thread."""
    wait: Wait | None = None
    calls: tuple[Call, ...] = ()
    """Calls, the latest first."""
    block: str = ""
    """One-rank block that its main thread is in."""
    is_threaded: bool = False
    """True if more than one thread calls barriers: while one waits another can still arrive."""
    has_left: bool = False
    """True if it has ended, or closed its process group: it never arrives again."""
    session: int = 1
    """Number of its process group in this store."""
    error: str = ""
    """Uncaught exception that ended it."""


class ProcessState(StrEnum):
    """State of a rank's process by the observer's own kernel."""

    UNKNOWN = "unknown"
    """The process runs on another machine."""
    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"


class Sighting(msgspec.Struct, frozen=True):
    """Observation of a rank."""

    heartbeat: RankHeartbeat | None = None
    process: ProcessState = ProcessState.UNKNOWN
    silent_s: float | None = None
    """Seconds of silence at least; None while that is not long."""

    @property
    def has_ended(self) -> bool:
        """True if it is certain that the rank calls no barrier any more."""
        return self.process is ProcessState.GONE or (self.heartbeat is not None and self.heartbeat.has_left)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RankHeartbeat)


def encode_heartbeat(heartbeat: RankHeartbeat) -> str:
    return _encoder.encode(heartbeat).decode()


def decode_heartbeat(text: bytes) -> RankHeartbeat | None:
    """Return a heartbeat, or None where the text is none: then the rank counts as silent."""
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def silence_s(first: tuple[float, RankHeartbeat], heartbeat: RankHeartbeat, now_s: float) -> float | None:
    """Return how long a rank has been silent at least, None for not at all.

    `first` is the observer's first look: its time, on the clock of `now_s`, and what it saw.
    """
    first_s, first_heartbeat = first
    silent_s = (now_s - first_s) - (heartbeat.uptime_s - first_heartbeat.uptime_s)
    return silent_s if silent_s > 2.5 * heartbeat.period_s else None


def calls_of(heartbeat: RankHeartbeat, kind: BarrierKind, label: str) -> Call:
    found = (call for call in heartbeat.calls if (call.kind, call.label) == (kind, label))
    return next(found, Call(kind, label, 0))


def ordinal(number: int) -> str:
    tens = number % 100 // 10
    return f"{number}{'th' if tens == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def place_text(place: Place | None) -> str:
    """Return ` at train.py:12 in main`, or nothing."""
    return "" if place is None else f" at {place.file.rpartition('/')[2]}:{place.line} in {place.function}"


def barrier_text(kind: BarrierKind, label: str) -> str:
    """Return `barrier 'epoch'`; for a collective the operation alone."""
    return label if kind is BarrierKind.COLLECTIVE else f"{kind} {label!r}"


def missing_ranks_text(kind: BarrierKind, label: str, sightings: Mapping[int, Sighting]) -> str:
    """Return the state of some ranks as text, those alike together: `rank 1 has ended after 1 call ...`."""
    found = sorted(((missing_rank_text(kind, label, sighting), rank) for rank, sighting in sightings.items()))
    groups = [(description, [rank for _, rank in some]) for description, some in groupby(found, key=lambda one: one[0])]
    groups.sort(key=lambda group: group[1])
    texts = [
        f"{'each of ' if len(ranks) > 1 else ''}{ranks_text(ranks)} {description}" for description, ranks in groups
    ]
    more = [f"and {len(texts) - MAX_FRAMES} others differently"] if len(texts) > MAX_FRAMES else []
    return "; ".join([*texts[:MAX_FRAMES], *more])


def missing_rank_text(kind: BarrierKind, label: str, sighting: Sighting) -> str:
    """Return what a rank does that has not arrived, as a predicate of one rank."""
    heartbeat = sighting.heartbeat
    if heartbeat is None:
        return "has reported nothing: it has come to no barrier of ddpcore yet"
    process = f"pid {heartbeat.pid} on {heartbeat.host}"
    calls = _calls_text(kind, label, heartbeat)
    if heartbeat.has_left:
        return f"has ended{f' with {heartbeat.error}' if heartbeat.error else ''} {calls}"
    if sighting.process is ProcessState.GONE:
        return f"has died, last seen{place_text(heartbeat.place)} {calls}"
    if sighting.process is ProcessState.STOPPED:
        return f"is stopped (SIGSTOP; {process}), last seen{place_text(heartbeat.place)} {calls}"
    if sighting.silent_s is not None:
        silent = f"has been silent for {sighting.silent_s:.0f} s ({process})"
        return f"{silent}, last seen{place_text(heartbeat.place)} {calls}"
    if heartbeat.wait is not None:
        return f"{wait_text(heartbeat.wait)}{_block_text(heartbeat)}{_instead_text(kind, label, heartbeat)}"
    return f"is alive{_block_text(heartbeat)}{place_text(heartbeat.place)}, {calls}"


def wait_text(wait: Wait) -> str:
    """Return `waits in its 2nd call of barrier 'epoch' at train.py:20 in main`."""
    if wait.kind is BarrierKind.COLLECTIVE:
        return f"waits in {wait.label} #{wait.count} of group {wait.group or '0'}{place_text(wait.place)}"
    return f"waits in its {ordinal(wait.count)} call of {barrier_text(wait.kind, wait.label)}{place_text(wait.place)}"


def _block_text(heartbeat: RankHeartbeat) -> str:
    return f" inside {heartbeat.block}" if heartbeat.block else ""


def _instead_text(kind: BarrierKind, label: str, heartbeat: RankHeartbeat) -> str:
    """Return the last barrier of the same kind that it has called, where it has never called this one."""
    is_there = heartbeat.wait is not None and heartbeat.wait.kind is kind
    if is_there or calls_of(heartbeat, kind, label).count:
        return ""
    other = next((call for call in heartbeat.calls if call.kind is kind), None)
    return "" if other is None else f", its last {kind} was {other.label!r}{place_text(other.place)}"


def _calls_text(kind: BarrierKind, label: str, heartbeat: RankHeartbeat) -> str:
    """Return `after 1 call of barrier 'epoch' (the last at train.py:12 in main)`."""
    call = calls_of(heartbeat, kind, label)
    name = barrier_text(kind, label)
    if call.count:
        return f"after {call.count} call{'s' if call.count > 1 else ''} of {name} (the last{place_text(call.place)})"
    description = f"without a call of {name}"
    if heartbeat.calls:
        last = heartbeat.calls[0]
        description += f" (its last barrier: {barrier_text(last.kind, last.label)}, {ordinal(last.count)} call"
        description += f"{place_text(last.place)})"
    return description
