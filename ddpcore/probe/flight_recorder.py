"""The only file that touches torch's private flight recorder, and the private map of process groups beside it.

The recorder is a ring in C++ that every collective passes, also those that DDP issues inside `backward()`. Everything
here is feature-detected and tolerant: on a torch without it, or with another one, the answers are empty and
`is_available` is False.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and distributed_c10d.py, torch 2.8 to 2.13. Gloo and NCCL each
have an own recorder with an own numbering of groups; NCCL's exists only in CUDA builds.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec
import torch

from ddpcore.probe.samples import CounterKey, Counters, GroupMembers, RecorderDump, RecorderEntry
from ddpcore.torch_names import replace

_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""Recorder's name -> function of `torch._C._distributed_c10d`, called with (include_collectives, only_active)."""

_Dump = Callable[[bool, bool], bytes | str]
_Positions = dict[CounterKey, tuple[int, int]]


class _Entry(msgspec.Struct, gc=False):
    """An entry as the recorder writes it; the other fields are skipped unread."""

    pg_id: int
    process_group: list[str]
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    profiling_name: str = ""
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    is_p2p: bool = False
    # On gloo an entry's state stays "scheduled"; `retired` alone says that it is over. Source: seen with torch 2.13.
    retired: bool = True
    # NCCL's watchdog retires what is over up to 0.1 s later; the state is asked of the GPU's events at each dump.
    state: str = ""
    time_created_ns: int = 0
    time_discovered_started_ns: int = 0
    duration_ms: float | None = None


class _Status(msgspec.Struct, gc=False):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class _Trace(msgspec.Struct):
    entries: list[_Entry] = []
    # Its keys, like the entries' ids, are local to the process: other ranks have other ones for the same group.
    pg_status: dict[int, _Status] = {}


# Lax, since the recorder writes its numbers in pg_status as strings.
_decoder = msgspec.json.Decoder(_Trace, strict=False)


class _Ring:
    """One of torch's recorders."""

    __slots__ = ("_counters", "_dump", "_name", "_status")

    def __init__(self, name: str, dump: _Dump) -> None:
        self._name = name
        self._dump = dump
        self._status: bytes | str | None = None
        self._counters: _Positions = {}

    def counters(self) -> _Positions:
        status = self._dump(False, False)  # noqa: FBT003 - C++ takes its two flags by place
        if status != self._status:
            self._status, self._counters = status, _counters(self._name, _decode(status))
        return self._counters

    def dump(self) -> tuple[list[RecorderEntry], _Positions]:
        name = self._name
        trace = _decode(self._dump(True, False))  # noqa: FBT003 - by place, as above
        # Starts and durations are recorded with TORCH_NCCL_ENABLE_TIMING alone.
        is_timed = any(entry.time_discovered_started_ns for entry in trace.entries)
        entries = [_entry(name, entry, is_timed=is_timed) for entry in trace.entries if entry.process_group]
        return entries, _counters(name, trace)


