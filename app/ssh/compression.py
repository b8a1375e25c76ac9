"""What is packed on an SSH connection, unpacked to a bounded size. Pure.

Source: OpenSSH PROTOCOL, section 1.2: zlib@openssh.com is zlib (RFC 4253, 6.2) that begins after authentication.
"""

from __future__ import annotations

import errno
import zlib

MAX_UNPACKED_BYTES = 1_048_576
"""Of one packet: 32 KiB of a channel's bytes are usual, and zlib makes a thousand bytes out of one."""


class Unpacker:
    """Unpacks one packet after another, none of which may become too large."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    def __call__(self, data: bytes) -> bytes:
        """Return what a packet says.

        Raises:
            ConnectionAbortedError: It is too large, or not packed.
        """
        try:
            unpacked = self._stream.decompress(data, MAX_UNPACKED_BYTES)
        except zlib.error as error:
            raise _aborted(f"a packet cannot be unpacked: {error}") from error
        if self._stream.unconsumed_tail:
            raise _aborted(f"a packet of {len(data)} bytes unpacks to more than {MAX_UNPACKED_BYTES}")
        return unpacked


def _aborted(words: str) -> ConnectionAbortedError:
    """Return it with a number: paramiko, which ends the connection of what it reads so, takes it to have one."""
    return ConnectionAbortedError(errno.ECONNABORTED, words)
