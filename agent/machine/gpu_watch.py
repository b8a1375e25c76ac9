"""Carries out what `sampler_care` decides: starts GPU samplers, kills them, notices their end. Never blocks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, assert_never

from agent.machine.sampler_care import (
    Effect,
    Event,
    KillSampler,
    SamplerCare,
    SamplerEnded,
    SamplerNotStarted,
    SamplerSpoke,
    SamplerStarted,
    StartSampler,
    Ticked,
)
from agent.node_state.observations import GpusSampled, GpuWatchChanged

if TYPE_CHECKING:
    from pathlib import Path

    from agent.node_state.gpu_sample import GpuSample
    from agent.node_state.node_state import NodeState

LOG_FILE = "gpu-sampler.log"


class GpuWatch:
    """GPU samplers of an agent, from the first `tick` to `close`; lives on the event loop's thread."""

    def __init__(self, inbox: str, log: Path, state: NodeState) -> None:
        self._inbox = inbox
        self._log = log
        self._state = state
        self._care = SamplerCare()
        self._samplers: dict[int, subprocess.Popen[bytes]] = {}
        self.pids: set[int] = set()
        """Pids of samplers that may still live: they are no leftovers."""

    def tick(self) -> None:
        """Start, kill and reap samplers that are due."""
        for pid, sampler in list(self._samplers.items()):
            if (code := sampler.poll()) is not None:
                del self._samplers[pid]
                self.pids.discard(pid)
                self._feed(SamplerEnded(pid, code))
        self._feed(Ticked())
        now_s = time.monotonic()
        self._state.apply(GpuWatchChanged(*self._care.status(now_s)), now_s)

    def receive(self, sample: GpuSample) -> None:
        """Take a sample from the inbox; one that no sampler of ours can have sent is dropped."""
        if sample.pid not in self.pids:
            return
        if not sample.unavailable:
            self._state.apply(GpusSampled(sample), time.monotonic())
        self._feed(SamplerSpoke(sample.pid, sample.unavailable))

    def close(self) -> None:
        """Kill what runs, and wait for none: a process that hangs in the kernel ends when it can."""
        for sampler in self._samplers.values():
            sampler.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                sampler.wait(0.2)
            sampler.returncode = sampler.returncode or 0  # an abandoned child is no resource that we forgot
        with contextlib.suppress(OSError):
            if not self._log.stat().st_size:
                self._log.unlink()

    def _feed(self, event: Event) -> None:
        for effect in self._care.handle(event, time.monotonic()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StartSampler():
                self._start()
            case KillSampler(pid=pid):
                self._samplers[pid].kill()
            case _:
                assert_never(effect)

    def _start(self) -> None:
        argv = [sys.executable, "-P", "-m", "agent.machine.gpu_sampler", self._inbox, str(os.getpid())]
        try:
            # None of our streams: one that hangs in the kernel would hold them open after our end.
            with self._log.open("wb") as log:
                sampler = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
                )
        except OSError as error:
            self._feed(SamplerNotStarted(error.strerror or str(error)))
            return
        self._samplers[sampler.pid] = sampler
        self.pids.add(sampler.pid)
        self._feed(SamplerStarted(sampler.pid))
