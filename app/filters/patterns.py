"""Text search with RE2 alone, whose time grows with the text and not with its powers.

Python's own engine backtracks and holds the interpreter while it does; RE2 takes time linear in the text whatever the
pattern is, within a bound of memory, and refuses what would need more.

Source: https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

MAX_PATTERN_CHARS = 1000
STEP_BYTES = 2**16
"""Bytes of lines searched at a time, give or take one line: 0.4 s of RE2 at its slowest, 6 us a byte."""
NUM_IN_TURN = 8
"""Number of adjacent lines with a pattern after which all that follow them are searched in one match."""
_MAX_MEMORY_BYTES = 8 * 2**20
MAX_WIDE = 8
"""Limit of parts that fit more than one text, up to which a pattern's automaton stays small whatever follows a match."""
_NOT_TEXT = re.compile(r"\\[pP](?:\{\^?\w+\}|\w)|\\.|\(\?P?<\w+>", re.DOTALL)
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_QUOTED = r"\\Q.*?(?:\\E|$)"
_CLASS = r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]"
_WIDE = re.compile(rf"{_QUOTED}|\\[^a-zA-Z0-9]|(?P<wide>{_CLASS}|\\.|[.|?*+(])|(?P<repeat>{{)", re.DOTALL)
_TOKEN = re.compile(
    rf"""{_QUOTED} | {_CLASS}   # texts and classes stand for themselves
    | (?P<unfit>\\[ACz] | \(\?[a-zA-Z]*-[a-zA-Z]*m[a-zA-Z]*[:)]) | \\.""",
    re.DOTALL | re.VERBOSE,
)
r"""`unfit` is what would mean another thing where many lines are searched together: \A, \z, ^ and $ without the flag m;
and \C, which also matches line ends and halves of characters."""


class PatternError(ValueError):
    """RE2 refuses a pattern; the message explains why."""