class FlightRecorder:
    """Reads what torch records of this process's collectives. Any thread may call; nothing blocks."""

    def __init__(self) -> None:
        c10d = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001 - there is no public recorder
        found = {name: getattr(c10d, function, None) for name, function in _DUMPS.items()}
        self._rings = [_Ring(name, dump) for name, dump in found.items() if dump is not None]
        self._c10d: Any = None
        self._default_group: weakref.ref[Any] | None = None
        self._num_openings = 0

    @property
    def is_available(self) -> bool:
        """False when this torch has no recorder: only stacks show what a rank does."""
        return bool(self._rings)

    def counters(self) -> Counters:
        """Return (enqueued, completed) per group: 4 us, whatever the ring holds."""
        if len(self._rings) == 1:
            return self._rings[0].counters()
        merged: _Positions = {}
        for ring in self._rings:
            merged.update(ring.counters())
        return merged

    def dump(self) -> RecorderDump:
        """Return everything in the rings, oldest entry first: 0.5 ms with 64 entries, 0.8 ms beside training."""
        entries: list[RecorderEntry] = []
        counters: _Positions = {}
        for ring in self._rings:
            more, positions = ring.dump()
            entries += more
            counters.update(positions)
        return RecorderDump(entries, counters)

    def members(self) -> dict[str, GroupMembers]:
        """Return the process groups that this rank belongs to, by c10d's name.

        The recorder's own `pg_config` is empty on gloo.
        """
        world = self._world()
        members: dict[str, GroupMembers] = {}
        try:
            for group, name in list(world.pg_names.items()):
                backends = str(world.pg_backend_config.get(group, ""))
                places = world.pg_group_ranks[group]
                ranks = tuple(sorted(places))
                members[name] = GroupMembers(
                    ranks=ranks,
                    is_mixed="gloo" in backends and "nccl" in backends,
                    description=str(getattr(group, "group_desc", "")),
                    is_sorted=ranks == tuple(sorted(places, key=places.__getitem__)),
                )
        except (AttributeError, KeyError, RuntimeError, TypeError):
            # Another torch, or a group that the main thread makes or destroys right now: the next dump asks again.
            return members
        return members

    def has_process_group(self) -> bool:
        """Return whether `init_process_group` has made the default group."""
        return getattr(self._world(), "_default_pg", None) is not None

    def num_openings(self) -> int:
        """Return how many default groups have been seen, one after another; a reference to none of them is kept.

        c10d gives the next one the old name and counts from 1 again. Ranks stand in different ones only where making a
        group does not wait for the others (NCCL, lazily). Source: distributed_c10d.py, torch 2.13.
        """
        group = getattr(self._world(), "_default_pg", None)
        if group is not None and (self._default_group is None or self._default_group() is not group):
            self._default_group = weakref.ref(group)
            self._num_openings += 1
        return self._num_openings

    def num_worlds(self, size: int) -> int:
        """Return how many default groups of this many ranks have been made since `count_worlds`."""
        return _num_worlds[size]

    def _world(self) -> Any:
        if self._c10d is None:
            self._c10d = getattr(getattr(torch, "distributed", None), "distributed_c10d", None)
        return getattr(self._c10d, "_world", None)


_num_worlds: Counter[int] = Counter()
"""How many default groups the program has made, by their number of ranks."""


def count_worlds() -> bool:
    """Count the default groups that this process makes; return False where this torch has no place for it.

    All ranks make a default group of all: its number is the same on each. One that is soon destroyed is counted too.
    Source: init_process_group in torch/distributed/distributed_c10d.py, torch 2.4 to 2.13.
    """
    try:
        replace("torch.distributed.distributed_c10d", "_update_default_pg", _counted)
    except (AttributeError, KeyError):
        return False
    return True


def _counted(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(original)
    def update(group: Any) -> None:
        original(group)
        with contextlib.suppress(Exception):
            if group is not None:
                _num_worlds[group.size()] += 1

    return update


def _decode(text: bytes | str) -> _Trace:
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Trace()


def _counters(name: str, trace: _Trace) -> _Positions:
    return {
        (name, group): (status.last_enqueued_collective, status.last_completed_collective)
        for group, status in trace.pg_status.items()
    }


def _entry(name: str, entry: _Entry, *, is_timed: bool) -> RecorderEntry:
    return RecorderEntry(
        key=(name, entry.pg_id),
        group=entry.process_group[0],
        seq=entry.collective_seq_id,
        op=entry.profiling_name,
        sizes=entry.input_sizes,
        is_p2p=entry.is_p2p,
        is_retired=entry.retired or entry.state == "completed",
        called_us=max(0, entry.time_created_ns // 1000),
        dtypes=entry.input_dtypes,
        p2p_seq=entry.p2p_seq_id,
        has_begun=entry.state != "scheduled" if is_timed else None,
        on_gpu_us=-1 if entry.duration_ms is None else max(0, round(1000 * entry.duration_ms)),
    )
