"""Observes the rank's GPUs: which NCCL call each GPU stands in, and what torch's allocator holds on it.

`first_open` returns the first call that is not over, which is the one that the GPU waits in: torch lets the stream of
each call wait for the stream of the program, and that for each call that is not asynchronous, so the calls behind it
have not begun. `GpuTransfers` keeps the sends and receives that the GPU stands in.

What NCCL's recorder holds of sends and receives. Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
(`pointToPoint`, `startCoalescing`, `endCoalescing`, `workEnqueue`), torch 2.4 to 2.13:

- A send is "nccl:send 0->1", a receive "nccl:recv 1<-0", by the ranks in the group. Its `collective_seq_id` is that of
  the collective before it, its `p2p_seq_id` counts this rank's sends and receives in the group.
- The calls of a batch have one number and never close: the entry that ends the batch, "nccl:coalesced" (or
  "nccl:ALLGATHER_coalesced" of collectives), is retired for all of them (`with_batches`). Torch 2.11 records it as a
  collective that has the seq of the one before it, also where it ends sends and receives (seen on an H200).
- The counters (`last_enqueued_collective`) are the number of the last call, of whichever of the two kinds it was.

`GpuMemory` reads what torch's allocator holds, on the main thread and at the end of a step. The allocator's figures lie
behind its lock, which a thread may hold for as long as the GPU takes; and torch asks for them while it holds the
interpreter's lock. A probe that did that on its thread could stop the whole rank. At the end of a step the main thread
itself holds no memory in flight, and training would take the same lock next.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ddpcore.wire import GpuMemoryReport, PeerCall, PeerWait

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ddpcore.probe.samples import CounterKey, Counters, GroupMembers, RecorderEntry

NCCL = "nccl"
MAX_CALLS = 16
"""Calls of one batch in a report."""
_END_OF_BATCH = "coalesced"
_TRANSFER = re.compile(r"(?:\w+:)?(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d+)")

_Kind = tuple[str, int, str]
"""Operation, global rank of the peer, the group's name."""


def with_batches(entries: Sequence[RecorderEntry]) -> list[RecorderEntry]:
    """Return a ring in which the calls of a batch begin and end when the batch does; oldest entry first."""
    batches_of_transfers = {_batch(entry) for entry in entries if entry.is_p2p}
    ends: dict[tuple[CounterKey, int, int], RecorderEntry] = {}
    listed: list[RecorderEntry] = []
    for entry in reversed(entries):
        batch = _batch(entry)
        changes: dict[str, Any] = {}
        if entry.op.endswith(_END_OF_BATCH):
            ends[batch] = entry
            changes = {"is_p2p": batch in batches_of_transfers}
        elif (end := ends.get(batch)) is not None and not entry.is_retired:
            changes = {"is_retired": end.is_retired, "has_begun": end.has_begun}
        listed.append(msgspec.structs.replace(entry, **changes) if changes else entry)
    return listed[::-1]


def _batch(entry: RecorderEntry) -> tuple[CounterKey, int, int]:
    return entry.key, entry.seq, entry.p2p_seq


def first_open(entries: Sequence[RecorderEntry]) -> RecorderEntry | None:
    """Return the first of NCCL's calls that is not over; `entries` as `with_batches` returns them."""
    return next((entry for entry in entries if entry.key[0] == NCCL and not entry.is_retired), None)


class GpuWaits:
    """The part of its time that the GPU spends in collectives, as of the last two slow ticks; 0 where none is timed.

    A kernel of NCCL runs from when its GPU comes to the collective until all have: it is how a GPU waits.
    """

    def __init__(self) -> None:
        self.frac = 0.0
        self._since_s: float | None = None
        self._last_seq: dict[CounterKey, int] = {}

    def learn(self, entries: Sequence[RecorderEntry], now_s: float) -> None:
        """Take a full dump, and its time; what the ring holds of a group stands for all its collectives since then."""
        since_s, self._since_s = self._since_s, now_s
        spent_s = 0.0
        timed = [entry for entry in entries if entry.on_gpu_us >= 0 and not entry.is_p2p]
        for key in {entry.key for entry in timed}:
            before = self._last_seq.get(key, 0)
            later = {entry.seq: entry.on_gpu_us / 1e6 for entry in timed if entry.key == key and entry.seq > before}
            if later:
                self._last_seq[key] = max(later)
                spent_s += sum(later.values()) / len(later) * (max(later) - before)
        if since_s is not None and now_s > since_s:
            self.frac = min(1.0, spent_s / (now_s - since_s))


class _Stand(NamedTuple):
    """What a GPU stands in."""

    key: CounterKey
    seq: int
    p2p_seq: int


