"""The latest report of each node, from when it comes until the frame loop takes it.

A node is identified by its socket, whatever name its message carries.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.codec import IncompatibleWireError, MalformedMessageError
from agent.wire.digest import NodeFrame, decode_frame
from app.fleet.report_reader import ReportReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from agent.wire.relay import Merged


class Received(NamedTuple):
    """A report and when it came."""

    node: str
    report: NodeFrame
    now_s: float
    """When it was made, as far as is known; monotonic, on this machine."""
    frame: bytes
    """The report as received."""


class Telemetry:
    """The reader of all nodes' reports.

    Start it once; `drain` is called from the frame loop and never blocks.
    """

    def __init__(self, sockets: Mapping[str, Path]) -> None:
        """`sockets` are the reports sockets of nodes by name; `take` is for other nodes."""
        self._reader = ReportReader(sockets, self._take_frame, self._take_malformed)
        self._latest: dict[str, tuple[float, bytes]] = {}
        self._lock = threading.Lock()
        self.incompatible: dict[str, str] = {}
        """What is wrong with incompatible nodes, by node."""
        self.num_malformed: Counter[str] = Counter()
        self.unreadable: dict[str, tuple[float, str]] = {}
        """Nodes of which the last message could not be read: since when, monotonic, and why."""
        self.last_report_s: dict[str, float] = {}
        """When the last report of each node came, monotonic, whatever its age."""
        self._as_of_s: dict[str, float] = {}
        """When the last report of each node was made, as far as is known; monotonic."""

    def start(self) -> None:
        """Begin to receive."""
        self._reader.start()

    @property
    def num_waiting(self) -> int:
        """Number of nodes with a report that was not taken."""
        return len(self._latest)

    def drain(self, max_reports: int | None = None) -> list[Received]:
        """Return the latest report of each node that has a new one, of all or of at most `max_reports`.

        They are decoded here, so that reports that a busy console never takes cost it nothing.
        """
        with self._lock:
            if max_reports is None or len(self._latest) <= max_reports:
                taken, self._latest = self._latest, {}
            else:
                taken = {node: self._latest.pop(node) for node in list(islice(self._latest, max_reports))}
        reports = (self._decoded(node, now_s, frame) for node, (now_s, frame) in taken.items())
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """Stop receiving; see `ReportReader.close`."""
        self._reader.close()

    def _take_frame(self, node: str, merged: Merged, way_s: float) -> None:
        for report in merged.reports:
            self.take(node, report.frame, way_s + report.age_ms / 1000)

    def _take_malformed(self, node: str, error: MalformedMessageError) -> None:
        if isinstance(error, IncompatibleWireError):
            self.incompatible[node] = str(error)
        else:
            self.num_malformed[node] += 1
            self.unreadable.setdefault(node, (time.monotonic(), str(error)))

    def take(self, node: str, frame: bytes, age_s: float = 0.0) -> None:
        """Take a node's report, of at most `age_s` seconds ago; may be called from any thread."""
        now_s = time.monotonic()
        with self._lock:
            # A later report is not older than an earlier one, however the delay varies.
            as_of_s = self._as_of_s[node] = max(now_s - age_s, self._as_of_s.get(node, -math.inf))
            self._latest[node] = (as_of_s, frame)
            self.last_report_s[node] = now_s

    def _decoded(self, node: str, now_s: float, frame: bytes) -> Received | None:
        try:
            received = Received(node, decode_frame(frame), now_s, frame)
        except MalformedMessageError as error:
            self._take_malformed(node, error)
            return None
        self.unreadable.pop(node, None)
        return received
