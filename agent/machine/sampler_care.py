"""When to start a GPU sampler, when to give one up, and what to report of it: events in, effects out.

A call into NVML can hang in the kernel, where no signal ends it. Such a sampler is killed, abandoned, and replaced
after a pause; a few abandoned ones are enough to know that another would hang as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, assert_never

import msgspec

from agent.wire.machine import GpuWatchState

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

SILENT_S = 5.0
"""Silence in seconds after which figures are old; the sampler samples once a second."""
HUNG_S = 15.0
"""Silence in seconds after which a sampler that has reported is replaced."""
START_S = 90.0
"""The same of one that has not reported yet: without persistence mode the driver wakes each GPU for seconds."""
FIRST_PAUSE_S = 2.0
LONGEST_PAUSE_S = 300.0
"""Longest pause in seconds between the end of one and the start of the next; doubles while none reports."""
ABSENT_PAUSE_S = 600.0
"""Seconds between looks where there never was NVML: a driver may have been installed. One that went away comes back
sooner."""
MAX_ABANDONED = 3


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""


class SamplerStarted(msgspec.Struct, frozen=True):
    """The sampler that was requested runs."""

    pid: int


class SamplerNotStarted(msgspec.Struct, frozen=True):
    """The sampler that was requested could not be started."""

    reason: str


class SamplerSpoke(msgspec.Struct, frozen=True):
    """A sample has arrived; it may be a late one of a sampler that was replaced."""

    pid: int
    unavailable: str


class SamplerEnded(msgspec.Struct, frozen=True):
    """A sampler's process has ended; a negative code is a signal."""

    pid: int
    code: int


Event: TypeAlias = Ticked | SamplerStarted | SamplerNotStarted | SamplerSpoke | SamplerEnded


class StartSampler(msgspec.Struct, frozen=True):
    """Start a sampler; the answer is `SamplerStarted` or `SamplerNotStarted`."""


class KillSampler(msgspec.Struct, frozen=True):
    """SIGKILL, without waiting for its end."""

    pid: int


Effect: TypeAlias = StartSampler | KillSampler


class SamplerCare:
    """State machine of an agent's samplers; `handle` is the only way to change it."""

    def __init__(self) -> None:
        self._running: int | None = None
        self._is_asked_for = False
        self._has_spoken = False
        self._last_sample_s = 0.0
        """Time of the running sampler's last sample, or of its start."""
        self._next_start_s = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._abandoned: set[int] = set()
        self._unreachable = ""
        self._has_watched = False
        """True once some sampler has seen GPUs."""
        self._trouble = ""

    @property
    def pids(self) -> AbstractSet[int]:
        """Pids of samplers that may still live."""
        return self._abandoned if self._running is None else self._abandoned | {self._running}

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event and return what is to be done."""
        match event:
            case Ticked():
                return self._tick(now_s)
            case SamplerStarted(pid=pid):
                self._running, self._is_asked_for, self._has_spoken, self._last_sample_s = pid, False, False, now_s
            case SamplerNotStarted(reason=reason):
                self._is_asked_for = False
                self._rest(now_s, f"the GPU sampler cannot be started: {reason}")
            case SamplerSpoke(pid=pid, unavailable=unavailable):
                self._listen(pid, unavailable, now_s)
            case SamplerEnded(pid=pid, code=code):
                self._bury(pid, code, now_s)
            case _:
                assert_never(event)
        return []

    def status(self, now_s: float) -> tuple[GpuWatchState, str]:
        """Return the state and, if there are no fresh figures, the reason."""
        if self._unreachable:
            return GpuWatchState.ABSENT, self._unreachable
        silent_s = now_s - self._last_sample_s
        if self._running is not None and not self._has_spoken:
            return GpuWatchState.STARTING if not self._trouble else GpuWatchState.SILENT, self._trouble
        if self._running is not None:
            if silent_s < SILENT_S:
                return GpuWatchState.WATCHING, ""
            return GpuWatchState.SILENT, f"NVML has not answered for {silent_s:.0f} s"
        if len(self._abandoned) >= MAX_ABANDONED:
            return GpuWatchState.SILENT, f"{self._trouble}; {len(self._abandoned)} samplers hang in the driver"
        return GpuWatchState.SILENT if self._trouble else GpuWatchState.STARTING, self._trouble

    def validate(self) -> None:
        """Assert what holds after every event."""
        assert self._running not in self._abandoned
        assert len(self._abandoned) <= MAX_ABANDONED
        assert not (self._is_asked_for and self._running is not None)
        assert FIRST_PAUSE_S <= self._pause_s <= LONGEST_PAUSE_S

    def _tick(self, now_s: float) -> list[Effect]:
        if self._running is not None:
            silent_s = now_s - self._last_sample_s
            if silent_s < (HUNG_S if self._has_spoken else START_S):
                return []
            pid, self._running = self._running, None
            self._abandoned.add(pid)
            self._rest(now_s, f"NVML does not answer: sampler {pid} was given up after {silent_s:.0f} s")
            return [KillSampler(pid)]
        if self._is_asked_for or now_s < self._next_start_s or len(self._abandoned) >= MAX_ABANDONED:
            return []
        self._is_asked_for = True
        return [StartSampler()]

    def _listen(self, pid: int, unavailable: str, now_s: float) -> None:
        if pid != self._running:
            return
        self._last_sample_s, self._has_spoken = now_s, True
        self._unreachable = unavailable
        if not unavailable:
            self._trouble, self._pause_s, self._has_watched = "", FIRST_PAUSE_S, True

    def _bury(self, pid: int, code: int, now_s: float) -> None:
        self._abandoned.discard(pid)
        if pid != self._running:
            return
        self._running = None
        if self._unreachable:
            self._next_start_s = now_s + (self._longer_pause_s() if self._has_watched else ABSENT_PAUSE_S)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._rest(now_s, f"the GPU sampler {how}; its directory has gpu-sampler.log")

    def _rest(self, now_s: float, trouble: str) -> None:
        self._unreachable, self._trouble = "", trouble
        self._next_start_s = now_s + self._longer_pause_s()

    def _longer_pause_s(self) -> float:
        """Return the next pause in seconds, and double the one after it."""
        pause_s, self._pause_s = self._pause_s, min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return pause_s
