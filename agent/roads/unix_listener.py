"""A Unix socket on which this user, and nobody else, may connect."""

from __future__ import annotations

import os
import socket

MAX_WAITING = 100
"""Connections that nobody has accepted yet; as many as servers of asyncio have."""


def listen_at(path: str) -> socket.socket:
    """Return a listener that does not block.

    Raises:
        OSError: The path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere
        listener.listen(MAX_WAITING)
    except OSError:
        listener.close()
        raise
    return listener
