"""Since when a rank stands, and what it waits for outside collectives. Pure; a part of `ddpcore.probing.rank_state`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ddpcore.probing.samples import NOTHING
from ddpcore.probing.step_clock import StepClock

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ddpcore.probing.samples import Sample
    from ddpcore.wire import PeerWait

MAX_GAP_S = 1.0
"""A longer gap between samples is a frozen process: the rest of it is no time of the rank's."""


class Standing:
    """What the looks at a main thread say, one after another."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._last_s: float | None = None
        self._since: dict[str, tuple[Hashable, float]] = {}
        """What was seen last of each kind, and since when."""
        self._had_nothing = True

    def observe(self, sample: Sample, *, has_moved: bool, is_pending: bool) -> None:
        """Take one tick's sample.

        Args:
            sample: Samples come in the order of their time.
            has_moved: A collective has been called or completed since the one before.
            is_pending: A collective is called and not over.
        """
        now_s, look = sample.now_s, sample.main
        gap_s = 0.0 if self._last_s is None else min(max(now_s - self._last_s, 0.0), MAX_GAP_S)
        self._last_s = now_s
        steps_done = sample.step.steps_done if sample.step else 0
        if sample.num_peer_calls:
            has_moved = self._is_new("calls", sample.num_peer_calls, now_s) or has_moved
        self._clock.observe(now_s, steps_done, 0.0 if is_pending else gap_s, has_moved=has_moved)
        self._is_new("place", sample.reading.place, now_s)
        if look is NOTHING and self._had_nothing:
            return
        self._had_nothing = look is NOTHING
        self._is_new("mark", look.mark or None, now_s)
        # While a collective is pending nobody knows which of the two a `Work.wait()` is about.
        calls = tuple(look.peer_wait.calls) if look.peer_wait is not None and not is_pending else ()
        self._is_new("peer", (calls, sample.num_peer_calls) if calls else None, now_s)
        self._is_new("child", look.child_wait, now_s)
        self._is_new("exit", look.exit_wait, now_s)

    def is_still(self, now_s: float) -> bool:
        """Say whether there has been no step, no collective, no send and no receive for a while."""
        return self._clock.is_still(now_s)

    def report(self, sample: Sample, gpu_wait: PeerWait | None = None) -> dict[str, Any]:
        """Return the fields of a `RankReport` that tell of it.

        Args:
            sample: The last one.
            gpu_wait: The sends or receives that the GPU stands in.
        """
        now_s, look = sample.now_s, sample.main
        fields: dict[str, Any] = {
            "stood_s": self._for_s("mark", now_s),
            "step_age_s": self._clock.age_s(now_s),
            "step_limit_s": self._clock.limit_s,
            "peer_calls": list(sample.peer_calls),
        }
        for kind, wait in (("peer", look.peer_wait), ("child", look.child_wait), ("exit", look.exit_wait)):
            if wait is not None and (for_s := self._for_s(kind, now_s)) > 0.0:
                fields[f"{kind}_wait"] = msgspec.structs.replace(wait, waiting_s=for_s)
        if look.store_meeting is not None:
            fields["store_meeting"] = look.store_meeting
        if gpu_wait is not None:
            fields["peer_wait"] = gpu_wait
        return fields

    def _is_new(self, kind: str, seen: Hashable, now_s: float) -> bool:
        """Note what is seen, None for nothing, and say whether it is something else than before."""
        known = self._since.get(kind)
        if known is not None and known[0] == seen:
            return False
        is_first = seen is not None and (known is None or known[0] is None)
        self._since[kind] = (seen, self._came_s(now_s) if is_first and kind not in {"place", "calls"} else now_s)
        return known is not None

    def _came_s(self, now_s: float) -> float:
        """Return when the main thread has come to where a first look finds it: it stands at that line since then."""
        return max(self._since.get("place", (None, now_s))[1], self._clock.moved_s)

    def _for_s(self, kind: str, now_s: float) -> float:
        seen, since_s = self._since.get(kind, (None, now_s))
        return 0.0 if seen is None else max(0.0, now_s - since_s)
