"""One host over SSH; its agent's sockets appear on this machine, again after a break.

Everything here blocks, within bounds. After `open_sockets` there is a directory on this machine in which the host's
agent seems to serve: clients of local agents work with this one. Where sshd forwards no sockets, each connection is the
standard input and output of an `agent proxy` there.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from agent.wire.codec import CONTROL_SOCKET, REPORTS_SOCKET
from agent.wire.relay import MAX_REPLY_BYTES, REQUEST_PREFIX
from app.errors import HostUnreachableError, IncompatibleAgentError, SessionError
from app.fleet.agent_link import DEFAULT_PYTHON, LINE_TIMEOUT_S, VERB_TIMEOUT_S, AgentLink
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.paths import TunnelDir
from app.ssh.connection import ForwardingRefusedError
from app.ssh.login import Logins
from app.ssh.tunnel import Tunnel
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from app.fleet.agent_link import AgentPlace, TakesFrame
    from app.ssh.connection import HostConnection
    from app.ssh.io_thread import ByteChannel, RingingChannel
    from app.ssh.remote_command import Finished


SOCKET_PAUSE_S = 2.0
"""Seconds between two attempts to connect to the reports of an agent that does not serve now: it may be restarting."""
NEXT_ATTEMPT_S = 5.0
"""Seconds after such a pause in which the next attempt comes if it is needed; libzmq tries every 2 s."""
PROXY_PAUSE_S = 15.0
"""The same through `agent proxy`, where each attempt starts a Python on the host."""


class Access(msgspec.Struct, frozen=True):
    """How the user reaches a host."""

    host: str
    python: str = DEFAULT_PYTHON
    """The interpreter there that has rankdeck; may begin with `~/`."""
    ssh_config: str = ""
    """Path read instead of ~/.ssh/config."""


class HostLink(AgentLink):
    """A connection to a host; the `with` block closes it, and leaves what runs there alone."""

    def __init__(self, access: Access, logins: Logins | None = None) -> None:
        """Make the local end.

        Args:
            access: The host, and how to reach it.
            logins: Shared with the other hosts of the command; without it the user is asked nothing.

        Raises:
            SessionError: A directory on this machine cannot be made.
        """
        super().__init__(access.host, access.python)
        self._ssh_config = access.ssh_config
        self._logins = logins or Logins()
        self._near = TunnelDir()
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: HostConnection | None = None
        self._tunnels: dict[str, Tunnel] = {}
        self._can_forward: bool | None = None
        """Whether sshd forwards sockets over this connection; None where that is not known."""
        self._next_reports_s = 0.0
        """Monotonic time before which nobody tries to connect to the reports."""
        self._no_reports: UnreachableReason | None = None
        """Why the last attempt to connect to the reports has failed, or the one before has not lasted."""
        self._reports_end = ""
        """What happens when the reports' connection ends; empty until there is one."""

    @property
    def unreachable_reason(self) -> UnreachableReason | None:
        """See `AgentLink.unreachable_reason`; counts only while no reports come."""
        return self._no_reports if time.monotonic() < self._next_reports_s + NEXT_ATTEMPT_S else None

    @property
    def directory(self) -> Path:
        """Directory in which the agent's sockets appear on this machine."""
        return self._near.path

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost."""
        return self._connection is not None and self._connection.is_alive

    def connect(self) -> None:
        """Log in; see `Logins.connect`.

        Raises:
            HostUnreachableError: Also when another thread has closed the link by then.
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

    def open_sockets(self, on_frame: TakesFrame) -> None:  # noqa: ARG002 - reports come by their socket
        """See `AgentLink.open_sockets`."""
        for name in (CONTROL_SOCKET, REPORTS_SOCKET):
            self._bring(name)
        if self.place is not None:
            self._find_forwarding()

    def forget_refusals(self) -> None:
        """See `AgentLink.forget_refusals`; applies to all hosts that share the logins."""
        self._logins.forget_refusals()

    def reconnect(self, *, asks: bool = False) -> None:
        """Log in again; see `AgentLink.reconnect`."""
        self.go_again(asks=asks)
        before = self.place
        place = self.find()
        if before is not None and place.dir != before.dir:
            raise IncompatibleAgentError(self.host, f"its agent serves in {clean(place.dir)} now: attach again")
        self._next_reports_s = 0.0
        self._no_reports, self._reports_end = None, ""
        if REPORTS_SOCKET in self._tunnels:
            self._find_forwarding()
        if (reports := self._tunnels.get(REPORTS_SOCKET)) is not None:
            reports.hang_up()

    def go_again(self, *, asks: bool = False) -> None:
        """Log in again, without a question unless a user waits for one; see `AgentLink.go_again`."""
        if not self.is_alive:
            lost, self._connection = self._connection, None
            if lost is not None:
                lost.close()
            self._can_forward = None
            self._log_in(asks=asks)

    def open_in(self, directory: str, socket_name: str) -> RingingChannel:
        """Connect to a socket there; see `AgentLink.open_in`."""
        connection = self._connected()
        if self._can_forward is not False:
            try:
                channel = connection.open_socket(f"{directory}/{socket_name}")
            except ForwardingRefusedError:  # or nobody listens: sshd's answer is the same
                if self._can_forward:
                    raise
            else:
                self._can_forward = self.is_forwarded = True
                return channel
        reports = ("--reports",) if socket_name == REPORTS_SOCKET else ()
        return connection.open_process(self._argv("proxy", *reports, "--dir", directory))

    def close(self) -> None:
        """Disconnect; each part is closed whatever the others raise. Safe to call twice."""
        with self._lock:
            self._is_closed = True
            tunnels, self._tunnels = self._tunnels, {}
        with contextlib.ExitStack() as parts:  # closed in reverse order
            parts.callback(self._near.remove)
            if self._connection:
                parts.callback(self._connection.close)
            for tunnel in tunnels.values():
                parts.callback(tunnel.close)

    def _connected(self) -> HostConnection:
        connection = self._connection  # another thread may be about to replace it
        if connection is None:
            raise HostUnreachableError(self.host, "not connected")
        return connection

    def _bring(self, name: str) -> None:
        """Make a socket of the agent appear on this machine, until the link is closed."""
        try:
            limit = (MAX_REPLY_BYTES, REQUEST_PREFIX) if name == REPORTS_SOCKET else ()
            tunnel = Tunnel(self.directory / name, lambda: self._open_socket(name), *limit)
        except OSError as error:
            reason = f"no socket for {self.host} can be opened here: {error.strerror}"
            raise SessionError(reason, "for many hosts raise ulimit -n") from error
        with self._lock:
            if not self._is_closed:
                self._tunnels[name] = tunnel
                return
        tunnel.close()
        raise HostUnreachableError(self.host, "the link to it is closed")

    def _find_forwarding(self) -> None:
        """Find out whether sshd forwards sockets; the agent serves, or did a moment ago."""
        if self._can_forward is not None:
            return
        try:
            self._connected().open_socket(f"{self._found().dir}/{CONTROL_SOCKET}").close()
        except ForwardingRefusedError:
            self._can_forward = False
        else:
            self._can_forward = True
        self.is_forwarded = self._can_forward

    def _open_socket(self, name: str) -> RingingChannel:
        """Connect to a socket of the agent; attempts on the reports socket keep a pause."""
        place = self._found()
        if name != REPORTS_SOCKET:
            return self.open_in(place.dir, name)
        now_s = time.monotonic()
        if now_s < self._next_reports_s or self._can_forward is None:
            raise HostUnreachableError(self.host, "its reports are asked for again later")
        self._next_reports_s = now_s + (SOCKET_PAUSE_S if self._can_forward else PROXY_PAUSE_S)
        why = self._reports_end
        try:
            channel = self.open_in(place.dir, name)
        except HostUnreachableError as error:
            is_refused = isinstance(error, ForwardingRefusedError)  # nobody listens: sshd names only the path
            why = "its socket for reports does not answer" if is_refused else error.text_for(self.host)
            raise
        else:
            self._reports_end = f"{'their connection' if self._can_forward else '`agent proxy --reports`'} ends there"
            return channel
        finally:
            self._no_reports = UnreachableReason(f"no reports: {why}", UnreachableKind.ANSWER) if why else None

    def _found(self) -> AgentPlace:
        if self.place is None:
            raise HostUnreachableError(self.host, "its agent is not found yet")
        return self.place

    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:
        return self._connected().run(argv, timeout_s or VERB_TIMEOUT_S, given)

    def _open(self, argv: Sequence[str]) -> ByteChannel:
        channel = self._connected().open_process(argv)
        channel.settimeout(LINE_TIMEOUT_S)
        return channel
