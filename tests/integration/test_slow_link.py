"""A link that carries less than a host reports: what comes over it is the newest that it can carry, and truly dated."""

from __future__ import annotations

import contextlib
import queue
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.codec import REPORTS_SOCKET, MalformedMessageError
from agent.wire.reports import decode_node_report
from app.fleet.host_link import Access, HostLink
from app.fleet.report_reader import ReportReader
from tests.support.hosts import Network, require_hosts
from tests.support.subscriber import Subscriber
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.relay import Merged

THROTTLE = """
import os, pathlib, socket, sys, threading, time
far = socket.socket()
far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
far.connect((sys.argv[1], int(sys.argv[2])))
def up():
    while chunk := os.read(0, 65536):
        far.sendall(chunk)
    far.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
bytes_s = pathlib.Path(sys.argv[3])
while chunk := far.recv(1024):
    if bytes_s.exists():
        time.sleep(len(chunk) / float(bytes_s.read_text()))
    os.write(1, chunk)
"""
"""What `nc` does, as slowly as a file says."""
START_S = 30.0
BUSY_S = 2.0
"""A machine that has more to do holds up a thread between two looks at the clock."""
SLOW_S = 60.0
"""What was asked for before the link became slow is carried first, 8 reports at most."""


class Spectator:
    """Hears on this machine what a host's agent reports there, and knows when it did."""

    def __init__(self, directory: Path) -> None:
        self.made_s: dict[int, float] = {}
        self.num_bytes = 0
        self._subscriber = Subscriber(directory)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def bytes_s(self) -> float:
        """Return how much is reported a second; three reports are wanted for that."""
        times = list(self.made_s.values())
        return self.num_bytes / len(times) * (len(times) - 1) / (times[-1] - times[0])

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._subscriber.close()

    def _hear(self) -> None:
        while not self._is_over.is_set():
            with contextlib.suppress(queue.Empty):
                frame = self._subscriber.next(0.05)
                self.made_s[decode_node_report(frame).report_seq] = time.monotonic()
                self.num_bytes += len(frame)


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("h1", sshd_options=request.param) as network:
        yield network


@pytest.mark.fault(row=14)
@pytest.mark.parametrize(
    "network", [(), pytest.param(("AllowStreamLocalForwarding no",), marks=pytest.mark.slow)], indirect=True
)
def test_reports_over_a_slow_link_are_truly_dated_and_the_newest_that_it_carries(network: Network) -> None:
    program, rate = network.directory / "throttle.py", network.directory / "bytes_s"
    program.write_text(THROTTLE)
    command = shlex.join([sys.executable, str(program)])
    network.configure(f"Host h1\n  Compression no\n  ProxyCommand {command} %h %p {shlex.quote(str(rate))}")
    came: list[tuple[int, float]] = []
    """Number of a report, and since when it is the state of the host as far as the link says."""

    def take(_node: str, merged: Merged, way_s: float) -> None:
        for report in merged.reports:
            as_of_s = time.monotonic() - way_s - report.age_ms / 1000
            came.append((decode_node_report(report.frame).report_seq, as_of_s))

    with HostLink(Access("h1", sys.executable, str(network.ssh_config))) as link:
        link.connect()
        place = link.bring_up()
        spectator = Spectator(Path(place.dir))
        reader = ReportReader({"h1": link.directory / REPORTS_SOCKET}, take, malformed)
        try:
            link.open_sockets(lambda frame, age_s=0.0: None)  # noqa: ARG005 - by their names
            reader.start()
            until(lambda: len(spectator.made_s) > 5 and len(came) > 2, START_S, "the agent reports")
            rate.write_text(str(spectator.bytes_s() / 2))
            num_before = len(came)
            until(lambda: _num_behind(came, spectator) > 6, SLOW_S, "what was asked for before comes late")
            until(lambda: _num_behind(came, spectator) <= 4, SLOW_S, "what comes is new again")
            num_slow = len(came)
        finally:
            rate.unlink(missing_ok=True)
            spectator.close()
            reader.close()
        link.shut_down(kill_jobs=True)

    assert num_slow - num_before > 3
    for seq, as_of_s in came:
        if seq in spectator.made_s:
            assert as_of_s < spectator.made_s[seq] + BUSY_S, "no report passes for newer than it is"


def malformed(_node: str, error: MalformedMessageError) -> None:
    raise error


def _num_behind(came: list[tuple[int, float]], spectator: Spectator) -> int:
    """Return how many reports have been made since the one that came last."""
    return max(spectator.made_s) - came[-1][0]
