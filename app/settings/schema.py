"""All settings in one table: name, allowed values, default, and a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence  # noqa: TC003 - msgspec looks at it
from typing import Protocol

import msgspec

from app.diagnosis.rank_facts import Thresholds
from app.settings.keys import WrongKeyError, key_named, nearest_text, shown_key
from app.settings.themes import DECK, THEMES

Value = str | float | tuple[str, ...]

VIEWS = ("overview", "ranks", "barriers", "stragglers", "memory", "logs", "charts", "events")
"""The views of the console, in the order of their tabs."""
TABLES = ("console", "thresholds", "keys")
"""Tables of a file that hold settings."""
DAY_S = 86_400.0
MAX_REPEATED_BITS = 1024
MAX_REPEATED = 60
"""Characters of a wrong value that are repeated."""
MAX_KEYS = 8
"""Limit of keys of one action."""


class WrongValueError(ValueError):
    """A value does not fit its setting; the message names what would."""


class _Named(msgspec.Struct, frozen=True):
    """Fields of every setting."""

    name: str
    """Name with its table: `thresholds.stall_s`."""
    default: Value
    sentence: str


class Choice(_Named, frozen=True):
    """One of several choices; true and false may be written without quotes."""

    choices: tuple[str, ...] = ()

    def take(self, value: object) -> str:
        """Return a value of a TOML file as this setting keeps it.

        Raises:
            WrongValueError: It does not fit.
        """
        word = str(value).lower() if isinstance(value, bool) else value
        if isinstance(word, str) and word in self.choices:
            return word
        near = nearest_text(word, self.choices) if isinstance(word, str) else ""
        raise WrongValueError(f"{repeated(value)} is none of {', '.join(self.choices)}{near}")

    def take_text(self, text: str) -> str:
        """Return a value of the environment or the command line; raises as `take`."""
        return self.take(text.strip())

    def shown(self, value: Value) -> str:
        return str(value)


class Seconds(_Named, frozen=True):
    """A duration."""

    low: float = 0.0
    high: float = DAY_S

    def take(self, value: object) -> float:
        """Return the seconds; see `Choice.take`."""
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # noqa: PLR0124 - NaN
            raise WrongValueError(f"{repeated(value)} is no number of seconds")
        if not self.low <= value <= self.high:
            raise WrongValueError(f"{repeated(value)} s is not from {self.low:g} to {self.high:g} s")
        return float(value)

    def take_text(self, text: str) -> float:
        """Return the seconds that a text names."""
        try:
            value = float(text)
        except ValueError:
            raise WrongValueError(f"{repeated(text)} is no number of seconds") from None
        return self.take(value)

    def shown(self, value: Value) -> str:
        return f"{value:g}"


class Keys(_Named, frozen=True):
    """The keys of an action, by Textual's names; none for an action that only the palette offers."""

    def take(self, value: object) -> tuple[str, ...]:
        """Return the keys, each once; see `Choice.take`."""
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list) or not all(isinstance(word, str) for word in names):
            raise WrongValueError(f'{repeated(value)} is no key or list of keys: "x", ["x", "f2"], [] for none')
        if len(names) > MAX_KEYS:
            raise WrongValueError(f"{len(names)} keys are more than {MAX_KEYS}")
        try:
            return tuple(dict.fromkeys(key_named(word) for word in names))
        except WrongKeyError as error:
            raise WrongValueError(str(error)) from None

    def take_text(self, text: str) -> tuple[str, ...]:
        """Return the keys that stand between commas."""
        text = text.strip() if len(text) > 1 else text
        if text in {"", "[]"}:
            return ()
        return self.take([text] if len(text) == 1 else [word.strip() for word in text.split(",")])

    def shown(self, value: Value) -> str:
        keys = value if isinstance(value, tuple) else ()
        return " ".join(shown_key(key) for key in keys) or "(none)"


Setting = Choice | Seconds | Keys
"""A setting that the user may choose."""


class Bindable(Protocol):
    """An action, as far as its keys go."""

    @property
    def name(self) -> str:
        """Name in files."""

    @property
    def keys(self) -> str:
        """Textual's names of its usual keys, separated by commas."""

    @property
    def title(self) -> str:
        """Name on the screen."""

    @property
    def contexts(self) -> frozenset[str]:
        """Consoles in which it is available."""


_DEFAULTS = Thresholds()
TABLE: Sequence[Setting] = (
    Choice(
        "console.theme",
        DECK,
        f"The colours: {', '.join(THEMES)}",
        tuple(THEMES),
    ),
    Choice(
        "console.ascii",
        "auto",
        "Only ASCII characters; auto: where the terminal is not UTF-8",
        ("auto", "true", "false"),
    ),
    Choice("console.start_view", VIEWS[0], f"The view to begin with: {', '.join(VIEWS)}", VIEWS),
    Seconds("thresholds.stall_s", _DEFAULTS.stall_s, "A longer wait is a stall: who causes it is a straggler", 1.0),
    Seconds("thresholds.silent_s", _DEFAULTS.silent_s, "Whose reports are older is silent", 1.0, 3600.0),
    Seconds("thresholds.lost_s", _DEFAULTS.lost_s, "A node that has been silent for longer is lost", 1.0),
    Seconds(
        "thresholds.join_s", _DEFAULTS.join_s, "So long may ranks wait in init_process_group for those that import", 1.0
    ),
    Seconds(
        "thresholds.patience_s",
        _DEFAULTS.patience_s,
        "So long may the first checkpoint, or evaluation, of a job keep the others waiting",
        1.0,
    ),
)
"""All settings but the keys, which come from the table of actions."""


def key_settings(actions: Sequence[Bindable]) -> list[Setting]:
    return [
        Keys(f"keys.{action.name}", tuple(key for key in action.keys.split(",") if key), action.title)
        for action in actions
    ]


class ConsoleSettings(msgspec.Struct, frozen=True):
    """Settings of the screen."""

    theme: str = DECK
    ascii: str = "auto"
    start_view: str = VIEWS[0]
    keys: Mapping[str, tuple[str, ...]] = {}
    """Textual's names of each action's keys, by action; an action that is not in it has its usual ones."""


class Settings(msgspec.Struct, frozen=True):
    """All settings."""

    console: ConsoleSettings = ConsoleSettings()
    thresholds: Thresholds = Thresholds()


def settings_of(values: Mapping[str, Value]) -> Settings:
    """Return settings by the values of all names."""
    by_table: dict[str, dict[str, Value]] = {table: {} for table in TABLES}
    for name, value in values.items():
        table, _, key = name.partition(".")
        by_table[table][key] = value
    console = msgspec.convert({**by_table["console"], "keys": by_table["keys"]}, ConsoleSettings)
    return Settings(console, msgspec.convert(by_table["thresholds"], Thresholds))


def repeated(value: object) -> str:
    """Return a wrong value as it is repeated to the user."""
    if isinstance(value, int) and value.bit_length() > MAX_REPEATED_BITS:
        return "a number of very many digits"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_REPEATED else f"{text[:MAX_REPEATED]}..."
