"""One end of a byte stream that shares a connection with others. Pure.

Bytes go only as far as the other end has given credit for, and credit is given as bytes are handed on: what is kept of
a stream is bounded at either end, however slowly anybody reads, and no stream holds up another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from agent.wire.relay import MAX_CHUNK_BYTES, WINDOW_BYTES, Credit, Data, End, OfStream, Reset

if TYPE_CHECKING:
    from collections.abc import Iterator

CREDIT_STEP_BYTES = WINDOW_BYTES // 2
"""Bytes of a step of credit, unless the near end has taken all: then nobody waits for less."""


class StreamBrokenError(Exception):
    """The other end does not keep to what was agreed."""


class StreamEnd:
    """Near is whoever is connected here, far is the other end of the connection."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._going = bytearray()
        self._coming = bytearray()
        self._credit = WINDOW_BYTES
        self._ungranted = 0
        """Bytes handed on that no credit was given for yet."""
        self._num_allowed = WINDOW_BYTES
        """Bytes that the far end may still send."""
        self._has_near_ended = False
        self._has_sent_end = False
        self._has_far_ended = False

    @property
    def room(self) -> int:
        """How many bytes of the near end would be taken now."""
        return 0 if self._has_near_ended else WINDOW_BYTES - len(self._going)

    @property
    def is_over(self) -> bool:
        """Nothing will come or go any more."""
        return self._has_sent_end and self._has_far_ended and not self._coming

    @property
    def is_near_to_end(self) -> bool:
        """The near end has been given all that there will be."""
        return self._has_far_ended and not self._coming

    def on_near_bytes(self, chunk: bytes) -> None:
        """Take bytes of the near end, at most `room`."""
        assert len(chunk) <= self.room
        self._going += chunk

    def near_ended(self) -> None:
        """Take that the near end sends no more."""
        self._has_near_ended = True

    def on_far_message(self, message: OfStream) -> None:
        """Take a message of the far end.

        Raises:
            StreamBrokenError: More than was allowed, something after the end, or that it is over.
        """
        match message:
            case Data(chunk=chunk):
                if len(chunk) > self._num_allowed or self._has_far_ended:
                    raise StreamBrokenError(f"stream {self.number}: more bytes than were allowed")
                self._num_allowed -= len(chunk)
                self._coming += chunk
            case Credit(num_bytes=num_bytes):
                if self._credit + num_bytes > WINDOW_BYTES:
                    raise StreamBrokenError(f"stream {self.number}: more credit than was used")
                self._credit += num_bytes
            case End():
                self._has_far_ended = True
            case Reset():
                raise StreamBrokenError(f"stream {self.number}: ended by the other side")
            case _:
                assert_never(message)

    @property
    def for_near(self) -> bytes:
        """What the near end has not been given yet."""
        return bytes(self._coming)

    def near_took(self, num_bytes: int) -> None:
        """Take that the near end was given so many bytes."""
        del self._coming[:num_bytes]
        self._ungranted += num_bytes

    def for_far(self) -> Iterator[OfStream]:
        """Yield what is due to the far end; each message once."""
        if self._ungranted >= CREDIT_STEP_BYTES or (self._ungranted and not self._coming):
            granted, self._ungranted = self._ungranted, 0
            self._num_allowed += granted
            yield Credit(self.number, granted)
        while self._going and self._credit:
            chunk = bytes(self._going[: min(self._credit, MAX_CHUNK_BYTES)])
            del self._going[: len(chunk)]
            self._credit -= len(chunk)
            yield Data(self.number, chunk)
        if self._has_near_ended and not self._going and not self._has_sent_end:
            self._has_sent_end = True
            yield End(self.number)
