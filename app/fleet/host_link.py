"""One host over SSH, and the sockets of its agent brought here, again after a break.

Everything here blocks, within bounds. After `open_report_channel` there is a directory on this machine in which the
host's agent seems to serve: whatever gives commands to local agents gives them to this one. Telemetry is heard by its
channel itself. Where sshd forwards no sockets, commands go through `agent proxy` and telemetry comes through `agent
telemetry`, each the standard input and output of a process there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import msgspec

from agent.wire.codec import CONTROL_SOCKET, REPORTS_SOCKET
from app.errors import HostUnreachableError, IncompatibleAgentError, SessionError
from app.fleet.agent_link import DEFAULT_PYTHON, LINE_TIMEOUT_S, VERB_TIMEOUT_S, AgentLink
from app.fleet.frame_stream import FrameStream
from app.paths import TunnelDir
from app.ssh.connection import ForwardingRefusedError, SubsystemRefusedError
from app.ssh.login import Logins
from app.ssh.tunnel import Tunnel
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from app.fleet.agent_link import AgentPlace, TakesFrame
    from app.ssh.connection import SshConnection
    from app.ssh.io_thread import ByteChannel, RingingChannel
    from app.ssh.remote_command import Finished


SOCKET_PAUSE_S = 2.0
"""At most, between two attempts to hear an agent that does not serve now: it may just be starting again."""
VERB_PAUSE_S = 15.0
"""Each attempt starts a Python on the host."""


class Access(msgspec.Struct, frozen=True):
    """How a person reaches a host."""

    host: str
    python: str = DEFAULT_PYTHON
    """The interpreter there that has rankdeck; may begin with `~/`."""
    ssh_config: str = ""
    """Read instead of ~/.ssh/config."""


class HostLink(AgentLink):
    """A connection to a host; the `with` block closes it, and leaves what runs there alone."""

    def __init__(self, access: Access, logins: Logins | None = None) -> None:
        """Make the near end.

        Args:
            access: Where to, and how.
            logins: Shared with the other hosts of the command; without it nobody is asked for anything.

        Raises:
            SessionError: This machine has no place for it.
        """
        super().__init__(access.host, access.python)
        self._ssh_config = access.ssh_config
        self._logins = logins or Logins()
        self._near = TunnelDir()
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: SshConnection | None = None
        self._parts: list[Tunnel | FrameStream] = []
        self._on_frame: TakesFrame | None = None
        self._reports: FrameStream | None = None

    @property
    def directory(self) -> Path:
        """Where the agent's sockets appear on this machine."""
        return self._near.path

    @property
    def carries_reports(self) -> bool:
        """True: they come through a channel that is read here."""
        return True

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost."""
        return self._connection is not None and self._connection.is_alive

    def connect(self) -> None:
        """Log in; see `Logins.connect`.

        Raises:
            HostUnreachableError: Also when the link was closed meanwhile, by another thread.
        """
        self._log_in(asks=True)

    def _log_in(self, *, asks: bool) -> None:
        connection = self._logins.connect(self.host, self._ssh_config, asks=asks)
        with self._lock:
            if not self._is_closed:
                self._connection = connection
                return
        connection.close()
        raise HostUnreachableError(self.host, "the link to it is closed")

    def open_report_channel(self, on_frame: TakesFrame) -> None:
        """Bring the agent's sockets here, or have them come once the host is reached; as in `AgentLink`."""
        self._on_frame = on_frame
        self._hold(self._tunnel())
        if self.place is not None:
            self._find_channel()

    def forget_refusals(self) -> None:
        """See `AgentLink.forget_refusals`; of all hosts that share the logins."""
        self._logins.forget_refusals()

    def reconnect(self, *, asks: bool = False) -> None:
        """Log in again; see `AgentLink.reconnect`."""
        self.go_again(asks=asks)
        before = self.place
        place = self.find()
        if before is not None and place.dir != before.dir:
            raise IncompatibleAgentError(self.host, f"its agent serves in {clean(place.dir)} now: begin anew")
        if self._on_frame is None:
            return
        if self._reports is None:
            self._find_channel()
        else:
            self._reports.begin()

    def go_again(self, *, asks: bool = False) -> None:
        """Log in again, without a question unless somebody waits for one; see `AgentLink.go_again`."""
        if not self.is_alive:
            lost, self._connection = self._connection, None
            if lost is not None:
                lost.close()
            self._log_in(asks=asks)

    def open_socket(self, path: str) -> RingingChannel:
        """Connect to a Unix socket there; see `AgentLink.open_socket`."""
        return self._connected().open_socket(path)

    def open_verb(self, *arguments: str) -> RingingChannel:
        """Start a verb there; see `AgentLink.open_verb`."""
        return self._connected().open_process(self._argv(*arguments))

    def close(self) -> None:
        """Let go of the host, of each part whatever the others raise; safe to call twice."""
        with self._lock:
            self._is_closed = True
            held, self._parts = self._parts, []
        with contextlib.ExitStack() as parts:  # from the last to the first
            parts.callback(self._near.remove)
            if self._connection:
                parts.callback(self._connection.close)
            for part in held:
                parts.callback(part.close)

    def _connected(self) -> SshConnection:
        connection = self._connection  # another thread may be about to replace it
        if connection is None:
            raise HostUnreachableError(self.host, "not connected")
        return connection

    def _find_channel(self) -> None:
        """Find out whether the host forwards sockets, and have its telemetry come in one way or the other."""
        try:
            self._open_control().close()
        except ForwardingRefusedError:
            self.is_forwarded = False
        assert self._on_frame is not None
        if self.is_forwarded:
            reports = FrameStream(self._open_reports, SOCKET_PAUSE_S, self._on_frame)
        else:
            reports = FrameStream(self._open_reports_verb, VERB_PAUSE_S, self._on_frame)
        self._hold(reports)
        reports.begin()
        self._reports = reports

    def _tunnel(self) -> Tunnel:
        try:
            return Tunnel(self.directory / CONTROL_SOCKET, self._open_control)
        except OSError as error:
            reason = f"no socket for {self.host} can be opened here: {error.strerror}"
            raise SessionError(reason, "for many hosts raise ulimit -n") from error

    def _hold(self, part: Tunnel | FrameStream) -> None:
        """Keep a part until the link is closed, which another thread may have done meanwhile."""
        with self._lock:
            if not self._is_closed:
                self._parts.append(part)
                return
        part.close()
        raise HostUnreachableError(self.host, "the link to it is closed")

    def _open_control(self) -> RingingChannel:
        connection, place = self._connected(), self._found()
        if self.is_forwarded:
            return connection.open_socket(f"{place.dir}/{CONTROL_SOCKET}")
        return self.open_verb("proxy", "--dir", place.dir)

    def _open_reports(self) -> RingingChannel:
        return self.open_socket(f"{self._found().dir}/{REPORTS_SOCKET}")

    def _open_reports_verb(self) -> RingingChannel:
        return self.open_verb("telemetry", "--dir", self._found().dir)

    def _found(self) -> AgentPlace:
        if self.place is None:
            raise HostUnreachableError(self.host, "its agent is not found yet")
        return self.place

    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:
        return self._connected().run(argv, timeout_s or VERB_TIMEOUT_S, given)

    def send_file(self, near: Path, far: str) -> bool:
        """Copy a file over SFTP; see `AgentLink.send_file`."""
        try:
            self._connected().send_file(near, far)
        except SubsystemRefusedError:
            return False
        return True

    def _open(self, argv: Sequence[str]) -> ByteChannel:
        channel = self._connected().open_process(argv)
        channel.settimeout(LINE_TIMEOUT_S)
        return channel
