"""The Unix socket for commands: one JSON line in, one JSON line out, as often as the peer likes.

`ControlSocket` serves it. The kernel decides who may send: the directory is 0700, the socket 0600 (`listen_at`), and
the peer's user id, as the kernel reports it (`Peer`), is compared.

`ask` sends one command to the agent that serves a directory and returns its reply, as every verb of the command line
does.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.errors import NoAgentError
from agent.wire.codec import CONTROL_SOCKET, MAX_COMMAND_BYTES, MalformedMessageError
from agent.wire.commands import (
    Command,
    RefusalReason,
    Refused,
    Reply,
    decode_command,
    decode_reply,
    encode_command,
    encode_reply,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_CONNECTIONS = 64
FAREWELL_S = 1.0
"""How long replies under way may take when the socket closes."""


class ControlSocket:
    """Serves commands from `open` to `close`."""

    def __init__(self, path: str, carry_out: Callable[[Command, Peer], Awaitable[Reply]]) -> None:
        self._path = path
        self._carry_out = carry_out
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._busy: set[asyncio.Task[None]] = set()
        """Connections that owe a reply."""

    async def open(self) -> None:
        """Bind the socket and start to serve.

        Raises:
            OSError: The path cannot be bound.
        """
        server_socket = listen_at(self._path)
        try:
            self._server = await asyncio.start_unix_server(self._connected, sock=server_socket, limit=MAX_COMMAND_BYTES)
        except OSError:
            server_socket.close()
            raise

    async def close(self) -> None:
        """Stop serving, once replies under way are out."""
        if self._server is None:
            return
        self._server.close()
        if self._busy:
            await asyncio.wait(self._busy, timeout=FAREWELL_S)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if refusal := self._refusal(peer):
                await _send(writer, refusal)
            else:
                await self._serve(task, reader, writer, peer)
        except (ConnectionError, asyncio.CancelledError):
            return  # the peer is gone, or we are about to be
        finally:
            self._connections.discard(task)
            writer.close()

    def _refusal(self, peer: Peer) -> Refused | None:
        if len(self._connections) > MAX_CONNECTIONS:
            return Refused(RefusalReason.NOT_PERMITTED, f"{MAX_CONNECTIONS} connections are open already")
        if peer.uid != os.geteuid():
            message = f"this agent serves user {os.geteuid()}, you are user {peer.uid}"
            return Refused(RefusalReason.NOT_PERMITTED, message)
        return None

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer
    ) -> None:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                message = f"a command of more than {MAX_COMMAND_BYTES} bytes"
                await _send(writer, Refused(RefusalReason.MALFORMED, message))
                return  # where the next command begins is unknown
            self._busy.add(task)
            try:
                await _send(writer, await self._reply(line, peer))
            finally:
                self._busy.discard(task)

    async def _reply(self, line: bytes, peer: Peer) -> Reply:
        try:
            command = decode_command(line)
        except MalformedMessageError as error:
            return Refused(RefusalReason.MALFORMED, str(error)[:4096])
        return await self._carry_out(command, peer)


async def _send(writer: asyncio.StreamWriter, reply: Reply) -> None:
    writer.write(encode_reply(reply))
    await writer.drain()


_UCRED = struct.Struct("=iII")
_CHANNEL_PREFIX = b"\0rankdeck-road "
_MAX_ADDRESS_BYTES = 107
"""Bytes of `sun_path`, its closing zero aside. Source: unix(7)."""


class Peer(NamedTuple):
    """The process that connected; one that it hands the connection to goes by its name."""

    pid: int
    """0 when it is of a PID namespace that is not seen from here."""
    uid: int
    process: str
    """What it calls itself, 15 bytes of its own choice: `sshd` for a console over SSH. Empty when it is gone."""
    channel: str = ""
    """Channel by which it has come, and for whom, where this process itself has connected for somebody: see
    `channel_address`."""


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected. Source: unix(7), SO_PEERCRED; proc_pid_comm(5)."""
    pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        process = Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n").decode(errors="replace")
    except OSError:
        process = ""
    return Peer(pid, uid, process, _channel_of(connection) if pid == os.getpid() else "")


def channel_address(channel: str) -> bytes:
    """Return an address that a socket of this process binds before it connects to this process: it names the channel.

    It is one of the abstract kind, which leaves no file, and no other process can borrow it: only of our own process
    is it believed.
    """
    head = _CHANNEL_PREFIX + secrets.token_hex(8).encode() + b" "
    return head + channel.encode()[: _MAX_ADDRESS_BYTES - len(head)]


def _channel_of(connection: socket.socket) -> str:
    address = connection.getpeername()
    if not isinstance(address, bytes) or not address.startswith(_CHANNEL_PREFIX):
        return ""
    return address.removeprefix(_CHANNEL_PREFIX).partition(b" ")[2].decode(errors="replace")


MAX_WAITING = 100
"""Connections that nobody has accepted yet; as many as servers of asyncio have."""


def listen_at(path: str) -> socket.socket:
    """Return a listener that does not block.

    Raises:
        OSError: The path cannot be bound.
    """
    server_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        server_socket.bind(path)
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere
        server_socket.listen(MAX_WAITING)
    except OSError:
        server_socket.close()
        raise
    return server_socket


REPLY_TIMEOUT_S = 10.0


def ask(directory: Path, command: Command, timeout_s: float = REPLY_TIMEOUT_S) -> tuple[bytes, Reply]:
    """Return the line that the agent answered with, and what it means.

    Args:
        directory: Where it serves.
        command: What is asked.
        timeout_s: For each piece of the answer.

    Raises:
        NoAgentError: Nobody answers there, or somebody who does not speak as we do.
    """
    line = _exchange(directory, encode_command(command), timeout_s)
    try:
        return line, decode_reply(line)
    except MalformedMessageError as error:
        raise NoAgentError(f"what answers at {directory} is no agent of this version: {error}") from error


def _exchange(directory: Path, line: bytes, timeout_s: float) -> bytes:
    path = directory / CONTROL_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as replies:
                reply = replies.readline(MAX_COMMAND_BYTES + 1)
        except OSError as error:
            raise NoAgentError(f"no agent answers at {path}: {error.strerror or error}") from error
    if not reply.endswith(b"\n"):
        raise NoAgentError(f"the agent at {path} ended without a reply")
    return reply
