"""The channel for commands: one JSON line to an agent, one JSON line back, over its command socket.

The socket is the agent's own, or one of this machine that leads to it (`app.ssh.tunnel`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from agent.wire.codec import CONTROL_SOCKET, MAX_COMMAND_BYTES
from agent.wire.commands import Command, RefusalReason, Refused, Reply, decode_reply, encode_command
from app.errors import AgentRefusedError, AgentUnreachableError
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from pathlib import Path

    Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]

REPLY_TIMEOUT_S = 10.0
"""Seconds for a reply; a later one will not come. No command of an agent waits, except for the stacks of stuck ranks,
which take eight seconds at most."""


class CommandChannel(Protocol):
    """A channel to one agent."""

    async def request(self, command: Command) -> Reply:
        """Send a command and return the agent's reply.

        Raises:
            AgentUnreachableError: No reply; whether the command was carried out is unknown.
        """

    async def close(self) -> None:
        """Close the channel; the agent keeps running."""


class StreamChannel:
    """A channel over one byte stream, opened at the first command and again after it broke."""

    def __init__(self, node: str, directory: Path) -> None:
        """`directory` holds the agent's socket, whether it serves by now or not."""
        self._node = node
        self._path = directory / CONTROL_SOCKET
        self._stream: Stream | None = None
        self._lock = asyncio.Lock()

    async def request(self, command: Command) -> Reply:
        """See `CommandChannel.request`."""
        async with self._lock:
            try:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    return await self._exchange(command)
            except TimeoutError:
                await self._drop()
                raise AgentUnreachableError(self._node, f"no reply in {REPLY_TIMEOUT_S:.0f} s") from None
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                await self._drop()
                raise AgentUnreachableError(self._node, _error_text(error)) from error
            except asyncio.CancelledError:
                # The pending reply would be taken for the next command's.
                if self._stream is not None:
                    self._stream[1].close()
                    self._stream = None
                raise

    async def close(self) -> None:
        """See `CommandChannel.close`."""
        async with self._lock:
            await self._drop()

    async def _exchange(self, command: Command) -> Reply:
        if self._stream is not None and self._stream[0].at_eof():
            await self._drop()  # it broke since the last command: open a new stream for this one
        if self._stream is None:
            self._stream = await self._open()
        reader, writer = self._stream
        writer.write(encode_command(command))
        await writer.drain()
        return decode_reply(await reader.readuntil(b"\n"))

    async def _open(self) -> Stream:
        try:
            return await asyncio.open_unix_connection(str(self._path), limit=MAX_COMMAND_BYTES)
        except (FileNotFoundError, ConnectionRefusedError):
            raise AgentUnreachableError(self._node, f"none serves at {self._path}") from None

    async def _drop(self) -> None:
        if self._stream is None:
            return
        _, writer = self._stream
        self._stream = None
        # Not closed in an orderly way, which would wait for a silent peer to read what was written.
        writer.transport.abort()
        try:
            await writer.wait_closed()
        except OSError:
            return  # the peer closed first


def taken(node: str, reply: Reply) -> Reply:
    """Return a reply that is not a refusal.

    Raises:
        AgentRefusedError: It is one.
    """
    if isinstance(reply, Refused):
        raise AgentRefusedError(node, reply.reason.value, clean(reply.message, LINE_LIMIT), reply.next_attempt)
    return reply


def knows_no_job(answer: object) -> bool:
    """Return whether an answer is the refusal of a node that does not know the job."""
    return isinstance(answer, AgentRefusedError) and answer.reason == RefusalReason.UNKNOWN_JOB


def _error_text(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "it closed the connection without a reply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return clean(str(error), LINE_LIMIT)
