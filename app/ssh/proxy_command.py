"""A ProxyCommand: a program of the person's own ~/.ssh/config whose input and output are the connection."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
from typing import IO, TYPE_CHECKING

from app.errors import HostUnreachableError
from app.safe_text import LINE_LIMIT, clean
from app.ssh.config import proxy_command_line

if TYPE_CHECKING:
    from app.ssh.config import SshSettings

END_S = 1.0
"""For the program to end when it is told, and for its last words."""


class ProxyCommand:
    """The program, in a session of its own: it gets no key that is pressed here, and asks nothing on this terminal.

    Attributes:
        stream: Leads to the host; whoever uses it closes it.
    """

    def __init__(self, settings: SshSettings) -> None:
        """Start it, in the person's own shell as ssh does.

        Raises:
            UsageError: See `proxy_command_line`.
            HostUnreachableError: There is no such shell, or the command is of a kind that cannot be used.
        """
        self._host = settings.alias
        if settings.hands_over_socket:
            raise HostUnreachableError(
                self._host, "ProxyUseFdpass is not supported", "use ProxyJump, or a ProxyCommand without it"
            )
        line = proxy_command_line(settings)
        self.stream, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", line],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self.stream.close()
            detail = f"ProxyCommand cannot be run by {error.filename}: {error.strerror}"
            raise HostUnreachableError(self._host, detail, "look at SHELL") from error
        finally:
            theirs.close()
        assert self._process.stderr
        self._said = bytearray()
        self._listener = threading.Thread(
            target=_read_last, args=(self._process.stderr, self._said), name="rankdeck-proxy-command", daemon=True
        )
        self._listener.start()

    def error(self) -> HostUnreachableError | None:
        """Return what the program says of its end, for which there is a moment; None if it goes on."""
        _wait_without_collecting(self._process.pid, END_S)
        # WNOWAIT: while it is not collected, its number is nobody else's, and its group can be ended.
        how = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if how is None:
            return None
        self._listener.join(END_S)
        lines = self._said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        is_code = how.si_code == os.CLD_EXITED
        end = f"exit code {how.si_status}" if is_code else signal.Signals(how.si_status).name
        detail = f"ProxyCommand has ended ({end}): {clean(lines[-1], LINE_LIMIT)}"
        return HostUnreachableError(self._host, detail, f"it is asked for nothing here; try: ssh {self._host}")

    def end(self) -> None:
        """End the program and what it has started; safe to call twice."""
        if self._process.returncode is not None:
            return
        self.stream.close()
        pid = self._process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGHUP)
        _wait_without_collecting(pid, END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # it, if it still runs, and whatever it has left
        self._process.wait()
        self._listener.join(END_S)


def _wait_without_collecting(pid: int, timeout_s: float) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(descriptor)


def _read_last(errors: IO[bytes], said: bytearray) -> None:
    """Read to the end, and keep the last of it."""
    with errors:
        while chunk := os.read(errors.fileno(), 65_536):
            said += chunk
            del said[:-LINE_LIMIT]
