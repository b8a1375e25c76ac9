"""Which ranks each node gets, of a job and of its next attempt. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import PrepareAgain
from agent.wire.jobs import ENDED_STATES
from app.deeds import max_ranks
from app.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.wire.jobs import JobStatus


def even_shares(num_ranks: int, num_nodes: int) -> list[int]:
    """Return how many ranks each node gets: as even as can be, the first ones more."""
    share, rest = divmod(num_ranks, num_nodes)
    return [share + (index < rest) for index in range(num_nodes)]


def newest(statuses: Mapping[str, JobStatus]) -> JobStatus:
    """Return how a job stands on a node of its newest attempt: one that was left out of it tells of an earlier one."""
    return max(statuses.values(), key=lambda status: status.attempt)


def of_newest_attempt(statuses: Mapping[str, JobStatus]) -> dict[str, JobStatus]:
    """Return how a job stands on the nodes of its newest attempt, as far as they are there."""
    attempt = newest(statuses).attempt
    return {node: status for node, status in statuses.items() if status.attempt == attempt}


def in_order(statuses: Mapping[str, JobStatus]) -> list[str]:
    """Return the nodes of a job, the one with node rank 0 first."""
    return sorted(statuses, key=lambda node: statuses[node].node_rank)


def next_shares(statuses: Mapping[str, JobStatus], num_ranks: int | None, *, takes_any: bool = False) -> dict[str, int]:
    """Return how many ranks each node of a job gets in its next attempt, the one with node rank 0 first.

    Args:
        statuses: By node, whether it has ended or not.
        num_ranks: None leaves every node as many as it had; else they are spread evenly.
        takes_any: All nodes given make up the next attempt; else those of the last one do.

    Raises:
        UsageError: A node of the last attempt is missing, or the ranks are too few or too many for the nodes.
    """
    first = newest(statuses)
    chosen = statuses if takes_any else of_newest_attempt(statuses)
    nodes = in_order(chosen)
    count = len(nodes)
    if count < first.num_nodes and not takes_any:
        raise UsageError(
            f"only {count} of the {first.num_nodes} nodes of job {first.job_id} can be asked",
            "name the others, too; to go on without them: rankdeck restart --on-these-hosts",
        )
    shares: Sequence[int] = [statuses[node].local_world_size for node in nodes]
    wanted = sum(shares) if num_ranks is None else num_ranks
    if not count <= wanted <= max_ranks(count):
        where = f"job {first.job_id} runs on {count} node{'' if count == 1 else 's'}"
        wrong = "few" if wanted < count else "many"
        raise UsageError(
            f"{where}: {wanted} rank{' is' if wanted == 1 else 's are'} too {wrong}",
            f"it can have {count} to {max_ranks(count)}",
        )
    if num_ranks is not None:
        shares = even_shares(num_ranks, count)
    return dict(zip(nodes, shares, strict=True))


def next_attempt(
    statuses: Mapping[str, JobStatus], num_ranks: int | None, meet_at: str | None = None
) -> dict[str, PrepareAgain]:
    """Return what each node of a job that has ended is asked to prepare, the one with node rank 0 first.

    Args:
        statuses: By node.
        num_ranks: None leaves every node as many as it had; else they are spread evenly.
        meet_at: None is the nodes of the last attempt. Else all nodes given make up the next one, and reach the first
            of them there; empty is where they met before.

    Raises:
        UsageError: The job still runs, or see `next_shares`.
    """
    job_id = next(iter(statuses.values())).job_id
    shares = next_shares(statuses, num_ranks, takes_any=meet_at is not None)
    if any(statuses[node].state not in ENDED_STATES for node in shares):
        raise UsageError(f"job {job_id} has not ended")
    attempt = 1 + newest(statuses).attempt
    commands, first_rank = {}, 0
    for node_rank, (node, share) in enumerate(shares.items()):
        command = PrepareAgain(job_id, attempt, first_rank, share, sum(shares.values()))
        if meet_at is not None:
            command = msgspec.structs.replace(command, num_nodes=len(shares), node_rank=node_rank)
        if meet_at:
            command = msgspec.structs.replace(command, master_addr=meet_at, master_port=0)
        commands[node] = command
        first_rank += share
    return commands
