"""Rows of how ranks spend their time; made by `app.wording.pace_words`."""

from __future__ import annotations

import msgspec

from app.rows import Severity  # noqa: TC001 - the struct's fields are resolved at run time


class PaceRow(msgspec.Struct, frozen=True):
    """How a rank spends its time beside the others; shares 0..1, None where it has not been observed long enough."""

    rank: int
    node: str
    severity: Severity
    """WARNING of a named straggler."""
    cost_frac: float | None
    """What the others lose to it: how much less it waits than they do in the middle."""
    wait_frac: float | None
    last_frac: float | None
    """Share of the collectives to which it came last among its node's ranks."""
    phases: dict[str, float]
    """Share of its time in each phase; the rest it waits."""
    more_of: list[str]
    """Phases in which it spends notably more than the others."""
    where: str
    """`file.py:line in function`, as last seen."""

    @property
    def is_old(self) -> bool:
        """False: shares of undisturbed training do not age while a rank is not heard of."""
        return False


class PaceSummary(msgspec.Struct, frozen=True):
    """How all ranks of the job spend their time."""

    severity: Severity
    text: str
    """A sentence."""
    window_s: float
    """Undisturbed time that was looked at."""
    phases: list[str]
    """Those in which any rank spends time, in the order of a step."""
    num_rows: int
    """Ranks that were observed long enough."""
