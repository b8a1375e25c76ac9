"""When to paint, by the terminal's own answers: a slow link costs frames, not keys.

What is written to a terminal behind a slow link waits in buffers that hold seconds of it, and the answer to a key waits
behind all that. So each paint ends in a question that every terminal answers at once, and what moves by itself is
painted only while no answer is owed; of a large change only as much as the link carries in a moment. What a key changes
does not wait, unless the link is behind by more than a screenful: then several keys are answered by one paint.

A terminal that never answers is painted at the pace of the frames, as one without questions.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_TAGS = 16
"""Questions are told apart by the column that they ask from."""
PATIENCE_S = 2.0
"""An answer that takes longer is not waited for."""
MAX_UNANSWERED = 3
"""So many in a row, and the terminal is one that does not answer; until it does."""
SLICE_S = 0.025
"""What moves by itself keeps the link busy for so long at a time."""
MIN_SLICE_BYTES = 2_048
CHOKED_BYTES = 65_536
"""More than a screenful that has not been answered for: from here keys share a paint."""
MEASURED_BYTES = 2_048
"""A smaller paint tells how long the way is, not how wide."""
QUICK_S = 0.002
"""What is carried in less says nothing about the link."""
SMOOTHING = 0.3


class _Question(NamedTuple):
    asked_s: float
    num_bytes: int


class Pacer:
    """Asks, and hears answers; times are of any one clock.

    Attributes:
        is_pacing: Whether the terminal is one that answers, as far as is known.
    """

    def __init__(self) -> None:
        self.is_pacing = True
        self._open: dict[int, _Question] = {}
        """By tag, the oldest first."""
        self._next_tag = 0
        self._num_unanswered = 0
        self._round_trip_s = float("inf")
        self._bytes_s = float("inf")

    @property
    def may_move(self) -> bool:
        """Whether what moves by itself may be painted now."""
        return not self._open

    @property
    def is_choked(self) -> bool:
        """Whether even the answer to a key has to wait."""
        return len(self._open) > 1 and sum(question.num_bytes for question in self._open.values()) > CHOKED_BYTES

    @property
    def slice_bytes(self) -> float:
        """How much of what moves by itself may be painted at once; infinity on a link that has never been slow."""
        return max(MIN_SLICE_BYTES, self._bytes_s * SLICE_S)

    def ask(self, num_bytes: int, now_s: float) -> int | None:
        """Return the tag of the question that ends a paint of some bytes; None where none is to be asked."""
        if not self.is_pacing or len(self._open) >= NUM_TAGS - 1:
            return None
        tag = self._next_tag
        self._next_tag = (tag + 1) % NUM_TAGS
        self._open[tag] = _Question(now_s, num_bytes)
        return tag

    def answered(self, tag: int, now_s: float) -> None:
        """Take an answer; it answers earlier questions too.

        A stray one, or one that comes too late, only says that the terminal does answer.
        """
        self.is_pacing, self._num_unanswered = True, 0
        if tag not in self._open:
            return
        num_bytes = 0
        while self._open:
            first = next(iter(self._open))
            question = self._open.pop(first)
            num_bytes += question.num_bytes
            if first == tag:
                self._measure(num_bytes, now_s - question.asked_s)
                return

    def look(self, now_s: float) -> None:
        """Give up on answers that are overdue."""
        for tag, question in list(self._open.items()):
            if now_s - question.asked_s < PATIENCE_S:
                break
            del self._open[tag]
            self._num_unanswered += 1
        if self._num_unanswered >= MAX_UNANSWERED:
            self.restart()
            self.is_pacing = False

    def restart(self) -> None:
        """Forget what was asked and learnt: the terminal was given away, or is another one."""
        self.is_pacing = True
        self._open.clear()
        self._num_unanswered = 0
        self._round_trip_s = self._bytes_s = float("inf")

    def _measure(self, num_bytes: int, took_s: float) -> None:
        self._round_trip_s = min(self._round_trip_s, took_s)
        carried_s = took_s - self._round_trip_s
        if num_bytes < MEASURED_BYTES or carried_s < QUICK_S:
            return
        rate = num_bytes / carried_s
        self._bytes_s = rate if self._bytes_s == float("inf") else self._bytes_s + SMOOTHING * (rate - self._bytes_s)
