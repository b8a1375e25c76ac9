"""Hands reports to consoles: each gets one frame for each time that it asks, once there is something new to it.

A publisher sends all that it has; on a link that carries less than that, the oldest goes first. Here nothing waits for
a console that is slow or far away: it gets the latest, and knows how old that is (`agent.wire.relay`).

`ReportSubscribers` serves the consoles of a relay. `NodeReports` serves those of an agent.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from agent.transport.latest_reports import LatestReports, ReportSubscriber
from agent.transport.report_sockets import ReportSocket
from agent.wire.relay import Merged, RosterEntry, decode_request, encode_merged

if TYPE_CHECKING:
    from collections.abc import Callable

MERGE_S = 0.05
"""Seconds between two frames for a console that has all: more nodes are in each, and it is a quarter of the time
between two reports of a node."""
READING_S = 0.4
"""Seconds in which a console reads what it was sent last: what libzmq has received and nobody has read is dropped with
the connection. Source: libzmq's socket_base.cpp, hiccuped, for ZMQ_IMMEDIATE."""
AWAY_S = 15.0
"""A console that has been sent a frame and does not ask for another one for so long does not count as watching."""


class _Console:
    """What one console has asked for."""

    def __init__(self, subscriber: ReportSubscriber) -> None:
        self.subscriber = subscriber
        self.asked = 0
        """The number of its latest request."""
        self.num_due = 0
        """Frames that it is still to be sent for that."""
        self.asked_at_s = 0.0
        """When its latest request came."""
        self.sent_at_s = 0.0
        self.next_frame_s = 0.0
        """Time before which nothing is sent to it."""
        self.timer: asyncio.TimerHandle | None = None


class ReportSubscribers:
    """Serves consoles from `open` to `close`."""

    def __init__(
        self,
        path: str,
        latest: LatestReports,
        origin: str,
        num_expected: Callable[[], int] = lambda: 1,
        on_watched: Callable[[], object] = lambda: None,
    ) -> None:
        """Make the server of the reports in `latest`.

        Args:
            path: Path of the socket.
            latest: What there is to be sent.
            origin: Name of the process that serves, in each frame.
            num_expected: Returns how many nodes there are to be.
            on_watched: Called when the first console has come, and when the last one has left.
        """
        self._path = path
        self._latest = latest
        self._origin = origin
        self._num_expected = num_expected
        self._on_watched = on_watched
        self._socket: ReportSocket | None = None
        self._consoles: dict[bytes, _Console] = {}

    @property
    def is_watched(self) -> bool:
        """Whether any console waits for reports."""
        return bool(self._consoles)

    @property
    def is_behind(self) -> bool:
        """Whether there is something that a console has not been sent."""
        return any(console.subscriber.has_news for console in self._consoles.values())

    def open(self) -> None:
        """Bind the socket and begin to serve.

        Raises:
            OSError: The path cannot be bound.
        """
        self._socket = ReportSocket(self._path)
        self._socket.open(self._take, lambda: None)

    def close(self) -> None:
        """Send what is new to those who wait for it, and close the socket."""
        if self._socket is None:
            return
        for peer, console in list(self._consoles.items()):
            console.next_frame_s = 0.0
            self._serve(peer)
            if console.timer is not None:
                console.timer.cancel()
        self._consoles.clear()
        self._socket.close()
        self._socket = None

    def send_news(self) -> None:
        """Send what has changed to all who wait for it."""
        for peer in list(self._consoles):
            self._serve(peer)

    def forget_away(self) -> None:
        """Forget consoles that no longer ask; to be called about once a second, or more often."""
        if self._socket is not None:
            self._socket.mind_descriptors()
        since_s = time.monotonic() - AWAY_S
        for peer, console in list(self._consoles.items()):
            if not console.num_due and console.sent_at_s < since_s:
                self._forget(peer)

    def _take(self, peer: bytes, message: bytes) -> None:
        assert self._socket is not None
        if not message:  # a new connection: ZMQ_PROBE_ROUTER
            self._socket.mind_descriptors()
            self._socket.send(peer, encode_merged(Merged(self._origin, 0, self._num_expected())))
        elif any(request := decode_request(message)):
            self._asked(peer, *request)

    def _asked(self, peer: bytes, number: int, num_frames: int) -> None:
        console = self._consoles.get(peer)
        if console is None:
            console = self._consoles[peer] = _Console(ReportSubscriber(self._latest, self._origin))
            if len(self._consoles) == 1:
                self._on_watched()
        console.asked, console.num_due, console.asked_at_s = number, num_frames, time.monotonic()
        self._serve(peer)

    def _serve(self, peer: bytes) -> None:
        """Send a console the frame that it has asked for, now or `MERGE_S` after the last one."""
        console, now_s = self._consoles.get(peer), time.monotonic()
        if console is None or not console.num_due or not console.subscriber.has_news:
            return
        if now_s < console.next_frame_s:
            self._serve_in(console.next_frame_s - now_s, peer, console)
            return
        held_ms = int((now_s - console.asked_at_s) * 1000)
        try:
            merged = console.subscriber.take(console.asked, held_ms, self._num_expected(), now_s)
            frame = encode_merged(merged) if merged is not None else b""
        except MemoryError:  # of a moment: libzmq is about to drop whoever has sent so much; it is all sent later
            console.subscriber = ReportSubscriber(self._latest, self._origin)
            self._serve_in(MERGE_S, peer, console)
            return
        if not frame:
            return
        console.num_due -= 1
        console.next_frame_s = now_s if console.subscriber.is_behind else now_s + MERGE_S
        assert self._socket is not None
        console.sent_at_s = now_s
        if not self._socket.send(peer, frame):
            self._forget(peer)
        elif console.subscriber.is_behind:
            self._serve_in(0.0, peer, console)

    def _serve_in(self, wait_s: float, peer: bytes, console: _Console) -> None:
        if console.timer is None:
            console.timer = asyncio.get_running_loop().call_later(wait_s, self._serve_later, peer, console)

    def _serve_later(self, peer: bytes, console: _Console) -> None:
        console.timer = None
        console.next_frame_s = 0.0
        self._serve(peer)

    def _forget(self, peer: bytes) -> None:
        console = self._consoles.pop(peer)
        if console.timer is not None:
            console.timer.cancel()
        if not self._consoles:
            self._on_watched()


