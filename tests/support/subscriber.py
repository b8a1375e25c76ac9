"""What an agent on this machine reports, as a console here reads it."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.reports import decode_node_report
from app.fleet.report_reader import ReportReader

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.codec import MalformedMessageError
    from agent.wire.relay import Merged
    from agent.wire.reports import NodeReport


class Subscriber:
    """Reads reports from now on, until it is closed."""

    def __init__(self, directory: Path) -> None:
        """Connect to the agent in `directory`, now or when one serves there."""
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = ReportReader({"agent": directory / REPORTS_SOCKET}, self._take, self._malformed)
        self._reader.start()

    def next(self, timeout_s: float = 30.0) -> bytes:
        """Return the next encoded report that was not taken; raises `queue.Empty`."""
        return self._frames.get(timeout=timeout_s)

    def report(self, timeout_s: float = 30.0) -> NodeReport:
        """Return it decoded."""
        return decode_node_report(self.next(timeout_s))

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()

    def _take(self, _name: str, merged: Merged, _way_s: float) -> None:
        for report in merged.reports:
            self._frames.put(report.frame)

    def _malformed(self, _name: str, error: MalformedMessageError) -> None:
        raise error
