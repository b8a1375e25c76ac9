"""A fleet that is only said to be there: what its agents would publish and answer, on as many Unix sockets.

    python -m tests.bench.fleet_feeder DIRECTORY [--nodes 2048] [--hz 2] [--lines-s 2000] [--talkers 128]

Each node has an agent's directory with an agent's two sockets: one that hands out a real `NodeReport` of eight ranks
through the real codec, and a control socket that answers `PullLogs` with real lines. One process stands for all agents,
so they share a ZeroMQ context; everything that crosses to the console is what agents send. It
prints `ready` once all sockets are there, and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from agent.transport.latest_reports import LatestReports
from agent.transport.subscribers import NodeReports, ReportSubscribers
from agent.wire.codec import CONTROL_SOCKET, MAX_COMMAND_BYTES, REPORTS_SOCKET
from agent.wire.commands import GetStatus, RefusalReason, Refused, Reply, Status, decode_command, encode_reply
from agent.wire.digest import encode_frame
from agent.wire.logs import MAX_PULLED_LINES, LogLine, Logs, PullLogs
from agent.wire.relay import RosterEntry
from agent.wire.signals import Reading, Signal
from ddpcore.wire import Phase
from tests.bench.bench_diagnosis import RANKS_PER_NODE, healthy, node_report

if TYPE_CHECKING:
    from agent.wire.reports import WorkerReport

SENT_AT_ONCE = 64
TICK_S = 0.01
FIRST_S = 60.0
"""The ranks' own clock at the beginning."""
KEPT_LINES = 4_000
"""Of a node: an agent keeps more, a console that follows asks for none of those."""
EPOCH = "bench"
STEPS_HZ = 3.0
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA)
RANK_SIGNALS = {
    Signal.GPU_CLOCK: Reading(1.755e9),
    Signal.GPU_MEMORY_CLOCK: Reading(2.619e9),
    Signal.NVLINKS: Reading(18.0),
    Signal.GPU_TEMPERATURE: Reading(61.3, 44.8, 271.5),
    Signal.GPU_POWER_LIMIT: Reading(700.0),
    Signal.PCIE_WIDTH: Reading(16.0),
    Signal.PCIE_GENERATION: Reading(5.0),
    Signal.GPU_POWER_CAP: Reading(0.31),
}
HOST_SIGNALS = {Signal.CPU_CLOCK: Reading(3.412e9), Signal.NIC_SPEED: Reading(4e11), Signal.CPU_PRESSURE: Reading(0.08)}
"""What an agent reports of healthy ranks with GPUs: levels, and rates that are not near 0."""
LINE = (
    "step {step} epoch 3 loss {loss:.5f} lr 2.93e-04 grad-norm {norm:.4f} throughput {rate:.1f} tokens/s mem 61.2 GiB"
)
"""With its figures about 105 characters."""


