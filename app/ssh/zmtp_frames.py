"""Telemetry over a plain stream, as a ZeroMQ publisher writes it: what a subscriber says, and what it hears.

A host's socket of telemetry is reached through a channel of SSH, so there is nothing left for libzmq to connect, to
watch or to queue: only the framing of its messages is wanted.

Source: ZMTP 3.0, https://rfc.zeromq.org/spec/23/: framing, greeting, the NULL mechanism, subscriptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError
from agent.wire.reports import MAX_NODE_REPORT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.ssh.far_end import ByteChannel

_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY" + b"\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
_EVERYTHING = b"\x01"
"""A subscription to the topic with which all messages begin: none."""
_MORE, _LONG, _COMMAND = 1, 2, 4
_SUBSCRIPTION = bytes([_COMMAND, len(_READY)]) + _READY + bytes([0, len(_EVERYTHING)]) + _EVERYTHING


def subscribe(channel: ByteChannel) -> ZmtpReader:
    """Ask a publisher for all it has, and return what takes its answer apart; blocks.

    Raises:
        MalformedMessageError: It is no publisher.
        EOFError: It has hung up; and whatever the channel raises.
    """
    reader = ZmtpReader()
    channel.sendall(_GREETING)
    # libzmq 4.3.5 hangs up on whoever is quicker: what comes with the greeting may be no more than READY.
    while not reader.is_ready:
        chunk = channel.recv(_GREETING_BYTES)
        if not chunk:
            raise EOFError
        for _ in reader.feed(chunk):
            raise MalformedMessageError("a message before anything was asked for")
    channel.sendall(_SUBSCRIPTION)
    return reader


class ZmtpReader:
    """Takes a stream apart; chunks may be cut anywhere.

    Attributes:
        is_ready: Whether the publisher has said that it is.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self._buffer = bytearray()
        self._is_greeted = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the messages that this chunk completes.

        Raises:
            MalformedMessageError: This is no publisher of reports: each is one frame, of a limited length.
        """
        self._buffer += chunk
        if not self._is_greeted:
            if len(self._buffer) < _GREETING_BYTES:
                return
            self._hear_greeting(bytes(self._buffer[:_GREETING_BYTES]))
            del self._buffer[:_GREETING_BYTES]
            self._is_greeted = True
        while len(self._buffer) > 1:
            flags = self._buffer[0]
            begin = 9 if flags & _LONG else 2
            if flags & _MORE or flags > _LONG | _COMMAND:
                raise MalformedMessageError(f"a frame with the flags {flags:#x}, where a report is one frame")
            if len(self._buffer) < begin:
                return
            length = int.from_bytes(self._buffer[1:begin], "big")
            if length > MAX_NODE_REPORT_BYTES:
                raise MalformedMessageError(f"a frame of {length} bytes, at most {MAX_NODE_REPORT_BYTES} are taken")
            end = begin + length
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[begin:end])
            del self._buffer[:end]
            if not flags & _COMMAND:
                yield frame
            elif frame.startswith(_READY[:6]):
                self.is_ready = True  # the only command of a publisher that sends no heartbeats

    def _hear_greeting(self, greeting: bytes) -> None:
        version, mechanism = greeting[10], greeting[12:32].rstrip(b"\0")
        if greeting[0] != 0xFF or greeting[9] != 0x7F or version < 3 or mechanism != b"NULL":
            raise MalformedMessageError("no ZeroMQ publisher without encryption")
