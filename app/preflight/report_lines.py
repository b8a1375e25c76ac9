"""A preflight as lines for users: problems first, with what to do; then a table; then one sentence. Pure."""

from __future__ import annotations

import textwrap
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.examination import Health, Row
from app.preflight.comparison import commit_text
from app.text import UNKNOWN, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from app.preflight.findings import HostFindings, Preflight

MIN_WIDTH = 60
MAX_WIDTH = 120
_NAME_WIDTH = 15
_MARKS = {Health.BAD: "BAD", Health.WARN: "warn", Health.OK: "ok"}
_MARK_WIDTH = 4
_INDENT = 2
_ORDER = (Health.BAD, Health.WARN, Health.OK)
_MODEL_WIDTH = 11
_COLUMNS = (
    ("host", 22),
    ("python", 8),
    ("torch", 14),
    ("NCCL", 8),
    ("GPUs", 16),
    ("code", 10),
    ("clock", 8),
    ("driver", 12),
    ("address", 40),
)
"""Title and width limit; columns without values are left out, then those that do not fit, from the right."""


class Tone(Enum):
    """Meaning of a piece of a line, for colours."""

    PLAIN = "plain"
    TITLE = "title"
    FAINT = "faint"
    BAD = "bad"
    WARN = "warn"
    OK = "ok"


class Piece(NamedTuple):
    """Part of a line."""

    text: str
    tone: Tone = Tone.PLAIN


_Line = list[Piece]


def report_lines(found: Preflight, width: int, *, shows_all: bool = False) -> Iterator[_Line]:
    """Yield lines of at most `width` columns, where the text can be broken.

    Args:
        found: The findings; safe to show.
        width: Width of the terminal.
        shows_all: Include rows that are well.
    """
    width = min(MAX_WIDTH, max(MIN_WIDTH, width))
    for title, rows in _sections(found, shows_all=shows_all):
        yield from _wrapped(title, width, "", Tone.TITLE)
        for row in rows:
            yield from _row_lines(row, width)
        yield []
    table = [*_table(found.hosts, width)]
    if table:
        yield from table
        yield []
    # A row on all hosts that is well has no section of its own.
    for row in found.rows:
        if row.status is Health.OK and not shows_all:
            yield from _wrapped(row.detail[:1].upper() + row.detail[1:] + ".", width, "", Tone.PLAIN)
    yield from _wrapped(summary_text(found), width, "", _tone(_worst_of(found)))


def summary_text(found: Preflight) -> str:
    """Return one sentence: how many hosts there are, and how many of them are fit."""
    num_away = sum(one.failure is not None for one in found.hosts)
    answered = [one for one in found.hosts if one.failure is None]
    num_bad = sum(one.health is Health.BAD for one in answered)
    num_warned = sum(one.health is Health.WARN for one in answered)
    num_well = len(answered) - num_bad - num_warned
    parts = [
        f"{count} {noun}"
        for count, noun in (
            (num_well, "well"),
            (num_warned, "with warnings"),
            (num_bad, "not fit"),
            (num_away, "could not be examined"),
        )
        if count
    ]
    of_all = [_MARKS[row.status] for row in found.rows if row.status is not Health.OK]
    together = f"; of all together: {of_all.count('BAD')} bad, {of_all.count('warn')} to look at" if of_all else ""
    return f"{len(found.hosts)} host{'' if len(found.hosts) == 1 else 's'}: {', '.join(parts)}{together}."


def _worst_of(found: Preflight) -> Health:
    rows = [*found.rows, *(row for one in found.hosts for row in one.rows)]
    return next(status for status in _ORDER if status is Health.OK or any(row.status is status for row in rows))


def _sections(found: Preflight, *, shows_all: bool) -> Iterator[tuple[str, list[Row]]]:
    """Yield titles and rows; the worst come first, and hosts with the same findings share a section."""
    of_all = [row for row in found.rows if shows_all or row.status is not Health.OK]
    shown = {
        one.host: tuple(row for row in one.rows if shows_all or row.status is not Health.OK) for one in found.hosts
    }
    answered = [shown[one.host] for one in found.hosts if one.failure is None]
    shared = [row for row in answered[0] if all(row in rows for rows in answered)] if len(answered) > 1 else []
    together: dict[tuple[Row, ...], list[str]] = {}
    for one in found.hosts:
        rows = shown[one.host]
        own = rows if one.failure is not None else tuple(row for row in rows if row not in shared)
        if own:
            together.setdefault(own, []).append(one.host)
    sections = [(", ".join(hosts), _worst_first(rows)) for rows, hosts in together.items()]
    if of_all:
        sections.insert(0, ("all hosts together", _worst_first(of_all)))
    if shared:
        sections.append(("every host that answers", _worst_first(shared)))
    yield from sorted(sections, key=lambda section: _ORDER.index(section[1][0].status))