class FedNode:
    """One agent: its newest report, and the lines that its ranks have printed."""

    def __init__(self, index: int, num_nodes: int) -> None:
        self.index = index
        report = node_report(index, num_nodes, num_nodes * RANKS_PER_NODE, 1, healthy)
        workers = [_in_training(worker) for worker in report.workers]
        self._first = msgspec.structs.replace(report, epoch=EPOCH, workers=workers, signals=dict(HOST_SIGNALS))
        self.report = self._first
        self.reports: NodeReports | None = None
        """Where its reports are handed out."""
        self._lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._num_lines = 0

    def frame(self, turn: int, now_s: float) -> bytes:
        """Return the next report: every rank a little further."""
        workers = [self._further(worker, turn, now_s) for worker in self._first.workers]
        self.report = msgspec.structs.replace(
            self._first, report_seq=turn, log_seq=self._num_lines, cpu_frac=0.4 + 0.01 * (turn % 7), workers=workers
        )
        return encode_frame(self.report)

    def _further(self, worker: WorkerReport, turn: int, now_s: float) -> WorkerReport:
        first = worker.report
        assert first is not None
        step = int(now_s * STEPS_HZ)
        seq = 10 * step + worker.rank % 3
        group = msgspec.structs.replace(
            first.groups[0], enqueued_seq=seq, completed_seq=seq - (worker.rank % 2), waiting_s=0.05 * (worker.rank % 2)
        )
        report = msgspec.structs.replace(
            first,
            report_seq=turn,
            step=step,
            loss_step=step,
            step_ages_ms=[100, 600, 1100, 1600],
            steps_done=step,
            loss=2.5 + 0.001 * ((turn * 7 + worker.rank) % 100),
            phase=PHASES[(turn + worker.rank) % len(PHASES)],
            groups=[group],
            observed_s=now_s,
            waited_s=now_s * (0.2 + 0.02 * (worker.rank % 7)),
        )
        return msgspec.structs.replace(
            worker, report=report, seen_s=now_s, cpu_s=now_s, cpu_cores=1.0, rss_bytes=worker.rss_bytes + 4096 * turn
        )

    def print(self, num_lines: int, turn: int) -> None:
        """Let the ranks print."""
        for count in range(num_lines):
            self._num_lines += 1
            rank = self.index * RANKS_PER_NODE + (turn + count) % RANKS_PER_NODE
            text = LINE.format(step=turn, loss=2.5 + rank * 1e-4, norm=0.8 + count * 1e-3, rate=48_000 + rank)
            self._lines.append(LogLine(self._num_lines, rank, "stdout", text))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a console, line by line."""
        try:
            while line := await reader.readline():
                writer.write(encode_reply(self._answer(line)))
                await writer.drain()
        except ConnectionError:
            return  # a console that is ended waits for no reply
        finally:
            writer.close()

    def _answer(self, line: bytes) -> Reply:
        match decode_command(line):
            case PullLogs(since_seq=since):
                kept_from = self._num_lines - len(self._lines) + 1
                skipped = max(0, since + 1 - kept_from)
                wanted = [self._lines[place] for place in range(skipped, len(self._lines))][:MAX_PULLED_LINES]
                return Logs(EPOCH, kept_from, wanted)
            case GetStatus():
                return Status(self.report)
            case command:
                return Refused(RefusalReason.UNKNOWN_JOB, f"a fleet on paper takes no {type(command).__name__}")


def _in_training(worker: WorkerReport) -> WorkerReport:
    assert worker.report is not None
    shares = [0.0, 0.0, 0.5, 1.5, 3.0, 0.4, 0.1, 0.0, 0.0, 0.2]
    report = msgspec.structs.replace(worker.report, worked_s=shares[: len(Phase)])
    return msgspec.structs.replace(worker, report=report, signals=dict(RANK_SIGNALS))


class Feeder:
    """All nodes, their sockets and their beat."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._nodes = [FedNode(index, options.nodes) for index in range(options.nodes)]
        zmq.Context.instance().set(zmq.MAX_SOCKETS, options.nodes + 64)
        self._newest = LatestReports() if options.is_relay else None
        for node in self._nodes:
            directory = node_directory(options.directory, node.index)
            directory.mkdir(parents=True)
            if self._newest is not None:
                self._newest.put_node(RosterEntry(directory.name, is_here=True), time.monotonic())

    async def run(self) -> None:
        """Publish until standard input ends."""
        await self._open()
        onlookers = self._open_relay()
        gc.collect()
        gc.freeze()
        print("ready", flush=True)
        ending = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        period_s, begun_s, num_sent, num_printed = 1 / self._options.hz, self._options.begun_s, 0, 0
        per_talker = max(1, round(self._options.lines_s / self._options.hz / max(1, self._options.talkers)))
        while not ending.done():
            due = int((time.monotonic() - begun_s) / period_s * len(self._nodes))
            # A feeder that falls behind by a second leaves reports out, as an agent would.
            num_sent = max(num_sent, due - len(self._nodes) * self._options.hz)
            while num_sent < due:
                turn, index = divmod(num_sent, len(self._nodes))
                node = self._nodes[index]
                if self._options.lines_s and index % max(1, len(self._nodes) // self._options.talkers) == 0:
                    node.print(per_talker, turn)
                    num_printed += per_talker
                frame = node.frame(turn + 2, time.monotonic() - begun_s + FIRST_S)
                if node.reports is not None:
                    node.reports.publish(frame)
                if self._newest is not None:
                    self._newest.put_report(node_directory("", index).name, frame, time.monotonic())
                num_sent += 1
                if num_sent % SENT_AT_ONCE == 0:
                    await asyncio.sleep(0)  # on a machine that is too busy for the fleet, consoles are answered too
            if onlookers is not None:
                onlookers.send_news()
            await asyncio.sleep(TICK_S)
        if onlookers is not None:
            onlookers.close()
        spent_s = time.monotonic() - begun_s
        print(f"{num_sent / spent_s:.0f} reports/s, {num_printed / spent_s:.0f} lines/s", flush=True)

    async def _open(self) -> None:
        """Let consoles in."""
        for index, node in enumerate(self._nodes):
            directory = node_directory(self._options.directory, index)
            await asyncio.start_unix_server(partial(_serve, node), directory / CONTROL_SOCKET, limit=MAX_COMMAND_BYTES)
            if self._newest is None:
                node.reports = NodeReports(str(directory / REPORTS_SOCKET), EPOCH)
                node.reports.open()

    def _open_relay(self) -> ReportSubscribers | None:
        """Hand out all reports in merged frames, as a relay does that has just heard them."""
        if self._newest is None:
            return None
        path = str(Path(self._options.directory, REPORTS_SOCKET))
        onlookers = ReportSubscribers(path, self._newest, EPOCH, lambda: len(self._nodes))
        onlookers.open()
        return onlookers


async def _serve(node: FedNode, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await node.serve(reader, writer)


def node_directory(directory: str | Path, index: int) -> Path:
    """Return where the sockets of a node are."""
    return Path(directory, f"node-{index:04}")


def node_names(num_nodes: int) -> list[str]:
    """Return the nodes' names."""
    return [f"node-{index:04}" for index in range(num_nodes)]


def main() -> None:
    """Feed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--hz", type=int, default=2)
    parser.add_argument("--lines-s", type=int, default=2000)
    parser.add_argument("--relay", dest="is_relay", action="store_true", help="hand all reports out as a relay does")
    parser.add_argument("--begun-s", type=float, default=time.monotonic(), help="when its clock began, monotonic")
    parser.add_argument("--talkers", type=int, default=128, help="nodes whose ranks print")
    asyncio.run(Feeder(parser.parse_args()).run())


if __name__ == "__main__":
    main()
