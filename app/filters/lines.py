"""Which log lines and which events a filter shows.

`lines_of` filters many log lines at a time: packed text is searched whole, and the rest is arrays. `is_event_shown`
filters events.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.causes import Severity
from app.filters.patterns import TextPattern
from app.filters.terms import EVERYTHING, Filter, Key, KeyKind, NameTerm, NumberTerm, TextTerm, WordTerm
from app.recording.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from app.filters.terms import Term
    from app.recording.events import Event

_LEVEL_PATTERNS = {
    "error": r"\b(?:ERROR|CRITICAL|FATAL|FAILED)\b|Traceback \(most recent call last\)|\b[A-Z]\w*(?:Error|Exception)\b"
    r"|(?:^|[\s\]:])(?:[Ee]rror|fatal): |^(?:\[rank\d+\]: ?)?\[?[EF]\d{4} |\bterminate called\b|\bSegmentation fault\b",
    "warning": r"\bWARN(?:ING)?\b|\b[A-Z]\w*Warning\b|(?:^|[\s\]:])[Ww]arning: |^(?:\[rank\d+\]: ?)?\[?W\d{4} ",
    "info": r"\bINFO\b|^(?:\[rank\d+\]: ?)?\[?I\d{4} ",
    "debug": r"\b(?:DEBUG|TRACE)\b",
}
"""Forms in which programs, Python, C++ and glog (torch's own log lines) write the levels."""

LOG_KEYS = (
    Key("level", KeyKind.WORD, choices=tuple(_LEVEL_PATTERNS)),
    Key("stream", KeyKind.WORD, choices=("stdout", "stderr")),
    Key("rank", KeyKind.NUMBER, numbers=(("launcher", -1),)),
    Key("node", KeyKind.NAME),
)


class Source(NamedTuple):
    """Node and job that lines come from."""

    node: str
    job_id: str
    """Job of the lines; empty for lines about the node."""
    is_stopped: bool = False
    """Whether they came while the job was stopped: then torchrun ends with a traceback, which is no error."""


class LogPiece(NamedTuple):
    """Some lines that follow each other, packed."""

    packed: bytes | bytearray | memoryview
    """Their text in UTF-8, each with its line end."""
    ends: NDArray[np.uint32]
    """Offset at which each line ends, with its line end."""
    source_indices: NDArray[np.uint32]
    """Index of each line in `sources`."""
    ranks: NDArray[np.int32]
    """Global rank; -1 is the launcher."""
    is_stderr: NDArray[np.bool_]
    sources: Sequence[Source]


class LineWish(msgspec.Struct, frozen=True):
    """Lines of the log that the user wants to see."""

    filter: Filter = EVERYTHING
    is_problems_only: bool = False
    culprits: frozenset[int] = frozenset()
    """Ranks whose stderr is a problem, whatever its text."""
    job_id: str = ""
    """Job whose lines are shown; empty shows those of all jobs."""

    def __bool__(self) -> bool:
        return bool(self.filter) or self.is_problems_only or bool(self.job_id)


@lru_cache(maxsize=len(_LEVEL_PATTERNS))
def level_pattern(level: str) -> TextPattern:
    return TextPattern(_LEVEL_PATTERNS[level], is_case_exact=True)


_IS_ERROR = WordTerm("level", frozenset({"error"}))
_IS_OF_RANK = NumberTerm("rank", ((-1, -1),), is_inverse=True)
ERRORS = LineWish(Filter("level=error", (_IS_ERROR,)))
RANK_ERRORS = LineWish(Filter("level=error !rank=launcher", (_IS_ERROR, _IS_OF_RANK)))
FROM_RANKS = Filter("!rank=launcher", (_IS_OF_RANK,))


def lines_of(piece: LogPiece, wish: LineWish, after_step: Callable[[], None] | None = None) -> NDArray[np.int64]:
    """Return the places of the wanted lines in a piece, in order.

    Args:
        piece: The lines to search.
        wish: What is wanted.
        after_step: Called after every `patterns.STEP_BYTES` of text; what it raises ends the search.
    """
    if wish.job_id:
        wanted = _from(piece, lambda source: source.job_id in ("", wish.job_id))
    else:
        wanted = np.ones(len(piece.ends), np.bool_)
    # Cheap terms come first: where nothing is left, no text is searched.
    for term in sorted(wish.filter.terms, key=lambda term: isinstance(term, TextTerm) or _is_level(term)):
        if not wanted.any():
            break
        wanted &= _found(piece, term, after_step) ^ term.is_inverse
    if wish.is_problems_only and wanted.any():
        is_culprit = np.isin(piece.ranks, list(wish.culprits))
        wanted &= _of_level(piece, "error", after_step) | (piece.is_stderr & is_culprit)
    return np.flatnonzero(wanted)


def _is_level(term: Term) -> bool:
    return isinstance(term, WordTerm) and term.key == "level"


def _found(piece: LogPiece, term: Term, after_step: Callable[[], None] | None) -> NDArray[np.bool_]:
    match term:
        case WordTerm(key="level", choices=choices):
            found = np.zeros(len(piece.ends), np.bool_)
            for level in choices:
                found |= _of_level(piece, level, after_step)
            return found
        case WordTerm(choices=choices):
            return np.where(piece.is_stderr, "stderr" in choices, "stdout" in choices)
        case NameTerm():
            return _from(piece, lambda source: term.fits(source.node))
        case NumberTerm():
            return term.among(piece.ranks)
        case _:
            assert isinstance(term, TextTerm), "no key of a log line is a figure"
            return _with(piece, term.pattern, after_step)


def _from(piece: LogPiece, is_wanted: Callable[[Source], bool]) -> NDArray[np.bool_]:
    wanted: NDArray[np.bool_] = np.array([is_wanted(source) for source in piece.sources], np.bool_)
    return wanted[piece.source_indices]


def _of_level(piece: LogPiece, level: str, after_step: Callable[[], None] | None) -> NDArray[np.bool_]:
    found = _with(piece, level_pattern(level), after_step)
    if level == "error" and found.any():
        found &= ~((piece.ranks == -1) & _from(piece, lambda source: source.is_stopped))
    return found


def _with(piece: LogPiece, pattern: TextPattern, after_step: Callable[[], None] | None) -> NDArray[np.bool_]:
    found = np.zeros(len(piece.ends), np.bool_)
    found[pattern.lines_in(piece.packed, piece.ends, after_step)] = True
    return found


EVENT_KEYS = (
    Key("kind", KeyKind.WORD, choices=tuple(str(kind) for kind in EventKind)),
    Key("severity", KeyKind.WORD, choices=tuple(str(severity) for severity in Severity)),
    Key("rank", KeyKind.NUMBER),
)
PROBLEMS = frozenset({Severity.WARNING, Severity.CRITICAL})


def is_event_shown(event: Event, wanted: Filter, *, is_problems_only: bool) -> bool:
    """Return whether every term of a filter holds for an event."""
    if is_problems_only and event.severity not in PROBLEMS:
        return False
    return all(_holds(event, term) is not term.is_inverse for term in wanted.terms)


def _holds(event: Event, term: Term) -> bool:
    match term:
        case WordTerm(key="kind", choices=choices):
            return event.kind in choices
        case WordTerm(choices=choices):
            return event.severity in choices
        case NumberTerm():
            return bool(term.among(np.array(event.ranks, np.int64)).any())
        case _:
            assert isinstance(term, TextTerm), "no key of an event is a name or a figure"
            return term.pattern.is_in(event.text)
