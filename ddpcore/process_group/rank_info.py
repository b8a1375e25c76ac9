"""What a rank publishes about itself in the join check, and the verdict on all ranks' entries together.

Pure. Every rank writes its `RankInfo` into the store before a process group exists; the last one to come judges them
for all (`judge`, called by `ddpcore.process_group.join_check`).

`error_of` makes the error that a rank raises for a verdict.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ddpcore.agreement import ranks_by_value, ranks_text
from ddpcore.errors import ContradictoryLaunchError, RanksMissingError, StaleRendezvousError, UnequalRanksError
from ddpcore.process_group.equality import differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpcore.errors import DdpcoreError

_BACKEND = "backend"
MAX_NAMED = 8
"""Ranks described one by one in a message."""


class RankInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts of one rank, before the process group exists."""

    rank: int
    world_size: int
    host: str
    pid: int
    machine: str = ""
    """Name that is equal on two ranks that see the same process numbers (`ddpcore.barriers.observer`)."""
    started_ticks: int = 0
    """Start of the process: a pid is used again, this pair is not."""
    joined_at: str = ""
    """Wall time, for messages."""
    address: str = ""
    """Address by which other machines reach this one; empty if there is none."""
    backend: str = ""
    local_rank: int | None = None
    """Local rank by the launcher; None is unknown, also below."""
    local_world_size: int | None = None
    node_rank: int | None = None
    strict: dict[str, str] = {}
    """Facts that must be the same on every rank."""
    soft: dict[str, str] = {}
    """Facts that should be the same on every rank."""
    allows_unequal: bool = False

    @property
    def node(self) -> str:
        """Name that is equal on ranks of one node; containers on a machine are nodes of their own."""
        return f"{self.host} {self.machine.partition(' ')[0]}"

    def is_process_of(self, other: RankInfo) -> bool:
        """Return whether two entries are of one process."""
        mine = (self.machine, self.host, self.pid, self.started_ticks)
        return mine == (other.machine, other.host, other.pid, other.started_ticks)


class Seat(msgspec.Struct, frozen=True, omit_defaults=True):
    """A rank's place on its node, which it reads once all ranks have joined."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_machines: int
    peer_address: str = ""
    """Address of rank 0's machine, or on that machine of another one; empty if there is no other or it is not known."""


class Presence(msgspec.Struct, frozen=True, omit_defaults=True):
    """Device of a rank, written once it has its seat."""

    gpu: str = ""
    """Identity of its GPU; empty without one, or where several ranks may share it."""


class Refusal(StrEnum):
    """Reason why no group is opened."""

    CONTRADICTION = "contradiction"
    MISSING = "missing"
    STALE = "stale"
    UNEQUAL = "unequal"
    FAILED = "failed"
    """A rank had an error of its own while joining."""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a round of the join check; without a refusal the ranks continue."""

    refusal: Refusal | None = None
    text: str = ""
    missing: list[int] = []
    timeout_s: float = 0.0
    differences: list[str] = []
    """Facts that are not equal on all ranks, a sentence each; without a refusal they are tolerated."""
    num_expected: int = 0
    """Number of ranks that may still join and have to read the refusal."""
    machine: str = ""
    """Machine of the rank that decided. A process started there after `at_ticks` belongs to another attempt."""
    at_ticks: int = 0
    """Time of the refusal, in the kernel's ticks."""


Entry = TypeVar("Entry", RankInfo, Seat, Presence, Verdict)


def encode(entry: RankInfo | Seat | Presence | Verdict) -> str:
    return msgspec.json.encode(entry).decode()


def decode(text: bytes, kind: type[Entry]) -> Entry:
    return msgspec.json.decode(text, type=kind)


def who(info: RankInfo) -> str:
    """Return `rank 1 (pid 12 on gpu3)`."""
    return f"rank {info.rank} (pid {info.pid} on {info.host})"


def who_has_come(infos: Sequence[RankInfo]) -> str:
    """Return who has joined: one by one, or if they are many, host by host."""
    if len(infos) <= MAX_NAMED:
        return ", ".join(who(info) for info in infos)
    hosts = _by_host(infos)
    texts = [f"{ranks_text(ranks)} on {host}" for host, ranks in hosts.items()][:MAX_NAMED]
    more = [f"and those on {len(hosts) - MAX_NAMED} more hosts"] if len(hosts) > MAX_NAMED else []
    return ", ".join([*texts, *more])


def judge(infos: Sequence[RankInfo]) -> Verdict:
    """Return what the entries of all ranks, in the order of ranks, mean together: the only comparison of ranks."""
    facts = [{**info.soft, **info.strict, _BACKEND: info.backend} for info in infos]
    found = differences(facts, [info.host for info in infos])
    # Nodes on which CUDA is not seen take gloo where the others take nccl, and all wait for ever.
    if _BACKEND in found:
        advice = "give backend and device, or see why CUDA is not there"
        text = f"the ranks would use different backends; {found[_BACKEND]}: {advice}"
        return Verdict(Refusal.CONTRADICTION, text)
    if contradiction := _local_contradiction(infos):
        return Verdict(Refusal.CONTRADICTION, contradiction)
    strict = {name for info in infos for name in info.strict}
    unequal = [text for name, text in found.items() if name in strict]
    if unequal and not any(info.allows_unequal for info in infos):
        text = (
            f"the ranks are not equal: {'; '.join(unequal)}. Install and copy the same everywhere; "
            "if it is meant, open the group with allow_unequal=True"
        )
        return Verdict(Refusal.UNEQUAL, text, differences=unequal)
    return Verdict(differences=list(found.values()))


