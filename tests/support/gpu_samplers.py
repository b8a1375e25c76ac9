"""GPU samplers for tests: one as a process of its own, and those of a `GpuWatch` without the rest of an agent."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from agent.machine.gpu_watch import GpuWatch
from agent.node_state.gpu_sample import GpuSample, decode_sample
from agent.node_state.node_state import NodeState
from agent.wire.machine import GpusReport, GpuWatchState
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

PATIENCE_S = 20.0


class SamplerProcess:
    """A sampler of its own process, and the inbox that it reports to."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.inbox.settimeout(PATIENCE_S)
        self.inbox.bind(str(path / "inbox"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.machine.gpu_sampler", str(path / "inbox"), str(os.getpid())],
            env=os.environ | environ,
            stderr=subprocess.PIPE,
        )

    def sample(self) -> GpuSample:
        """Return the next sample."""
        return decode_sample(self.inbox.recv(1 << 20))

    def sample_with(self, condition: Callable[[GpuSample], object]) -> GpuSample:
        """Return the first sample that satisfies `condition`."""
        (found,) = until(lambda: [sample] if condition(sample := self.sample()) else [], PATIENCE_S, "a sample")
        return found

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()
        self.inbox.close()


class Ward:
    """A `GpuWatch` without the rest of an agent."""

    def __init__(self, path: Path) -> None:
        self.inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.inbox.setblocking(False)
        self.inbox.bind(str(path / "inbox"))
        self.state = NodeState("a", "e", "host", os.getpid(), 4)
        self.log = path / "sampler.log"
        self.watch = GpuWatch(str(path / "inbox"), self.log, self.state)

    def gpus(self) -> GpusReport:
        """Let a beat pass and return what a console is told."""
        self._read()  # as an agent does, which reads what has come before it looks which samplers have ended
        began_s = time.monotonic()
        self.watch.tick()
        assert time.monotonic() - began_s < 1.0, "the event loop was held up"
        self._read()
        report = self.state.report(time.monotonic(), report_seq=1, jobs=[], log_seq=0, malformed_datagrams=0)
        return report.gpus

    def _read(self) -> None:
        while True:
            try:
                self.watch.receive(decode_sample(self.inbox.recv(1 << 20)))
            except BlockingIOError:
                return

    def wait_until(self, condition: Callable[[GpusReport], object], what: str) -> GpusReport:
        """Return the first report that satisfies `condition`."""
        (found,) = until(lambda: [gpus] if condition(gpus := self.gpus()) else [], PATIENCE_S, what)
        return found

    def close(self) -> None:
        """End the samplers."""
        self.watch.close()
        self.inbox.close()


def is_watching(gpus: GpusReport) -> bool:
    return gpus.state is GpuWatchState.WATCHING and bool(gpus.gpus)
