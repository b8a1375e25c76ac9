"""Reports for the asking, as agents and relays hand them out: how many to ask for, and how old each is. Pure.

Whoever asks for many gets each at once; behind a link that carries less than is reported, those asked for before stand
in the way of the newest. So a long way is asked for one at a time, and what comes is as new as the link allows.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from agent.wire.codec import FrameReader, MalformedMessageError
from agent.wire.relay import ASK, MAX_MERGED_BYTES, Merged, decode_merged

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_WAY_S = 0.2
"""As long as from report to report: what takes no longer cannot queue up."""


class PullCredit:
    """The near end of a stream; chunks may be cut anywhere."""

    def __init__(self, max_asked: int) -> None:
        """`max_asked` frames are asked for ahead where the way is short."""
        self._max_asked = max_asked
        self._reader = FrameReader(MAX_MERGED_BYTES)
        self._asked_at_s: deque[float] = deque()
        self._way_s = math.inf
        """Of the last frame: longer than any, before the first."""

    def asks(self, now_s: float) -> bytes:
        """Return what is to be sent now, and count it as sent: nothing while enough is asked for."""
        wanted = self._max_asked if self._way_s < LONG_WAY_S else 1
        if 2 * len(self._asked_at_s) > wanted:
            return b""
        num = wanted - len(self._asked_at_s)
        self._asked_at_s.extend([now_s] * num)
        return ASK * num

    def feed(self, chunk: bytes, now_s: float) -> Iterator[tuple[Merged, float]]:
        """Yield the frames that this chunk completes, with how long each was under way, at most.

        Raises:
            MalformedMessageError: This is no such stream, or more than was asked for.
        """
        for frame in self._reader.feed(chunk):
            merged = decode_merged(frame)
            if not self._asked_at_s:
                raise MalformedMessageError("a frame that nobody has asked for")
            self._way_s = max(0.0, now_s - self._asked_at_s.popleft() - merged.held_ms / 1000)
            yield merged, self._way_s
