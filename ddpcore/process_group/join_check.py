"""The join check: all ranks meet in the store before there is a process group, so that each knows who is there.

`join` does it in two rounds. In the first every rank claims its number and writes its `RankInfo`; the last one compares
all of them, and gives each rank its `Seat`. In the second each writes the device it has chosen (`Presence`), which
proves that all are alive, and that the entries of the first round are not left from an earlier run. A verdict is set
once: the rank that first finds a reason against the group publishes it to all. Traffic grows with the number of ranks,
not its square.

    rankdeck/<generation>/claim <rank>       a counter: 1 for the rank's owner
    rankdeck/<generation>/card <rank>        RankInfo
    rankdeck/<generation>/world              the first rank's RankInfo: all must name its world size
    rankdeck/<generation>/seat <rank>        Seat, by the last rank
    rankdeck/<generation>/presence <rank>    Presence
    rankdeck/<generation>/verdict 1, 2       Verdict
    rankdeck/<generation>/group/...          torch's own keys of the process group

A store may outlive ranks: torchrun's does over its restarts, and every store over a group that is closed and opened
again. The entries of before then belong to an earlier generation, and the ranks begin a new one.

`VerdictBoard` holds the verdicts: each is set once, read by all, and the rank that hosts the store stays until it is
read.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ddpcore.agreement import ranks_text
from ddpcore.barriers.observer import process_state, ticks_now
from ddpcore.barriers.rank_status import ProcessState
from ddpcore.errors import ContradictoryLaunchError, DdpcoreError, MasterUnreachableError
from ddpcore.process_group import rank_info
from ddpcore.process_group.rank_info import Presence, RankInfo, Refusal, Seat, Verdict, decode, encode, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch._C._distributed_c10d import Store

    from ddpcore.process_group.rank_info import Entry
    from ddpcore.process_group.rendezvous_spec import RendezvousSpec

POLL_S = (0.001, 0.2)
"""Seconds between two looks at the verdict, the first and the longest. 1,024 ranks then ask a store 5,000 times a
second, of the 30,000 and more that one TCPStore answers."""

POLL_GROWTH = 1.3

NEWS_S = (20.0, 60.0)
"""Seconds until the first log line about missing ranks, and between later ones."""

INFO_S = 5.0
"""Seconds for a claimed number to get its entry: the two are set within a millisecond."""

MAX_RENEWALS = 16
"""Generations that one call may begin or follow."""

SECOND_ROUND_S = 10.0
"""Least time in seconds of the second round, when the first one has taken nearly all of it."""

_GENERATION = "rankdeck/generation"

logger = logging.getLogger(__name__)


class Joined(NamedTuple):
    """The result of a join check that lets the group be opened."""

    seat: Seat
    presence: Presence
    differences: list[str]
    """Facts that are not equal on all ranks and are tolerated, a sentence each."""
    generation: int
    group_store: Store
    """Store for the process group: empty, and the same for all ranks."""


class _RenewedError(Exception):
    """The ranks have begun a new generation; this one is past."""


def join(
    store: Store,
    info: RankInfo,
    spec: RendezvousSpec,
    *,
    timeout_s: float,
    prepare: Callable[[Seat], Presence],
) -> Joined:
    """Wait for all ranks, and compare them; blocks.

    `prepare` chooses the device; an error of it is published to the other ranks. Raises ContradictoryLaunchError (two
    processes claim a rank, or ranks name different worlds, backends or one GPU), RanksMissingError on every rank that
    joined, StaleRendezvousError, UnequalRanksError (other code or versions), MasterUnreachableError (the store is
    gone).
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        for _ in range(MAX_RENEWALS):
            with contextlib.suppress(_RenewedError):
                return _JoinCheck(store, info, spec, timeout_s).join(deadline_s, prepare)
    except dist.DistError as error:
        _raise_if_removed(spec)
        raise MasterUnreachableError(
            f"the store at {spec.where} is gone before all ranks had come; its host (rank 0, or torchrun on the first "
            f"node) has ended: look at its output (torch: {str(error).partition(chr(10))[0]})"
        ) from error
    raise ContradictoryLaunchError(
        f"rank {info.rank} (pid {info.pid} on {info.host}) is claimed at {spec.where} again and again by others: give "
        "every process a rank of its own, and every job a rendezvous of its own"
    )


