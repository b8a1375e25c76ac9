"""What files of torch's flight recorder show of ranks that are gone: who had not come to a call that others waited in.

torch writes one a rank at a time-out (`TORCH_FR_DUMP_TEMP_FILE`, by default comm_lib_trace_rank_N in torch/ of
$XDG_CACHE_HOME or ~/.cache, of older torch /tmp/nccl_trace_rank_N), a pickle of plain values: an unpickler that refuses
every global reads it whole. Of each group its numbered collectives are compared, at the first that a rank has not
ended: with NCCL ranks enqueue calls ahead. Sends and receives have no numbers that ranks can compare.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp, 2.8 to 2.13; written by gloo for the tests, not on GPUs.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import msgspec

from app.diagnosis.causes import Severity
from app.inspect.comparison import LIBRARY
from app.text import LINE_LIMIT, clean, clean_name, place_text, ranks_text
from ddpcore.wire import Place

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MAX_DUMP_BYTES = 1 << 26
_OWN_SIZES = {"all_to_all", "all_to_all_single", "all_to_all_v_single", "all_gather_v", "scatter"}
_RANK = re.compile(r"\b[0-9]{1,6}\b")
Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Sizes = Annotated[list[Annotated[list[Number], msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=1 << 14)]
"""Dimensions of each tensor; an all_to_all has as many tensors as ranks."""


class MalformedDumpError(Exception):
    """A file is no dump of torch's flight recorder."""


class Frame(msgspec.Struct, frozen=True):
    """A call on the stack of an entry."""

    filename: str
    line: int
    name: str


class Entry(msgspec.Struct, frozen=True):
    """A call that a rank has made."""

    process_group: tuple[str, str]
    """Name and description of its group."""
    profiling_name: str
    """Backend and operation: `nccl:all_reduce`."""
    collective_seq_id: Number
    is_p2p: bool
    state: str
    input_sizes: Any = None
    """As it is in the file, where all entries may share one list: a copy for each would know no bounds."""
    retired: bool = False
    record_id: int = -1
    """How many calls the rank had recorded before it; -1: unknown."""
    frames: Annotated[list[Frame], msgspec.Meta(max_length=256)] = []

    @property
    def op(self) -> str:
        """Its operation."""
        return clean_name(self.profiling_name.rpartition(":")[2])

    @property
    def sizes(self) -> str:
        """Sizes of its inputs; nothing where those of ranks may differ or cannot be read."""
        try:
            return "" if self.op in _OWN_SIZES else str(msgspec.convert(self.input_sizes, _Sizes))
        except msgspec.ValidationError:
            return ""

    @property
    def is_over(self) -> bool:
        """Whether it has ended on its rank."""
        return self.retired or self.state == "completed"

    @property
    def place(self) -> Place | None:
        """Innermost line of the user's program."""
        own = next((frame for frame in self.frames if not LIBRARY.search(frame.filename)), None)
        return None if own is None else Place(own.filename, own.line, own.name)

    @property
    def text(self) -> str:
        """What was called, and where."""
        where = f" at {place_text(self.place)}" if self.place is not None else ""
        name, description = self.process_group
        return f"{self.op} #{self.collective_seq_id} of {clean_name(description or name)}{where}"


class _Group(msgspec.Struct, frozen=True):
    ranks: str
    """`[0, 1, 2]`, or `[]` where torch has not recorded them."""


class Dump(msgspec.Struct, frozen=True):
    """What one rank's recorder held, oldest entry first."""

    entries: Annotated[list[Entry], msgspec.Meta(max_length=50_000)]
    pg_config: Any = None

    @property
    def groups(self) -> dict[str, frozenset[int]]:
        """Ranks of each group that the rank has called in, by the group's name; gloo records none."""
        try:
            config = msgspec.convert(self.pg_config, dict[str, _Group])
        except msgspec.ValidationError:
            return {}
        texts = {group.ranks for group in config.values()}
        ranks = {text: frozenset(map(int, _RANK.findall(text))) for text in texts}
        return {name: ranks[group.ranks] for name, group in config.items() if ranks[group.ranks]}

    @property
    def world(self) -> frozenset[int]:
        """Ranks of the default group; none where they are not recorded."""
        return self.groups.get("0", frozenset())

    @property
    def is_whole(self) -> bool:
        """Whether the recorder still held the rank's first call."""
        return not self.entries or self.entries[0].record_id == 0