def local_places(nodes: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return local rank, local world size and node rank of each rank; ranks of one node name the same node."""
    ranks_of = ranks_by_value(nodes)
    number_of = {node: number for number, node in enumerate(ranks_of)}
    return [(ranks_of[node].index(rank), len(ranks_of[node]), number_of[node]) for rank, node in enumerate(nodes)]


def seats(infos: Sequence[RankInfo]) -> list[Seat]:
    """Return each rank's place on its node, from its launcher or else from who shares a machine."""
    nodes = [info.node for info in infos]
    first = infos[0]
    elsewhere = next((info.address for info in infos if info.node != first.node and info.address), "")
    return [
        Seat(
            local_rank=local_rank if info.local_rank is None else info.local_rank,
            local_world_size=local_size if info.local_world_size is None else info.local_world_size,
            node_rank=node_rank if info.node_rank is None else info.node_rank,
            num_machines=len(set(nodes)),
            peer_address=elsewhere if info.node == first.node else first.address,
        )
        for info, (local_rank, local_size, node_rank) in zip(infos, local_places(nodes), strict=True)
    ]


def judge_presences(infos: Sequence[RankInfo], presences: Sequence[Presence]) -> Verdict:
    """Return the verdict on the ranks' devices."""
    holders: dict[str, RankInfo] = {}
    for info, presence in zip(infos, presences, strict=True):
        holder = holders.setdefault(presence.gpu, info)
        if presence.gpu and holder is not info:
            text = (
                f"{who(holder)} and {who(info)} would use one GPU, {presence.gpu}, and nccl wants one for each rank: "
                "start no more ranks than GPUs, and check LOCAL_RANK and CUDA_VISIBLE_DEVICES"
            )
            return Verdict(Refusal.CONTRADICTION, text)
    return Verdict()


def duplicate_text(first: RankInfo | None, second: RankInfo, where: str) -> str:
    """Return the message about two processes that claim one rank."""
    claimed = f"{who(first)}, {first.joined_at}," if first else f"another rank {second.rank}"
    return (
        f"two processes claim rank {second.rank} at {where}: {claimed} was there before pid {second.pid} on "
        f"{second.host}: give every process a rank of its own, and every job a rendezvous of its own"
    )


def stale_text(dead: RankInfo, where: str, path: str) -> str:
    """Return the message about a rendezvous that a dead process has left behind."""
    remedy = f"Remove it (rm {path}) and start all ranks again" if path else "End all ranks and start them again"
    return (
        f"{where} was left behind by a run that has been killed: {who(dead)} has joined it {dead.joined_at} and is "
        f"gone. {remedy}"
    )


def unknown_claim_text(other: RankInfo, mine: RankInfo, where: str, path: str) -> str:
    """Return the message about a claim of another machine, whose process cannot be seen from here."""
    remedy = f"remove the file (rm {path}) and start all ranks again" if path else "end all ranks and start them again"
    return (
        f"{who(other)} has joined {where} as rank {mine.rank} {other.joined_at}, before pid {mine.pid} on {mine.host}. "
        f"If that process still runs, two processes claim one rank: end one. If it is of an earlier run, {remedy}"
    )


def world_text(first: RankInfo, second: RankInfo, where: str) -> str:
    """Return the message about two ranks with different world sizes."""
    return (
        f"{who(first)} was started in a world of {first.world_size}, {who(second)} in a world of {second.world_size}, "
        f"and both came to {where}: start all ranks with one world size"
    )


def missing_text(missing: Sequence[int], infos: Sequence[RankInfo], where: str, timeout_s: float) -> str:
    """Return the message about ranks that did not join."""
    have = "has" if len(missing) == 1 else "have"
    there = f"{who_has_come(infos)} {'is' if len(infos) == 1 else 'are'} there" if infos else "nobody is there"
    return (
        f"{ranks_text(missing)} of {len(missing) + len(infos)} {have} not come to {where} in {timeout_s:g} s; {there}. "
        f"Look at how {'it was' if len(missing) == 1 else 'they were'} started and with what output "
        f"{'it' if len(missing) == 1 else 'they'} ended, or give a longer join_timeout_s"
    )


def vanished_text(vanished: Sequence[RankInfo], where: str, timeout_s: float) -> str:
    """Return the message about ranks that had joined, and did not answer when all were there."""
    names = ", ".join(who(info) for info in vanished[:MAX_NAMED])
    return (
        f"{names} had come to {where}, and did not answer in {timeout_s:g} s when all were there: it has ended or is "
        "stopped. Look at its output; if it is of an earlier run, start again with another rendezvous"
    )


def _local_contradiction(infos: Sequence[RankInfo]) -> str:
    seen: dict[tuple[str, int | None, int], RankInfo] = {}
    for info in infos:
        if info.local_rank is None:
            continue
        other = seen.setdefault((info.node, info.node_rank, info.local_rank), info)
        if other is not info:
            return (
                f"{who(other)} and {who(info)} both have LOCAL_RANK={info.local_rank}: "
                "ranks of one machine would share a device; start each with a local rank of its own"
            )
    return ""


def _by_host(infos: Sequence[RankInfo]) -> Mapping[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for info in infos:
        hosts.setdefault(info.host, []).append(info.rank)
    return hosts


def error_of(verdict: Verdict) -> DdpcoreError:
    if verdict.refusal is Refusal.MISSING:
        return RanksMissingError(verdict.text, verdict.missing, verdict.timeout_s)
    if verdict.refusal is Refusal.STALE:
        return StaleRendezvousError(verdict.text)
    if verdict.refusal is Refusal.UNEQUAL:
        return UnequalRanksError(verdict.text, verdict.differences)
    return ContradictoryLaunchError(verdict.text)
