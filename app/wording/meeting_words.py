"""Ranks that do not find each other in `init_process_group`, in words: parts of a verdict's sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.safe_text import clean_name
from app.words import ranks_text

if TYPE_CHECKING:
    from app.diagnosis.verdicts import MeetingSide, Verdict

MAX_MEETINGS_TOLD = 3


def meeting_head(verdict: Verdict) -> str:
    """Return in what the ranks differ that have come: the store, the number of a rank, or how many are to come."""
    sides = verdict.meetings[:MAX_MEETINGS_TOLD]
    if len({(side.address, side.port) for side in verdict.meetings}) > 1:
        told = ", ".join(f"{ranks_text(side.ranks)} to {store_text(side)}" for side in sides)
        return f"in {verdict.op} ranks go to different stores and never meet: {told}"
    if any(side.number is not None for side in sides):
        told = ", ".join(_number(side) for side in sides if side.number is not None)
        return f"{told}: two ranks cannot have one number"
    told = ", ".join(f"{ranks_text(side.ranks)} for {side.world_size}" for side in sides)
    num_ranks = sum(len(side.ranks) for side in verdict.meetings)
    return f"the ranks wait in {verdict.op} for another number of ranks than there are ({num_ranks}): {told}"


def _number(side: MeetingSide) -> str:
    verb = "comes" if len(side.ranks) == 1 else "come"
    return f"{ranks_text(side.ranks)} {verb} to init_process_group as rank {side.number}"


def store_text(side: MeetingSide) -> str:
    """Return `127.0.0.1:29500`, an IPv6 address in brackets."""
    address = clean_name(side.address)
    return f"[{address}]:{side.port}" if ":" in address else f"{address}:{side.port}"
