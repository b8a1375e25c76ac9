"""Sends reports to consoles: each gets what is new to it when it asks, as fast as it reads.

`ReportSubscribers` serves the consoles of a relay, or of an agent.

`ReportStream` is the Unix socket on which an agent hands out its latest report, one for each time that it is asked. A
publisher sends what there is, and on a link that carries less the oldest goes first. Here nothing waits for a console
that is slow or far away: it gets the latest, and knows how old that is (`agent.wire.relay`).

`Publisher` is the ZeroMQ socket on which the node's reports go out: one frame a report, to every subscriber, never
waiting.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from typing import TYPE_CHECKING

import zmq

from agent.transport.command_socket import listen_at, peer_of
from agent.transport.latest_reports import LatestReports, ReportSubscriber
from agent.wire.codec import with_length
from agent.wire.relay import ASK, MAX_ASKED, RosterEntry, encode_merged

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
        self.received_at_s = time.monotonic()
        self.news = asyncio.Event()


class ReportSubscribers:
    """Serves consoles from `open` to `close`."""

    def __init__(
        self,
        latest: LatestReports,
        relay: str,
        num_expected: Callable[[], int],
        on_watched: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_watched` is called when the first console has come, and when the last one has left."""
        self._latest = latest
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

    async def open(self, server_socket: socket.socket) -> None:
        """Begin to serve."""
        self._server = await asyncio.start_unix_server(self._connected, sock=server_socket)

    async def close(self) -> None:
        """Let go of all consoles."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send_news(self) -> None:
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
                min(self._consoles, key=lambda served: self._consoles[served].received_at_s).cancel()
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
        subscriber = ReportSubscriber(self._latest, self._relay)
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
                while asked and subscriber.has_news:
                    now_s = time.monotonic()
                    merged = subscriber.take(int((now_s - asked[0]) * 1000), self._num_expected(), now_s)
                    if merged is None:
                        break
                    asked.popleft()
                    writer.write(with_length(encode_merged(merged)))
                    await writer.drain()
                    if not subscriber.is_behind:
                        await asyncio.sleep(MERGE_S)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)


async def _listen(reader: asyncio.StreamReader, console: _Console) -> None:
    """Note when each frame was asked for, until the console is gone or asks for what it may not."""
    while asks := await reader.read(64):
        if asks.strip(ASK) or len(console.asked) + len(asks) > MAX_ASKED:
            return
        console.received_at_s = time.monotonic()
        console.asked.extend([console.received_at_s] * len(asks))
        console.news.set()


HERE = "here"
"""The only node: who it is, the way to it says."""


class ReportStream:
    """Serves consoles from `open` to `close`."""

    def __init__(self, path: str, epoch: str) -> None:
        self._path = path
        self._latest = LatestReports()
        self._latest.put_node(RosterEntry(HERE, is_here=True), time.monotonic())
        self._subscribers = ReportSubscribers(self._latest, epoch, lambda: 1)

    async def open(self) -> None:
        """Bind the socket and start to serve.

        Raises:
            OSError: The path cannot be bound.
        """
        await self._subscribers.open(listen_at(self._path))

    @property
    def has_listeners(self) -> bool:
        """Whether anybody is connected now."""
        return self._subscribers.are_there

    def publish(self, frame: bytes) -> None:
        """Take an encoded report for whoever asks."""
        self._latest.put_report(HERE, frame, time.monotonic())
        self._subscribers.send_news()

    async def close(self) -> None:
        """Let go of all consoles."""
        await self._subscribers.close()


SEND_HIGH_WATER_MARK = 8
"""Reports kept for a subscriber that is slow; it wants only the newest anyway."""


class Publisher:
    """What the node says, on a Unix path: an XPUB socket, which is a PUB that hears who subscribes."""

    def __init__(self, path: str) -> None:
        """Bind `path`.

        Raises:
            OSError: It cannot be bound (`zmq.ZMQError` is an OSError's cousin and is turned into one).
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._topics: set[bytes] = set()
        """What somebody has subscribed to, and nobody has let go of."""
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror, path) from error
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere

    def has_listeners(self) -> bool:
        """Return whether anybody is subscribed now. A connection that broke counts until the kernel knows of it."""
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return bool(self._topics)
            # Source: zmq_socket(3), XPUB: a byte 1 or 0, then the topic, once for the first and the last subscriber.
            (self._topics.add if message[:1] == b"\x01" else self._topics.discard)(message[1:])

    def publish(self, frame: bytes) -> None:
        """Send an encoded report; the socket drops what a subscriber does not take in time."""
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; libzmq removes the path."""
        self._socket.close(linger=0)
        self._context.term()
