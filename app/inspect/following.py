"""Ranks of other launchers from look to look: looks at one process are joined, ranks that are gone are kept. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from app.inspect.comparison import standing_of
from app.inspect.inspection_text import unseen_lines
from app.inspect.seen import SeenJob, jobs_of
from app.model.cluster import MAX_WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from app.inspect.seen import HostSeen, SeenRank

MIN_LOOKS = 3
"""Looks kept of a rank that moves: so many show that."""
MAX_LOOKS = 64
"""Looks kept of a rank that stays at one place, or in one function."""
SURE_LOOKS = 8
"""Looks at one place from which earlier ones at other lines of its function are forgotten."""

Process = tuple[str, int, int]
"""Host, pid and start: one process for ever."""


def process_of(rank: SeenRank) -> Process:
    """Return the process of a rank."""
    return rank.host, rank.pid, rank.start


class Following:
    """What some hosts have seen so far."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostSeen] = {}
        self._stays: dict[Process, tuple[int, int]] = {}
        """Number of the last looks at a process that have shown it at one place, and in one function."""

    def put(self, host: str, seen: HostSeen) -> None:
        """Take what a host has seen in its latest look."""
        before = {process_of(rank): rank for rank in self._hosts[host].ranks} if host in self._hosts else {}
        ranks = [msgspec.structs.replace(rank, host=host) for rank in seen.ranks]
        joined = [self._joined(before.get(process_of(rank)), rank) for rank in ranks]
        for process in before.keys() - set(map(process_of, ranks)):
            del self._stays[process]
        self._hosts[host] = msgspec.structs.replace(seen, ranks=joined)

    def _joined(self, before: SeenRank | None, seen: SeenRank) -> SeenRank:
        """Return a rank with its earlier looks: those of its stay at one place, or the few that show that it moves."""
        looks = [] if before is None else before.looks
        here, inside = self._stays.get(process_of(seen), (0, 0))
        for look in seen.looks:
            pair = standing_of(msgspec.structs.replace(seen, looks=[*looks[-1:], look]))
            here = here + 1 if looks and not pair.is_moving else 1
            inside = inside + 1 if looks and (not pair.is_moving or pair.is_in_function) else 1
            stay = here if here >= SURE_LOOKS else inside
            looks = [*looks, look][-min(MAX_LOOKS, max(MIN_LOOKS, stay)) :]
        self._stays[process_of(seen)] = here, inside
        return msgspec.structs.replace(seen, looks=looks)

    def unseen_lines(self) -> list[str]:
        """Return what the hosts could not show, and what would help."""
        return unseen_lines(self._hosts)

    def jobs(self, own_pids: Mapping[str, Collection[int]]) -> list[SeenJob]:
        """Return the jobs without those of rankdeck, whose pids are given by host; the largest first."""
        found = [job for job in jobs_of(self._hosts.items()) if job.size <= MAX_WORLD_SIZE]
        return [job for job in found if not any(rank.pid in own_pids.get(rank.host, ()) for rank in job.ranks)]


def job_now(before: SeenJob, jobs: Sequence[SeenJob]) -> SeenJob:
    """Return a job as it is now, out of all jobs; ranks that are gone are kept, as ended.

    A job that has been restarted has other processes under the same key, on some of its hosts.
    """
    processes, hosts = set(map(process_of, before.ranks)), {rank.host for rank in before.ranks}
    alike = [job for job in jobs if _identity(job) == _identity(before)]
    same = [job for job in alike if not processes.isdisjoint(map(process_of, job.ranks))]
    again = [job for job in alike if not hosts.isdisjoint(rank.host for rank in job.ranks)]
    now = next(iter(same or again), None)
    if now is None:
        return SeenJob(before.name, before.how, before.size, [_ended(rank) for rank in before.ranks])
    # Ranks of spawn are numbered in the order of those that are left.
    numbers = {process_of(rank): rank.rank for rank in before.ranks} if now.how == "spawn" else {}
    here = [msgspec.structs.replace(rank, rank=numbers.get(process_of(rank), rank.rank)) for rank in now.ranks]
    size = max(before.size, now.size) if now.how == "spawn" else now.size
    gone = {rank.rank: _ended(rank) for rank in before.ranks if rank.rank < size}
    ranks = gone | {rank.rank: rank for rank in here}
    return SeenJob(now.name, now.how, size, [ranks[number] for number in sorted(ranks)])


def _identity(job: SeenJob) -> tuple[str, str, int]:
    return job.how, job.name, job.ranks[0].uid


def _ended(rank: SeenRank) -> SeenRank:
    last = rank.looks[-1]
    return rank if not last.state else msgspec.structs.replace(rank, looks=[msgspec.structs.replace(last, state="")])
