"""The keys of this run: what the person's settings say, else the table of actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.settings.keys import shown_key
from app.tui.actions import ACTIONS, VIEW_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping


class Keymap:
    """The keys of every action, by its name."""

    def __init__(self, chosen: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Take Textual's names of keys that were chosen; actions that are not named keep their usual ones."""
        usual = {action.name: tuple(filter(None, action.keys.split(","))) for action in ACTIONS}
        self._keys = {**usual, **(chosen or {})}

    def keys(self, name: str) -> tuple[str, ...]:
        """Return Textual's names of an action's keys."""
        return self._keys[name]

    def shown(self, name: str) -> str:
        """Return an action's keys as people write them, empty where it has none."""
        return " ".join(map(shown_key, self._keys[name]))

    def first(self, name: str) -> str:
        """Return the first of an action's keys as people write it, empty where it has none."""
        keys = self._keys[name]
        return shown_key(keys[0]) if keys else ""

    def hint(self, name: str, words: str, *, head: str = "") -> str:
        """Return `head` and `s: words`; nothing where the action has no key."""
        key = self.first(name)
        return f"{head}{key}: {words}" if key else ""

    def views(self) -> str:
        """Return the keys of the views in short, `1-8`; where they are not in a row, that of the next view."""
        keys = [self.first(name) for name in VIEW_NAMES]
        row = [str(int(keys[0]) + place) for place in range(len(keys))] if keys[0].isdigit() else []
        return f"{keys[0]}-{keys[-1]}" if keys == row else self.first("next_view")
