"""Measures a rank's progress: its steps, how long they take, and since when the rank stands still.

Pure: time is an argument. `ddpcore.probe.rank_state` and `ddpcore.probe.group_track` are made of these parts.

`Standing` holds since when the main thread stands, and what it waits for outside collectives. `StepClock` holds how
long steps take and for how long the rank has made none.

`CallsAtSteps` holds how many collectives of a group this rank had called at the end of each step. The recorder reports
when each collective was called, the program when each step was over: a step's count is the seq of the last call before
its end. A rank that makes one call fewer than the others differs from them in every later step.

`step_ages` is when the latest steps ended: only so can ranks be compared whose reports are of different moments.

`OptimizerSteps` counts the training steps of a program that reports none, by what its optimizers do.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from ddpcore.probe.samples import NOTHING, StepAges, StepEnd
from ddpcore.wire import StepCalls

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from ddpcore.probe.samples import RecorderEntry, Sample, StepMark
    from ddpcore.wire import PeerWait

MAX_GAP_S = 1.0
"""Gap in seconds between samples beyond which the process was frozen: the rest is no time of the rank's."""


class Standing:
    """What successive looks at a main thread have found."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._last_s: float | None = None
        self._since: dict[str, tuple[Hashable, float]] = {}
        """Last observation of each kind, and its time."""
        self._had_nothing = True

    def observe(self, sample: Sample, *, has_moved: bool, is_pending: bool, is_held_up: bool) -> None:
        """Take one tick's sample, in the order of time.

        `has_moved`: a collective has been called or completed since the sample before. `is_pending`: one is not over.
        `is_held_up`: the rank waits in it for others.
        """
        now_s, look = sample.now_s, sample.main
        gap_s = 0.0 if self._last_s is None else min(max(now_s - self._last_s, 0.0), MAX_GAP_S)
        self._last_s = now_s
        steps_done = sample.step.steps_done if sample.step else 0
        if sample.num_peer_calls:
            has_moved = self._is_new("calls", sample.num_peer_calls, now_s) or has_moved
        self._clock.observe(now_s, steps_done, 0.0 if is_held_up else gap_s, has_moved=has_moved)
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
        """Return whether there has been no step, no collective, no send and no receive for a while."""
        return self._clock.is_still(now_s)

    def report(self, sample: Sample, gpu_wait: PeerWait | None = None) -> dict[str, Any]:
        """Return the fields of a `RankReport` about progress; `gpu_wait` is what the GPU stands in."""
        now_s, look = sample.now_s, sample.main
        fields: dict[str, Any] = {
            "stood_s": self._for_s("mark", now_s),
            "step_age_s": self._clock.age_s(now_s),
            "step_limit_s": self._clock.limit_s,
            "peer_calls": list(sample.peer_calls),
            "step_ages_ms": list(sample.step_ages.ages_ms),
            "step_stride": sample.step_ages.stride,
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
        """Note what is seen, None for nothing, and return whether it is something else than before."""
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


MIN_STEPS = 2
"""Steps before their usual time is known: the first one takes longer than those after it."""
MIN_MOVES = 3
"""The same in a program that makes no steps."""
USUAL_FACTOR = 10.0
"""Usual steps that are more than any step takes."""
LONGEST_FACTOR = 2.0
"""Factor of the longest time between two steps so far, with all between them: an evaluation, a checkpoint."""
LEAST_LIMIT_S = 1.0
"""Seconds that a step may always take."""
STILL_S = 2.0
"""Seconds without a step or a collective after which the main thread is looked at more closely."""
_SMOOTHING = 0.1
"""Weight of the latest step in the usual time."""


class StepClock:
    """Measures the time between steps; a program that makes none is measured by its collectives.

    Time in which the rank waits in a collective is another's: it makes no step long.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._moved_s = 0.0
        self._steps_done = 0
        self._num_seen = 0
        self._own_s = 0.0
        """Own time in seconds since the last step."""
        self._usual_s = 0.0
        self._longest_s = 0.0

    def observe(self, now_s: float, steps_done: int, own_s: float, *, has_moved: bool) -> None:
        """Take a sample.

        `steps_done` is 0 until the first step. `own_s` is the time since the sample before that was no wait in a
        collective. `has_moved`: a collective has been called or completed since then.
        """
        if self._began_s is None:
            self._began_s = self._moved_s = now_s
        if steps_done and not self._steps_done:
            # The first step is known: what the collectives before it showed is of another measure.
            self._num_seen, self._usual_s, self._longest_s, self._own_s = 0, 0.0, 0.0, 0.0
        num_steps = max(0, steps_done - self._steps_done) if steps_done else int(has_moved)
        self._steps_done = steps_done
        self._own_s += own_s
        if num_steps:
            if self._num_seen:
                step_s = self._own_s / num_steps
                known_s = self._usual_s
                self._usual_s = step_s if self._num_seen == 1 else known_s + _SMOOTHING * (step_s - known_s)
                self._longest_s = max(self._longest_s, self._own_s if num_steps == 1 else step_s)
            self._num_seen += num_steps if self._steps_done else 1
            self._own_s = 0.0
        if num_steps or has_moved:
            self._moved_s = now_s

    def is_still(self, now_s: float) -> bool:
        """Return whether there has been neither a step nor a collective for a while."""
        return self._began_s is not None and now_s - self._moved_s >= STILL_S

    @property
    def moved_s(self) -> float:
        """When there was a step or a collective last, or the first sample."""
        return self._moved_s

    def age_s(self, now_s: float) -> float:
        """Return the time since the last step or collective; 0 before there were a few."""
        return max(0.0, now_s - self._moved_s) if self._is_known else 0.0

    @property
    def limit_s(self) -> float:
        """How long a step may take at most; 0 before there were a few."""
        if not self._is_known:
            return 0.0
        return max(USUAL_FACTOR * self._usual_s, LONGEST_FACTOR * self._longest_s, LEAST_LIMIT_S)

    @property
    def _is_known(self) -> bool:
        return self._num_seen >= (MIN_STEPS if self._steps_done else MIN_MOVES)


