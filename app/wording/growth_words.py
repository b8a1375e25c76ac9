"""Memory that grows towards a limit, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.memory import LimitKind
from app.rows import MemoryGrowthRow
from app.words import bytes_text, ranks_text, seconds_text

if TYPE_CHECKING:
    from agent.wire.memory import LimitReport
    from app.diagnosis.memory import Growth

MINUTE_S = 60.0
SOON_S = 10.0
LIMIT_WORDS = {
    LimitKind.MACHINE: "the memory of the machine",
    LimitKind.CGROUP: "the limit of its cgroup",
    LimitKind.ADDRESS_SPACE: "its limit of address space, ulimit -v",
    LimitKind.DATA: "its limit of data, ulimit -d",
    LimitKind.GPU: "the memory of its GPU",
}


def growth_parts(growth: Growth, whose: str) -> list[str]:
    """Return `the memory of rank 1 on demo-0 grows by 120 MiB/min` and what is left to which limit."""
    report = growth.report
    kind = "GPU memory" if growth.is_of_gpu else "memory"
    is_one = len(growth.ranks) == 1
    head = f"the {kind} of {whose} grows by {_rates(growth)}{'' if is_one else ' each'}"
    nearest = "" if is_one else f"{ranks_text([growth.nearest])} is nearest: "
    left = f"{nearest}{remaining_text(report.remaining_s)} to {limit_text(report.limit)}"
    return [head, left, f"it holds {bytes_text(report.held_bytes)} after {about_text(report.for_s)} of growth"]


def past_growth_text(growth: Growth | None) -> str:
    """Return how memory grew before a rank ended; empty where it did not."""
    if growth is None:
        return ""
    its = "its" if len(growth.ranks) == 1 else "their"
    kind = "GPU memory" if growth.is_of_gpu else "memory"
    limit = limit_text(growth.report.limit)
    return f"{its} {kind} had grown by {_rates(growth)} for {about_text(growth.report.for_s)} towards {limit}"


def growth_hint(growth: Growth | None) -> str:
    """Return what to look for."""
    if growth is not None and growth.is_of_gpu:
        return "look for tensors kept from step to step, as losses without .item()"
    return "look for lists, caches and losses without .item() that grow"


def growth_row(growth: Growth | None) -> MemoryGrowthRow | None:
    """Return the row of `--json`."""
    if growth is None:
        return None
    report = growth.report
    return MemoryGrowthRow(
        rank=growth.nearest,
        limit=str(report.limit.kind),
        rate_bytes_per_min=MINUTE_S * report.rate_bytes_hz,
        held_bytes=report.held_bytes,
        limit_bytes=report.limit.limit_bytes,
        used_bytes=report.limit.used_bytes,
        remaining_s=report.remaining_s,
        growing_s=report.for_s,
    )


def limit_text(limit: LimitReport) -> str:
    """Return `the limit of its cgroup (8.0 GiB)`."""
    return f"{LIMIT_WORDS[limit.kind]} ({bytes_text(limit.limit_bytes)})"


def rate_per_minute_text(rate_bytes_hz: float) -> str:
    """Return `120 MiB/min`."""
    return f"{bytes_text(MINUTE_S * rate_bytes_hz)}/min"


def remaining_text(remaining_s: float) -> str:
    """Return `about 9 min`, `about 40 s` or `less than 10 s`."""
    return f"less than {SOON_S:.0f} s" if remaining_s < SOON_S else f"about {about_text(remaining_s)}"


def about_text(seconds: float) -> str:
    """Return a time in whole minutes, or in whole seconds below two."""
    whole_s = MINUTE_S * round(seconds / MINUTE_S) if seconds >= 2 * MINUTE_S else float(round(seconds))
    return seconds_text(whole_s) if whole_s >= SOON_S else f"{whole_s:.0f} s"


def _rates(growth: Growth) -> str:
    low, high = rate_per_minute_text(growth.lowest_hz), rate_per_minute_text(growth.highest_hz)
    return low if low == high else f"{low} to {high}"
