"""What each part of a probe's sample costs beside training, where the caches are cold.

    python -m tests.bench.bench_probe_parts [--samples 300]

One process trains ByteGPT under DDP with gloo; on another thread the probe's own parts are called in the order of a
sample, at random moments, each with its CPU time taken. Medians hardly change on a busy machine, so two states of the
code can be compared there; one sample in five dumps the recorder too.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import distributed

from ddpcore.examples.bytegpt import ByteGPT
from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.probe.rank_state import RankIdentity, RankState
from ddpcore.probe.reporting import Pace, ReportSocket, tick_of
from ddpcore.probe.samples import Sample, StepMark
from ddpcore.probe.stack import StackWalk, code_roots
from ddpcore.wire import encode_report

RECORDER_ENTRIES = 64
"""As the agent sets it; the ring is full before the first sample."""

SHORTEST_GAP_S = 0.03
LONGEST_GAP_S = 0.07
WARM_S = 3.0
"""Before the first sample: until training has settled."""


class Parts:
    """The probe's parts, called as its thread does, and the CPU time of each call.

    Args:
        inbox: Where reports go.
    """

    def __init__(self, inbox: Path) -> None:
        self.costs_ns: dict[str, list[int]] = {}
        self._began_ns = 0
        self._recorder = FlightRecorder()
        self._walk = StackWalk(code_roots())
        self._state = RankState(
            RankIdentity(rank=0, local_rank=0, world_size=2, pid=os.getpid(), job_id="b", attempt=1)
        )
        self._pace = Pace(0)
        self._out = ReportSocket(str(inbox))
        self._num_steps = 0

    def _done(self, part: str) -> None:
        self.costs_ns.setdefault(part, []).append(time.thread_time_ns() - self._began_ns)
        self._began_ns = time.thread_time_ns()

    def sample(self, *, with_dump: bool) -> None:
        """Take one sample and send its report."""
        self._num_steps += 7
        step = StepMark(self._num_steps, 2.5, 0, 5.5, self._num_steps)
        self._began_ns = time.thread_time_ns()
        self._done("(taking the time)")
        now_s, wall_s = time.monotonic(), time.time()  # noqa: TID251 - as the probe does
        self._pace.begin_sample(now_s)
        reading = self._walk.read(threading.main_thread().ident or 0)
        self._done("stack")
        counters = self._recorder.counters()
        self._done("counters")
        has_process_group, num_openings = self._recorder.has_process_group(), self._recorder.num_openings()
        self._done("process group")
        self._state.observe(
            Sample(
                now_s=now_s,
                counters=counters,
                reading=reading,
                has_process_group=has_process_group,
                num_openings=num_openings,
                step=step,
                tick=tick_of(wall_s),
            )
        )
        self._done("fold")
        if with_dump:
            dump, members = self._recorder.dump(), self._recorder.members()
            self._done("dump")
            self._state.learn(dump, members)
            self._done("fold of the dump")
        self._pace.end_sample(now_s, wall_s, is_pending=self._state.is_pending, is_waiting=self._state.is_waiting)
        self._pace.reported(now_s)
        self._done("pace")
        report = self._state.report(probe_cpu_s=time.thread_time())
        self._done("report")
        datagram = encode_report(report)
        self._done("encoding")
        self._out.send(datagram)
        self._done("sending")


def train(is_over: threading.Event) -> None:
    """Train until it is over."""
    model = torch.nn.parallel.DistributedDataParallel(ByteGPT())
    optimizer = torch.optim.AdamW(model.parameters())
    while not is_over.is_set():
        optimizer.zero_grad()
        model(torch.randint(0, 256, (16, 65))).mean().backward()
        optimizer.step()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=300)
    args = parser.parse_args()
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(RECORDER_ENTRIES)
    torch.set_num_threads(1)
    is_over = threading.Event()

    def look(parts: Parts) -> None:
        moments = random.Random(1)
        time.sleep(WARM_S)
        try:
            for number in range(args.samples):
                time.sleep(moments.uniform(SHORTEST_GAP_S, LONGEST_GAP_S))
                parts.sample(with_dump=number % 5 == 0)
        finally:
            is_over.set()

    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(f"{directory}/inbox.sock")
        distributed.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        threading.Thread(target=lambda: [None for _ in iter(lambda: inbox.recv(65_536), b"")], daemon=True).start()
        for _ in range(RECORDER_ENTRIES):
            distributed.all_reduce(torch.ones(1))
        parts = Parts(Path(directory, "inbox.sock"))
        looker = threading.Thread(target=look, args=(parts,))
        looker.start()
        train(is_over)
        looker.join()
    for part, costs_ns in parts.costs_ns.items():
        print(f"{part:18} {statistics.median(costs_ns) / 1e3:7.1f} us (median of {len(costs_ns)})")
    sys.stdout.flush()
    # The inbox's reader stands in recv for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
