"""A real agent for tests, in a directory with a short name, spoken to over its own sockets."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from agent.wire.codec import CONTROL_SOCKET
from agent.wire.commands import Command, Commit, GetStatus, Prepare, Reply, Status, decode_reply, encode_command
from tests.support.ranks import descendants, still_runs
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport

END_S = 10.0
REPLY_S = 60.0
"""A reply takes milliseconds; a machine that stands still takes as long as it likes."""


class RunningAgent:
    """An agent of its own process; the `with` block ends it and all it has started."""

    def __init__(
        self,
        *options: str,
        node: str = "here",
        directory: Path | None = None,
        environment: dict[str, str] | None = None,
        preamble: str = "",
        inside: Sequence[str] = (),
    ) -> None:
        """`preamble` is what its Python runs before it is an agent, `inside` the words that run it on a host."""
        # Short, since a socket's path has 108 bytes.
        self.directory = directory or Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
        serve = ("serve", "--dir", str(self.directory), "--node", node, *options)
        program = ("-c", f"{preamble}\nfrom agent.cli import main\nmain()") if preamble else ("-m", "agent")
        self.argv = [*inside, sys.executable, "-P", *program, *serve]
        self.process = subprocess.Popen(
            self.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        self._road: socket.socket | None = None
        self._seen = {psutil.Process(self.process.pid)}

    def __enter__(self) -> Self:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, stderr = self.process.communicate()
            raise AssertionError(f"the agent did not start: {stderr}")
        self.ready: dict[str, Any] = json.loads(line)
        self._road = self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._road:
            self._road.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        left = self.processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()
        self.process.communicate()
        psutil.wait_procs(left, timeout=10)
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self) -> socket.socket:
        """Return a new connection to the command socket."""
        road = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        road.settimeout(REPLY_S)
        road.connect(str(self.directory / CONTROL_SOCKET))
        return road

    def close_stdin(self) -> None:
        """Do what the death of a console does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def ask(self, command: Command) -> Reply:
        """Send a command and return the reply."""
        return self.ask_raw(encode_command(command))

    def ask_raw(self, line: bytes) -> Reply:
        """Send any bytes and return the reply."""
        assert self._road is not None
        self._road.sendall(line)
        with self._road.makefile("rb") as replies:
            return decode_reply(replies.readline())

    def report(self) -> NodeReport:
        """Return a fresh report."""
        reply = self.ask(GetStatus())
        assert isinstance(reply, Status)
        return reply.report

    def wait_until(self, condition: Callable[[NodeReport], bool], within_s: float, what: str) -> NodeReport:
        """Return the first report that satisfies `condition`, remembering every pid on the way."""

        def look() -> NodeReport | None:
            self.processes()
            report = self.report()
            return report if condition(report) else None

        try:
            report = until(look, within_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}\n{self.logs()}") from None
        assert report is not None
        return report

    def start_job(self, spec: JobSpec) -> Reply:
        """Prepare and commit a job, and return the reply to `Prepare`."""
        prepared = self.ask(Prepare(spec))
        self.ask(Commit(spec.job_id))
        return prepared

    def processes(self) -> list[psutil.Process]:
        """Return what is alive of all that this agent has ever been seen to run, itself included."""
        alive = [process for process in self._seen if still_runs(process)]
        self._seen.update(descendants(*(process.pid for process in alive)))
        return [process for process in self._seen if still_runs(process)]

    def logs(self) -> str:
        """Return everything that was printed, for a failure's message."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.directory.rglob("*.log"))
        )


def run_agent_verb(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -P -m agent ...` to its end."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "agent", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
    )
