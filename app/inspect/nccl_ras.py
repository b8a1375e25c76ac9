"""Which ranks NCCL's RAS shows behind the others: how many collectives each has launched. Pure.

A count grows when a rank launches a collective, not when that completes. In a healthy job counts differ from moment to
moment too, so only ranks that are behind in two answers, and stand in both, are behind.

Source: NCCL's src/ras/client_support.cc. Its JSON lacks a comma in `missing_ranks` in 2.28.9.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import msgspec

from app.text import LINE_LIMIT, clean, clean_name, ranks_text
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from app.inspect.seen import SeenJob

Name = Annotated[str, msgspec.Meta(max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0)]
InWorld = Annotated[int, msgspec.Meta(ge=0, le=2**18)]
MAX_LINES = 3
_NO_COMMA = re.compile(r'(?<=[\d}"])(\s*\n\s*)(?=["{])')


class RasRank(msgspec.Struct, frozen=True):
    """A rank of a communicator that has answered."""

    rank: InWorld
    """Within the communicator."""
    pid: int
    collective_counts: Annotated[dict[Name, Count], msgspec.Meta(max_length=64)]
    """Collectives that it has launched, by kind."""

    @property
    def num_launched(self) -> int:
        """Number of all of them."""
        return sum(self.collective_counts.values())


class RasMissing(msgspec.Struct, frozen=True):
    """A rank of a communicator that has not answered."""

    rank: InWorld
    pid: int


class RasCommunicator(msgspec.Struct, frozen=True):
    """A communicator, by its hash."""

    hash: Name
    secondary_hash: Name
    size: InWorld
    ranks: Annotated[list[RasRank], msgspec.Meta(max_length=2**18)]
    missing_ranks: Annotated[list[RasMissing], msgspec.Meta(max_length=2**18)] = []


class RasAnswer(msgspec.Struct, frozen=True):
    """One answer."""

    communicators: Annotated[list[RasCommunicator], msgspec.Meta(max_length=2**16)]


class Behind(msgspec.Struct, frozen=True):
    """Ranks of a communicator that stand behind its others."""

    size: int
    """Ranks of the communicator."""
    ranks: list[int]
    """Ranks that are behind; global ones where `is_global`, else those within the communicator."""
    is_global: bool
    num_launched: int
    """Collectives that the first of them has launched."""
    most_launched: int
    ops: list[str]
    """Kinds of collectives whose counts differ."""


@lru_cache(maxsize=2)
def decoded(text: str) -> RasAnswer | None:
    """Return an answer as JSON; None for anything else."""
    begin = text.find("{")
    for candidate in (text[begin:], _NO_COMMA.sub(r",\1", text[begin:])):
        try:
            return msgspec.json.decode(candidate, type=RasAnswer)
        except DECODE_ERRORS:
            continue
    return None


def behind(job: SeenJob) -> list[Behind]:
    """Return the ranks that stand behind in a communicator of a job, the largest communicator first."""
    if job.ras is None:
        return []
    answers = [decoded(text) for text in job.ras.answers]
    if len(answers) != 2 or answers[0] is None or answers[1] is None:
        return []
    before = {(one.hash, one.secondary_hash): one for one in answers[0].communicators}
    found = (
        _behind_in(job, before[now.hash, now.secondary_hash], now)
        for now in sorted(answers[1].communicators, key=lambda one: -one.size)
        if (now.hash, now.secondary_hash) in before
    )
    return [one for one in found if one is not None]


def ranks_behind(job: SeenJob) -> set[int]:
    """Return the ranks that are behind in the largest communicator in which some are, and whose numbers are known."""
    return next((set(one.ranks) for one in behind(job) if one.is_global), set())


def _behind_in(job: SeenJob, then: RasCommunicator, now: RasCommunicator) -> Behind | None:
    counts = {one.rank: one.num_launched for one in then.ranks}
    most = max(now.ranks, key=lambda one: one.num_launched, default=None)
    standing = [one for one in now.ranks if counts.get(one.rank) == one.num_launched]
    last = min(standing, key=lambda one: one.num_launched, default=None)
    if most is None or last is None or last.num_launched == most.num_launched:
        return None
    ops = [op for op, count in most.collective_counts.items() if last.collective_counts.get(op) != count]
    late = [one for one in standing if one.num_launched == last.num_launched]
    numbers = [one.rank for one in late] if now.size == job.size else _by_pid(job, [one.pid for one in late])
    is_global = numbers is not None
    ranks = sorted([one.rank for one in late] if numbers is None else numbers)
    return Behind(now.size, ranks, is_global, last.num_launched, most.num_launched, ops)


def _by_pid(job: SeenJob, pids: list[int]) -> list[int] | None:
    """Return the ranks with these pids; None unless each pid is that of one rank: hosts may use the same ones."""
    ranks: dict[int, list[int]] = {}
    for rank in job.ranks:
        ranks.setdefault(rank.pid, []).append(rank.rank)
    found = [ranks.get(pid, []) for pid in pids]
    return [one for (one,) in found] if all(len(one) == 1 for one in found) else None


def ras_lines(job: SeenJob) -> list[str]:
    """Return what RAS shows of a job, or why it shows nothing; empty where it was not asked."""
    if job.ras is None:
        return []
    if job.ras.trouble:
        return [f"NCCL's RAS: {clean(job.ras.trouble, LINE_LIMIT)}"]
    if len([text for text in job.ras.answers if decoded(text)]) < 2:
        return [f"NCCL {clean_name(job.ras.version)}'s RAS: its answer is not understood"]
    lines = [_line(one, job.size) for one in behind(job)[:MAX_LINES]] + _mute_lines(job)
    return lines or ["NCCL's RAS: no rank is behind the others in what it has launched, twice within 1 s"]


def _mute_lines(job: SeenJob) -> list[str]:
    """Return the ranks of the whole job that do not answer."""
    last = decoded(job.ras.answers[-1]) if job.ras else None
    mute = {
        one.rank for comm in (last.communicators if last else []) if comm.size == job.size for one in comm.missing_ranks
    }
    does = "does" if len(mute) == 1 else "do"
    return [f"NCCL's RAS: {ranks_text(sorted(mute))} {does} not answer: stopped, ended or cut off"] if mute else []


def _line(one: Behind, world_size: int) -> str:
    has = "has" if len(one.ranks) == 1 else "have"
    where = "" if one.size == world_size else f" of a communicator of {one.size}"
    who = ranks_text(one.ranks) if one.is_global else f"{ranks_text(one.ranks)} in it"
    ops = ", ".join(clean_name(op) for op in one.ops[:MAX_LINES])
    return (
        f"NCCL's RAS{where}: {who} {has} launched {one.num_launched} collectives, others {one.most_launched} ({ops}), "
        "twice within 1 s"
    )
