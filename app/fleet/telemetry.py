"""Receives the nodes' reports: one thread, one SUB socket per node, the newest report of each.

A node is who its socket says, whatever name its message carries. The sockets conflate: a console that was busy
continues with the newest state, not with a backlog. Sockets are waited for by their descriptors: libzmq's own poll
looks at every socket each time, which for 2,048 of them takes 3 ms.

Source: zmq_getsockopt(3), ZMQ_FD: it says that a socket wants to be looked at, until nothing more can be received.
"""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, cast

import zmq

from agent.wire.codec import IncompatibleWireError, MalformedMessageError
from agent.wire.digest import NodeFrame, decode_frame
from agent.wire.reports import MAX_NODE_REPORT_BYTES
from app.paths import make_room_for_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

POLL_S = 0.2
"""How long the thread takes to see that it should end."""
GATHER_S = 0.02
"""Between two looks at the sockets: many nodes are heard at once, instead of waking up for each."""
SPARE_SOCKETS = 16
_POLLIN = int(zmq.POLLIN)
"""A plain number, as sockets answer: arithmetic with an enumeration takes longer than to receive a report."""


class Received(NamedTuple):
    """A report and when it came."""

    node: str
    report: NodeFrame
    now_s: float
    """Monotonic, on this machine; of a report that was kept on the way, when it left its agent."""
    frame: bytes
    """The report as it came."""


class Telemetry:
    """The reader of all nodes' reports.

    Start it once; `drain` is called from the frame loop and never blocks.
    """

    def __init__(self, sockets: Mapping[str, Path]) -> None:
        """`sockets` are those of the nodes that are heard by one on this machine; `take` is for others."""
        self._unheard = dict(sockets)
        """Nodes for which there is no socket yet."""
        self._latest: dict[str, tuple[float, bytes]] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankdeck-telemetry", daemon=True)
        self.incompatible: dict[str, str] = {}
        """What is wrong with the nodes whose version does not fit, by node."""
        self.num_malformed: Counter[str] = Counter()
        self.last_report_s: dict[str, float] = {}
        """When each node was heard last, monotonic, however old what it said was."""
        self._as_of_s: dict[str, float] = {}
        """Of when what each node said last is."""

    def start(self) -> None:
        """Begin to receive; a socket that is not there yet is tried again until it is."""
        if self._unheard:
            self._thread.start()

    @property
    def num_waiting(self) -> int:
        """How many nodes have spoken since they were last asked."""
        return len(self._latest)

    def drain(self, max_reports: int | None = None) -> list[Received]:
        """Return the newest report of each node that has spoken since it was last asked, of all or of so many.

        They are decoded here, and so only those that are wanted: what a busy console has no time for costs it nothing.
        """
        with self._lock:
            if max_reports is None or len(self._latest) <= max_reports:
                taken, self._latest = self._latest, {}
            else:
                taken = {node: self._latest.pop(node) for node in list(islice(self._latest, max_reports))}
        reports = (self._decoded(node, now_s, frame) for node, (now_s, frame) in taken.items())
        return [report for report in reports if report is not None]

    def close(self) -> None:
        """End the thread and its sockets; blocks for at most about `POLL_S`."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        selector = selectors.DefaultSelector()
        try:
            _make_room(context, len(self._unheard))
            while not self._is_closing.is_set():
                if self._unheard:
                    self._subscribe(context, selector)
                for key, _ in selector.select(POLL_S):
                    self._receive(*key.data)
                self._is_closing.wait(GATHER_S)
        finally:
            context.destroy(linger=0)
            selector.close()

    def _subscribe(self, context: zmq.Context[zmq.Socket[bytes]], selector: selectors.BaseSelector) -> None:
        """Listen to each node; where there can be no socket, for want of a descriptor, it is tried again."""
        for node, path in [*self._unheard.items()]:
            try:
                socket = _subscribed(context, path)
            except zmq.ZMQError:
                return
            del self._unheard[node]
            selector.register(cast("int", socket.get(zmq.FD)), selectors.EVENT_READ, (node, socket))

    def _receive(self, node: str, socket: zmq.Socket[bytes]) -> None:
        """Take what a socket has; its descriptor is silent until there is more only once there is nothing."""
        try:
            while True:
                self.take(node, socket.recv(zmq.NOBLOCK))
                if not cast("int", socket.get(zmq.EVENTS)) & _POLLIN:
                    return
        except zmq.Again:
            return  # a connection has come or gone

    def take(self, node: str, frame: bytes, age_s: float = 0.0) -> None:
        """Take a frame that has come on whatever road, after so long on it; may be called from any thread."""
        now_s = time.monotonic()
        with self._lock:
            # However the way there varies, a later report is not older than an earlier one.
            as_of_s = self._as_of_s[node] = max(now_s - age_s, self._as_of_s.get(node, -math.inf))
            self._latest[node] = (as_of_s, frame)
            self.last_report_s[node] = now_s

    def _decoded(self, node: str, now_s: float, frame: bytes) -> Received | None:
        try:
            return Received(node, decode_frame(frame), now_s, frame)
        except IncompatibleWireError as error:
            self.incompatible[node] = str(error)
        except MalformedMessageError:
            self.num_malformed[node] += 1
        return None


def _make_room(context: zmq.Context[zmq.Socket[bytes]], num_nodes: int) -> None:
    """Allow as many sockets as nodes: a context has 1,023 unless told."""
    context.set(zmq.MAX_SOCKETS, num_nodes + SPARE_SOCKETS)
    make_room_for_nodes(num_nodes)


def _subscribed(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    """Return a socket that hears what is said there; raises `zmq.ZMQError`, and leaves none then."""
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.CONFLATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_NODE_REPORT_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.connect(f"ipc://{path}")
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket
