"""The trainer's side of a writer process: starts it, gives it jobs, hears how they went."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WRITER = Path(__file__).with_name("writer.py")

END_S = 600.0
"""How long the end of a program waits for its last checkpoint. A disk that needs more for one share hangs."""


class WriterProcess:
    """Keeps one writer, started anew if it has died. One job at a time; nothing here blocks but what says so.

    Args:
        memory_fd: The memfd that its jobs are in.
    """

    def __init__(self, memory_fd: int) -> None:
        self._memory_fd = memory_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._job_number = 0
        self._problem: str | None = ""
        self._follows = False
        self._undeleted: list[str] = []

    @property
    def is_busy(self) -> bool:
        """True from a job on until its result has been heard (`poll`)."""
        return self._problem is None

    @property
    def only_follows(self) -> bool:
        """True if the last job has failed since something else had, in another rank most likely."""
        return self._follows

    @property
    def pid(self) -> int | None:
        """The writer's process, while there is one."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Make sure that a writer lives, unless one is at work: whether that one has died is `poll`'s to say.

        Raises:
            OSError: The system starts none.
        """
        if self.is_busy or (self._process is not None and self._process.poll() is None):
            return
        self._drop()
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: signals for the trainer's group and the terminal's Ctrl-C are not for it. No
            # inherited output: who reads the trainer's to its end would wait for the writer.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(WRITER), str(self._memory_fd), str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[self._memory_fd],
                start_new_session=True,
                cwd="/",
                # Whoever looks for a rank by its environment must not find the writer.
                env={name: value for name, value in os.environ.items() if name not in {"RANK", "LOCAL_RANK"}},
            )
        self._socket = ours
        self._buffer = b""

    def submit(self, job: dict[str, Any]) -> None:
        """Give the writer a job. It must not be busy, and has to be started."""
        assert self._socket is not None
        assert not self.is_busy
        self._job_number += 1
        self._problem = None
        self._follows = False
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # A writer that has just died is found out by `poll`.
            self._socket.sendall(json.dumps({"number": self._job_number, **job}).encode() + b"\n")

    def poll(self, timeout_s: float = 0.0) -> str | None:
        """Return how the last job went: "" well, or what went wrong; None while it is at work. Blocks for the time-out.

        A problem is told until the next job.
        """
        deadline_s = time.monotonic() + timeout_s
        while self._listen(0.0 if not self.is_busy else max(0.0, deadline_s - time.monotonic())):
            pass
        return self._problem

    def take_undeleted(self) -> list[str]:
        """Return what the writer could not delete since the last call, and why."""
        taken, self._undeleted = self._undeleted, []
        return taken

    def refuse(self, problem: str) -> None:
        """Take note of a problem that came before the writer could be given its job."""
        self._problem = problem

    def forget(self, patience_s: float) -> None:
        """Give up the present job, as if it had never been; blocks until it is over, or kills the writer in time."""
        if self._socket is not None and self.is_busy:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(json.dumps({"abandon": self._job_number}).encode() + b"\n")
            if self.poll(patience_s) is None:
                self._kill()
        self._problem = ""

    def end(self, patience_s: float = END_S) -> None:
        """Let the writer finish and end; blocks until it has, or kills it in time."""
        if self._process is None:
            return
        self.poll()
        self._close_socket()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._kill()
        self._drop()

    def _listen(self, timeout_s: float) -> bool:
        """Take one message, or the news that the writer has died; return whether there may be more."""
        if self._socket is None or not select.select([self._socket], [], [], timeout_s)[0]:
            return False
        try:
            chunk = self._socket.recv(65_536)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self._bury()
            return False
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            self._undeleted += message.get("undeleted", [])
            if message["number"] == self._job_number and "problem" in message:
                self._problem = message["problem"]
                self._follows = message.get("follows", False)
        return True

    def _bury(self) -> None:
        """Take note of a writer's death, and leave no zombie."""
        assert self._process is not None
        status = self._process.wait()
        how = f"was ended by {signal.strsignal(-status)}" if status < 0 else f"has ended with status {status}"
        if self._problem is None:
            self._problem = f"its writer process {how} before it was done"
        self._drop()

    def _kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._drop()

    def _drop(self) -> None:
        self._close_socket()
        self._process = None

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
