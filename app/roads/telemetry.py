"""Receives the nodes' reports: one thread, one SUB socket per node, the newest report of each.

A node is who its socket says, whatever name its message carries. The sockets conflate: a console that was busy
continues with the newest state, not with a backlog.

Source: libzmq #3937 (a SUB with heartbeats and a finite queue aborts when its reader stalls; CONFLATE does not).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import zmq

from agent.wire.codec import IncompatibleWireError, MalformedMessageError
from agent.wire.reports import MAX_NODE_REPORT_BYTES, NodeReport, decode_node_report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

POLL_MS = 200
"""How long the thread takes to see that it should end."""


class Received(NamedTuple):
    """A report and when it came."""

    node: str
    report: NodeReport
    now_s: float
    """Monotonic, on this machine."""
    frame: bytes
    """The report as it came."""


class Telemetry:
    """The reader of all nodes' reports.

    Start it once; `drain` is called from the frame loop and never blocks.
    """

    def __init__(self, sockets: Mapping[str, Path]) -> None:
        self._sockets = dict(sockets)
        self._latest: dict[str, Received] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankdeck-telemetry", daemon=True)
        self.incompatible: dict[str, str] = {}
        """What is wrong with the nodes whose version does not fit, by node."""
        self.num_malformed: dict[str, int] = dict.fromkeys(self._sockets, 0)

    def start(self) -> None:
        """Begin to receive; a socket that is not there yet is tried again until it is."""
        self._thread.start()

    def drain(self) -> list[Received]:
        """Return the newest report of each node that has spoken since the last call."""
        with self._lock:
            taken, self._latest = self._latest, {}
        return list(taken.values())

    def close(self) -> None:
        """End the thread and its sockets; blocks for at most about `POLL_MS`."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        try:
            poller = zmq.Poller()
            node_of = {}
            for node, path in self._sockets.items():
                socket = _subscribe(context, path)
                node_of[socket] = node
                poller.register(socket, zmq.POLLIN)
            while not self._is_closing.is_set():
                for socket, _ in poller.poll(POLL_MS):
                    self.take(node_of[socket], socket.recv(zmq.NOBLOCK))
        finally:
            context.destroy(linger=0)

    def take(self, node: str, frame: bytes) -> None:
        """Take a frame that has come on whatever road; may be called from any thread."""
        try:
            report = decode_node_report(frame)
        except IncompatibleWireError as error:
            self.incompatible[node] = str(error)
            return
        except MalformedMessageError:
            self.num_malformed[node] += 1
            return
        with self._lock:
            self._latest[node] = Received(node, report, time.monotonic(), frame)


def _subscribe(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_NODE_REPORT_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(f"ipc://{path}")
    return socket
