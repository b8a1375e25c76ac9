"""Smooths signals, and finds when each last changed lastingly.

Pure: there is no clock, `now_s` is given. Memory and time of a sample do not grow.

A signal is seen as a row of levels. A level has a mean and two mean deviations: of samples, and of the smoothed value,
which is the larger the slower the noise. Samples change the level when they lie off it, to one side, by more than these
deviations and the floor of the signal allow, and go on to do so: three samples and `LASTING_S` at least, and longer
after short changes of that size, which are the signal's habit. The change is dated to the first of these samples.

One burst of a signal without bounds would fill its average for many seconds. So a sample of `BURSTING` counts there up
to what three of the last samples have reached: a burst that comes again counts, one alone does not.

The level before the change is the base: a change back to it ends the change, unless the base was known for a shorter
time than what followed. The start of a program is no base for its training.
"""

from __future__ import annotations

from collections import deque
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.signals import RATES, Reading, Signal

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

SMOOTHING_S = 5.0
"""Length of the moving average whose samples are as old, on average, as those in a reading."""
BASELINE_S = 60.0
"""Time constant in seconds of a level's mean and deviations."""
LASTING_S = 3.0
LASTING_SAMPLES = 3
"""A change has lasted so long, and in so many samples, when it is found; twice as many if they may be noise."""
LEAK = 1.5
"""Seconds by which a second on the level shortens what was about to be a change."""
YOUNG_S, YOUNG_SAMPLES = 10.0, 10.0
"""Seconds and samples by which slow noise is known half."""
KNOWN_S, KNOWN_SAMPLES = 10.0, 15.0
"""Seconds and samples before which a first level does not change."""
STILL_PART = 0.4
"""Part of these that is enough where all samples were the same."""
SHORT_BASE_PARTS = 2.0
"""A base is taken to be known for too short a time when the change has lasted so many times longer."""
MIN_NEW_BASE_S, NEW_BASE_S = 120.0, 1800.0
"""Age in seconds of a change whose level becomes the base: `NEW_BASE_PARTS` times as long as the base was known, within
these."""
NEW_BASE_PARTS = 4.0
STALE_S = 30.0
"""Age in seconds of the last sample from which on a signal is not known."""
MAX_STEP_S = 5.0
"""Seconds that one sample stands for at most."""
MAX_GAP_S = 15.0
"""A longer time without samples interrupts what was about to be a change."""
GAP_WEIGHT_S = 1.0
"""Seconds that the sample after such a time stands for."""
NUM_SPREADS = 2.0
"""Standard deviations that a sample lies off its level at least."""
NUM_SMOOTH_SPREADS = 6.0
"""Standard deviations of the smoothed value that a sample lies off its level at least."""
MAX_BURST_S = 30.0
"""A longer change was none of the short ones that a signal makes again and again."""
BURST_MEMORY_S = 600.0
BURST_PART = 1.5
"""Size, in sizes of the last short change, up to which a change may be another one of them."""
NEUTRAL_PART = 0.5
"""Part of its floor below which a rate is left out of a report."""
BURSTING = frozenset(
    {
        *(Signal.MAJOR_FAULTS, Signal.LOG_LINES, Signal.PCIE_REPLAYS, Signal.NVLINK_ERRORS, Signal.GPU_ECC_CORRECTED),
        *(Signal.SWAPPED, Signal.NIC_ERRORS, Signal.NIC_DROPS, Signal.TCP_RETRANSMITS),
    }
)
"""Signals of which a usual difference is a small part of what one sample may be."""
NUM_RECENT = 20
"""Samples among which a burst is to come again: some training steps take many seconds."""
MAX_VALUE = 1e18
_SIGMA = 1.2533
"""Standard deviation of a normal distribution in mean deviations."""
_CLIP = 3.0


class Floor(NamedTuple):
    """What counts as a change at least: in the signal's unit, and as part of its level."""

    absolute: float
    relative: float = 0.0