def publish_failure(store: Store, info: RankInfo, spec: RendezvousSpec, error: Exception) -> None:
    """Report to the other ranks that this one never joins, and why; blocks some seconds at most."""
    with contextlib.suppress(RuntimeError, _RenewedError):
        # Torch's errors of a lost store are RuntimeErrors.
        _JoinCheck(store, info, spec, 0.0).fail(error)


def _raise_if_removed(spec: RendezvousSpec) -> None:
    if spec.path and not Path(spec.path).exists():
        raise MasterUnreachableError(f"{spec.where} has been removed while ranks were joining: start all ranks again")


def group_prefix(generation: int) -> str:
    return f"rankdeck/{generation}"


class _JoinCheck:
    """One rank's part in one generation."""

    def __init__(self, base: Store, info: RankInfo, spec: RendezvousSpec, timeout_s: float) -> None:
        self._base = base
        self._generation = int(base.compare_set(_GENERATION, "", "0"))
        self._store = PrefixStore(group_prefix(self._generation), base)
        self._board = VerdictBoard(self._store, info, hosts_store=spec.hosts_store)
        self._info = info
        self._spec = spec
        self._timeout_s = timeout_s

    def join(self, deadline_s: float, prepare: Callable[[Seat], Presence]) -> Joined:
        rank, size = self._info.rank, self._info.world_size
        self._board.enter()
        self._claim()
        if self._store.add("arrived", 1) == size:
            self._compare()
        first = self._await_verdict(1, deadline_s)
        (seat,) = self._read("seat", Seat, [rank])
        try:
            presence = prepare(seat)
        except (DdpcoreError, RuntimeError, OSError) as error:
            # A device that does not start raises torch's RuntimeError.
            self._publish_failure(error)
            raise
        self._store.set(f"presence {rank}", encode(presence))
        if self._store.add("present", 1) == size:
            infos, presences = self._read("card", RankInfo, range(size)), self._read("presence", Presence, range(size))
            self._board.set(2, rank_info.judge_presences(infos, presences))
        self._await_verdict(2, max(deadline_s, time.monotonic() + SECOND_ROUND_S))
        return Joined(seat, presence, first.differences, self._generation, PrefixStore("group", self._store))

    def fail(self, error: Exception) -> None:
        self._board.enter()
        self._claim()
        self._publish_failure(error)

    def _publish_failure(self, error: Exception) -> None:
        self._board.refuse(Verdict(Refusal.FAILED, f"{rank_info.who(self._info)} cannot take part: {error}"))
        self._board.take_leave(self._info.world_size)

    def _claim(self) -> None:
        """Claim this rank's number and write its entry, or find out who has it."""
        rank, text = self._info.rank, encode(self._info)
        if self._store.add(f"claim {rank}", 1) > 1:
            self._contest()
        self._store.set(f"card {rank}", text)
        first = decode(self._store.compare_set("world", "", text), RankInfo)
        if first.world_size != self._info.world_size:
            self._renew_if_past(first)
            text = rank_info.world_text(first, self._info, self._spec.where)
            largest = max(first.world_size, self._info.world_size)
            self._board.raise_refusal(self._board.refuse(Verdict(Refusal.CONTRADICTION, text, num_expected=largest)))
        if self._spec.path:
            self._look_for_dead()

    def _contest(self) -> None:
        """Refuse the group since this rank's number is taken, or begin a new generation if an earlier one took it."""
        other = self._owner_of(self._info.rank)
        if other is not None:
            self._renew_if_past(other)
        where, path = self._spec.where, self._spec.path
        if other is not None and not _shares_machine(other, self._info):
            verdict = Verdict(Refusal.CONTRADICTION, rank_info.unknown_claim_text(other, self._info, where, path))
        elif other is not None and _is_gone(other):
            verdict = Verdict(Refusal.STALE, rank_info.stale_text(other, where, path))
        else:
            verdict = Verdict(Refusal.CONTRADICTION, rank_info.duplicate_text(other, self._info, where))
        self._board.refuse(verdict)
        # Whatever the others have read before: this process is one too many.
        self._board.raise_refusal(verdict)

    def _renew_if_past(self, other: RankInfo) -> None:
        """Leave a generation that is over, to begin a new one or follow others there."""
        if self._is_over(other):
            self._base.compare_set(_GENERATION, str(self._generation), str(self._generation + 1))
            raise _RenewedError

    def _is_over(self, other: RankInfo) -> bool:
        """Return whether the generation of this other process is past."""
        if other.is_process_of(self._info) or self._store.check(["closed"]):
            return True
        shares_machine = _shares_machine(other, self._info)
        verdict = self._board.refusal()
        if verdict is None:
            # torchrun gives a rank out again only when all of the attempt before have ended.
            return self._spec.has_agent_store and (not shares_machine or _is_gone(other))
        if verdict.refusal is Refusal.STALE:
            return False
        if shares_machine and other.rank == self._info.rank and _is_gone(other):
            return True
        # Who was started after a group was refused belongs to a new attempt; who only comes late is to read that.
        return verdict.machine == self._info.machine and self._info.started_ticks > verdict.at_ticks > 0

    def _look_for_dead(self) -> None:
        """Refuse a rendezvous file in which a dead process of this machine stands: it never joins."""
        for other in self._read("card", RankInfo, self._ranks_with("card")):
            if _shares_machine(other, self._info) and _is_gone(other):
                self._renew_if_past(other)
                if self._board.refusal() is not None:
                    return
                text = rank_info.stale_text(other, self._spec.where, self._spec.path)
                self._board.raise_refusal(self._board.refuse(Verdict(Refusal.STALE, text)))

    def _owner_of(self, rank: int) -> RankInfo | None:
        """Return who has claimed a rank; None if it writes no entry in time."""
        deadline_s = time.monotonic() + INFO_S
        while not self._store.check([f"card {rank}"]):
            if time.monotonic() > deadline_s:
                return None
            time.sleep(POLL_S[0])
        (info,) = self._read("card", RankInfo, [rank])
        return info

    def _read(self, name: str, kind: type[Entry], ranks: Iterable[int]) -> list[Entry]:
        """Return the entries of these ranks under a name."""
        keys = [f"{name} {rank}" for rank in ranks]
        return [decode(text, kind) for text in self._store.multi_get(keys)] if keys else []

    def _ranks_with(self, name: str) -> list[int]:
        return [rank for rank in range(self._info.world_size) if self._store.check([f"{name} {rank}"])]

    def _compare(self) -> None:
        """Compare all ranks and decide the first round; the last rank calls it."""
        infos = self._read("card", RankInfo, range(self._info.world_size))
        verdict = rank_info.judge(infos)
        if verdict.refusal is not None:
            self._board.refuse(verdict)
            return
        for rank, seat in enumerate(rank_info.seats(infos)):
            self._store.set(f"seat {rank}", encode(seat))
        self._board.set(1, verdict)

    def _await_verdict(self, number: int, deadline_s: float) -> Verdict:
        """Return how a round was decided; raise what refuses the group."""
        pause_s, began_s = POLL_S[0], time.monotonic()
        news_s = began_s + NEWS_S[0]
        while not self._is_decided(number):
            now_s = time.monotonic()
            if pause_s >= POLL_S[1] and int(self._base.get(_GENERATION)) != self._generation:
                raise _RenewedError
            if now_s > deadline_s:
                self._board.raise_refusal(self._give_up(number))
            if now_s > news_s:
                self._log_progress(number, now_s - began_s)
                news_s = now_s + NEWS_S[1]
            time.sleep(pause_s)
            pause_s = min(POLL_S[1], POLL_GROWTH * pause_s)
        verdict = self._board.read(number)
        self._board.raise_refusal(verdict)
        return verdict

    def _is_decided(self, number: int) -> bool:
        _raise_if_removed(self._spec)
        return self._board.is_set(number)

    def _absent(self, number: int) -> list[int]:
        there = self._ranks_with("claim" if number == 1 else "presence")
        return sorted(set(range(self._info.world_size)).difference(there))

    def _log_progress(self, number: int, waited_s: float) -> None:
        absent = self._absent(number)
        is_first_there = self._info.rank == min(set(range(self._info.world_size)) - set(absent), default=0)
        if absent and is_first_there:
            logger.warning(
                "rank %d waits at %s for %s, for %.0f s now",
                self._info.rank,
                self._spec.where,
                ranks_text(absent),
                waited_s,
            )

    def _give_up(self, number: int) -> Verdict:
        absent = self._absent(number)
        if not absent:
            # The last one has come just now, and judges.
            return self._last_look(number)
        infos = self._read("card", RankInfo, self._ranks_with("card"))
        where, timeout_s = self._spec.where, self._timeout_s
        if number == 1:
            there = [info for info in infos if info.rank not in absent]
            text = rank_info.missing_text(absent, there, where, timeout_s)
        else:
            text = rank_info.vanished_text([info for info in infos if info.rank in absent], where, timeout_s)
        return self._board.refuse(Verdict(Refusal.MISSING, text, missing=absent, timeout_s=timeout_s))

    def _last_look(self, number: int) -> Verdict:
        deadline_s = time.monotonic() + INFO_S
        while not self._board.is_set(number) and time.monotonic() < deadline_s:
            time.sleep(POLL_S[1])
        text = f"the last rank to come to {self._spec.where} has not reported what it found: look at the ranks' output"
        return self._board.refuse(Verdict(Refusal.FAILED, text))