_Key = tuple[tuple[str, str], frozenset[int]]
"""Name and description of a group, and its ranks: groups that torch has split off may share a name."""


class DumpFinding(NamedTuple):
    """What the dumps of a job's ranks show together."""

    severity: Severity
    culprits: list[int]
    waiting: list[int]
    without_dump: list[int]
    """Ranks of the job, by the groups and the files' names, without a file that can be read."""
    text: str


_ERRORS = (ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, MemoryError, RecursionError)
"""What unpickling raises for other files, besides TypeError and ValueError. Source: pickle.py, the unpickler."""


class _PlainUnpickler(pickle._Unpickler):  # noqa: SLF001 - its reason is below
    """The one written in Python: its memo is a dict, which no number in a file can make as large as the memory."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise MalformedDumpError(f"it wants {clean_name(module)}.{clean_name(name)}, and a dump holds plain values")

    def persistent_load(self, _pid: object) -> NoReturn:
        raise MalformedDumpError("it refers to something outside, and a dump holds plain values")


def read_dump(content: bytes) -> Dump:
    """Return a rank's dump.

    Raises:
        MalformedDumpError: It is none; nothing of it was run.
    """
    if not content:
        raise MalformedDumpError("it is empty")
    try:
        values: Any = _PlainUnpickler(io.BytesIO(content)).load()
        return msgspec.convert(values, Dump)
    except (*_ERRORS, TypeError, ValueError, pickle.UnpicklingError, struct.error) as error:
        if content.startswith(pickle.PROTO) and not content.endswith(pickle.STOP):
            raise MalformedDumpError("it is cut short") from error
        raise MalformedDumpError(clean(str(error), LINE_LIMIT) or type(error).__name__) from error


def compared(
    dumps: Mapping[int, Dump], unread: Mapping[int, str] | None = None, notes: Sequence[str] = ()
) -> DumpFinding:
    """Return who held up whom when the dumps were written.

    Args:
        dumps: By rank.
        unread: Why the file of a rank that left no dump cannot be read, by rank.
        notes: What else the files show.
    """
    unread = unread or {}
    calls, everyone = _calls(dumps)
    waits = {key: _waits(by_rank) for key, by_rank in calls.items()}
    waiting = {rank for waits_there in waits.values() for rank in waits_there}
    silent = {rank for rank, dump in dumps.items() if dump.is_whole}
    without = sorted(everyone.union(unread) - set(dumps))
    parts: list[str] = []
    culprits: set[int] = set()
    met: list[str] = []
    for key, by_rank in calls.items():
        last: dict[int, Entry | None] = {rank: None for rank in key[1] & silent if rank not in by_rank}
        last |= {rank: next(reversed(own.values())) for rank, own in by_rank.items()}
        for number in sorted({entry.collective_seq_id for entry in waits[key].values()}):
            there = {rank: entry for rank, entry in waits[key].items() if entry.collective_seq_id == number}
            called = {rank: own[number] for rank, own in by_rank.items() if number in own}
            absent = {rank: one for rank, one in last.items() if one is None or one.collective_seq_id < number}
            last = {rank: one for rank, one in last.items() if rank not in absent}
            behind = {rank: one for rank, one in absent.items() if rank not in waiting}
            if behind:
                culprits |= set(behind)
                parts.append(_behind_text(behind, there))
            elif len({(entry.op, entry.sizes) for entry in called.values()}) > 1:
                culprits |= set(_fewest(called))
                parts.append(_mismatch_text(called))
                break  # from here on the numbers are of different calls
            else:
                come = f"all{' that left a dump' if without else ''} have come to it"
                if absent:
                    come = f"{ranks_text(sorted(absent))}, waiting in another call, {_has(absent)} not come to it"
                met.append(f"{ranks_text(sorted(there))} waited in {next(iter(there.values())).text}, and {come}")
    reasons: dict[str, list[int]] = defaultdict(list)
    for rank in without:
        how = f"no readable dump: {unread[rank]}" if rank in unread else "no dump: frozen, killed, or elsewhere"
        reasons[how].append(rank)
    parts += [f"{ranks_text(ranks)} {_has(ranks)} left {how}" for how, ranks in reasons.items()]
    if not culprits and met:
        more = f" (one of {len(met)} such calls)" if len(met) > 1 else ""
        parts.insert(0, f"{met[0]}{more}")
    severity = Severity.CRITICAL if culprits or without else Severity.WARNING if waiting else Severity.OK
    parts = parts or ["no rank waited in a collective when the dumps were written"]
    return DumpFinding(severity, sorted(culprits), sorted(waiting - culprits), without, "; ".join([*parts, *notes]))


def _calls(dumps: Mapping[int, Dump]) -> tuple[dict[_Key, dict[int, dict[int, Entry]]], set[int]]:
    """Return the collectives of each group by rank and number, and the ranks of the job."""
    calls: dict[_Key, dict[int, dict[int, Entry]]] = defaultdict(lambda: defaultdict(dict))
    everyone = set(range(max(dumps, default=-1) + 1))
    shared: dict[frozenset[int], frozenset[int]] = {}
    for rank, dump in dumps.items():
        groups = {name: shared.setdefault(ranks, ranks) for name, ranks in dump.groups.items()}
        everyone.update(*groups.values())
        for entry in dump.entries:
            if not entry.is_p2p:
                members = groups.get(entry.process_group[0], frozenset())
                calls[entry.process_group, members][rank][entry.collective_seq_id] = entry
    return calls, everyone


def _waits(by_rank: Mapping[int, dict[int, Entry]]) -> dict[int, Entry]:
    """Return by rank the first of its calls that is not over, nor followed by one that is: one group's end in order."""
    waits = {}
    for rank, own in by_rank.items():
        for entry in takewhile(lambda entry: not entry.is_over, reversed(own.values())):
            waits[rank] = entry
    return waits


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _behind_text(behind: Mapping[int, Entry | None], there: Mapping[int, Entry]) -> str:
    who, has = ranks_text(sorted(behind)), _has(behind)
    call = next(iter(there.values()))
    before = next(filter(None, behind.values()), None)
    its = "its" if len(behind) == 1 else "their"
    last = f"{its} last call there was {before.text}" if before is not None else f"{its} dump has no call there"
    return f"{who} {has} not come to {call.text}, in which {ranks_text(sorted(there))} waited; {last}"


def _mismatch_text(there: Mapping[int, Entry]) -> str:
    calls = []
    for ranks in _sides(there):
        entry = there[ranks[0]]
        sizes = f" with sizes {entry.sizes}" if entry.sizes else ""
        calls.append(f"{ranks_text(ranks)} called {entry.text}{sizes}"[:LINE_LIMIT])
    return f"the ranks called different things under one number: {clean('; '.join(calls), 2 * LINE_LIMIT)}"


def _sides(there: Mapping[int, Entry]) -> list[list[int]]:
    sides: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, entry in sorted(there.items()):
        sides[entry.op, entry.sizes].append(rank)
    return sorted(sides.values(), key=len)


def _fewest(there: Mapping[int, Entry]) -> Sequence[int]:
    sides = _sides(there)
    return sides[0] if len(sides[0]) < len(sides[1]) else sorted(there)
