"""What the console's model costs: microseconds per rank report, milliseconds per look, at 1,024 and 16,384 ranks.

    python -m tests.bench.bench_diagnosis [--quick]

Reports are decoded beforehand; decoding is printed beside, for scale. Times are the best of several rounds: the machine
may be shared.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec

from agent.wire.digest import decode_frame, encode_frame
from agent.wire.jobs import JobState, JobStatus
from agent.wire.reports import (
    WIRE_VERSION,
    ExitReport,
    NodeReport,
    ProcessState,
    WorkerReport,
)
from agent.wire.signals import Reading
from app.diagnosis.because.signals import TRAITS, Scope
from app.diagnosis.diagnoser import Diagnoser, Diagnosis
from app.model.cluster import Cluster
from app.recording.history import History
from app.session.session import MAX_DRAINED
from app.view.view import View
from ddpcore.wire import GroupReport, Phase, Place, RankReport

if TYPE_CHECKING:
    from collections.abc import Callable

    StateOf = Callable[[int], tuple[ProcessState, int, bool]]
    """Process, seq, and whether it waits, of a rank."""

RANKS_PER_NODE = 8
ROUNDS = 7
LATE_SEQ = 2000
LONG_S = 100.0
"""Seconds of a wait that is a stall."""
HOST_SIGNALS = {signal.value: Reading(0.1) for signal, trait in TRAITS.items() if trait.scope is Scope.HOST}
RANK_SIGNALS = {
    signal.value: Reading(0.1, 0.05, 60.0) for signal, trait in TRAITS.items() if trait.scope is not Scope.HOST
}
"""As many as there can be: most are left out of a report while they are near 0."""
VISIBLE_ROWS = 50


def frames(num_nodes: int, turn: int, state_of: StateOf) -> list[bytes]:
    """Return every node's frame of one turn."""
    world_size = num_nodes * RANKS_PER_NODE
    return [encode_frame(node_report(node, num_nodes, world_size, turn, state_of)) for node in range(num_nodes)]


def node_report(node: int, num_nodes: int, world_size: int, turn: int, state_of: StateOf) -> NodeReport:
    first = node * RANKS_PER_NODE
    status = JobStatus(
        job_id="bench", attempt=0, state=JobState.RUNNING, state_s=turn, world_size=world_size, num_nodes=num_nodes,
        node_rank=node, first_rank=first, local_world_size=RANKS_PER_NODE,
    )  # fmt: skip
    workers = [
        worker(rank, rank - first, world_size, turn, state_of(rank)) for rank in range(first, first + RANKS_PER_NODE)
    ]
    return NodeReport(
        wire_version=WIRE_VERSION, node=f"n{node}", epoch="e", report_seq=turn, hostname=f"host{node}", agent_pid=1,
        num_cpus=64, memory_total_bytes=2**40, memory_available_bytes=2**39, jobs=[status], workers=workers,
        signals=HOST_SIGNALS,
    )  # fmt: skip


def worker(
    rank: int, local_rank: int, world_size: int, turn: int, state: tuple[ProcessState, int, bool]
) -> WorkerReport:
    process, seq, is_waiting = state
    group = GroupReport(
        group="0", enqueued_seq=seq, completed_seq=seq - 1 if is_waiting else seq, op="all_reduce",
        sizes=[[25_000_000]], waiting_s=waiting_s(state, turn), is_waiting=is_waiting,
    )  # fmt: skip
    report = RankReport(
        wire_version=1, rank=rank, local_rank=local_rank, world_size=world_size, pid=1000 + rank, job_id="bench",
        attempt=0, report_seq=turn, phase=Phase.BACKWARD, phase_s=0.1,
        place=Place("/home/user/train.py", 142, "train_step"), step=10 * turn, loss=2.5,
        steps_done=10 * turn, groups=[group], observed_s=turn / 2,
        waited_s=turn / 2 * (0.2 + 0.3 * (rank % 7) / 7),
    )  # fmt: skip
    is_dead = process is ProcessState.EXITED
    return WorkerReport(
        job_id="bench", attempt=0, rank=rank, local_rank=local_rank, pid=1000 + rank, process=process,
        process_s=turn / 2, rss_bytes=2**33 + rank, cpu_s=turn, exit=ExitReport(signal=9) if is_dead else None,
        report=report, report_age_s=0.05, signals=RANK_SIGNALS,
    )  # fmt: skip