def _shares_machine(one: RankInfo, other: RankInfo) -> bool:
    return bool(one.machine) and one.machine == other.machine


def _is_gone(info: RankInfo) -> bool:
    return process_state(info.pid, info.started_ticks) is ProcessState.GONE


READ_S = 3.0
"""How long the host of the store stays for the others to read why the group is not opened. A rank that was a little
earlier than the host connects only a second later: torch waits longer from try to try."""

VERDICT_POLL_S = 0.001

_ROUNDS = (1, 2)


class VerdictBoard:
    """One rank's view of the verdicts of one generation. With `hosts_store` the store ends with this process."""

    def __init__(self, store: Store, info: RankInfo, *, hosts_store: bool) -> None:
        self._store = store
        self._info = info
        self._hosts_store = hosts_store

    def enter(self) -> None:
        """Count this rank as one that reads the verdict."""
        self._store.add("entered", 1)

    def is_set(self, number: int) -> bool:
        return self._store.check([f"verdict {number}"])

    def read(self, number: int) -> Verdict:
        return decode(self._store.get(f"verdict {number}"), Verdict)

    def set(self, number: int, verdict: Verdict) -> Verdict:
        """Decide a round, unless another rank has; return the verdict."""
        return decode(self._store.compare_set(f"verdict {number}", "", encode(verdict)), Verdict)

    def refuse(self, verdict: Verdict) -> Verdict:
        """Refuse the group in both rounds; return the verdict, which may be another rank's."""
        verdict = msgspec.structs.replace(verdict, machine=self._info.machine, at_ticks=ticks_now())
        results = [self.set(number, verdict) for number in _ROUNDS]
        return next((one for one in results if one.refusal is not None), verdict)

    def refusal(self) -> Verdict | None:
        """Return why no group is opened, if that is decided."""
        decided = (self.read(number) for number in _ROUNDS if self.is_set(number))
        return next((verdict for verdict in decided if verdict.refusal is not None), None)

    def raise_refusal(self, verdict: Verdict) -> None:
        """Raise the error of a refusal, once the ranks that read it from this process's store have done so."""
        if verdict.refusal is None:
            return
        # After a time-out nobody is expected any more.
        is_final = verdict.refusal is Refusal.MISSING
        self.take_leave(0 if is_final else max(verdict.num_expected, self._info.world_size))
        raise error_of(verdict)

    def take_leave(self, expected: int) -> None:
        """Count this rank as one that has read the verdict; the store's host waits for the others.

        Those that are just joining count, too.
        """
        self._store.add("told", 1)
        if not self._hosts_store:
            return
        deadline_s = time.monotonic() + READ_S
        while self._store.add("told", 0) < max(expected, self._store.add("entered", 0)):
            if time.monotonic() > deadline_s:
                return
            time.sleep(VERDICT_POLL_S)
