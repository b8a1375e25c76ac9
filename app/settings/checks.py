"""What is wrong with settings only together: thresholds that contradict each other, keys that two actions want."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from app.settings.keys import shown_key
from app.settings.layers import Entry, Trouble

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.settings.schema import Bindable

ORDERED = (
    ("thresholds.silent_s", "thresholds.stall_s", "who is silent would be taken for slow"),
    ("thresholds.silent_s", "thresholds.lost_s", "a node would be lost before it is silent"),
)
"""(The smaller one, the larger one, what would come of it otherwise.)"""
KEPT = ("quit", "help", "palette")
"""Actions that keep a key: whoever has these finds the others."""


def contradictions(entries: Mapping[str, Entry], ladder: Sequence[str]) -> list[Trouble]:
    """Return which thresholds contradict each other; `ladder` has the places of the layers, the lowest first."""
    troubles = []
    for smaller, larger, what in ORDERED:
        low, high = entries[smaller], entries[larger]
        if isinstance(low.value, float) and isinstance(high.value, float) and low.value >= high.value:
            upper, other = _upper_first(low, high, ladder)
            is_not = "not below" if upper is low else "not above"
            told = (
                f"{upper.name}: {upper.value:g} s is {is_not} {other.name} ({other.value:g} s, {other.origin}): {what}"
            )
            troubles.append(Trouble(upper.origin, told))
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
    """Return two entries, the one first that was said later: that one is to be changed."""

    def height(entry: Entry) -> tuple[int, int]:
        return (ladder.index(entry.origin.place) if entry.origin.place in ladder else len(ladder), entry.origin.line)

    return (one, other) if height(one) > height(other) else (other, one)
