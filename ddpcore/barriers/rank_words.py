"""Ranks in words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHORT_RUN = 2
"""Consecutive ranks up to here are listed, more become a range."""


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks [0-5, 7]` of sorted ranks; what is only two in a row is listed."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > _SHORT_RUN else ", ".join(map(str, run)) for run in runs]
    return f"ranks [{', '.join(texts)}]"