class TextPattern:
    """A regular expression of RE2's; small letters stand for both cases, unless it holds a capital one.

    Texts are given as UTF-8; several lines may be given together, each with its line end, which nothing matches.
    """

    __slots__ = ("_compiled", "_run", "_to_line_end", "source")

    def __init__(self, source: str, *, is_case_exact: bool = False) -> None:
        """Compile `source`.

        Raises:
            PatternError: It is none, or too long.
        """
        import re2  # type: ignore[import-untyped] # noqa: PLC0415 - a console without a filter does without

        self.source = source
        if len(source) > MAX_PATTERN_CHARS:
            raise PatternError(f"it is longer than {MAX_PATTERN_CHARS} characters")
        source = _HALF_CHARACTER.sub("\ufffd", source)
        if unfit := next(filter(None, (token["unfit"] for token in _TOKEN.finditer(source))), ""):
            raise PatternError(f"{unfit} is not taken: ^ and $ are the begin and the end of a line, . a character")
        options = re2.Options()
        options.log_errors = False
        options.never_nl = True
        options.never_capture = True  # the places of groups cost a second pass over each match, and are not used
        options.max_mem = _MAX_MEMORY_BYTES
        has_capital = any(character.isupper() for character in _NOT_TEXT.sub("", source))
        options.case_sensitive = is_case_exact or has_capital
        try:
            re2.compile(source.encode(), options)
            self._compiled: Any = re2.compile(f"(?m)(?:{source})".encode(), options)
            # A match takes the rest of its line along: each line is searched once.
            self._to_line_end: Any = re2.compile(f"(?m)(?:{source}).*".encode(), options)
            # Lines that follow each other, of which each has it: \C is the line end, which nothing else may match.
            run = rf"(?m)(?:.*(?:{source}).*$\C)+"
            self._run: Any = re2.compile(run.encode(), options) if _is_small(source) else None
        except re2.error as error:
            raise PatternError(error.args[0].decode(errors="replace")) from None

    def is_in(self, text: str) -> bool:
        """Return whether the pattern is found in a line."""
        return self._compiled.search(text.encode()) is not None

    def span(self, text: str) -> tuple[int, int] | None:
        """Return where in a line the pattern is found first, in characters; None where it is not, or is empty."""
        packed = text.encode()
        match = self._compiled.search(packed)
        if match is None or match.start() == match.end():
            return None
        start = len(packed[: match.start()].decode())
        return start, start + len(packed[match.start() : match.end()].decode())

    def lines_in(
        self,
        packed: bytes | bytearray | memoryview,
        ends: NDArray[np.uint32],
        after_step: Callable[[], None] | None = None,
    ) -> NDArray[np.int64]:
        """Return the numbers of the lines in which the pattern is found, in order.

        Args:
            packed: Lines, each with its line end.
            ends: Where each of them ends, with its line end.
            after_step: Called every `STEP_BYTES`; what it raises ends the search.
        """
        text, begin = memoryview(packed), 0
        runs: list[tuple[int, int]] = []
        for stop in _stops(ends):
            self._add_runs(text[begin:stop], begin, ends, runs)
            begin = stop
            if after_step is not None:
                after_step()
        if not runs:
            return np.empty(0, np.int64)
        first, last = _lines_at(runs, ends).T
        change = np.zeros(len(ends) + 1, np.int8)
        change[first] = 1
        change[last + 1] -= 1
        return np.flatnonzero(np.cumsum(change))

    def _add_runs(self, text: memoryview, begin: int, ends: NDArray[np.uint32], runs: list[tuple[int, int]]) -> None:
        """Add a byte of the first and one of the last of lines that follow each other and have it, most often one line.

        A match costs as much as 1 KiB of text: where several lines in turn have it, all that follow are matched in one.
        Such a match keeps all alternatives until the line ends, and so is for patterns that are small.
        """
        matches, num_asked = self._to_line_end.finditer(text), NUM_IN_TURN
        while batch := [match.start() for match in islice(matches, num_asked)]:
            runs += [(begin + start, begin + start) for start in batch if start < len(text)]
            if self._run is None or len(batch) < num_asked:
                continue
            num_asked *= 2
            lines = _lines_at(runs[-NUM_IN_TURN:], ends)[:, 0]
            place = int(ends[lines[-1]]) - begin
            if np.diff(lines).max() <= 1 and (run := self._run.match(text, place)) is not None:
                runs.append((begin + place, begin + run.end() - 1))
                matches = self._to_line_end.finditer(text, run.end())
                if _lines_at(runs[-1:], ends)[0, 1] - lines[-1] >= NUM_IN_TURN:
                    num_asked = NUM_IN_TURN


def _is_small(source: str) -> bool:
    """Return whether the automaton of a pattern stays small where all of its alternatives are kept.

    Only wide parts leave open which of them are alive; a repeat with numbers counts as that many parts.
    """
    parts = list(_WIDE.finditer(source))
    return not any(part["repeat"] for part in parts) and sum(part["wide"] is not None for part in parts) <= MAX_WIDE


def _lines_at(places: list[tuple[int, int]], ends: NDArray[np.uint32]) -> NDArray[np.int64]:
    return np.searchsorted(ends, np.array(places, np.uint32), side="right")


def _stops(ends: NDArray[np.uint32]) -> list[int]:
    """Return the line ends at which steps end."""
    if not len(ends):
        return []
    crossing = np.searchsorted(ends, np.arange(STEP_BYTES, int(ends[-1]), STEP_BYTES, dtype=np.uint32))
    # Not np.unique: it takes as long as 20 KiB of RE2.
    return list(dict.fromkeys([*ends[crossing].tolist(), int(ends[-1])]))


def literal(text: str) -> str:
    """Return the pattern of a text that stands for itself."""
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return f"\\{character}" if character.isascii() and not character.isalnum() and character != " " else character


def glob(text: str) -> str:
    """Return the pattern of a whole name in which `*` stands for any characters and `?` for one."""
    parts = {"*": ".*", "?": "."}
    return "^(?:" + "".join(parts.get(character) or _escaped(character) for character in text) + ")$"