FLOORS = {
    Signal.CPU_WAIT: Floor(0.05),
    Signal.CPU_THROTTLED: Floor(0.03),
    Signal.CPUS_ALLOWED: Floor(0.5),
    Signal.FAR_FROM_GPU: Floor(0.5),
    Signal.BLOCKED: Floor(0.1),
    Signal.MAJOR_FAULTS: Floor(20.0, 0.3),
    Signal.GC_PAUSE: Floor(0.02),
    Signal.GIL_WAIT: Floor(0.1),
    Signal.LOG_LINES: Floor(20.0, 0.3),
    Signal.GPU_CLOCK: Floor(30e6, 0.03),
    Signal.GPU_MEMORY_CLOCK: Floor(30e6, 0.03),
    Signal.GPU_TEMPERATURE: Floor(5.0),
    Signal.GPU_THERMAL: Floor(0.05),
    Signal.GPU_POWER_CAP: Floor(0.1),
    Signal.GPU_POWER_BRAKE: Floor(0.05),
    Signal.GPU_HW_SLOWDOWN: Floor(0.05),
    Signal.GPU_POWER_LIMIT: Floor(5.0),
    Signal.PCIE_WIDTH: Floor(0.5),
    Signal.PCIE_GENERATION: Floor(0.5),
    Signal.PCIE_REPLAYS: Floor(1.0, 0.3),
    Signal.NVLINKS: Floor(0.5),
    Signal.NVLINK_ERRORS: Floor(0.2, 0.3),
    Signal.GPU_ECC_CORRECTED: Floor(0.2, 0.3),
    Signal.GPU_ROW_REMAP: Floor(0.5),
    Signal.GPU_OTHERS: Floor(0.5),
    Signal.CPU_OTHERS: Floor(0.05),
    Signal.CPU_STEAL: Floor(0.03),
    Signal.CPU_PRESSURE: Floor(0.1),
    Signal.MEMORY_PRESSURE: Floor(0.02),
    Signal.IO_PRESSURE: Floor(0.1),
    Signal.SWAPPED: Floor(1e6, 0.3),
    Signal.CPU_CLOCK: Floor(50e6, 0.05),
    Signal.NIC_SPEED: Floor(1e6, 0.01),
    Signal.NIC_ERRORS: Floor(1.0, 0.3),
    Signal.NIC_DROPS: Floor(5.0, 0.3),
    Signal.TCP_RETRANSMITS: Floor(0.01, 0.3),
}
"""Smaller changes than these are none, however still the signal was before."""
NEUTRAL = {signal: NEUTRAL_PART * FLOORS[signal].absolute for signal in RATES}
"""Values of rates below which they are left out of a report: 0 for who reads it."""


class _Level:
    """A level: what is known of the samples on it."""

    __slots__ = ("deviation", "known_s", "mean", "noise_known_s", "smooth_deviation")

    def __init__(self, mean: float, known_s: float = 0.0, like: _Level | None = None) -> None:
        """It is first taken to be as noisy as the level before, if there is one."""
        self.mean = mean
        self.known_s = known_s
        """Seconds of samples."""
        self.deviation: float = like.deviation if like is not None else 0.0
        """Mean deviation of samples."""
        self.smooth_deviation: float = like.smooth_deviation if like is not None else 0.0
        """Mean deviation of the smoothed value."""
        self.noise_known_s: float = known_s + (like.noise_known_s if like is not None else 0.0)
        """Seconds of samples from which the deviations come."""

    def is_known(self, period_s: float) -> bool:
        """Return whether it may change: one that has been still so far is known sooner."""
        in_part = 1.0 if self.deviation else STILL_PART
        return self.known_s >= in_part * max(KNOWN_S, KNOWN_SAMPLES * period_s)

    def near(self, floor: float, period_s: float) -> float:
        """Return how far off it a mean over some seconds lies by chance at most, given the time between samples."""
        # What is known of few seconds or samples is known badly: slow noise has not shown yet.
        young_s = YOUNG_S + YOUNG_SAMPLES * period_s
        spread = _SIGMA * self.smooth_deviation * (1.0 + young_s / (self.noise_known_s + 1.0))
        return max(floor, NUM_SMOOTH_SPREADS * spread)


