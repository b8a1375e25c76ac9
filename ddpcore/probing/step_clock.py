"""How long a rank's steps take, and how long it has made none. Pure: time is an argument."""

from __future__ import annotations

MIN_STEPS = 2
"""Before anything is known of how long they take: the first one takes longer than those after it."""
MIN_MOVES = 3
"""Of a program that makes no steps."""
USUAL_FACTOR = 10.0
"""This many usual steps are more than a step takes."""
LONGEST_FACTOR = 2.0
"""Or so many times the longest so far, with all that lay between two steps: an evaluation, a checkpoint."""
LEAST_LIMIT_S = 1.0
"""A step may always take so long. With NCCL a collective is pending nearly always, and no time is the rank's own."""
STILL_S = 2.0
"""After this time without a step or a collective the main thread is looked at more closely."""
_SMOOTHING = 0.1
"""Weight of the latest step in what is usual."""


class StepClock:
    """Measures the time between steps; a program that makes none is measured by its collectives.

    Time in which the rank waits in a collective is another's: it makes no step long.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._moved_s = 0.0
        self._steps_done = 0
        self._num_seen = 0
        self._own_s = 0.0
        """Own time since the last step."""
        self._usual_s = 0.0
        self._longest_s = 0.0

    def observe(self, now_s: float, steps_done: int, own_s: float, *, has_moved: bool) -> None:
        """Take a sample.

        Args:
            now_s: Its time.
            steps_done: Steps so far; 0 as long as the program has made none.
            own_s: Time since the sample before that was no wait in a collective.
            has_moved: A collective has been called or completed since then.
        """
        if self._began_s is None:
            self._began_s = self._moved_s = now_s
        if steps_done and not self._steps_done:
            # The first step is known: what the collectives before it told is of another measure.
            self._num_seen, self._usual_s, self._longest_s, self._own_s = 0, 0.0, 0.0, 0.0
        num_steps = max(0, steps_done - self._steps_done) if steps_done else int(has_moved)
        self._steps_done = steps_done
        self._own_s += own_s
        if num_steps:
            if self._num_seen:
                step_s = self._own_s / num_steps
                known_s = self._usual_s
                self._usual_s = step_s if self._num_seen == 1 else known_s + _SMOOTHING * (step_s - known_s)
                self._longest_s = max(self._longest_s, self._own_s if num_steps == 1 else step_s)
            self._num_seen += num_steps if self._steps_done else 1
            self._own_s = 0.0
        if num_steps or has_moved:
            self._moved_s = now_s

    def is_still(self, now_s: float) -> bool:
        """Say whether there has been neither a step nor a collective for a while."""
        return self._began_s is not None and now_s - self._moved_s >= STILL_S

    @property
    def moved_s(self) -> float:
        """When there was a step or a collective last, or the first sample."""
        return self._moved_s

    def age_s(self, now_s: float) -> float:
        """Return the time since the last step or collective; 0 before there were a few."""
        return max(0.0, now_s - self._moved_s) if self._is_known else 0.0

    @property
    def limit_s(self) -> float:
        """How long a step may take at most; 0 before there were a few."""
        if not self._is_known:
            return 0.0
        return max(USUAL_FACTOR * self._usual_s, LONGEST_FACTOR * self._longest_s, LEAST_LIMIT_S)

    @property
    def _is_known(self) -> bool:
        return self._num_seen >= (MIN_STEPS if self._steps_done else MIN_MOVES)
