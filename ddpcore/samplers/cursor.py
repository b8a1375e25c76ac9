"""How far training has come: an epoch and a position in it, the same on every rank and at every world size.

A step takes the next `global_batch_size` positions from the cursor, or those that are left of the epoch. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ddpcore.errors import SamplerStateError
from ddpcore.samplers.order import MAX_NUM_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpcore.samplers.order import Order

STATE_VERSION = "cursor-v1"

_MAX_SHOWN = 80
"""Characters of a value that an error repeats."""

_HOW_TO_RESTART = "to train on from here all the same, load no state and call set_epoch()"


class Cursor(NamedTuple):
    """A place between two steps.

    Attributes:
        epoch: From 0.
        position: Positions of this epoch that finished steps have taken.
    """

    epoch: int = 0
    position: int = 0


class Steps(NamedTuple):
    """Cut of an epoch into steps; with `drop_last` a step that is not full is left out."""

    num_samples: int
    global_batch_size: int
    drop_last: bool

    def num_left(self, cursor: Cursor) -> int:
        """Return how many steps the cursor's epoch still has."""
        num_positions = self.num_samples - cursor.position
        return (
            num_positions // self.global_batch_size if self.drop_last else -(-num_positions // self.global_batch_size)
        )

    def num_positions(self, cursor: Cursor) -> int:
        """Return how many positions the step at the cursor takes."""
        return min(self.global_batch_size, self.num_samples - cursor.position)

    def settle(self, cursor: Cursor) -> Cursor:
        """Return the cursor, or the beginning of the next epoch where no step is left in its own.

        A cursor saved under another batch size can stand where `drop_last` leaves nothing.
        """
        return cursor if self.num_left(cursor) else Cursor(cursor.epoch + 1, 0)

    def after(self, cursor: Cursor, num_steps: int = 1) -> Cursor:
        """Return the cursor after so many more steps of its epoch."""
        position = min(cursor.position + num_steps * self.global_batch_size, self.num_samples)
        return self.settle(Cursor(cursor.epoch, position))


def cursor_state(order: Order, cursor: Cursor) -> dict[str, object]:
    """Return a cursor as a JSON-able state that names its order."""
    return {
        "version": STATE_VERSION,
        "order": order.fingerprint(),
        "epoch": cursor.epoch,
        "position": cursor.position,
    }


def parse_cursor_state(state: object, order: Order) -> Cursor:
    """Return the cursor of a state, which may be damaged, for the order that it is to continue.

    Raises SamplerStateError if it is no state, or one of another data set, seed, order or version.
    """
    if not isinstance(state, dict):
        raise SamplerStateError(f"a sampler's state is a dict, not {_shown(state)}: load what state_dict() returned")
    missing = {"version", "order", "epoch", "position"} - state.keys()
    if missing:
        raise SamplerStateError(
            f"the sampler state lacks {', '.join(sorted(missing))}: load what state_dict() of the same sampler returned"
        )
    if state["version"] != STATE_VERSION:
        raise SamplerStateError(
            f"the sampler state has version {_shown(state['version'])}, this is {STATE_VERSION!r}: "
            "resume with the version of rankdeck that saved it"
        )
    _check_order(state["order"], order)
    epoch = checked_count("epoch", state["epoch"], MAX_NUM_SAMPLES)
    return Cursor(epoch, checked_count("position", state["position"], order.num_samples))


def checked_count(name: str, value: object, highest: int) -> int:
    """Return a number of a state; raise SamplerStateError if it is no integer from 0 to `highest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplerStateError(f"the sampler state is damaged: {name} is {_shown(value)} instead of an integer")
    if not 0 <= value <= highest:
        raise SamplerStateError(f"the sampler state is damaged: {name} {_shown(value)} is not within 0 to {highest}")
    return value


def _check_order(saved: object, order: Order) -> None:
    """Refuse the fingerprint of another order, with what differs."""
    if not isinstance(saved, dict):
        raise SamplerStateError(f"the sampler state is damaged: order is {_shown(saved)} instead of a dict")
    ours: Mapping[str, object] = order.fingerprint()
    differing = [key for key in sorted(ours.keys() | saved.keys(), key=str) if saved.get(key) != ours.get(key)]
    if differing:
        facts = ", ".join(f"{key} was {_shown(saved.get(key))} and is {_shown(ours.get(key))}" for key in differing)
        raise SamplerStateError(
            f"the sampler state belongs to another order of samples ({facts}): "
            f"resume with the same data set, seed and sampler; {_HOW_TO_RESTART}"
        )


def _shown(value: object) -> str:
    """Return a short text for a value that may be anything."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, lists in lists in lists
        return f"something of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
