"""Keys that come together mean what they mean one by one.

Textual gives a key to whoever has the focus when it comes, though what the key before it does may not be done: typed
ahead, or come together over a link that stutters, the letters of `/step` would be commands. So a key waits until a mark
that was sent after the one before it has come all the way up, and again for what that one has set off.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from textual.app import App
from textual.events import Key, Paste
from textual.message import Message

if TYPE_CHECKING:
    from textual.events import Event

NUM_MARKS = 3
"""For the key itself, for the messages of whoever took it, and for what those have done."""
PATIENCE_S = 0.5
"""With a mark that is lost, as with a screen that has closed meanwhile."""


class KeyDone(Message, bubble=True):
    """Comes up behind a key."""

    def __init__(self, number: int, num_left: int) -> None:
        """Of which key, and how many marks follow."""
        super().__init__()
        self.number = number
        self.num_left = num_left


class KeysInOrder(App[None]):
    """An app that takes one key, or one paste, after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._typed_ahead: deque[Event] = deque()
        self._num_typed = 0
        self._is_key_under_way = False

    async def on_event(self, event: Event) -> None:
        """Hold a key back while one is under way."""
        if not isinstance(event, Key | Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self._is_key_under_way:
            self._typed_ahead.append(event)
        else:
            await self._hand_over(event)

    async def _hand_over(self, event: Event) -> None:
        self._is_key_under_way = True
        self._num_typed += 1
        lost = KeyDone(self._num_typed, 0)
        await super().on_event(event)
        self._mark(self._num_typed, NUM_MARKS - 1)
        asyncio.get_running_loop().call_later(PATIENCE_S, self.post_message, lost)

    def _mark(self, number: int, num_left: int) -> None:
        mark = KeyDone(number, num_left)
        if not (self.focused or self.screen).post_message(mark):
            self.post_message(mark)

    def on_key_done(self, mark: KeyDone) -> None:
        """Go on, once what was left for later before the mark came is done, as to move the focus."""
        self.call_later(self._pass, mark)

    async def _pass(self, mark: KeyDone) -> None:
        if not self._is_key_under_way or mark.number != self._num_typed:
            return
        if mark.num_left:
            self._mark(mark.number, mark.num_left - 1)
            return
        self._is_key_under_way = False
        if self._typed_ahead:
            await self._hand_over(self._typed_ahead.popleft())
