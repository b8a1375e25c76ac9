"""Which ranks each node gets, of a job and of its next attempt. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.commands import PrepareAgain
from agent.wire.jobs import ENDED_STATES
from app.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.wire.jobs import JobStatus


def even_shares(num_ranks: int, num_nodes: int) -> list[int]:
    """Return how many ranks each node gets: as even as can be, the first ones more."""
    share, rest = divmod(num_ranks, num_nodes)
    return [share + (index < rest) for index in range(num_nodes)]


def next_attempt(statuses: Mapping[str, JobStatus], num_ranks: int | None) -> dict[str, PrepareAgain]:
    """Return what each node of a job that has ended is asked to prepare, the one with node rank 0 first.

    Args:
        statuses: By node: all of the job's.
        num_ranks: None leaves every node as many as it had; else they are spread evenly.

    Raises:
        UsageError: The job still runs, a node of it is missing, or the nodes are more than the ranks.
    """
    in_order = sorted(statuses.items(), key=lambda item: item[1].node_rank)
    first = in_order[0][1]
    if any(status.state not in ENDED_STATES for status in statuses.values()):
        raise UsageError(f"job {first.job_id} has not ended")
    if len(in_order) < first.num_nodes:
        raise UsageError(
            f"only {len(in_order)} of the {first.num_nodes} nodes of job {first.job_id} know it",
            "start it anew: rankdeck run",
        )
    if num_ranks is None:
        shares: Sequence[int] = [status.local_world_size for _, status in in_order]
    elif num_ranks < len(in_order):
        raise UsageError(f"job {first.job_id} runs on {len(in_order)} nodes: {num_ranks} ranks are too few")
    else:
        shares = even_shares(num_ranks, len(in_order))
    attempt = 1 + max(status.attempt for status in statuses.values())
    commands, first_rank = {}, 0
    for (node, status), share in zip(in_order, shares, strict=True):
        commands[node] = PrepareAgain(status.job_id, attempt, first_rank, share, sum(shares))
        first_rank += share
    return commands
