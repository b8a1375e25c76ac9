"""Reads figures out of what a rank prints, by patterns of the user's: the loss of a program that reports none.

Patterns are anybody's, and so are the lines: a pattern that backtracks could hold the agent for hours over one line.
RE2 matches in time linear in the line whatever the pattern is, and refuses what it cannot do so (look-around,
back-references). What is left is bounded: lines in length and number, patterns in length and memory, and all of it by
the time that the caller gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.errors import MetricPatternError
from agent.wire.codec import LOSS_METRIC, STEP_METRIC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_NAMES = 8
MAX_NAME_CHARS = 64
"""Characters of one pattern's name: eight patterns fit into a report."""
MAX_LOOKED_LINES = 64
"""Latest lines of one file in one look: an older figure is of no use once there is a newer one."""
MAX_LOOKED_CHARS = 1000
"""Characters of a line. The worst pattern of 512 characters takes 7 ms for as many, a common one 7 us."""
_MAX_MEMORY_BYTES = 2**20
_BEHIND_NUMBERS = " \t,;:."
_LINE_STEP = r"(?i)(?:^|[^a-z])(?:step|iter|iteration)s?[^0-9a-z]{0,4}(?P<step>[0-9]{1,15})(?:\.?$|\.?[^0-9.])"
"""Matches what looks like a step: `step 20`, `global_step=20`, `[iter: 20]`; not `step 0.25`."""


class LineMetrics:
    """The patterns of one job.

    Args:
        texts: In RE2's syntax. A named group is the metric of that name; a pattern's only group without a name is the
            loss, beside named ones where no pattern has a loss otherwise.

    Raises:
        MetricPatternError: One of them is of no use; the message gives which, and why.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._patterns = [_compiled(text) for text in texts]
        if not any(LOSS_METRIC in names for _, names in self._patterns):
            for pattern, names in self._patterns:
                if pattern.groups == len(names) + 1 <= MAX_NAMES:
                    names[LOSS_METRIC] = min({*range(1, pattern.groups + 1)} - {*names.values()})
        self._line_step = _compiled(_LINE_STEP) if self._patterns else None
        self.loss_step: float | None = None
        """Step in the very line of the loss that was read last; None where the patterns find none."""
        self.line_step: float | None = None
        """The same, found without a pattern: whether it is the rank's own step is not known."""

    def read(self, lines: Sequence[str], unfinished: str, is_over: Callable[[], bool]) -> dict[str, float]:
        """Return the latest value of each metric.

        Args:
            lines: As they were printed.
            unfinished: The line that is still being printed, such as a progress bar; a value that stands at its very
                end may be cut short and is not taken, as at the end of the characters that are looked at.
            is_over: Asked before each pattern; True ends the reading.
        """
        found: dict[str, float] = {}
        for place, line in enumerate((unfinished, *reversed(lines[-MAX_LOOKED_LINES:]))):
            missing = [(pattern, names) for pattern, names in self._patterns if not found.keys() >= names.keys()]
            if not missing:
                break
            text, in_line = line[:MAX_LOOKED_CHARS], dict[str, float]()
            end = len(text) if place == 0 or len(line) > len(text) else None
            for pattern, names in missing if text else ():
                if is_over():
                    break
                for name, value in _values(pattern, names, text, must_end_before=end):
                    in_line.setdefault(name, value)
            if LOSS_METRIC in in_line and LOSS_METRIC not in found:
                # A pattern that has found a later step is asked again: the loss is of the step in its own line.
                asked = (pattern for pattern in self._patterns if STEP_METRIC in pattern[1])
                steps = (self._step_by(*pattern, text, must_end_before=end) for pattern in asked)
                self.loss_step = next((step for step in steps if step is not None), None)
                assert self._line_step is not None, "a loss was found by a pattern"
                self.line_step = self._step_by(*self._line_step, text, must_end_before=end)
            found = in_line | found
        return found

    @staticmethod
    def _step_by(pattern: Any, names: dict[str, int], text: str, *, must_end_before: int | None) -> float | None:
        return dict(_values(pattern, names, text, must_end_before=must_end_before)).get(STEP_METRIC)


def _values(pattern: Any, names: dict[str, int], text: str, *, must_end_before: int | None) -> list[tuple[str, float]]:
    match = pattern.search(text)
    if match is None:
        return []
    values = []
    for name, number in names.items():
        group = match.group(number)
        if group is None or (must_end_before is not None and match.end(number) >= must_end_before):
            continue
        if name == LOSS_METRIC and name not in pattern.groupindex and _is_shared(match, number, names):
            continue
        try:
            values.append((name, float(group.rstrip(_BEHIND_NUMBERS))))
        except ValueError:
            continue  # a word where a number was expected: the next line may have one
    return values


def _is_shared(match: Any, number: int, names: dict[str, int]) -> bool:
    """Whether a group is a part of another metric, such as its decimals, or has one in it."""
    (start, end), others = match.span(number), (match.span(other) for other in names.values() if other != number)
    return any(start < other_end and other_start < end for other_start, other_end in others)


def _compiled(text: str) -> tuple[Any, dict[str, int]]:
    """Return a pattern, and the groups that are metrics."""
    try:
        import re2  # type: ignore[import-untyped] # noqa: PLC0415 - a job without patterns does without
    except ImportError:
        raise MetricPatternError("patterns for metrics need the package google-re2 on this node") from None
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY_BYTES
    try:
        pattern = re2.compile(text, options)
    except re2.error as error:
        why = error.args[0] if error.args else error
        reason = why.decode(errors="replace") if isinstance(why, bytes) else str(why)
        raise MetricPatternError(f"the metric pattern {text!r} is not one that RE2 takes: {reason}") from None
    names = dict(pattern.groupindex) or ({LOSS_METRIC: 1} if pattern.groups == 1 else {})
    if not names:
        raise MetricPatternError(
            f"the metric pattern {text!r} has {pattern.groups or 'no'} groups without names: "
            "put (...) around the number, or (?P<name>...) around each of several"
        )
    if len(names) > MAX_NAMES or any(len(name) > MAX_NAME_CHARS for name in names):
        raise MetricPatternError(
            f"the metric pattern {text[:80]!r} has {len(names)} names: {MAX_NAMES} of {MAX_NAME_CHARS} characters fit"
        )
    return pattern, names
