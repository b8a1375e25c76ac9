"""Where the verdicts of a roll call stand: each is set once, read by all, and its host stays until it is read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from ddpcore.barriers.process_table import ticks_now
from ddpcore.process_group.rank_card import RankCard, Refusal, Verdict, decode_verdict, encode
from ddpcore.process_group.refusals import error_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

READ_S = 3.0
"""How long the host of the store stays for the others to read why the group is not opened. A rank that was a little
earlier than the host connects only a second later: torch waits longer from try to try."""

POLL_S = 0.001

_ROUNDS = (1, 2)


class VerdictBoard:
    """One rank's view of the verdicts of one generation.

    Args:
        store: Of the generation.
        card: This rank's.
        hosts_store: The store ends with this process.
    """

    def __init__(self, store: Store, card: RankCard, *, hosts_store: bool) -> None:
        self._store = store
        self._card = card
        self._hosts_store = hosts_store

    def enter(self) -> None:
        """Say that this rank has come, to be told how it ends."""
        self._store.add("entered", 1)

    def is_set(self, number: int) -> bool:
        """Say whether a round is decided."""
        return self._store.check([f"verdict {number}"])

    def read(self, number: int) -> Verdict:
        """Return how a round was decided."""
        return decode_verdict(self._store.get(f"verdict {number}"))

    def set(self, number: int, verdict: Verdict) -> Verdict:
        """Decide a round, if nobody was faster; return how it is decided."""
        return decode_verdict(self._store.compare_set(f"verdict {number}", "", encode(verdict)))

    def refuse(self, verdict: Verdict) -> Verdict:
        """Tell all, in whichever round they are; return what they are told, if somebody was faster."""
        verdict = msgspec.structs.replace(verdict, machine=self._card.machine, at_ticks=ticks_now())
        told = [self.set(number, verdict) for number in _ROUNDS]
        return next((one for one in told if one.refusal is not None), verdict)

    def refusal(self) -> Verdict | None:
        """Return why no group is opened, if that is decided."""
        decided = (self.read(number) for number in _ROUNDS if self.is_set(number))
        return next((verdict for verdict in decided if verdict.refusal is not None), None)

    def raise_refusal(self, verdict: Verdict) -> None:
        """Raise what a refusal says, once those that are to hear it from this process have heard it."""
        if verdict.refusal is None:
            return
        # After a time-out nobody is expected any more.
        is_final = verdict.refusal is Refusal.MISSING
        self.take_leave(0 if is_final else max(verdict.num_expected, self._card.world_size))
        raise error_of(verdict)

    def take_leave(self, expected: int) -> None:
        """Say that this rank knows; the store's host stays until those that have come, or may just come, know too."""
        self._store.add("told", 1)
        if not self._hosts_store:
            return
        deadline_s = time.monotonic() + READ_S
        while self._store.add("told", 0) < max(expected, self._store.add("entered", 0)):
            if time.monotonic() > deadline_s:
                return
            time.sleep(POLL_S)
