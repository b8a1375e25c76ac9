"""The consoles of a relay, or of an agent: each gets what is new to it, when it asks, as fast as it reads."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from agent.roads.newest import Newest, Onlooker
from agent.roads.peer import peer_of
from agent.wire.length_frames import with_length
from agent.wire.merged import ASK, MAX_ASKED, encode_merged

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

MAX_CONSOLES = 64
"""Of more, the one that has asked for nothing longest is let go: sshd holds the end of a dead connection for long."""
MERGE_S = 0.05
"""Between two frames for a console that knows all there is: so many nodes are told of in one, a quarter of the time
between two reports of a node."""


class _Console:
    """One that is served: what it has asked for, and when it did last, or came."""

    def __init__(self) -> None:
        self.asked: deque[float] = deque()
        """When each frame was asked for that it has not got."""
        self.heard_at_s = time.monotonic()
        self.news = asyncio.Event()


class Onlookers:
    """Serves consoles from `open` to `close`."""

    def __init__(
        self,
        newest: Newest,
        relay: str,
        num_expected: Callable[[], int],
        on_watched: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_watched` is called when the first console has come, and when the last one has left."""
        self._newest = newest
        self._relay = relay
        self._num_expected = num_expected
        self._on_watched = on_watched
        self._server: asyncio.Server | None = None
        self._consoles: dict[asyncio.Task[None], _Console] = {}
        """Those that are served, by the task that does."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def are_there(self) -> bool:
        """Somebody looks on."""
        return bool(self._consoles)

    async def open(self, listener: socket.socket) -> None:
        """Begin to serve."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listener)

    async def close(self) -> None:
        """Let go of all consoles."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell_news(self) -> None:
        """Say that something has changed."""
        for console in self._consoles.values():
            console.news.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if peer_of(writer.get_extra_info("socket")).uid != os.geteuid():
                return
            if len(self._consoles) >= MAX_CONSOLES:
                min(self._consoles, key=lambda served: self._consoles[served].heard_at_s).cancel()
            console = self._consoles[task] = _Console()
            if len(self._consoles) == 1:
                self._on_watched()
            await self._serve(reader, writer, console)
        except (ConnectionError, MemoryError, asyncio.CancelledError):
            return  # it is gone, or we are about to be; or there is no memory for it now, and it asks again
        finally:
            self._tasks.discard(task)
            writer.close()
            if self._consoles.pop(task, None) is not None and not self._consoles:
                self._on_watched()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, console: _Console) -> None:
        asked = console.asked
        onlooker = Onlooker(self._newest, self._relay)
        listening = asyncio.create_task(_listen(reader, console))
        try:
            while True:
                waiting = asyncio.create_task(console.news.wait())
                try:
                    await asyncio.wait([listening, waiting], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waiting.cancel()
                if listening.done():
                    return
                console.news.clear()
                while asked and onlooker.has_news:
                    now_s = time.monotonic()
                    merged = onlooker.take(int((now_s - asked[0]) * 1000), self._num_expected(), now_s)
                    if merged is None:
                        break
                    asked.popleft()
                    writer.write(with_length(encode_merged(merged)))
                    await writer.drain()
                    if not onlooker.is_behind:
                        await asyncio.sleep(MERGE_S)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def _listen(reader: asyncio.StreamReader, console: _Console) -> None:
    """Note when each frame was asked for, until the console is gone or asks for what it may not."""
    while said := await reader.read(64):
        if said.strip(ASK) or len(console.asked) + len(said) > MAX_ASKED:
            return
        console.heard_at_s = time.monotonic()
        console.asked.extend([console.heard_at_s] * len(said))
        console.news.set()
