"""The Unix socket on which an agent hands out its newest report, one for each time that it is asked.

A publisher sends what there is, and on a link that carries less the oldest goes first. Here nothing waits for a console
that is slow or far away: it gets the newest, and knows how old that is (`agent.wire.merged`).
"""

from __future__ import annotations

import time

from agent.roads.newest import Newest
from agent.roads.onlookers import Onlookers
from agent.roads.unix_listener import listen_at
from agent.wire.merged import RosterEntry

HERE = "here"
"""The only node: who it is, the way to it says."""


class ReportStream:
    """Serves consoles from `open` to `close`."""

    def __init__(self, path: str, epoch: str) -> None:
        self._path = path
        self._newest = Newest()
        self._newest.put_node(RosterEntry(HERE, is_here=True), time.monotonic())
        self._onlookers = Onlookers(self._newest, epoch, lambda: 1)

    async def open(self) -> None:
        """Bind the socket and start to serve.

        Raises:
            OSError: The path cannot be bound.
        """
        await self._onlookers.open(listen_at(self._path))

    @property
    def has_listeners(self) -> bool:
        """Whether anybody is connected now."""
        return self._onlookers.are_there

    def publish(self, frame: bytes) -> None:
        """Take an encoded report for whoever asks."""
        self._newest.put_report(HERE, frame, time.monotonic())
        self._onlookers.tell_news()

    async def close(self) -> None:
        """Let go of all consoles."""
        await self._onlookers.close()
