"""Handles keys one after the other, also when several arrive together.

Textual gives a key to the widget with the focus when it arrives, though the previous key may be in progress. Typed
ahead, or arriving together over a slow link, the letters of `/step` would be commands. So a key waits until a mark that
was sent after the previous key has bubbled up to the app, and again for the messages that this key has caused.
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
"""Marks per key: for the key itself, for the messages of its receiver, and for those that these cause."""
PATIENCE_S = 0.5
"""Seconds to wait for a mark; one is lost when its screen closes."""


class KeyDone(Message, bubble=True):
    """The mark that follows a key."""

    def __init__(self, number: int, num_left: int) -> None:
        """Take the key's number, and how many marks follow this one."""
        super().__init__()
        self.number = number
        self.num_left = num_left


class KeysInOrder(App[None]):
    """An app that handles one key, or one paste, at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._typed_ahead: deque[Event] = deque()
        self._num_typed = 0
        self._is_key_under_way = False

    async def on_event(self, event: Event) -> None:
        """Hold a key back while another one is in progress."""
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
        """Continue after callbacks that were queued before the mark, such as moving the focus."""
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
