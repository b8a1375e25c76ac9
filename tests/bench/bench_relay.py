"""What a relay costs, and what a plain ZeroMQ proxy would lose.

`python -m tests.bench.bench_relay [--nodes 500] [--seconds 10] [--bytes 9000]`: agents that are simulated in one
process dial a real relay, each with a new report five times a second; consoles take the merged frames, one slowly.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import zmq

from agent.relay.relay_dir import Invitation, read_invitation
from agent.transport.relay_sockets import knock_with
from agent.wire.relay import RELAY_VERSION, Hello, RelayHeartbeat, Report, Take, decode_from_relay, encode_relay_message
from tests.support.relays import MergedReader
from tests.support.waiting import until

PERIOD_S = 0.2
BEATS = 10
"""Periods between two beats."""


class SimulatedNodes:
    """Agents of one thread: each answers a `Take` with its report of the moment."""

    def __init__(self, invitation: Invitation, num_nodes: int, num_bytes: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, num_nodes + 16)
        self._sockets = []
        self._poller = zmq.Poller()
        self._frame = b"x" * num_bytes
        self._wanted_at_s: dict[zmq.Socket[bytes], float] = {}
        self._is_over = threading.Event()
        for number in range(num_nodes):
            socket = self._context.socket(zmq.DEALER)
            knock_with(socket, invitation.key, invitation.relay_key)
            socket.connect(f"tcp://{invitation.address}:{invitation.port}")
            socket.send(encode_relay_message(Hello(RELAY_VERSION, f"n{number}", "a", b"{}", num_nodes)))
            self._sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        self.num_sent = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        due_s, period = time.monotonic(), 0
        while not self._is_over.is_set():
            for socket, _ in self._poller.poll(20):
                while True:
                    try:
                        message = decode_from_relay(socket.recv(zmq.NOBLOCK))
                    except zmq.Again:
                        break
                    if isinstance(message, Take):
                        self._wanted_at_s[socket] = time.monotonic()
            if time.monotonic() >= due_s:
                due_s, period = due_s + PERIOD_S, period + 1
                self._report(is_beat=period % BEATS == 0)

    def _report(self, *, is_beat: bool) -> None:
        for socket in self._sockets:
            if (wanted_at_s := self._wanted_at_s.pop(socket, None)) is not None:
                held_ms = int((time.monotonic() - wanted_at_s) * 1000)
                socket.send(encode_relay_message(Report(0, held_ms, self._frame)))
                self.num_sent += 1
            elif is_beat:
                socket.send(encode_relay_message(RelayHeartbeat()))


def measure(num_nodes: int, seconds: float, num_bytes: int) -> None:
    """Print what a relay of so many nodes costs, and how old reports are at consoles."""
    directory = Path(tempfile.mkdtemp(prefix="rdr-", dir="/tmp"))
    argv = [sys.executable, "-P", "-m", "agent", "relay", "--listen", "127.0.0.1", "--dir", str(directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        invitation = read_invitation(directory / "invitation.json")
        assert invitation is not None
        relay = psutil.Process(process.pid)
        nodes = SimulatedNodes(invitation, num_nodes, num_bytes)
        try:
            quick, slow = MergedReader(directory), MergedReader(directory, pause_s=1.0)
            with quick, slow:
                until(lambda: len(quick.newest) == num_nodes, 60, "every node has been heard")
                quick.forget_figures()
                slow.forget_figures()
                before_s, sent = sum(relay.cpu_times()[:2]), nodes.num_sent
                began_s = time.monotonic()
                time.sleep(seconds)
                took_s = time.monotonic() - began_s
                spent_s = sum(relay.cpu_times()[:2]) - before_s
                rss = relay.memory_info().rss
            print(
                f"{num_nodes} nodes, {num_bytes} bytes: {(nodes.num_sent - sent) / took_s:.0f} reports/s in, "
                f"{quick.num_reports / took_s:.0f}/s out to one console, {spent_s / took_s:.1%} of a core, "
                f"{rss / 2**20:.0f} MiB"
            )
            for name, reader in (("quick", quick), ("a frame a second", slow)):
                ages = sorted(reader.ages_s)
                print(
                    f"  console, {name}: {reader.num_frames / took_s:.1f} frames/s, {reader.num_reports / took_s:.0f} "
                    f"reports/s of {len(reader.newest)} nodes, age p50 {ages[len(ages) // 2] * 1e3:.0f} ms, "
                    f"p99 {ages[len(ages) * 99 // 100] * 1e3:.0f} ms"
                )
        finally:
            nodes.close()
            process.terminate()
            process.wait()
            shutil.rmtree(directory, ignore_errors=True)


def left_behind_a_proxy(num_publishers: int = 5) -> int:
    """Return how many publishers' newest messages a conflating subscriber finds behind ZeroMQ's own proxy."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    front.bind("inproc://front")
    back.bind("inproc://back")
    threading.Thread(target=_proxy, args=(front, back), daemon=True).start()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.CONFLATE, 1)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect("inproc://back")
    publishers = [context.socket(zmq.PUB) for _ in range(num_publishers)]
    for publisher in publishers:
        publisher.connect("inproc://front")
    time.sleep(0.5)
    for _ in range(3):
        for number, publisher in enumerate(publishers):
            publisher.send(b"%d" % number)
    time.sleep(0.5)
    found = set()
    while subscriber.poll(100):
        found.add(subscriber.recv())
    context.destroy(linger=0)
    return len(found)


def _proxy(front: zmq.Socket[bytes], back: zmq.Socket[bytes]) -> None:
    try:
        zmq.proxy(front, back)
    except zmq.ZMQError:
        return  # the context has ended


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--bytes", type=int, default=9000)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(f"behind zmq.proxy with CONFLATE: {left_behind_a_proxy()} of 5 publishers are heard")
    measure(options.nodes, options.seconds, options.bytes)


if __name__ == "__main__":
    main()