class _Track:
    """One signal of one key."""

    __slots__ = (
        *("_absolute", "_at_s", "_base", "_burst_at_s", "_burst_s", "_burst_size", "_is_run_far", "_level", "_onset_s"),
        *("_recent", "_relative", "_run_num", "_run_s", "_run_side", "_run_sum", "_run_weight_s", "_since_s"),
        "_smooth",
    )

    def __init__(self, signal: Signal, value: float, now_s: float) -> None:
        self._absolute, self._relative = FLOORS[signal]
        self._at_s = now_s
        self._recent: deque[float] | None = deque(maxlen=NUM_RECENT) if signal in BURSTING else None
        self._smooth = self._counted(value)
        self._level = _Level(value)
        self._base: _Level | None = None
        self._since_s = now_s
        # A run of samples off the level; its side is 0 where there is none.
        self._run_side = 0
        self._is_run_far = False
        self._run_num = 0
        self._run_s = self._run_weight_s = self._run_sum = 0.0
        self._onset_s = now_s
        # The longest short change of late.
        self._burst_s = self._burst_size = 0.0
        self._burst_at_s = now_s

    def take(self, value: float, now_s: float) -> None:
        """Take a finite sample that is not negative."""
        before_s = self._at_s
        passed_s = now_s - before_s
        self._at_s = now_s
        if passed_s <= 0.0:
            self._turn_back(passed_s)
            return
        counted = self._counted(value)
        level = self._level
        weight_s = min(MAX_STEP_S, passed_s)
        if passed_s > MAX_GAP_S:
            self._run_side, before_s, weight_s = 0, now_s, GAP_WEIGHT_S
        elif value == level.mean and not (self._run_side or level.deviation or level.smooth_deviation or self._base):
            level.known_s += weight_s  # a still signal: most are 0 all the time
            level.noise_known_s += weight_s
            self._smooth += (counted - self._smooth) * weight_s / (SMOOTHING_S / 2 + weight_s)
            return
        self._smooth += (counted - self._smooth) * weight_s / (SMOOTHING_S / 2 + weight_s)
        side = self._side(level, value - level.mean, weight_s)
        if side and (self._base is not None or level.is_known(weight_s)):
            self._extend_run(side, value, weight_s, before_s)
        elif self._run_side:
            self._shorten_run(value, weight_s)
        else:
            self._learn(level, value - level.mean, weight_s)

    def is_known(self, now_s: float) -> bool:
        """Return whether there was a sample of late."""
        return now_s - self._at_s <= STALE_S

    def reading(self, now_s: float, neutral: float) -> Reading | None:
        """Return what is sent of it; None of what is not known, or is below `neutral`."""
        if not self.is_known(now_s) or self._smooth < neutral:
            return None
        age_s = max(0.0, now_s - self._since_s)
        if self._base is None or age_s >= _new_base_s(self._base):
            return Reading(self._smooth)
        return Reading(self._smooth, self._base.mean, age_s)

    def _counted(self, value: float) -> float:
        """Return what a sample counts in the average."""
        if self._recent is None:
            return value
        self._recent.append(value)
        return min(value, self._reached())

    def _reached(self) -> float:
        """Return what as many of the last samples as a change takes have reached."""
        if self._recent is None:
            return MAX_VALUE
        highest = nlargest(LASTING_SAMPLES, self._recent)
        return highest[-1] if len(highest) == LASTING_SAMPLES else 0.0

    def _side(self, level: _Level, off: float, weight_s: float) -> int:
        """Return to which side a sample lies off its level by more than chance: 1 or -1, else 0."""
        side = 1 if off > 0.0 else -1
        floor = self._floor(level)
        slow = level.near(floor, weight_s)
        if side * off >= max(slow, NUM_SPREADS * _SIGMA * level.deviation):
            return side
        # A small step beneath noise shows in the smoothed value; that alone is slow to see an end.
        return side if side * off >= floor / 2 and side * (self._smooth - level.mean) >= slow else 0

    def _extend_run(self, side: int, value: float, weight_s: float, before_s: float) -> None:
        """Take a sample off the level; `before_s` is when the one before was taken."""
        level = self._level
        if side != self._run_side:
            self._run_side, self._run_num, self._run_s, self._is_run_far = side, 0, 0.0, False
        # Samples far outside its noise are unlikely by themselves; others need to be more.
        is_far = side * (value - level.mean) >= 2 * NUM_SPREADS * _SIGMA * level.deviation
        self._run_num += 2 if is_far else 1
        if not self._run_s or (is_far and not self._is_run_far):
            # A large change begins with its first far sample: those before it were noise.
            self._onset_s, self._run_weight_s, self._run_sum = before_s, 0.0, 0.0
        self._is_run_far |= is_far
        self._run_s += weight_s
        self._run_weight_s += weight_s
        self._run_sum += value * weight_s
        if self._run_num >= 2 * LASTING_SAMPLES and self._run_s >= LASTING_S and self._has_lasted():
            self._change()

    def _shorten_run(self, value: float, weight_s: float) -> None:
        """Take a sample on the level while there is a run off it."""
        level = self._level
        self._run_s -= LEAK * weight_s
        self._run_weight_s += weight_s
        self._run_sum += value * weight_s
        if self._run_s <= 0.0:
            self._run_side = 0  # its samples belonged to the level
            if self._run_num >= 2 * LASTING_SAMPLES:
                self._burst_at_s = self._at_s
            self._learn(level, self._run_sum / self._run_weight_s - level.mean, self._run_weight_s)

    def _floor(self, level: _Level) -> float:
        return max(self._absolute, self._relative * level.mean)

    def _learn(self, level: _Level, off: float, weight_s: float) -> None:
        if level.known_s >= KNOWN_S:
            # One wild sample is to move neither mean nor deviations by much.
            most = _CLIP * max(_SIGMA * level.deviation, self._absolute / _CLIP)
            off = most if off > most else max(off, -most)
        known_s = level.known_s / 2  # later samples of a young level count for more
        part = weight_s / (min(BASELINE_S, known_s) + weight_s)
        level.known_s += weight_s
        level.noise_known_s += weight_s
        level.mean += off * part
        level.deviation += (abs(off) - level.deviation) * part
        level.smooth_deviation += (
            min(abs(self._smooth - level.mean), abs(off) + level.deviation) - level.smooth_deviation
        ) * part
        if self._base is not None and self._at_s - self._since_s >= _new_base_s(self._base):
            self._base = None

    def _has_lasted(self) -> bool:
        """Return whether the run is longer than the short changes of its size that this signal makes."""
        if not self._burst_s:
            return True
        if self._at_s - self._burst_at_s > BURST_MEMORY_S:
            self._burst_s = 0.0
            return True
        size = abs(self._run_sum / self._run_weight_s - self._level.mean)
        return size > BURST_PART * self._burst_size or self._run_s >= LASTING_S + 2.0 * self._burst_s

    def _change(self) -> None:
        """The run becomes the level."""
        level, base = self._level, self._base
        mean = self._run_sum / self._run_weight_s
        self._smooth = min(mean, self._reached())
        new = _Level(mean, self._run_weight_s, level)
        self._run_side = 0
        if base is None:
            self._base, self._level, self._since_s = level, new, self._onset_s
            return
        off, off_before = mean - base.mean, level.mean - base.mean
        if abs(off) < min(base.near(self._floor(base), MAX_STEP_S), abs(off_before) / 2):
            self._return(level, base, new)
            return
        self._level = new
        new.known_s += level.known_s
        if off * off_before < 0.0 or abs(off) >= 2.0 * abs(off_before):
            # Before, it was on the other side of the base, or hardly off it.
            self._since_s = self._onset_s
            new.known_s = self._run_weight_s

    def _return(self, level: _Level, base: _Level, new: _Level) -> None:
        """The level is the base again."""
        if level.known_s > SHORT_BASE_PARTS * base.known_s:
            self._base, self._level, self._since_s = level, new, self._onset_s
            return
        lasted_s = self._onset_s - self._since_s
        if lasted_s <= MAX_BURST_S:
            self._burst_s = max(self._burst_s, lasted_s)
            self._burst_size = max(self._burst_size, abs(level.mean - base.mean))
            self._burst_at_s = self._at_s
        self._level, self._base = base, None

    def _turn_back(self, passed_s: float) -> None:
        """The clock has gone back: ages stay."""
        self._run_side = 0
        self._since_s += passed_s
        self._burst_at_s += passed_s


