"""The reports of a host, heard through one channel of its connection, which is opened again whenever it ends."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from agent.wire.codec import MalformedMessageError
from app.errors import HostUnreachableError
from app.ssh.far_end import FarEnd, hang_up
from app.ssh.pump import join_pump, leave_pump
from app.ssh.transport import CHANNEL_ERRORS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from app.ssh.far_end import RingingChannel

FIRST_PAUSE_S = 0.1
MAX_CHUNKS = 16
"""Taken before other hosts have their turn."""


class FrameReader(Protocol):
    """Takes a stream apart."""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the frames that a chunk completes.

        Raises:
            MalformedMessageError: This is no such stream.
        """
        ...


class Heard(NamedTuple):
    """A channel, and what takes apart what it brings."""

    channel: RingingChannel
    reader: FrameReader


class FrameStream:
    """One channel at a time, read in the pump's thread. Of frames that have come together only the newest is told."""

    def __init__(self, open_heard: Callable[[], Heard], max_pause_s: float, on_frame: Callable[[bytes], None]) -> None:
        """Make it; `begin` opens it.

        Args:
            open_heard: May block, and raises what channels raise where there is nothing to hear.
            max_pause_s: Between two attempts: the pauses grow up to this.
            on_frame: Is called in the pump's thread, and must not block.
        """
        self._open_heard = open_heard
        self._max_pause_s = max_pause_s
        self._on_frame = on_frame
        self._lock = threading.Lock()
        self._is_closed = False
        self._turn = 0
        """Counts what was begun: a channel that was opened for an earlier turn is not wanted any more."""
        self._pause_s = FIRST_PAUSE_S
        self._far: FarEnd | None = None
        self._reader: FrameReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pump = join_pump()

    def begin(self) -> None:
        """Open a channel, in place of any that is there; where that fails it is tried again later. May block."""
        with self._lock:
            self._turn += 1
            turn = self._turn
            if self._is_closed:
                return
            self._pump.call(self._drop)
        self._open(turn)

    def close(self) -> None:
        """End it; safe to call twice."""
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
            self._turn += 1
        if is_closed:
            return
        try:
            self._pump.run(self._drop)
        finally:
            leave_pump()

    def _open(self, turn: int) -> None:
        heard: Heard | None = None
        try:
            heard = self._open_heard()
        except (HostUnreachableError, MalformedMessageError, *CHANNEL_ERRORS):
            pass  # the node's row says that nothing comes
        finally:
            with self._lock:
                is_wanted = not self._is_closed
                if is_wanted:
                    self._pump.call(partial(self._listen, turn, heard))
            if not is_wanted and heard is not None:
                hang_up(heard.channel)

    def _listen(self, turn: int, heard: Heard | None) -> None:
        if turn != self._turn:
            if heard is not None:
                hang_up(heard.channel)
        elif heard is None:
            self._try_later()
        else:
            self._reader = heard.reader
            self._far = FarEnd(heard.channel, lambda: self._pump.gather(self._read))

    def _read(self) -> None:
        if self._far is None or self._reader is None:
            return
        newest: bytes | None = None
        try:
            for _ in range(MAX_CHUNKS):
                chunk = self._far.take()
                if chunk is None:
                    break
                if not chunk:
                    self._lose()
                    break
                for frame in self._reader.feed(chunk):
                    newest = frame
            else:
                self._pump.gather(self._read)
        except MalformedMessageError:
            self._lose()
        if newest is not None:
            self._pause_s = FIRST_PAUSE_S
            self._on_frame(newest)

    def _lose(self) -> None:
        self._drop()
        self._try_later()

    def _try_later(self) -> None:
        turn = self._turn
        self._timer = self._pump.loop.call_later(self._pause_s, self._try, turn)
        self._pause_s = min(2 * self._pause_s, self._max_pause_s)

    def _try(self, turn: int) -> None:
        if turn == self._turn:
            self._pump.errands.do(partial(self._open, turn))

    def _drop(self) -> None:
        far, self._far = self._far, None
        if self._timer is not None:
            self._timer.cancel()
        if far is not None:
            hang_up(far.channel)
