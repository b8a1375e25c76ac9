"""Rows of the memory that ranks hold; made by `app.wording.memory_words`."""

from __future__ import annotations

import msgspec

from app.rows import OLD_S, Severity


class MemoryRow(msgspec.Struct, frozen=True):
    """The memory of one rank beside the others'."""

    rank: int
    node: str
    rss_bytes: int | None
    pss_bytes: int | None
    peak_rss_bytes: int | None
    """The highest value that this console has seen."""
    from_median_frac: float | None
    """(rss - median) / median over the ranks of the job: 0.25 is a quarter more than the median. Of a rank that
    has ended the peak is compared."""
    severity: Severity
    gpu: int | None = None
    """This one and the next four as in `RankRow`."""
    gpu_used_bytes: int | None = None
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    torch_peak_bytes: int | None = None
    gpu_total_bytes: int | None = None
    age_s: float | None = None
    """Since its node's last report."""
    has_ended: bool = False
    tree_bytes: int | None = None
    """What it holds with its child processes."""
    limit: str = ""
    """The kind of the limit to which it comes first, or is nearest: machine, cgroup, address_space, data."""
    limit_bytes: int | None = None
    limit_used_bytes: int | None = None
    """By whomever the limit counts."""
    growth_bytes_per_min: float | None = None
    """None unless its memory grows steadily."""
    remaining_s: float | None = None
    """Until the limit is reached at that rate."""
    gpu_growth_bytes_per_min: float | None = None
    """The same of its GPU's memory."""
    gpu_remaining_s: float | None = None
    is_near: bool = False
    """A limit is ten minutes away or less: there is a verdict on it."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are no longer those of now."""
        return self.has_ended or (self.age_s is not None and self.age_s > OLD_S)


class MemorySummary(msgspec.Struct, frozen=True):
    """Memory over all ranks of the job."""

    total_bytes: int
    median_bytes: int
    max_bytes: int
    max_rank: int | None
    imbalance_frac: float | None
    """(max - median) / median."""
    severity: Severity
    text: str