NUM_LATEST = 4
"""Latest steps that are kept."""
NUM_OLDER = 12
"""Older steps that are kept: those that are multiples of the highest powers of two, so that all ranks keep the same."""


class CallsAtSteps:
    """Seqs of one group by step."""

    __slots__ = ("_pairs", "_seq_of")

    def __init__(self) -> None:
        self._seq_of: dict[int, int] = {}
        self._pairs: list[StepCalls] = []

    def learn(self, entries: Sequence[RecorderEntry], ends: Sequence[StepEnd]) -> None:
        """Take the group's collectives in the ring, and the ends of the latest steps, both in the order of time."""
        calls = sorted((entry for entry in entries if entry.called_us > 0), key=_called_us)
        if not calls:
            return
        times = [entry.called_us for entry in calls]
        for end in _ascending(ends):
            place = bisect_right(times, end.at_us)
            if place > 0:
                seq = calls[place - 1].seq
                if self._seq_of.get(end.step, seq) != seq:
                    # The program counts its steps from the start again.
                    self._seq_of = {known: before for known, before in self._seq_of.items() if known < end.step}
                self._seq_of[end.step] = seq
        self._forget_undone()
        self._thin()
        self._pairs = [StepCalls(step, seq) for step, seq in sorted(self._seq_of.items())]

    def report(self) -> list[StepCalls]:
        """Return what is kept, ascending."""
        return self._pairs

    def _forget_undone(self) -> None:
        """Forget higher steps with lower seqs: the program has begun a new count since."""
        latest_seq = max(self._seq_of.values(), default=0)
        for step in sorted(self._seq_of, reverse=True):
            if self._seq_of[step] >= latest_seq:
                break
            del self._seq_of[step]

    def _thin(self) -> None:
        older = sorted(self._seq_of)[:-NUM_LATEST]
        kept = sorted(older, key=_weight, reverse=True)[:NUM_OLDER]
        for step in set(older) - set(kept):
            del self._seq_of[step]


def _ascending(ends: Sequence[StepEnd]) -> Sequence[StepEnd]:
    """Return the latest ends whose steps ascend."""
    first = len(ends)
    while first > 0 and ends[first - 1].step >= 0 and (first == len(ends) or ends[first - 1].step < ends[first].step):
        first -= 1
    return ends[first:]


def _weight(step: int) -> tuple[int, int]:
    """Return the highest power of two that divides a step, then the step itself."""
    return (step & -step if step else 1 << 62, step)


def _called_us(entry: RecorderEntry) -> int:
    return entry.called_us


MAX_AGES = 16
MAX_AGE_MS = 2_000
"""Steps that ended longer ago are the same for all ranks whose reports are current."""
MAX_STRIDE = 2**31 - 1


def step_ages(last: StepMark | None, ends: Sequence[StepEnd], now_us: int) -> StepAges:
    """Return when the latest steps ended, as far back as they follow each other in equal strides.

    `ends` are in the order of time. The end of the last step may be missing there, and later ones may be there: the
    main thread goes on while the probe reads.
    """
    if last is None:
        return StepAges()
    known = len(ends)
    while known > 0 and ends[known - 1].step > last.step:
        known -= 1
    latest_first = list(ends[:known][::-1])
    if not latest_first or latest_first[0].step != last.step:
        latest_first.insert(0, StepEnd(last.step, now_us))
    stride = latest_first[0].step - latest_first[1].step if len(latest_first) > 1 else 0
    ages_ms: list[int] = []
    for end, before in pairwise(latest_first[: MAX_AGES + 1]):
        age_ms = (now_us - end.at_us) // 1000
        is_in_order = (ages_ms[-1] if ages_ms else 0) <= age_ms <= MAX_AGE_MS
        if end.step - before.step != stride or not 1 <= stride <= MAX_STRIDE or before.step < 0 or not is_in_order:
            break
        ages_ms.append(age_ms)
    return StepAges(stride, tuple(ages_ms)) if ages_ms else StepAges()


MAX_OPTIMIZERS = 65_536
"""Optimizers distinguished within a step; a program with one for each parameter has thousands."""


class OptimizerSteps:
    """Counts rounds of optimizers: a step begins when an optimizer steps that has already stepped in the last one.

    So two optimizers that take turns make one step together; where one steps five times as often as the other, it is
    what counts; micro-batches whose gradients are only added up do not; and an optimizer may be replaced by another.
    """

    __slots__ = ("_stepped", "num_steps")

    def __init__(self) -> None:
        self.num_steps = 0
        self._stepped: set[int] = set()

    def note(self, optimizer_id: int) -> bool:
        """Take an optimizer's step; return whether a new step of the training began with it.

        The `id()` keeps no optimizer alive. One that gets the number of another that is gone counts as the same, which
        is right as often as not.
        """
        stepped = self._stepped
        if stepped and optimizer_id not in stepped and len(stepped) < MAX_OPTIMIZERS:
            stepped.add(optimizer_id)
            return False
        stepped.clear()
        stepped.add(optimizer_id)
        self.num_steps += 1
        return True
