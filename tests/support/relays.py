"""A real relay for tests, and what a console makes of its stream."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.relay import encode_merged
from app.fleet.report_reader import ReportReader
from tests.support.waiting import until

if TYPE_CHECKING:
    from types import TracebackType

    from agent.wire.codec import MalformedMessageError
    from agent.wire.relay import Merged, RosterEntry

END_S = 10.0


class RunningRelay:
    """A relay on loopback, in a process of its own; the `with` block ends it and removes its directory."""

    def __init__(self, *options: str, directory: Path | None = None) -> None:
        # Short, since a socket's path has 108 bytes.
        self.directory = directory or Path(tempfile.mkdtemp(prefix="rdr-", dir="/tmp"))
        self._options = options
        self._errors = self.directory.with_name(f"{self.directory.name}.said")
        self.process = self._start()
        self.ready: dict[str, Any] = {}

    @property
    def invitation(self) -> Path:
        return self.directory / "invitation.json"

    def __enter__(self) -> Self:
        self._wait_until_ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._errors.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def end(self) -> None:
        """End it as a person does."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        """End it as a machine does."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def begin_again(self) -> None:
        """Start the next one in the same directory."""
        self.process = self._start()
        self._wait_until_ready()

    def said(self) -> str:
        """Return what it has said to people."""
        return self._errors.read_text()

    def roster(self) -> dict[str, Any]:
        """Return what it says of itself."""
        argv = [sys.executable, "-P", "-m", "agent", "roster", "--dir", str(self.directory)]
        done = subprocess.run(argv, capture_output=True, timeout=60, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def wait_for(self, *nodes: str, within_s: float = 20.0) -> None:
        """Wait until exactly these nodes are there."""
        with MergedReader(self.directory) as reader:
            until(lambda: reader.is_whole and reader.here == set(nodes), within_s, f"{nodes} are there")

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-P", "-m", "agent", "relay", "--listen", "127.0.0.1", "--dir", str(self.directory)]
        with self._errors.open("ab") as said:
            return subprocess.Popen([*argv, *self._options], stdout=subprocess.PIPE, stderr=said)

    def _wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.kill()
            raise AssertionError(f"the relay did not start: {self.said()}")
        self.ready = json.loads(line)


class MergedReader:
    """A console: takes merged frames in a thread, with a pause after each if wanted."""

    def __init__(self, directory: Path, pause_s: float = 0.0) -> None:
        self.entries: dict[str, RosterEntry] = {}
        self.newest: dict[str, tuple[bytes, float]] = {}
        """By node: the newest report, and how old it was when it came."""
        self.is_over = threading.Event()
        """The connection has ended."""
        self.is_whole = False
        """Every node has been told of."""
        self.forget_figures()
        self._pause_s = pause_s
        self._is_closing = threading.Event()
        path = directory / REPORTS_SOCKET
        self._reader = ReportReader({"relay": path}, self._take, self._malformed, lambda _: self.is_over.set())

    @property
    def here(self) -> set[str]:
        """The nodes that are there."""
        return {node for node, entry in list(self.entries.items()) if entry.is_here}

    def forget_figures(self) -> None:
        """Count from now on."""
        self.num_frames = self.num_reports = 0
        self.ages_s: list[float] = []
        self.sizes: list[int] = []

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._reader.close()

    def _malformed(self, _name: str, error: MalformedMessageError) -> None:
        raise error

    def _take(self, _name: str, merged: Merged, way_s: float) -> None:
        self.entries.update((entry.node, entry) for entry in merged.nodes)
        for report in merged.reports:
            age_s = report.age_ms / 1000 + way_s
            self.newest[report.node] = (report.frame, age_s)
            self.ages_s.append(age_s)
        self.is_whole |= merged.is_whole
        self.num_frames += 1
        self.num_reports += len(merged.reports)
        self.sizes.append(len(encode_merged(merged)))
        self._is_closing.wait(self._pause_s)
