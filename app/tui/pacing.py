"""Decides when to paint, by the terminal's answers: a slow link costs frames, not keys.

Output to a terminal behind a slow link waits in buffers that hold seconds of it, and the answer to a key waits behind
all of it. So each paint ends in a question that every terminal answers immediately. Automatic changes are painted only
while no answer is outstanding, and of a large change only as much as the link carries in a moment. The effect of a key
is painted immediately, unless more than a screenful is unanswered: then several keys share one paint.

A terminal that never answers is painted at the rate of the frames, without questions.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_TAGS = 16
"""Number of questions that differ by the column of the cursor."""
PATIENCE_S = 2.0
"""Seconds to wait for an answer."""
MAX_UNANSWERED = 3
"""Unanswered questions in a row after which the terminal counts as one that does not answer, until it answers."""
SLICE_S = 0.025
"""Seconds for which automatic changes may keep the link busy."""
MIN_SLICE_BYTES = 2_048
CHOKED_BYTES = 65_536
"""Unanswered bytes, more than a screenful, above which keys share a paint."""
MEASURED_BYTES = 2_048
"""Smallest paint that measures the link's rate; a smaller one only measures its delay."""
QUICK_S = 0.002
"""Shortest transfer time that measures the link's rate."""
SMOOTHING = 0.3


class _Question(NamedTuple):
    asked_s: float
    num_bytes: int


class Pacer:
    """Decides by questions and answers; all times are of one clock.

    Attributes:
        is_pacing: Whether the terminal answers, as far as known.
    """

    def __init__(self) -> None:
        self.is_pacing = True
        self._open: dict[int, _Question] = {}
        """Open questions by tag, the oldest first."""
        self._next_tag = 0
        self._num_unanswered = 0
        self._round_trip_s = float("inf")
        self._bytes_s = float("inf")

    @property
    def may_move(self) -> bool:
        """Whether automatic changes may be painted now."""
        return not self._open

    @property
    def is_choked(self) -> bool:
        """Whether even the effect of a key has to wait."""
        return len(self._open) > 1 and sum(question.num_bytes for question in self._open.values()) > CHOKED_BYTES

    @property
    def slice_bytes(self) -> float:
        """Limit of bytes of automatic changes in one paint; infinity on a link that was never slow."""
        return max(MIN_SLICE_BYTES, self._bytes_s * SLICE_S)

    def ask(self, num_bytes: int, now_s: float) -> int | None:
        """Return the tag of the question that ends a paint of some bytes; None when no question is due."""
        if not self.is_pacing or len(self._open) >= NUM_TAGS - 1:
            return None
        tag = self._next_tag
        self._next_tag = (tag + 1) % NUM_TAGS
        self._open[tag] = _Question(now_s, num_bytes)
        return tag

    def answered(self, tag: int, now_s: float) -> None:
        """Take an answer; it answers earlier questions too.

        An unexpected or late answer only shows that the terminal answers.
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
        """Drop overdue questions."""
        for tag, question in list(self._open.items()):
            if now_s - question.asked_s < PATIENCE_S:
                break
            del self._open[tag]
            self._num_unanswered += 1
        if self._num_unanswered >= MAX_UNANSWERED:
            self.restart()
            self.is_pacing = False

    def restart(self) -> None:
        """Forget questions and measurements: the terminal was released, or is another one."""
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
