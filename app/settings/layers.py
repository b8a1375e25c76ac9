"""Merges settings from several places, one above the other: each place's values, its errors, and what holds.

`merged` returns what holds. `contradictions` and `key_troubles` find what is wrong with settings only together:
thresholds that contradict each other, keys that two actions want.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from app.settings.keys import nearest, nearest_text, shown_key
from app.settings.schema import TABLES, Setting, Value, WrongValueError, repeated
from app.settings.toml_lines import NotTomlError, parse
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from app.settings.schema import Bindable
    from app.settings.toml_lines import Path

DEFAULT = "default"
MAX_SHOWN = 400
"""Characters of one sentence about an error: the file may be another user's."""
ELSEWHERE = {"thresholds.abandon_s": "give it where a job is started: rankdeck run --abandon-after"}
"""Settings that are looked for here, and set in another place."""


class Origin(msgspec.Struct, frozen=True):
    """Place of a setting."""

    place: str
    """A file, a variable, `--set`, or `default`."""
    line: int = 0
    """Line of a file, from 1 on."""

    @property
    def is_file(self) -> bool:
        """Whether it may be left out by leaving out the files."""
        return self.line > 0

    def __str__(self) -> str:
        """Return it as editors and terminals understand it: `config.toml:3`."""
        return f"{self.place}:{self.line}" if self.line else self.place


class Entry(msgspec.Struct, frozen=True):
    """A setting as one place has it."""

    name: str
    value: Value
    origin: Origin


class Trouble(msgspec.Struct, frozen=True):
    """An error in one place."""

    origin: Origin
    what: str

    def __str__(self) -> str:
        """Return one clean line."""
        text = clean(f"{self.origin}: {self.what}", LINE_LIMIT)
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class Layer(msgspec.Struct, frozen=True):
    """Settings and errors of one place."""

    entries: Sequence[Entry] = ()
    troubles: Sequence[Trouble] = ()


class Known:
    """The known settings, by name."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self.by_name: Mapping[str, Setting] = {setting.name: setting for setting in settings}

    def defaults(self) -> Layer:
        origin = Origin(DEFAULT)
        return Layer([Entry(setting.name, setting.default, origin) for setting in self.by_name.values()])

    def file_layer(self, text: str, place: str, *, is_shared: bool) -> Layer:
        """Return the layer of a file; in one that is shared with others, tables that hold no settings are theirs."""
        try:
            content, lines = parse(text)
        except NotTomlError as error:
            return Layer((), [Trouble(Origin(place, error.line), f"it is not TOML: {error}")])
        entries: list[Entry] = []
        troubles: list[Trouble] = []

        def origin(*path: str) -> Origin:
            return Origin(place, _line_of(path, lines))

        for table, keys in content.items():
            if table not in TABLES:
                if not is_shared:
                    known = f"{', '.join(TABLES)}{nearest_text(table, TABLES)}"
                    troubles.append(Trouble(origin(table), f"{table}: no such table; there are {known}"))
            elif not isinstance(keys, dict):
                troubles.append(Trouble(origin(table), f"{table} is a table: write [{table}] above its settings"))
            else:
                for key, value in keys.items():
                    self._take(f"{table}.{key}", value, origin(table, key), entries, troubles)
        return Layer(entries, troubles)

    def text_layer(self, given: Iterable[tuple[str, str, Origin]]) -> Layer:
        """Return the layer of texts: (name of a setting, value, where) of the environment or the command line."""
        entries: list[Entry] = []
        troubles: list[Trouble] = []
        for name, text, origin in given:
            self._take(name, text, origin, entries, troubles, is_text=True)
        return Layer(entries, troubles)

    def _take(
        self,
        name: str,
        value: object,
        origin: Origin,
        entries: list[Entry],
        troubles: list[Trouble],
        *,
        is_text: bool = False,
    ) -> None:
        setting = self.by_name.get(name)
        if setting is None:
            what = ELSEWHERE.get(name) or f"no such setting{self._nearest(name)}"
            troubles.append(Trouble(origin, f"{name}: {what}"))
            return
        try:
            taken = setting.take_text(str(value)) if is_text else setting.take(value)
        except WrongValueError as error:
            troubles.append(Trouble(origin, f"{name}: {error}"))
        else:
            entries.append(Entry(name, taken, origin))

    def _nearest(self, name: str) -> str:
        """Return which setting was perhaps meant: of that table, else of any."""
        table, _, key = name.rpartition(".")
        tables = [table] if table in TABLES else TABLES
        by_key = {one.partition(".")[2]: one for one in self.by_name if one.partition(".")[0] in tables}
        near = nearest(key, list(by_key))
        return f"; the nearest is {by_key[near]}" if near else ""


def environment_settings(environ: Mapping[str, str]) -> list[tuple[str, str, Origin]]:
    """Return the environment's settings of looks, for `Known.text_layer`; an empty variable is ignored.

    `NO_COLOR` asks for no colour whatever its value; a theme named beside it overrides it.

    Source: https://no-color.org.
    """
    given = []
    for name, variable in (("console.theme", "RANKDECK_THEME"), ("console.ascii", "RANKDECK_ASCII")):
        if value := environ.get(variable, ""):
            word = {"1": "true", "0": "false"}.get(value, value) if name == "console.ascii" else value
            given.append((name, word, Origin(variable)))
    if environ.get("NO_COLOR") and not environ.get("RANKDECK_THEME"):
        given.append(("console.theme", "plain", Origin("NO_COLOR")))
    return given


def assigned_settings(assignments: Iterable[str]) -> tuple[list[tuple[str, str, Origin]], list[Trouble]]:
    """Return the `--set KEY=VALUE` settings, for `Known.text_layer`, and the errors of those that are no assignment."""
    given: list[tuple[str, str, Origin]] = []
    troubles: list[Trouble] = []
    origin = Origin("--set")
    for assignment in assignments:
        name, sign, value = assignment.partition("=")
        if sign:
            given.append((name.strip(), value, origin))
        else:
            troubles.append(Trouble(origin, f"{repeated(assignment)} is no KEY=VALUE, as console.theme=light"))
    return given, troubles


def merged(layers: Iterable[Layer]) -> dict[str, Entry]:
    """Return each setting from the highest layer that has it, and within one layer its last value."""
    return {entry.name: entry for layer in layers for entry in layer.entries}


def _line_of(path: Path, lines: Mapping[Path, int]) -> int:
    """Return the line of a key, or of the nearest thing around it that has one: inline tables stand on one line."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


