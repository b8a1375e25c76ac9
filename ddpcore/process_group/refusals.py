"""The error that a rank raises for a verdict of the roll call.

Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcore.errors import (
    ContradictoryLaunchError,
    RanksMissingError,
    StaleRendezvousError,
    UnequalRanksError,
)
from ddpcore.process_group.rank_card import Refusal

if TYPE_CHECKING:
    from ddpcore.errors import DdpcoreError
    from ddpcore.process_group.rank_card import Verdict


def error_of(verdict: Verdict) -> DdpcoreError:
    """Return what to raise; the same words on every rank."""
    if verdict.refusal is Refusal.MISSING:
        return RanksMissingError(verdict.text, verdict.missing, verdict.timeout_s)
    if verdict.refusal is Refusal.STALE:
        return StaleRendezvousError(verdict.text)
    if verdict.refusal is Refusal.UNEQUAL:
        return UnequalRanksError(verdict.text, verdict.differences)
    return ContradictoryLaunchError(verdict.text)