def waiting_s(state: tuple[ProcessState, int, bool], turn: int) -> float:
    """Return how long a rank has waited: for a rank that is late since long, or a moment."""
    _, seq, is_waiting = state
    return 0.0 if not is_waiting else LONG_S if seq == LATE_SEQ else 0.5 + turn / 2


def one_late(rank: int) -> tuple[ProcessState, int, bool]:
    """Return a live rank for which all others wait: its signals are compared with theirs."""
    return (ProcessState.RUNNING, LATE_SEQ - 1, False) if rank == 5 else (ProcessState.RUNNING, LATE_SEQ, True)


def healthy(rank: int) -> tuple[ProcessState, int, bool]:
    return ProcessState.RUNNING, 1000 + rank % 3, rank % 2 == 0


def one_frozen(rank: int) -> tuple[ProcessState, int, bool]:
    return (ProcessState.FROZEN, 999, False) if rank == 5 else (ProcessState.RUNNING, 1000, True)


def all_dead(rank: int) -> tuple[ProcessState, int, bool]:
    return ProcessState.EXITED, 1000, False


def measure(num_nodes: int, name: str, state_of: StateOf) -> None:
    world_size = num_nodes * RANKS_PER_NODE
    names = [f"n{node}" for node in range(num_nodes)]
    cluster, diagnoser = Cluster(names), Diagnoser()
    diagnosis = diagnoser.observe(cluster, 0.0)
    history = History()
    decoding, applying, observing, viewing, keeping = [], [], [], [], []
    for turn in range(1, ROUNDS + 1):
        raw = frames(num_nodes, turn, state_of)
        now_s = 100.0 + 3.0 * turn
        begun = time.perf_counter()
        reports = [decode_frame(frame) for frame in raw]
        decoded = time.perf_counter()
        heard = [(node, report, now_s) for node, report in zip(names, reports, strict=True)]
        for first in range(0, num_nodes, MAX_DRAINED):
            cluster.apply_all(heard[first : first + MAX_DRAINED])
        applied = time.perf_counter()
        diagnosis = diagnoser.observe(cluster, now_s)
        observed = time.perf_counter()
        look(cluster, diagnosis, now_s)
        viewed = time.perf_counter()
        history.observe(View(cluster, diagnosis, now_s))
        kept = time.perf_counter()
        decoding.append((decoded - begun) / world_size * 1e6)
        applying.append((applied - decoded) / world_size * 1e6)
        observing.append((observed - applied) * 1e3)
        viewing.append((viewed - observed) * 1e3)
        keeping.append((kept - viewed) * 1e3)
    verdicts = ", ".join(sorted({verdict.cause for verdict in diagnosis.verdicts})) or "none"
    print(
        f"{world_size:>6} ranks, {name:<11} decode {min(decoding):5.2f} us/rank   apply {min(applying):5.2f} us/rank   "
        f"observe {min(observing):6.2f} ms (worst {max(observing):6.2f})   "
        f"view of {VISIBLE_ROWS} rows {min(viewing):6.2f} ms   "
        f"history, once a second, {min(keeping):6.2f} ms   verdicts: {verdicts}"
    )


def look(cluster: Cluster, diagnosis: Diagnosis, now_s: float) -> None:
    """Ask for what a screen asks for."""
    view = View(cluster, diagnosis, now_s)
    view.headline()
    view.job()
    view.ranks(range(VISIBLE_ROWS))
    view.barriers()
    view.verdicts()
    view.memory(range(VISIBLE_ROWS))
    view.memory_summary()


def main() -> None:
    sizes = (128,) if "--quick" in sys.argv else (128, 2048)
    print(f"numpy, msgspec {msgspec.__version__}, best of {ROUNDS} rounds")
    for num_nodes in sizes:
        measure(num_nodes, "healthy", healthy)
        measure(num_nodes, "one frozen", one_frozen)
        measure(num_nodes, "one late", one_late)
        measure(num_nodes, "all dead", all_dead)


if __name__ == "__main__":
    main()
