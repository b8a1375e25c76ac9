"""One host over SSH: its agent found, brought up and ended there, and its sockets brought here, again after a break.

Everything here blocks, within bounds. After `open_road` there is a directory on this machine in which the host's agent
seems to serve: whatever speaks to local agents speaks to this one. Where sshd forwards no sockets, commands go
through `agent proxy` and telemetry comes through `agent relay`, each the standard input and output of a process there.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Self

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.fields import CONTROL_SOCKET, TELEMETRY_SOCKET
from agent.wire.replies import Accepted, decode_reply
from agent.wire.reports import WIRE_VERSION
from app.errors import AgentRefusedError, AgentUnreachableError, ExitCode, HostUnreachableError, IncompatibleAgentError
from app.runtime_dir import TunnelDir
from app.safe_text import clean
from app.ssh.connection import CHANNEL_ERRORS, ForwardingRefusedError, SshConnection, connect
from app.ssh.relay_frames import FrameReader
from app.ssh.tunnel import JOIN_S, Tunnel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from app.ssh.tunnel import ByteChannel

VERB_TIMEOUT_S = 45.0
"""A start of Python on a busy machine, twice, and an agent that takes up its jobs."""
EXIT_NO_COMMAND = 127
EXIT_CANNOT_EXECUTE = 126
_OLD_PYTHON = "python -h"
"""In what a Python before 3.11 says of the option -P: "Try `python -h' for more information."."""
_OLD_RANKDECK = ("No such command", "No such option")
"""In what click says of a verb or an option that its program does not have."""


class Access(msgspec.Struct, frozen=True):
    """How a person reaches a host."""

    host: str
    python: str = "python3"
    """The interpreter there that has rankdeck; may begin with `~/`."""
    ssh_config: str = ""
    """Read instead of ~/.ssh/config."""


class AgentPlace(msgspec.Struct, frozen=True):
    """What the agent says of itself; the schema is `agent.service.whereabouts`."""

    ready: bool
    dir: str
    python: str
    home: str
    wire_version: int
    node: str = ""
    epoch: str = ""
    pid: int = 0
    is_new: bool = False
    rankdeck: str = ""


class HostLink:
    """A connection to a host; the `with` block closes it, and leaves what runs there alone."""

    def __init__(self, access: Access) -> None:
        """Make the near end.

        Raises:
            SessionError: This machine has no place for it.
        """
        self.host = access.host
        self._access = access
        self._near = TunnelDir()
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: SshConnection | None = None
        self._tunnels: list[Tunnel] = []
        self._relay: tuple[ByteChannel, threading.Thread] | None = None
        self._on_frame: Callable[[bytes], None] | None = None
        self.place: AgentPlace | None = None
        """Where the agent serves; None before it is found."""
        self.is_forwarded = True
        """False when sshd forwards no sockets."""

    @property
    def directory(self) -> Path:
        """Where the agent's sockets appear on this machine."""
        return self._near.path

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost."""
        return self._connection is not None and self._connection.is_alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Log in; see `app.ssh.connection.connect`.

        Raises:
            HostUnreachableError: Also when the link was closed meanwhile, by another thread.
        """
        connection = connect(self.host, self._access.ssh_config)
        with self._lock:
            if not self._is_closed:
                self._connection = connection
                return
        connection.close()
        raise HostUnreachableError(self.host, "the link to it is closed")

    def bring_up(self) -> AgentPlace:
        """Start the agent unless it serves already, and return where.

        Raises:
            AgentUnreachableError: It does not start; its own words are in the message.
            IncompatibleAgentError: It speaks another version.
        """
        self.place = self._ask_place("serve", "--daemon")
        return self.place

    def find(self) -> AgentPlace:
        """Return where the agent serves.

        Raises:
            AgentUnreachableError: None does.
            IncompatibleAgentError: It speaks another version.
        """
        place = self._ask_place("where")
        if not place.ready:
            raise AgentUnreachableError(self.host, "none serves there", f"rankdeck up {self.host}")
        self.place = place
        return place

    def shut_down(self, *, kill_jobs: bool) -> int:
        """End the agent; returns when it is gone, with the number of jobs that go on.

        Raises:
            AgentUnreachableError: None serves there.
            AgentRefusedError: It does not want to.
        """
        options = ("--kill-jobs",) if kill_jobs else ()
        line = self._run("shutdown", *options)
        try:
            reply = decode_reply(line)
        except MalformedMessageError as error:
            raise AgentUnreachableError(self.host, clean(str(error))) from error
        if not isinstance(reply, Accepted):
            raise AgentRefusedError(self.host, "shutdown", clean(str(reply)))
        return reply.num_jobs_left or 0

    def open_road(self, on_frame: Callable[[bytes], None]) -> None:
        """Bring the agent's sockets here.

        Args:
            on_frame: Called from a thread with each frame of telemetry, where it cannot come through a socket.

        Raises:
            HostUnreachableError: The connection broke.
        """
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
        """Log in again after the connection was lost: what was brought here by `open_road` comes again.

        Raises:
            HostKeyError: The host is no longer known to be who it was.
            HostUnreachableError: It still cannot be reached.
            AgentUnreachableError: No agent serves there now.
            IncompatibleAgentError: Another one serves there now, in another place or of another version.
        """
        lost, self._connection = self._connection, None
        if lost is not None:
            lost.close()
        self.connect()
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

    def _argv(self, *arguments: str) -> list[str]:
        # -P: the directory that a login begins in may hold an `agent` of its own.
        return [self._access.python, "-P", "-m", "agent", *arguments]

    def _ask_place(self, *arguments: str) -> AgentPlace:
        line = self._run(*arguments)
        try:
            place = msgspec.json.decode(line, type=AgentPlace)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            detail = f"`agent {arguments[0]}` there says something else: {clean(str(error))}"
            raise IncompatibleAgentError(self.host, detail) from error
        if place.wire_version != WIRE_VERSION:
            detail = f"the agent speaks wire version {place.wire_version}, this console {WIRE_VERSION}"
            raise IncompatibleAgentError(self.host, detail)
        return place

    def _run(self, *arguments: str) -> bytes:
        """Run a verb of the agent there, and return its answer: the last line that was printed.

        A login shell may print lines of its own before.
        """
        done = self._connected().run(self._argv(*arguments), VERB_TIMEOUT_S)
        if done.exit_code == 0:
            return b"".join(done.stdout.strip().splitlines()[-1:])
        if done.exit_code == ExitCode.REFUSED:
            raise AgentRefusedError(self.host, arguments[0], done.said)
        python = self._access.python
        if done.exit_code in (EXIT_NO_COMMAND, EXIT_CANNOT_EXECUTE):
            raise AgentUnreachableError(self.host, f"{python} does not run there", "name one: --python")
        if "No module named" in done.said:
            hint = f"install rankdeck there ({python} -m pip install rankdeck), or name another Python: --python"
            raise AgentUnreachableError(self.host, f"{python} has no rankdeck ({done.said})", hint)
        if _OLD_PYTHON in done.said:
            raise IncompatibleAgentError(self.host, f"{python} is older than 3.11: name a newer one by --python")
        if any(words in done.said for words in _OLD_RANKDECK):
            raise IncompatibleAgentError(self.host, f"rankdeck there is another version ({done.said})")
        raise AgentUnreachableError(self.host, done.said.removeprefix("agent: ") or f"exit code {done.exit_code}")


def _read_frames(channel: ByteChannel, on_frame: Callable[[bytes], None]) -> None:
    reader = FrameReader()
    with contextlib.suppress(*CHANNEL_ERRORS, MalformedMessageError):  # the node's row says that nothing comes
        while chunk := channel.recv(65_536):
            for frame in reader.feed(chunk):
                on_frame(frame)
