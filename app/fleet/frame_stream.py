"""The reports of a host, heard through one channel of its connection, which is opened again whenever it ends."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError
from agent.wire.relay import MAX_ASKED
from app.errors import HostUnreachableError
from app.fleet.credit import PullCredit
from app.ssh.io_thread import ChannelReader, hang_up, join_io_thread, leave_io_thread
from app.ssh.transport import CHANNEL_ERRORS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from app.fleet.agent_link import TakesFrame
    from app.ssh.io_thread import RingingChannel

FIRST_PAUSE_S = 0.1
MAX_CHUNKS = 16
"""Taken before other hosts have their turn."""


class FrameStream:
    """One channel at a time, read in the pump's thread. Of frames that have come together only the newest is told."""

    def __init__(self, open_channel: Callable[[], RingingChannel], max_pause_s: float, on_frame: TakesFrame) -> None:
        """Make it; `begin` opens it.

        Args:
            open_channel: May block, and raises what channels raise where there is nothing to hear.
            max_pause_s: Between two attempts: the pauses grow up to this.
            on_frame: Is called in the pump's thread, and must not block.
        """
        self._open_channel = open_channel
        self._max_pause_s = max_pause_s
        self._on_frame = on_frame
        self._lock = threading.Lock()
        self._is_closed = False
        self._turn = 0
        """Counts what was begun: a channel that was opened for an earlier turn is not wanted any more."""
        self._pause_s = FIRST_PAUSE_S
        self._far: ChannelReader | None = None
        self._credit = PullCredit(MAX_ASKED)
        self._timer: asyncio.TimerHandle | None = None
        self._io_thread = join_io_thread()

    def begin(self) -> None:
        """Open a channel, in place of any that is there; where that fails it is tried again later. May block."""
        with self._lock:
            self._turn += 1
            turn = self._turn
            if self._is_closed:
                return
            self._io_thread.call(self._drop)
        self._open(turn)

    def close(self) -> None:
        """End it; safe to call twice."""
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
            self._turn += 1
        if is_closed:
            return
        try:
            self._io_thread.run(self._drop)
        finally:
            leave_io_thread()

    def _open(self, turn: int) -> None:
        channel: RingingChannel | None = None
        try:
            channel = self._open_channel()
        except (HostUnreachableError, *CHANNEL_ERRORS):
            pass  # the node's row says that nothing comes
        finally:
            with self._lock:
                is_wanted = not self._is_closed
                if is_wanted:
                    self._io_thread.call(partial(self._listen, turn, channel))
            if not is_wanted and channel is not None:
                hang_up(channel)

    def _listen(self, turn: int, channel: RingingChannel | None) -> None:
        if turn != self._turn:
            if channel is not None:
                hang_up(channel)
        elif channel is None:
            self._try_later()
        else:
            self._credit = PullCredit(MAX_ASKED)
            channel.settimeout(0.0)  # a host that takes nothing must not hold up the others
            self._far = ChannelReader(channel, lambda: self._io_thread.gather(self._read))
            self._ask()

    def _ask(self) -> None:
        """Ask for more if it is time to; a host that does not let us is lost."""
        if self._far is not None and (asks := self._credit.asks(time.monotonic())):
            try:
                self._far.channel.sendall(asks)
            except CHANNEL_ERRORS:
                self._lose()

    def _read(self) -> None:
        if self._far is None:
            return
        latest: tuple[bytes, float] | None = None
        try:
            for _ in range(MAX_CHUNKS):
                chunk = self._far.take()
                if chunk is None:
                    break
                if not chunk:
                    self._lose()
                    break
                for merged, way_s in self._credit.feed(chunk, time.monotonic()):
                    for report in merged.reports:
                        latest = report.frame, way_s + report.age_ms / 1000
            else:
                self._io_thread.gather(self._read)
        except MalformedMessageError:
            self._lose()
        self._ask()
        if latest is not None:
            self._pause_s = FIRST_PAUSE_S
            self._on_frame(*latest)

    def _lose(self) -> None:
        self._drop()
        self._try_later()

    def _try_later(self) -> None:
        turn = self._turn
        self._timer = self._io_thread.loop.call_later(self._pause_s, self._try, turn)
        self._pause_s = min(2 * self._pause_s, self._max_pause_s)

    def _try(self, turn: int) -> None:
        if turn == self._turn:
            self._io_thread.workers.do(partial(self._open, turn))

    def _drop(self) -> None:
        far, self._far = self._far, None
        if self._timer is not None:
            self._timer.cancel()
        if far is not None:
            hang_up(far.channel)
