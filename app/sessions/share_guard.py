"""Ends what is left of a job that has failed on another node: there it would wait for ranks that are gone. Pure.

torchrun ends the ranks of its own node; those of the others hang until torch gives up, ten minutes by its own choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.jobs import JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.wire.jobs import JobStatus

PATIENCE_S = 12.0
"""From the first failure: ranks that notice it end by themselves, and evidence of it is whole after ten seconds."""
_HAS_FAILED = frozenset({JobState.FAILED, JobState.LOST})


class ShareGuard:
    """Watches the shares of all jobs of a session."""

    def __init__(self) -> None:
        self._failed_at_s: dict[tuple[str, int], float] = {}
        self._done: set[tuple[str, int, str]] = set()

    def to_end(self, shares: Mapping[str, JobStatus], now_s: float) -> list[str]:
        """Return the nodes on which a job should be ended now.

        Args:
            shares: How one attempt of a job stands, by node, as far as nodes have told.
            now_s: Monotonic; infinite where nobody will look again.
        """
        first = next(iter(shares.values()), None)
        if first is None or first.is_elastic or not any(status.state in _HAS_FAILED for status in shares.values()):
            return []
        key = (first.job_id, first.attempt)
        failed_at_s = self._failed_at_s.setdefault(key, now_s)
        if now_s < failed_at_s + PATIENCE_S:
            return []
        running = (node for node, status in shares.items() if status.state is JobState.RUNNING)
        return [node for node in running if (*key, node) not in self._done]

    def end_has_come(self, status: JobStatus, node: str) -> None:
        """Take that a node has agreed to end its share: it is asked once."""
        self._done.add((status.job_id, status.attempt, node))