HERE = "here"
"""The only node of an agent: its name is known by the connection."""


class NodeReports:
    """The latest report of an agent, for consoles and for the relay that it has dialled; from `open` to `close`."""

    def __init__(self, path: str, epoch: str) -> None:
        self._latest = LatestReports()
        self._latest.put_node(RosterEntry(HERE, is_here=True), time.monotonic())
        self._subscribers = ReportSubscribers(path, self._latest, epoch)
        self.follower: Callable[[bytes], None] | None = None
        """Called with each report, in this process; who sets it counts as watching."""

    def open(self) -> None:
        """Bind the socket and begin to serve; raises as `ReportSubscribers.open`."""
        self._subscribers.open()

    def look(self) -> bool:
        """Return whether anybody is watching; to be called about once a second."""
        self._subscribers.forget_away()
        return self._subscribers.is_watched or self.follower is not None

    def publish(self, frame: bytes) -> None:
        """Take an encoded report, for all who wait for one."""
        self._latest.put_report(HERE, frame, time.monotonic())
        self._subscribers.send_news()
        if self.follower is not None:
            self.follower(frame)

    async def finish(self, within_s: float) -> None:
        """Wait until all consoles have the last report and time to read it; some have yet to ask for it.

        Args:
            within_s: How long consoles that do not ask are waited for, in seconds.
        """
        deadline_s = time.monotonic() + within_s
        while self._subscribers.is_behind and time.monotonic() < deadline_s:  # noqa: ASYNC110 - as they ask
            await asyncio.sleep(MERGE_S / 5)
        if self._subscribers.is_watched:
            await asyncio.sleep(READING_S)

    def close(self) -> None:
        """Send the last report to those who wait for it and close the socket."""
        self._subscribers.close()
