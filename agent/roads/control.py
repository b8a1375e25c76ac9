"""The Unix socket on which commands come in: one JSON line in, one JSON line out, as often as the peer likes.

Who may speak is decided by the kernel: the directory is 0700, the socket 0600, and the peer's user id is compared.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from agent.roads.peer import Peer, peer_of
from agent.roads.unix_listener import listen_at
from agent.wire.codec import MAX_COMMAND_BYTES, MalformedMessageError
from agent.wire.commands import Command, decode_command
from agent.wire.replies import RefusalReason, Refused, Reply, encode_reply

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
        listener = listen_at(self._path)
        try:
            self._server = await asyncio.start_unix_server(self._connected, sock=listener, limit=MAX_COMMAND_BYTES)
        except OSError:
            listener.close()
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
