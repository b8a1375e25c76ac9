"""The datagram socket on which ranks report, and the GPU sampler.

A datagram is one whole report of one rank, or one whole sample of all GPUs; its first byte shows which. The kernel
adds the sender's pid, which within a container is another one. Reading is bounded for each wake of the event loop, so
that a rank that sends without pause costs its own reports, not the agent's other duties.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from typing import TYPE_CHECKING

from agent.node_state.gpu_sample import MAX_SAMPLE_BYTES, MalformedSampleError, decode_sample, is_sample
from ddpcore.wire import MAX_REPORT_BYTES, MalformedReportError, decode_report

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.node_state.gpu_sample import GpuSample
    from ddpcore.wire import RankReport

MAX_DATAGRAMS_A_WAKE = 64
_MAX_BYTES = max(MAX_REPORT_BYTES, MAX_SAMPLE_BYTES) + 1
_CREDENTIALS = struct.Struct("=iII")
"""Pid, uid and gid of a sender, in this process's namespaces. Source: unix(7), SCM_CREDENTIALS."""
_CREDENTIALS_SPACE = socket.CMSG_SPACE(_CREDENTIALS.size)


class Inbox:
    """Receives reports from `open` to `close`; lives on the event loop's thread."""

    def __init__(
        self, path: str, on_report: Callable[[RankReport, int], None], on_sample: Callable[[GpuSample], None]
    ) -> None:
        self._path = path
        self._on_report = on_report
        self._on_sample = on_sample
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.num_malformed = 0
        """Datagrams that were neither."""

    def open(self) -> None:
        """Bind the socket and start to read.

        Raises:
            OSError: The path cannot be bound.
        """
        self._socket.bind(self._path)
        os.chmod(self._path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._drain)

    def close(self) -> None:
        """Stop reading."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()

    def _drain(self) -> None:
        for _ in range(MAX_DATAGRAMS_A_WAKE):
            try:
                # One byte more than allowed, so that a longer datagram is seen as too long and not as cut.
                datagram, found, _, _ = self._socket.recvmsg(_MAX_BYTES, _CREDENTIALS_SPACE)
            except BlockingIOError:
                return
            try:
                if is_sample(datagram):
                    self._on_sample(decode_sample(datagram))
                else:
                    self._on_report(decode_report(datagram), _sender_of(found))
            except (MalformedReportError, MalformedSampleError):
                self.num_malformed += 1


def _sender_of(found: list[tuple[int, int, bytes]]) -> int:
    """Return the pid of a datagram's sender, 0 where the kernel does not show it."""
    for level, kind, content in found:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(content) == _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(content)[0])
    return 0
