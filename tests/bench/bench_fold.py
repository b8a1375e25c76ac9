"""What a console spends on taking the reports of 2,048 nodes, by part: microseconds of CPU time for one of eight ranks.

    python -m tests.bench.bench_fold [--quick]

The reports are those of `fleet_feeder`, every rank a little further each time. They are received from its sockets by a
reader's own thread, and go through the real decoder and model as many at a time as a session takes, so that what an
earlier report leaves behind is freed as it is there. Each figure is the best of several rounds: the machine may be
shared.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.digest import decode_frame
from app.fleet.telemetry import Telemetry
from app.model.cluster import Cluster
from app.recording.recorder import Past
from app.recording.records import ReportRecord
from app.session.session import MAX_DRAINED
from app.tui.rendering import YOUNG_OBJECTS
from tests.bench.fleet_feeder import FedNode, node_directory, node_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.wire.digest import NodeFrame

Result = TypeVar("Result")

NUM_NODES = 2048
NUM_NODES_QUICK = 256
ROUNDS = 9
REPORTS_HZ = 2
CONNECT_S = 60.0
"""In which all nodes must have been heard."""
RECEIVE_ROUNDS = 3
RECEIVE_S = 3.0


class Costs:
    """What each part costs a report: the least of all rounds so far."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self._spent_s: dict[str, float] = {}

    def measure(self, part: str, work: Callable[[], Result]) -> Result:
        """Do some of a part's work."""
        begun_s = time.thread_time()
        result = work()
        self._spent_s[part] = self._spent_s.get(part, 0.0) + time.thread_time() - begun_s
        return result

    def end_round(self, num_reports: int) -> None:
        """Take the round's sums over so many reports."""
        for part, spent_s in self._spent_s.items():
            spent_us = spent_s / num_reports * 1e6
            self.us[part] = min(spent_us, self.us.get(part, spent_us))
        self._spent_s.clear()


class CountedTelemetry(Telemetry):
    """Counts what it receives, and tells what its thread has spent."""

    num_received = 0

    def take(self, node: str, frame: bytes, age_s: float = 0.0) -> None:
        self.num_received += 1
        super().take(node, frame, age_s)

    def spent_s(self) -> float:
        """Return the CPU time of the thread that receives."""
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "rankdeck-reports")
        assert thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def fold(num_nodes: int) -> dict[str, float]:
    """Return what is spent on frames once they are here."""
    costs, cluster, past = Costs(), Cluster(node_names(num_nodes)), Past()
    names = list(cluster.nodes)
    nodes = [FedNode(index, num_nodes) for index in range(num_nodes)]
    for turn in range(1, ROUNDS + 1):
        begun_s = 100.0 + turn / REPORTS_HZ
        frames = [node.frame(turn, begun_s) for node in nodes]
        for first in range(0, num_nodes, MAX_DRAINED):
            now_s = begun_s + first / num_nodes / REPORTS_HZ
            some = frames[first : first + MAX_DRAINED]
            reports = costs.measure("decode", partial(_decode, some))
            costs.measure("fold in", partial(_apply, cluster, names[first:], reports, now_s))
            costs.measure("keep", partial(_keep, past, names[first:], some, now_s))
        costs.end_round(num_nodes)
    cluster.validate()
    return costs.us


def _decode(frames: list[bytes]) -> list[NodeFrame]:
    return [decode_frame(frame) for frame in frames]


def _apply(cluster: Cluster, names: list[str], reports: list[NodeFrame], now_s: float) -> None:
    cluster.apply_all([(name, report, now_s) for name, report in zip(names, reports, strict=False)])


def _keep(past: Past, names: list[str], frames: list[bytes], now_s: float) -> None:
    for name, frame in zip(names, frames, strict=False):
        past.add(ReportRecord(now_s, name, frame))


def receive(num_nodes: int) -> float:
    """Return what the reader's thread spends on receiving a report, without libzmq's own thread."""
    feeder = [sys.executable, "-m", "tests.bench.fleet_feeder", "--nodes", str(num_nodes), "--hz", str(REPORTS_HZ)]
    with tempfile.TemporaryDirectory() as directory:
        fed = subprocess.Popen([*feeder, "--lines-s", "0", directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert fed.stdin is not None
        assert fed.stdout is not None
        assert fed.stdout.readline() == b"ready\n"
        sockets = {
            name: node_directory(directory, index) / REPORTS_SOCKET for index, name in enumerate(node_names(num_nodes))
        }
        telemetry = CountedTelemetry(sockets)
        telemetry.start()
        try:
            return _receive(telemetry, num_nodes)
        finally:
            telemetry.close()
            fed.stdin.close()
            fed.stdout.read()
            fed.wait()


def _receive(telemetry: CountedTelemetry, num_nodes: int) -> float:
    give_up_s = time.monotonic() + CONNECT_S
    while telemetry.num_waiting < num_nodes:
        assert time.monotonic() < give_up_s, f"only {telemetry.num_waiting} of {num_nodes} nodes were heard"
        time.sleep(RECEIVE_S / 10)
    costs_us = []
    for _ in range(RECEIVE_ROUNDS):
        num_before, spent_before_s = telemetry.num_received, telemetry.spent_s()
        time.sleep(RECEIVE_S)
        costs_us.append((telemetry.spent_s() - spent_before_s) / (telemetry.num_received - num_before) * 1e6)
    return min(costs_us)


def main() -> None:
    """Measure and print."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    num_nodes = NUM_NODES_QUICK if "--quick" in sys.argv else NUM_NODES
    print(f"{num_nodes} nodes, us for a report of eight ranks; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    costs = {"receive": receive(num_nodes), **fold(num_nodes)}
    for part, spent_us in costs.items():
        print(f"  {part:<8}{spent_us:6.1f}")
    share = sum(costs.values()) * num_nodes * REPORTS_HZ / 1e6
    print(f"  at {REPORTS_HZ} reports/s of each node {100 * share:.1f} % of a core")


if __name__ == "__main__":
    main()
