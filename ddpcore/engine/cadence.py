"""How often, and until when: `"100 steps"`, `"2 epochs"`, `"10 min"`. Pure."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from ddpcore.errors import CadenceError


class Unit(StrEnum):
    STEP = "step"
    EPOCH = "epoch"
    SECOND = "second"


_UNITS: dict[str, tuple[Unit, float]] = {
    "step": (Unit.STEP, 1),
    "steps": (Unit.STEP, 1),
    "epoch": (Unit.EPOCH, 1),
    "epochs": (Unit.EPOCH, 1),
    "s": (Unit.SECOND, 1),
    "min": (Unit.SECOND, 60),
    "h": (Unit.SECOND, 3600),
}
_FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


class Progress(NamedTuple):
    """Finished steps and epochs at a step's boundary, and seconds since any fixed moment."""

    step: int
    epoch: int
    elapsed_s: float = 0.0


class Cadence(NamedTuple):
    """A number of steps, epochs or seconds: whole and at least 1 for steps and epochs, above 0 for seconds."""

    amount: float
    unit: Unit

    def is_due(self, before: Progress, now: Progress) -> bool:
        """Return whether a multiple of the amount lies behind `before` and not behind `now`.

        `before` is the last boundary looked at; for seconds, the last time that it was due.
        """
        match self.unit:
            case Unit.STEP:
                return now.step // self.amount > before.step // self.amount
            case Unit.EPOCH:
                return now.epoch // self.amount > before.epoch // self.amount
            case Unit.SECOND:
                return now.elapsed_s - before.elapsed_s >= self.amount

    def is_reached(self, now: Progress) -> bool:
        """Return whether training has come this far, counted from its beginning."""
        match self.unit:
            case Unit.STEP:
                return now.step >= self.amount
            case Unit.EPOCH:
                return now.epoch >= self.amount
            case Unit.SECOND:
                return now.elapsed_s >= self.amount


def parse_cadence(text: str, *units: Unit) -> Cadence:
    """Return the cadence in a text like `"100 steps"`, `"1 epoch"` or `"10 min"`; without `units` any unit is taken.

    Raises CadenceError for any other text; the message shows what can be written.
    """
    allowed = units or tuple(Unit)
    if not isinstance(text, str):
        raise _not_a_cadence(text, allowed)
    match = _FORM.fullmatch(text)
    unit, factor = _UNITS.get(match[2] if match else "", (None, 0.0))
    if match is None or unit not in allowed:
        raise _not_a_cadence(text, allowed)
    amount = float(match[1]) * factor
    if amount <= 0 or (unit is not Unit.SECOND and not amount.is_integer()):
        raise _not_a_cadence(text, allowed)
    return Cadence(amount, unit)


def _not_a_cadence(text: object, allowed: tuple[Unit, ...]) -> CadenceError:
    examples = {Unit.STEP: "'100 steps'", Unit.EPOCH: "'1 epoch'", Unit.SECOND: "'10 min'"}
    return CadenceError(f"{text!r} is no cadence: write it like {' or '.join(examples[unit] for unit in allowed)}")