class GpuTransfers:
    """The send or receive, or the batch of them, that the GPU stands in, as of the last full dump."""

    def __init__(self) -> None:
        self.has_open = False
        """True if any is called and not over, also behind something else, but not behind work of the rank's own."""
        self._stand: _Stand | None = None
        self._since_s = 0.0
        self._completed: int | None = None
        self._calls: list[PeerCall] = []

    def learn(
        self,
        entries: Sequence[RecorderEntry],
        counters: Counters,
        latest: Sequence[PeerCall],
        members: Mapping[str, GroupMembers],
        since_s: float,
    ) -> None:
        """Take a full dump.

        `entries` are as `with_batches` returns them, `counters` of the same moment. `latest` is the last send or
        receive of each kind, counted. `since_s` is when NCCL's counters changed last.
        """
        first = first_open(entries)
        is_at_work = first is not None and first.has_begun is False
        self.has_open = not is_at_work and any(entry.is_p2p and not entry.is_retired for entry in entries)
        if first is None or is_at_work or not first.is_p2p:
            self._stand, self._calls = None, []
            return
        stand = _Stand(first.key, first.seq, first.p2p_seq)
        if stand != self._stand:
            self._stand, self._since_s = stand, since_s
        self._completed = counters.get(first.key, (-1, -1))[1]
        batch = (first.seq, first.p2p_seq)
        ring = [entry for entry in entries if entry.is_p2p and entry.key == first.key]
        numbered = _numbered(ring, latest, members)
        self._calls = [call for entry, call in numbered if (entry.seq, entry.p2p_seq) == batch][:MAX_CALLS]

    def wait(self, now_s: float, counters: Counters) -> PeerWait | None:
        """Return what the GPU waits in; None where that is no send or receive, or may be over by now."""
        if self._stand is None or not self._calls or counters.get(self._stand.key, (-1, -1))[1] != self._completed:
            return None
        return PeerWait(self._calls, max(0.0, now_s - self._since_s), is_on_gpu=True)


def _numbered(
    ring: Sequence[RecorderEntry], latest: Sequence[PeerCall], members: Mapping[str, GroupMembers]
) -> list[tuple[RecorderEntry, PeerCall]]:
    """Return the sends and receives of a ring with their numbers, in their order, as far as they are counted."""
    num_calls = {(call.op, call.peer, call.group): call.number for call in latest if call.tag == 0}
    num_later: Counter[_Kind] = Counter()
    listed: list[tuple[RecorderEntry, PeerCall]] = []
    for entry in reversed(ring):
        kind = _kind_of(entry, members)
        if kind is None:
            continue
        number = num_calls.get(kind, 0) - num_later[kind]
        num_later[kind] += 1
        if number > 0:
            op, peer, group = kind
            listed.append((entry, PeerCall(op, peer, group, number=number)))
    return listed[::-1]


def _kind_of(entry: RecorderEntry, members: Mapping[str, GroupMembers]) -> _Kind | None:
    found = _TRANSFER.fullmatch(entry.op)
    known = members.get(entry.group)
    if found is None or known is None or int(found["peer"]) >= len(known.ranks):
        return None
    return found["op"], known.ranks[int(found["peer"])], entry.group


MEMORY_PERIOD_S = 1.0
"""Seconds between looks."""
MAX_GPUS = 64


class Cuda(Protocol):
    """The part of `torch.cuda` that is used."""

    def is_initialized(self) -> bool:
        """Return whether the program uses CUDA."""

    def device_count(self) -> int:
        """Return how many GPUs it sees."""

    @property
    def get_device_properties(self) -> Callable[[int], Any]:
        """Return what a GPU is."""

    @property
    def memory_stats_as_nested_dict(self) -> Callable[[int], Mapping[str, Any]]:
        """Return the allocator's figures."""


class GpuMemory:
    """Looks at most once a second; initialises nothing."""

    def __init__(self) -> None:
        self._due_s = float("-inf")
        self._uuids: dict[int, str] = {}
        self._last: tuple[GpuMemoryReport, ...] = ()

    def look(self, now_s: float, cuda: Cuda | None = None) -> tuple[GpuMemoryReport, ...]:
        """Return the memory held on each GPU that has some; never raises.

        `cuda` is `torch.cuda` by default. Where the allocator has no figures (a pluggable one has none, and raises
        RuntimeError) the last figures stay, and it is not asked again: training continues.
        """
        if now_s < self._due_s:
            return self._last
        self._due_s = now_s + MEMORY_PERIOD_S
        if cuda is None:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            try:
                reports = [self._of(cuda, device) for device in range(min(cuda.device_count(), MAX_GPUS))]
            except RuntimeError:
                self._due_s = float("inf")
            else:
                self._last = tuple(report for report in reports if report is not None)
        return self._last

    def _of(self, cuda: Cuda, device: int) -> GpuMemoryReport | None:
        stats = cuda.memory_stats_as_nested_dict(device)
        reserved = _whole(stats, "reserved_bytes")
        if not any(reserved):
            return None
        if device not in self._uuids:
            self._uuids[device] = _uuid(cuda.get_device_properties(device))
        allocated = _whole(stats, "allocated_bytes")
        return GpuMemoryReport(self._uuids[device], allocated[0], reserved[0], allocated[1], reserved[1])


def _whole(stats: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return (current, peak) over all pools."""
    figures = stats.get(name, {}).get("all", {})
    return max(0, int(figures.get("current", 0))), max(0, int(figures.get("peak", 0)))


def _uuid(properties: Any) -> str:
    """Return a UUID as NVML writes it; torch leaves the kind away."""
    text = str(getattr(properties, "uuid", ""))
    return text if not text or text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
