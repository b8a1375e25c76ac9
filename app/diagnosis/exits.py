"""Which death came first by its own cause, and which were its consequence.

When a rank dies its peers lose their connections and raise, and the launchers end the rest by SIGTERM, later by
SIGKILL. torchrun blames the first non-zero exit that it notices; a rank that left with code 0 is never among those.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec

from agent.wire.logs import LOST_PEER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.diagnosis.rank_facts import Thresholds
    from app.model.job_model import Death

TOLD_SIGNALS = frozenset({int(signal.SIGTERM), int(signal.SIGKILL)})
"""By which a launcher or an agent ends a rank."""


class Exits(msgspec.Struct, frozen=True):
    """The deaths of a job, sorted out."""

    culprits: list[Death]
    """Those that died first by their own cause."""
    lost_connection: list[int]
    """Ranks that ended because they lost a connection."""
    early_leavers: list[Death]
    """Ranks that left with code 0 about when one lost its connection, when no other cause is known."""
    first_bad_s: float | None
    """When the first rank ended badly; None when none did."""


NO_EXITS = Exits([], [], [], None)


def is_clean(death: Death) -> bool:
    """Return whether a rank ended with code 0."""
    return death.exit.signal is None and death.exit.code == 0


def has_left(death: Death, farewells: frozenset[int]) -> bool:
    """Return whether a rank ended in good order, or was on the way to it when its launcher ended it."""
    return is_clean(death) or (_was_ending(death, farewells) and not death.exit.error)


def has_failed(death: Death, farewells: frozenset[int]) -> bool:
    """Return whether a rank was on the way out by an exception of its own when its launcher ended it.

    Those to whom it had said so by then may well be out before it, and the launcher acts on the first.
    """
    return _was_ending(death, farewells) and bool(death.exit.error) and not has_lost_peer(death)


def _was_ending(death: Death, farewells: frozenset[int]) -> bool:
    return death.rank in farewells and death.exit.signal == signal.SIGTERM


def is_unknown(death: Death) -> bool:
    """Return whether it was not learnt how a rank ended."""
    return death.exit.signal is None and death.exit.code is None


def has_lost_peer(death: Death) -> bool:
    """Return whether a rank says that it lost another."""
    return not is_clean(death) and LOST_PEER.search(death.exit.words) is not None


def is_on_request(death: Death, stop_began_s: float, thresholds: Thresholds) -> bool:
    """Return whether a rank ended because its job was told to."""
    margin_s = thresholds.short_s if death.exit.signal in TOLD_SIGNALS else 0.0
    return death.at_s >= stop_began_s - margin_s


class ExitContext(msgspec.Struct, frozen=True):
    """What is to be known beside the deaths.

    Attributes:
        stop_began_s: When the job was told to end; infinity while it was not.
        has_other_cause: Something else explains lost connections: a lost node, or a verdict that stood before.
        called_less: Of the ranks that left with code 0, those known to have called fewer collectives than one that
            ended badly. Counts are seen now and then: a rank that is not among them may have called less too.
        now_s: Now.
        world_size: Of the job.
        farewells: Ranks whose interpreters had begun to end, by their own last word.
    """

    stop_began_s: float
    has_other_cause: bool
    called_less: frozenset[int]
    now_s: float
    world_size: int = 0
    farewells: frozenset[int] = frozenset()


def sort_out(deaths: Mapping[int, Death], context: ExitContext, thresholds: Thresholds) -> Exits:
    """Return who died first, and of what.

    A death that looks like a consequence is not told before its cause has had `grace_s` to be reported; when no cause
    comes, the first of them is the best that is known.
    """
    now_s = context.now_s
    told = [death for death in deaths.values() if not is_on_request(death, context.stop_began_s, thresholds)]
    known = sorted((d for d in told if not is_clean(d) and not is_unknown(d)), key=_by_time)
    if not known:
        return NO_EXITS
    first_s = known[0].at_s
    bad = sorted(known + [d for d in told if is_unknown(d) and d.at_s <= first_s + thresholds.instant_s], key=_by_time)
    first_s = bad[0].at_s
    lost_connection = [death.rank for death in bad if has_lost_peer(death)]
    first = [death for death in bad if death.at_s <= first_s + thresholds.instant_s]
    own = [death for death in first if _has_own_cause(death, thresholds, now_s)]
    if own:
        return Exits(own, lost_connection, [], first_s)
    # Whoever closes its connections dies a little later than those that lose them by it.
    until_s = first[-1].at_s + thresholds.grace_s
    if failed := [death for death in told if has_failed(death, context.farewells) and death.at_s <= until_s]:
        return Exits(sorted(failed, key=_by_time), lost_connection, [], first_s)
    leavers = [death for death in told if has_left(death, context.farewells) and death.at_s <= until_s]
    # When nearly all have left in good order, the one that lost them has only been the last to end.
    is_end_of_all = len(leavers) > 1 and 0 < context.world_size <= len(leavers) + len(bad)
    if leavers and not is_end_of_all and any(has_lost_peer(death) for death in first):
        surely = [death for death in leavers if death.rank in context.called_less]
        return Exits([], lost_connection, sorted(surely or leavers, key=_by_time), first_s)
    is_early = now_s - first_s < thresholds.grace_s or context.has_other_cause
    return Exits([] if is_early else first[:1], lost_connection, [], first_s)


def _by_time(death: Death) -> tuple[float, int]:
    return (death.at_s, death.rank)


def _has_own_cause(death: Death, thresholds: Thresholds, now_s: float) -> bool:
    """Return whether nothing says that a death is another's consequence.

    An exit code comes before its error line is read: until then it is unclear.
    """
    if has_lost_peer(death) or death.exit.signal == signal.SIGTERM:
        return False
    is_unclear = death.exit.signal is None and not death.exit.error
    return not is_unclear or now_s - death.at_s >= thresholds.grace_s