def _worst_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: _ORDER.index(row.status))


def _row_lines(row: Row, width: int) -> Iterator[_Line]:
    name = row.name.replace("_", " ")
    lead = " " * _INDENT
    head = [
        Piece(lead),
        Piece(_MARKS[row.status].ljust(_MARK_WIDTH), _tone(row.status)),
        Piece(f"  {name:<{_NAME_WIDTH}}  "),
    ]
    margin = " " * (_INDENT + _MARK_WIDTH + 2 + _NAME_WIDTH + 2)
    if len(name) > _NAME_WIDTH:
        yield [*head[:-1], Piece(f"  {name}")]
        head = [Piece(margin)]
    first, *others = [*_wrapped(row.detail, width - len(margin), "", Tone.PLAIN)] or [[]]
    yield head + first
    for line in others:
        yield [Piece(margin), *line]
    if row.todo:
        for number, line in enumerate(_wrapped(row.todo, width - len(margin) - 3, "", Tone.FAINT)):
            yield [Piece(margin), Piece("-> " if not number else "   ", Tone.FAINT), *line]


def _wrapped(text: str, width: int, indent: str, tone: Tone) -> Iterator[_Line]:
    for line in textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False):
        yield [Piece(line, tone)]


def _table(hosts: Sequence[HostFindings], width: int) -> Iterator[_Line]:
    """Yield a table of the hosts' facts."""
    answered = [one for one in hosts if one.facts is not None]
    if not answered:
        return
    rows = [[title for title, _ in _COLUMNS], *map(_cells, answered)]
    columns = [*zip(*rows, strict=True)]
    kept: list[list[str]] = []
    left = width
    for cells, (_, limit) in zip(columns, _COLUMNS, strict=True):
        if all(cell == UNKNOWN for cell in cells[1:]):
            continue
        column_width = min(limit, max(map(len, cells)))
        needed = column_width + 2 * bool(kept)
        if needed <= left:
            left -= needed
            kept.append([_cut(cell, column_width).ljust(column_width) for cell in cells])
    healths = [None, *(one.health for one in answered)]
    for number, (line, health) in enumerate(zip(zip(*kept, strict=True), healths, strict=True)):
        name, *rest = line
        tail = ("  " + "  ".join(rest)).rstrip()
        tone = Tone.FAINT if not number or health is None else _tone(health)
        yield [Piece(name, tone), Piece(tail, Tone.PLAIN if number else Tone.FAINT)]


def _cells(one: HostFindings) -> list[str]:
    facts, clock = one.facts, one.clock
    assert facts is not None
    names = list(dict.fromkeys(facts.gpus))
    gpus = ", ".join(f"{facts.gpus.count(name)} x {_model(name)}" for name in names)
    offset = UNKNOWN
    if clock is not None:
        certain_s = max(0.0, abs(clock.offset_s) - clock.uncertainty_s)
        offset = f"{'-' if clock.offset_s < 0 else '+'}{seconds_text(certain_s)}" if certain_s >= 0.05 else "same"
    code = facts.code
    program = UNKNOWN if code is None else commit_text(code) if code.commit else code.digest[:9]
    return [
        one.host,
        *(text or UNKNOWN for text in (facts.python, facts.torch, facts.nccl, gpus, program)),
        offset,
        *(text or UNKNOWN for text in (facts.driver, facts.address)),
    ]


def _model(name: str) -> str:
    """Return `H100 80GB` of `NVIDIA H100 80GB HBM3`: as much of the name as fits."""
    return textwrap.shorten(name.removeprefix("NVIDIA "), _MODEL_WIDTH, placeholder="") or name[:_MODEL_WIDTH]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


def _tone(health: Health) -> Tone:
    return Tone(health.value)
