"""Looks, while the main thread waits at a gate, whether those it waits for can come at all.

Runs in the heart's thread. Of the ranks that wait at a gate the lowest looks for all, the second lowest less often in
case the first is stopped; who waits for a first-block looks at its one rank itself. When a rank can never come
(`ddpcore.barriers.deadlock`), the gate is condemned: its `|go` key is set to an error, which releases everybody who
waits there.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.barriers import deadlock
from ddpcore.barriers.gate_keys import GateResult, Reason, encode_result, go_key
from ddpcore.barriers.gate_store import complete
from ddpcore.barriers.tally import ARITY
from ddpcore.barriers.whereabouts import Beat, Sighting, Wait, fates_text, gate_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._C._distributed_c10d import Store

    from ddpcore.barriers.gate_session import GateSession
    from ddpcore.barriers.journal import OpenWait
    from ddpcore.barriers.own_collectives import OwnCollectives
    from ddpcore.barriers.whereabouts import GateKind

LOOK_AFTER_S = 1.0
"""Shorter waits are life: nobody looks into them."""

MAX_LOOKS_HZ = 2000.0
"""Of all waiting ranks together."""

MAX_INTERVAL_S = 2.0
"""Between two looks into a wait that has lasted for long, in jobs of up to 4,000 ranks."""

SAY_EVERY_S = 30.0
"""Between two lines in the log about a long wait."""

CONDEMN_DELAY_S = 0.5
"""Between the mark that makes newcomers read why, and the release of those who wait (see
`ddpcore.barriers.gate.TRUST_S`)."""

MAX_LOOKED_AT = 64
"""Missing ranks looked at in one turn."""

MAX_CHAIN = 4
"""Ranks followed that wait for a rank that waits."""

_DEPUTY_TURNS = 3
_log = logging.getLogger(__name__)


class _Verdict(NamedTuple):
    """A gate that can never be passed."""

    wait: Wait
    rank: int
    """Who waits there."""
    lost: Mapping[int, Sighting]
    """Who never comes there."""

    def result(self) -> GateResult:
        """Return what is to stand at the gate."""
        has_died = self.wait.master is not None and any(sighting.has_ended for sighting in self.lost.values())
        text = deadlock.never_text(self.wait, self.rank, self.lost)
        ended = sorted(rank for rank, sighting in self.lost.items() if sighting.has_ended)
        reason = Reason.DIED if has_died else Reason.NEVER
        return GateResult(reason=reason, text=text, missing=sorted(self.lost), ended=ended)


class Examiner:
    """Examines the waits of one session.

    Args:
        session: Whose waits.
        store: A connection of this thread.
        collectives: What this process has called of torch.distributed.
    """

    def __init__(self, session: GateSession, store: Store, collectives: OwnCollectives) -> None:
        self._session = session
        self._store = store
        self._own = _OwnCalls(session, collectives)
        self._rank = session.placement.rank
        self._world_size = session.placement.world_size
        self._interval_s = self._world_size / MAX_LOOKS_HZ
        self._wait: OpenWait | None = None
        self._num_turns = 0
        self._due_s = 0.0
        self._say_s = 0.0

    def examine(self, wait: OpenWait, now_s: float) -> None:
        """Look once into the main thread's wait, if that is due."""
        if wait is not self._wait:
            self._wait, self._num_turns = wait, 0
            self._due_s = wait.entered_s + LOOK_AFTER_S
            self._say_s = wait.entered_s + SAY_EVERY_S
        if now_s < self._due_s:
            return
        slackening_s = min(MAX_INTERVAL_S, (now_s - wait.entered_s) / 20)
        self._due_s = now_s + max(self._interval_s, slackening_s)
        if wait.master is None:
            self._examine_gate(wait, now_s)
        else:
            self._examine_first(wait, wait.master, now_s)
        self._num_turns += 1

    def _examine_gate(self, wait: OpenWait, now_s: float) -> None:
        missing = list(self._session.tally.missing(self._store, wait.key))
        if not missing:
            # The last one has come, and was stopped before it could say so.
            complete(self._store, wait, self._world_size)
            return
        before_me = _num_here_before(self._rank, missing)
        is_my_turn = before_me == 0 or (before_me == 1 and self._num_turns % _DEPUTY_TURNS == _DEPUTY_TURNS - 1)
        if not is_my_turn and self._num_turns:
            return
        first = self._num_turns * MAX_LOOKED_AT % max(1, len(missing) - MAX_LOOKED_AT + 1)
        sightings = self._session.observer.look(self._store, missing[first : first + MAX_LOOKED_AT], now_s)
        if is_my_turn and not self._give_up(wait, sightings, now_s) and before_me == 0:
            self._say(wait, sightings, now_s)

    def _examine_first(self, wait: OpenWait, master: int, now_s: float) -> None:
        sightings = self._session.observer.look(self._store, [master], now_s)
        is_first_here = self._rank == master + 1 or self._session.placement.local_rank <= 1
        if not self._give_up(wait, sightings, now_s) and is_first_here:
            self._say(wait, sightings, now_s)

    def _give_up(self, wait: OpenWait, sightings: Mapping[int, Sighting], now_s: float) -> bool:
        """Condemn the gates that can never be passed, mine and theirs, and say whether there are any."""
        mine = self._session.heart.told_wait(wait, now_s)
        ended = {rank: sighting for rank, sighting in sightings.items() if sighting.has_ended}
        if ended:
            self._condemn([_Verdict(mine, self._rank, ended)])
            return True
        if self._session.journal.num_threads > 1:
            return False
        lost: dict[int, Sighting] = {}
        verdicts = []
        for rank, sighting in sightings.items():
            theirs = self._wait_for_me(sighting, now_s, 0)
            if theirs is not None and deadlock.gives_up_first(mine, theirs):
                lost[rank] = sighting
            if theirs is not None and theirs.key and deadlock.gives_up_first(theirs, mine):
                me = Sighting(Beat(0.0, 0.0, "", "", 0, 0, wait=mine, calls=self._session.journal.latest()))
                verdicts.append(_Verdict(theirs, rank, {self._rank: me}))
        if lost:
            verdicts.append(_Verdict(mine, self._rank, lost))
        self._condemn(verdicts)
        return bool(verdicts)

    def _wait_for_me(self, sighting: Sighting, now_s: float, depth: int) -> Wait | None:
        """Return the wait that a rank is in, or follows others in, and that only this rank can end."""
        beat = sighting.beat
        if beat is None or beat.wait is None or beat.is_threaded:
            return None
        wait = beat.wait
        if deadlock.needs(wait, self._rank, self._own):
            is_decided = bool(wait.key) and self._store.check([go_key(wait.key)])
            return None if is_decided else wait
        if wait.master is None or depth == MAX_CHAIN:
            return None
        further = self._session.observer.look_at(self._store, wait.master, now_s)
        return self._wait_for_me(further, now_s, depth + 1)

    def _condemn(self, verdicts: list[_Verdict]) -> None:
        """Release all who wait at some gates, and whoever comes later, with an error.

        Unless a rank has come there in the meantime that was taken for lost.
        """
        tally, store = self._session.tally, self._store
        gates = [verdict for verdict in verdicts if verdict.wait.master is None]
        for verdict in gates:
            tally.condemn(store, verdict.wait.key, list(tally.missing(store, verdict.wait.key)))
        if gates:
            # Whoever else finds it out does the same; the first one's words stand.
            time.sleep(CONDEMN_DELAY_S)
        for verdict in verdicts:
            is_first_block = verdict.wait.master is not None
            if is_first_block or verdict.lost.keys() & tally.missing(store, verdict.wait.key):
                store.compare_set(go_key(verdict.wait.key), "", encode_result(verdict.result()))

    def _say(self, wait: OpenWait, sightings: Mapping[int, Sighting], now_s: float) -> None:
        """Write a line about a long wait into the log."""
        if now_s < self._say_s:
            return
        self._say_s = now_s + SAY_EVERY_S
        _log.warning(
            "rank %d has waited for %.0f s in %s: %s",
            self._rank,
            now_s - wait.entered_s,
            gate_text(wait.kind, wait.label),
            fates_text(wait.kind, wait.label, sightings),
        )


class _OwnCalls:
    """What this rank has called, as `deadlock` asks for it."""

    def __init__(self, session: GateSession, collectives: OwnCollectives) -> None:
        self._journal = session.journal
        self._collectives = collectives

    def count(self, kind: GateKind, label: str) -> int:
        return self._journal.count(kind, label)

    def finished(self, kind: GateKind, label: str) -> int:
        return self._journal.finished(kind, label)

    def collectives(self, group: str) -> int:
        return self._collectives.called(group)


def _num_here_before(rank: int, missing: list[int]) -> int:
    """Return how many lower ranks of the same counter have come."""
    first = rank // ARITY * ARITY
    return rank - first - sum(first <= other < rank for other in missing)
