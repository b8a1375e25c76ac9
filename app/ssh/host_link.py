"""One host over SSH, and the sockets of its agent brought here, again after a break.

Everything here blocks, within bounds. After `open_road` there is a directory on this machine in which the host's agent
seems to serve: whatever speaks to local agents speaks to this one. Where sshd forwards no sockets, commands go
through `agent proxy` and telemetry comes through `agent relay`, each the standard input and output of a process there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.fields import CONTROL_SOCKET, TELEMETRY_SOCKET
from app.errors import HostUnreachableError, IncompatibleAgentError, SessionError
from app.runtime_dir import TunnelDir
from app.safe_text import clean
from app.ssh.agent_link import DEFAULT_PYTHON, VERB_TIMEOUT_S, AgentLink
from app.ssh.connection import ForwardingRefusedError, SubsystemRefusedError
from app.ssh.login import Logins
from app.ssh.relay_frames import FrameReader
from app.ssh.talk import LINE_TIMEOUT_S
from app.ssh.transport import CHANNEL_ERRORS
from app.ssh.tunnel import JOIN_S, Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from app.ssh.agent_link import AgentPlace
    from app.ssh.connection import SshConnection
    from app.ssh.remote_command import Finished
    from app.ssh.tunnel import ByteChannel


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
        self._tunnels: list[Tunnel] = []
        self._relay: tuple[ByteChannel, threading.Thread] | None = None
        self._on_frame: Callable[[bytes], None] | None = None
        self._has_road = False
        self._has_telemetry = True
        self._road_lock = threading.Lock()
        """Held while telemetry begins to come: a lost connection may come back in another thread."""

    @property
    def directory(self) -> Path:
        """Where the agent's sockets appear on this machine."""
        return self._near.path

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

    def open_road(self, on_frame: Callable[[bytes], None], *, has_telemetry: bool = True) -> None:
        """Bring the agent's sockets here, or have them come once the host is reached; see `AgentLink.open_road`."""
        self._on_frame = on_frame
        self._has_telemetry = has_telemetry
        self._tunnels.append(self._tunnel(CONTROL_SOCKET, self._open_control))
        if self.place is not None:
            self._find_road()

    def bring_telemetry(self) -> None:
        """Have the agent's telemetry come too; see `AgentLink.bring_telemetry`."""
        with self._road_lock:
            if not self._has_telemetry:
                self._has_telemetry = True
                if self._has_road:
                    self._open_telemetry_road()

    def forget_refusals(self) -> None:
        """See `AgentLink.forget_refusals`; of all hosts that share the logins."""
        self._logins.forget_refusals()

    def reconnect(self, *, asks: bool = False) -> None:
        """Log in again, without a question unless somebody waits for one; see `AgentLink.reconnect`."""
        if not self.is_alive:
            lost, self._connection = self._connection, None
            if lost is not None:
                lost.close()
            self._log_in(asks=asks)
        before = self.place
        place = self.find()
        if before is not None and place.dir != before.dir:
            raise IncompatibleAgentError(self.host, f"its agent serves in {clean(place.dir)} now: begin anew")
        if not self._has_road:
            self._find_road()
        elif not self.is_forwarded and self._has_telemetry:
            self._end_relay()
            self._start_relay()

    def close(self) -> None:
        """Let go of the host, of each part whatever the others raise; safe to call twice."""
        with self._lock:
            self._is_closed = True
        tunnels, self._tunnels = self._tunnels, []
        with contextlib.ExitStack() as parts:  # from the last to the first
            parts.callback(self._near.remove)
            if self._connection:
                parts.callback(self._connection.close)
            for tunnel in tunnels:
                parts.callback(tunnel.close)
            parts.callback(self._end_relay)

    def _connected(self) -> SshConnection:
        connection = self._connection  # another thread may be about to replace it
        if connection is None:
            raise HostUnreachableError(self.host, "not connected")
        return connection

    def _find_road(self) -> None:
        """Find out whether the host forwards sockets, and have its telemetry come in one way or the other."""
        try:
            self._open_control().close()
        except ForwardingRefusedError:
            self.is_forwarded = False
        with self._road_lock:
            if self._has_telemetry:
                self._open_telemetry_road()
            self._has_road = True

    def _open_telemetry_road(self) -> None:
        if self.is_forwarded:
            self._tunnels.append(self._tunnel(TELEMETRY_SOCKET, self._open_telemetry))
        else:
            self._start_relay()

    def _tunnel(self, name: str, open_channel: Callable[[], ByteChannel]) -> Tunnel:
        try:
            return Tunnel(self.directory / name, open_channel)
        except OSError as error:
            words = f"no socket for {self.host} can be opened here: {error.strerror}"
            raise SessionError(words, "for many hosts raise ulimit -n") from error

    def _open_control(self) -> ByteChannel:
        connection, place = self._connected(), self._found()
        if self.is_forwarded:
            return connection.open_socket(f"{place.dir}/{CONTROL_SOCKET}")
        return connection.open_process(self._argv("proxy", "--dir", place.dir))

    def _open_telemetry(self) -> ByteChannel:
        return self._connected().open_socket(f"{self._found().dir}/{TELEMETRY_SOCKET}")

    def _found(self) -> AgentPlace:
        if self.place is None:
            raise HostUnreachableError(self.host, "its agent is not found yet")
        return self.place

    def _start_relay(self) -> None:
        assert self._on_frame is not None
        channel = self._connected().open_process(self._argv("relay", "--dir", self._found().dir))
        reading = (channel, self._on_frame)
        thread = threading.Thread(target=_read_frames, args=reading, name="rankdeck-relay", daemon=True)
        self._relay = (channel, thread)
        thread.start()

    def _end_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is None:
            return
        channel, thread = relay
        with contextlib.suppress(*CHANNEL_ERRORS):
            channel.close()
        thread.join(JOIN_S)

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


def _read_frames(channel: ByteChannel, on_frame: Callable[[bytes], None]) -> None:
    reader = FrameReader()
    with contextlib.suppress(*CHANNEL_ERRORS, MalformedMessageError):  # the node's row says that nothing comes
        while chunk := channel.recv(65_536):
            for frame in reader.feed(chunk):
                on_frame(frame)