ORDERED = (
    ("thresholds.silent_s", "thresholds.stall_s", "who is silent would be taken for slow"),
    ("thresholds.silent_s", "thresholds.lost_s", "a node would be lost before it is silent"),
)
"""(The smaller one, the larger one, the consequence otherwise.)"""
KEPT = ("quit", "help", "palette")
"""Actions that keep a key: with these the others can be found."""


def contradictions(entries: Mapping[str, Entry], ladder: Sequence[str]) -> list[Trouble]:
    """Return which thresholds contradict each other; `ladder` has the places of the layers, the lowest first."""
    troubles = []
    for smaller, larger, what in ORDERED:
        low, high = entries[smaller], entries[larger]
        if isinstance(low.value, float) and isinstance(high.value, float) and low.value >= high.value:
            upper, other = _upper_first(low, high, ladder)
            is_not = "not below" if upper is low else "not above"
            problem = (
                f"{upper.name}: {upper.value:g} s is {is_not} {other.name} ({other.value:g} s, {other.origin}): {what}"
            )
            troubles.append(Trouble(upper.origin, problem))
    return troubles


def key_troubles(entries: Mapping[str, Entry], actions: Sequence[Bindable], ladder: Sequence[str]) -> list[Trouble]:
    """Return which keys are given twice where both actions are there, and which actions may not be without one."""
    bound = [(entries[f"keys.{action.name}"], action) for action in actions]
    troubles = [
        Trouble(entry.origin, f"{entry.name}: {action.name} keeps a key: without one nobody finds out")
        for entry, action in bound
        if action.name in KEPT and not entry.value
    ]
    for (one, first), (two, second) in combinations(bound, 2):
        if not first.contexts & second.contexts:
            continue
        for key in _keys(one):
            if key in _keys(two):
                upper, other = _upper_first(one, two, ladder)
                taken = f"{shown_key(key)} is also the key of {other.name.partition('.')[2]} ({other.origin})"
                troubles.append(
                    Trouble(upper.origin, f"{upper.name}: {taken}: give one of them another, or [] for none")
                )
    return troubles


def _keys(entry: Entry) -> tuple[str, ...]:
    return entry.value if isinstance(entry.value, tuple) else ()


def _upper_first(one: Entry, other: Entry, ladder: Sequence[str]) -> tuple[Entry, Entry]:
    """Return two entries, the one that overrides first: that one is to be changed."""

    def height(entry: Entry) -> tuple[int, int]:
        return (ladder.index(entry.origin.place) if entry.origin.place in ladder else len(ladder), entry.origin.line)

    return (one, other) if height(one) > height(other) else (other, one)
