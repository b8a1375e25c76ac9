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
from app.errors import HostUnreachableError, IncompatibleAgentError
from app.runtime_dir import TunnelDir
from app.safe_text import clean
from app.ssh.agent_link import VERB_TIMEOUT_S, AgentLink
from app.ssh.connection import ForwardingRefusedError
from app.ssh.login import Logins
from app.ssh.relay_frames import FrameReader
from app.ssh.transport import CHANNEL_ERRORS
from app.ssh.tunnel import JOIN_S, Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from app.ssh.connection import SshConnection
    from app.ssh.remote_command import Finished
    from app.ssh.tunnel import ByteChannel


class Access(msgspec.Struct, frozen=True):
    """How a person reaches a host."""

    host: str
    python: str = "python3"
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

    def open_road(self, on_frame: Callable[[bytes], None]) -> None:
        """Bring the agent's sockets here; see `AgentLink.open_road`."""
        assert self.place is not None
        self._on_frame = on_frame
        place, near_control = self.place, self.directory / CONTROL_SOCKET
        far_control = f"{place.dir}/{CONTROL_SOCKET}"
        try:
            self._connected().open_socket(far_control).close()
        except ForwardingRefusedError:
            self.is_forwarded = False
        if self.is_forwarded:
            far_telemetry = f"{place.dir}/{TELEMETRY_SOCKET}"
            self._tunnels += [
                Tunnel(near_control, lambda: self._connected().open_socket(far_control)),
                Tunnel(self.directory / TELEMETRY_SOCKET, lambda: self._connected().open_socket(far_telemetry)),
            ]
            return
        proxy = self._argv("proxy", "--dir", place.dir)
        self._tunnels.append(Tunnel(near_control, lambda: self._connected().open_process(proxy)))
        self._start_relay()

    def reconnect(self) -> None:
        """Log in again, without a question: the terminal shows something else now; see `AgentLink.reconnect`."""
        lost, self._connection = self._connection, None
        if lost is not None:
            lost.close()
        self._log_in(asks=False)
        before = self.place
        assert before is not None
        place = self.find()
        if place.dir != before.dir:
            raise IncompatibleAgentError(self.host, f"its agent serves in {clean(place.dir)} now: begin anew")
        if not self.is_forwarded:
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

    def _start_relay(self) -> None:
        assert self.place is not None
        assert self._on_frame is not None
        channel = self._connected().open_process(self._argv("relay", "--dir", self.place.dir))
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

    def _execute(self, argv: Sequence[str]) -> Finished:
        return self._connected().run(argv, VERB_TIMEOUT_S)


def _read_frames(channel: ByteChannel, on_frame: Callable[[bytes], None]) -> None:
    reader = FrameReader()
    with contextlib.suppress(*CHANNEL_ERRORS, MalformedMessageError):  # the node's row says that nothing comes
        while chunk := channel.recv(65_536):
            for frame in reader.feed(chunk):
                on_frame(frame)