def _new_base_s(base: _Level) -> float:
    return min(max(MIN_NEW_BASE_S, NEW_BASE_PARTS * base.known_s), NEW_BASE_S)


class SignalTracks:
    """All signals of a node: of its ranks, and of itself."""

    def __init__(self) -> None:
        self._tracks: dict[Hashable, dict[Signal, _Track]] = {}

    def take(self, key: Hashable, signal: Signal, value: float | None, now_s: float) -> None:
        """Take a sample of a rank or of the host; one that is no finite number from 0 on counts as none."""
        if value is None or not 0.0 <= value <= MAX_VALUE:
            return
        tracks = self._tracks.get(key)
        if tracks is None:
            tracks = self._tracks[key] = {}
        track = tracks.get(signal)
        if track is None:
            tracks[signal] = _Track(signal, value, now_s)
        else:
            track.take(value, now_s)

    def readings(self, key: Hashable, now_s: float) -> dict[str, Reading]:
        """Return what is sent of a rank or of the host, by signal."""
        found = {}
        for signal, track in self._tracks.get(key, {}).items():
            reading = track.reading(now_s, NEUTRAL.get(signal, 0.0))
            if reading is not None:
                found[signal.value] = reading
        return found

    def unmeasured(self, key: Hashable, rates: Iterable[Signal], now_s: float) -> int:
        """Return which rates of a rank or of the host are not known, as an `Unmeasured`."""
        tracks = self._tracks.get(key, {})
        found = 0
        for place, signal in enumerate(rates):
            track = tracks.get(signal)
            if track is None or not track.is_known(now_s):
                found |= 1 << place
        return found

    def forget(self, key: Hashable, signal: Signal | None = None) -> None:
        """Drop what is known of a rank or of the host: of that signal alone if one is given."""
        if signal is None:
            self._tracks.pop(key, None)
        else:
            self._tracks.get(key, {}).pop(signal, None)
