"""What the nodes say of a job as a whole: each node's newest word, and what they say together.

Words come a few times a second from each node and hardly ever say anything new, so that the sum is made anew only then.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.jobs import ENDED_STATES, JobState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agent.wire.jobs import JobStatus

WORST_FIRST = (
    JobState.FAILED,
    JobState.LOST,
    JobState.STOPPING,
    JobState.RESTARTING,
    JobState.RUNNING,
    JobState.PREPARED,
    JobState.STOPPED,
    JobState.SUCCEEDED,
)
"""Of its nodes' states a job has the first in this order."""


class NodeShare(NamedTuple):
    """What a node last said of the job as a whole."""

    status: JobStatus
    received_s: float

    @property
    def began_s(self) -> float:
        """Since when the job has been in its state on this node."""
        return self.received_s - self.status.state_s


class SharesTogether:
    """What all nodes say of the job; made anew when `is_news` says so."""

    def __init__(self, shares: Mapping[int, NodeShare]) -> None:
        self._shares = shares

    @cached_property
    def _worst_first(self) -> list[JobStatus]:
        statuses = [share.status for _, share in sorted(self._shares.items())]
        return sorted(statuses, key=lambda status: WORST_FIRST.index(status.state))

    @cached_property
    def state(self) -> JobState:
        """The worst one."""
        return self._worst_first[0].state if self._worst_first else WORST_FIRST[-1]

    @cached_property
    def is_ended(self) -> bool:
        """Whether the job is over on every node that has told of it."""
        return all(status.state in ENDED_STATES for status in self._worst_first)

    @cached_property
    def over_nodes(self) -> list[int]:
        """Indices of the nodes that say that it is over there."""
        return [node for node, share in self._shares.items() if share.status.state in ENDED_STATES]

    @cached_property
    def is_past(self) -> bool:
        """Whether it had ended on every node before the agent there began."""
        return self.is_ended and all(status.is_past for status in self._worst_first)

    @cached_property
    def exit_code(self) -> int | None:
        """The first that is not 0."""
        codes = [status.exit_code for status in self._worst_first if status.exit_code is not None]
        return next((code for code in codes if code), codes[0] if codes else None)

    @cached_property
    def detail(self) -> str:
        """What the first node says that says anything."""
        return next((status.detail for status in self._worst_first if status.detail), "")

    @cached_property
    def allows_faults(self) -> bool:
        """Whether harm may be done to the ranks everywhere."""
        return all(status.allow_faults for status in self._worst_first)

    @cached_property
    def why_unprobed(self) -> str:
        """Why ranks have no probe, as the first node says that knows."""
        return next((share.status.unprobed for share in self._shares.values() if share.status.unprobed), "")

    @cached_property
    def unprobed_nodes(self) -> list[int]:
        """Indices of the nodes that know that their ranks have no probe."""
        return [node for node, share in self._shares.items() if share.status.unprobed]

    @cached_property
    def nodes_with_cause(self) -> list[int]:
        """Indices of the nodes that tell why the job failed."""
        return [node for node, share in self._shares.items() if share.status.root_cause is not None]


def is_news(before: JobStatus, after: JobStatus) -> bool:
    """Return whether what nodes say together may differ by a node's new word."""
    return (
        before.state is not after.state
        or before.exit_code != after.exit_code
        or before.detail != after.detail
        or before.allow_faults is not after.allow_faults
        or before.unprobed != after.unprobed
        or before.is_past is not after.is_past
        or (before.root_cause is None) is not (after.root_cause is None)
    )
