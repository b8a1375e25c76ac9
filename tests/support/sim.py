"""A whole cluster without processes, sockets or clocks: every pure core, the real codecs, a virtual clock.

    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.freeze(2, at_step=10)
    sim.run(seconds=8)
    assert sim.view().headline().text.startswith("rank 2 on demo-1 is frozen")

Simulated ranks run a training program, their probes and agents are the real cores, reports cross both wires as bytes,
may be dropped and delayed, and end in the real model, diagnosis and view. All randomness is seeded: two runs are equal.
"""

from __future__ import annotations

import functools
import heapq
import pickle
from random import Random
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from agent.wire.digest import decode_frame
from agent.wire.jobs import JobState
from agent.wire.logs import exception_line
from app.diagnosis.causes import Severity
from app.diagnosis.diagnoser import Diagnoser, Diagnosis, Thresholds
from app.model.cluster import Cluster
from app.view.view import View
from tests.support.sim_node import START_S, SimNode
from tests.support.sim_program import Call, Program, Training
from tests.support.sim_rank import Meetings, SimRank

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from app.diagnosis.causes import Cause
    from app.view.rows import VerdictRow

P = ParamSpec("P")
T = TypeVar("T")

TICK_S = 0.01
NODE_PERIOD_S = 0.2
NEWS_GAP_S = 0.1
OBSERVE_PERIOD_S = 0.1
LAUNCH_S = 0.5
"""From the start to the launchers running."""
SPAWN_S = 1.0
"""To the ranks' processes being there."""
STOP_S = 0.5
"""From a stop to the ranks' end."""
TEARDOWN_S = (0.2, 3.0)
"""From an exception that nobody catches to the end of the process."""
IMPORT_S = 3.0
"""To torch being imported, and up to half a second more, rank by rank."""
LOST_PEER_ERROR = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31415. "
    "This is typically caused by a remote worker crashing."
)

TIMED_OUT_ERROR = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting {ms}ms for recv operation to complete"
)
"""Source: torch 2.13, seen."""
WATCHDOG_ERROR = (
    "c10::DistBackendError: [PG ID 0 PG GUID 0(default_pg) Rank {rank}] NCCL watchdog thread ended by "
    "exception: [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "NumelIn=1, NumelOut=1, Timeout(ms)={ms}) ran for {ms} milliseconds before timing out."
)
"""Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp."""


def played_once(play: Callable[P, T]) -> Callable[P, T]:
    """Return a function that plays a simulation the first time, and hands out copies of how that ended."""

    @functools.cache
    def played(*args: Hashable, **kwargs: Hashable) -> bytes:
        return pickle.dumps(play(*args, **kwargs))  # type: ignore[arg-type]

    @functools.wraps(play)
    def copied(*args: P.args, **kwargs: P.kwargs) -> T:
        return pickle.loads(played(*args, **kwargs))  # type: ignore[arg-type, no-any-return]

    return copied


class SimCluster:
    """Nodes, ranks and a console.

    Args:
        num_nodes: How many nodes, named `demo-0`, `demo-1`, ...
        ranks_per_node: Ranks on each.
        program: What the ranks do; an endless `Training` unless told.
        groups: Process groups beside the one of all ranks: members by name.
        seed: Of everything random.
        noise: By which fraction each piece of work is longer or shorter at random.
        drop: Which share of datagrams and frames is lost.
        delay_s: Up to how long a frame is on its way; beyond 0.2 s frames overtake each other.
        hangs_on_death: Ranks whose peer is gone wait on, as with NCCL, instead of dying as with gloo.
        timeout_s: Of the process groups: who waits for longer dies of it, with an exception as with gloo, or, where
            peers hang on death, by the abort of NCCL's watchdog.
        thresholds: Of the diagnosis.
    """

    def __init__(
        self,
        num_nodes: int = 2,
        ranks_per_node: int = 2,
        *,
        program: Program | None = None,
        groups: dict[str, tuple[int, ...]] | None = None,
        seed: int = 0,
        noise: float = 0.2,
        drop: float = 0.0,
        delay_s: float = 0.01,
        hangs_on_death: bool = False,
        timeout_s: float = float("inf"),
        thresholds: Thresholds | None = None,
    ) -> None:
        self.now_s = START_S
        self.world_size = num_nodes * ranks_per_node
        self.noise, self.drop, self.delay_s = noise, drop, delay_s
        self.hangs_on_death = hangs_on_death
        self.timeout_s = timeout_s
        self.told: list[tuple[float, Cause, tuple[int, ...]]] = []
        """Each verdict that came up: when (seconds since the start), cause, culprits."""
        self.heard: list[tuple[float, str, bytes]] = []
        """Each frame that has arrived: when, of which node."""
        self.alarms: list[tuple[float, Cause, tuple[int, ...]]] = []
        """The same, of those that want somebody's attention."""
        self.each_view: Callable[[View], object] = id
        self._program = program or Training()
        self._groups = groups or {}
        self._seed = seed
        self._random = Random(seed)
        self._begun_s = START_S
        self._standing: set[tuple[Cause, tuple[int, ...]]] = set()
        self.alarming: set[tuple[Cause, tuple[int, ...]]] = set()
        """Those that stand now."""
        self._on_the_way: list[tuple[float, int, str, bytes]] = []
        self._num_sent = 0
        self._losses: dict[int, float] = {}
        self._closed: set[int] = set()
        self._late_s: dict[int, float] = {}
        self._launch_late_s: dict[int, float] = {}
        """By node: how much later than the others' its launcher starts."""
        self._stop_due_s = float("inf")
        self.attempt = 0
        self._ranks_per_node = ranks_per_node
        self.ranks = self._make_ranks()
        per_node = ranks_per_node
        self.nodes = [
            SimNode(
                f"demo-{index}",
                index,
                self.ranks[index * per_node : (index + 1) * per_node],
                self.world_size,
                num_nodes,
            )
            for index in range(num_nodes)
        ]
        for node in self.nodes:
            node.admit("demo", 0, self.now_s)
        self.cluster = Cluster([node.name for node in self.nodes])
        self._diagnoser = Diagnoser(thresholds)
        self.diagnosis: Diagnosis = self._diagnoser.observe(self.cluster, self.now_s)

    # What a test does to the cluster.

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - TICK_S / 2:
            self._tick()

    def run_until(self, condition: Callable[[], bool], within_s: float, what: str = "the condition") -> float:
        """Let time pass until the condition holds; return how long it took."""
        begun_s = self.now_s
        while not condition():
            assert self.now_s - begun_s <= within_s, f"not within {within_s} s: {what}; told: {self.told}"
            self._tick()
        return self.now_s - begun_s

    def run_to_step(self, step: int) -> None:
        """Let time pass until every rank has begun a step."""
        self.run_until(lambda: all(rank.begun_step >= step for rank in self.ranks), 600, f"step {step}")

    def freeze(self, rank: int, at_step: int | None = None) -> None:
        """SIGSTOP."""
        self._strike(rank, at_step, "freeze", 1)

    def thaw(self, rank: int) -> None:
        """SIGCONT."""
        self._strike(rank, None, "thaw", 1)

    def kill(self, rank: int, at_step: int | None = None, signal: int = 9) -> None:
        """End the process by a signal."""
        self._strike(rank, at_step, "signal", signal)

    def kill_for_memory(self, rank: int, at_step: int | None = None) -> None:
        """Let the kernel end the process for want of memory."""
        self._strike(rank, at_step, "oom", 1)

    def come_late(self, rank: int, seconds: float) -> None:
        """Let a rank come to init_process_group that much after its import of torch."""
        self._late_s[rank] = seconds

    def exit(self, rank: int, at_step: int | None = None, code: int = 0) -> None:
        """Let the process end by itself."""
        self._strike(rank, at_step, "exit", code)

    def fail(self, rank: int, teardown_s: float, at_step: int | None = None) -> None:
        """Let an exception end the program, and the process so much later."""
        self._strike(rank, at_step, "raise", teardown_s)

    def leave(self, rank: int, teardown_s: float, at_step: int | None = None, code: int = 0) -> None:
        """Let the program end by `sys.exit`, and the process so much later."""
        self.ranks[rank].leaving_code = code
        self._strike(rank, at_step, "leave", teardown_s)

    def close_group(self, rank: int) -> None:
        """Let a rank destroy its process group and work on."""
        self._closed.add(rank)
        self.slow(rank, 1e5)

    def slow(self, rank: int, factor: float, at_step: int | None = None) -> None:
        """Stretch all work of the rank; 1 heals."""
        self._strike(rank, at_step, "slow", factor)

    def hold_gil(self, rank: int, at_step: int | None = None) -> None:
        """Stop the rank and its probe while its process looks alive."""
        self._strike(rank, at_step, "gil", 1)

    def release_gil(self, rank: int) -> None:
        """Undo `hold_gil`."""
        self._strike(rank, None, "gil", 0)

    def block(self, rank: int, at_step: int | None = None) -> None:
        """Put the process into uninterruptible sleep."""
        self._strike(rank, at_step, "block", 1)

    def cut_network(self) -> None:
        """Let no collective complete from here on."""
        self._meetings.is_cut = True

    def mend_network(self) -> None:
        """Undo `cut_network`."""
        self._meetings.mend()

    def mismatch(self, rank: int, call: Call) -> None:
        """Let a rank make another call than its program says, once."""
        self.ranks[rank].altered = call

    def lose_node(self, node: int) -> None:
        """Cut a node off: its ranks stop, its agent is not heard."""
        self.nodes[node].is_lost = True

    def return_node(self, node: int) -> None:
        """Undo `lose_node`."""
        self.nodes[node].is_lost = False

    def stop_agent(self, node: int) -> None:
        """Let a node's agent end as `rankdeck down` ends it; the job lives on."""
        stopped = self.nodes[node]
        self.cluster.apply(stopped.name, decode_frame(stopped.publish(self.now_s, is_last=True)), self.now_s)
        stopped.is_unheard = True

    def restart_agent(self, node: int) -> None:
        """Start a node's agent anew; the job lives on."""
        self.nodes[node].restart_agent("demo", self.attempt, self.now_s)
        self.nodes[node].is_unheard = False

    def stop(self) -> None:
        """Ask the job to end."""
        for node in self.nodes:
            node.go(JobState.STOPPING, self.now_s)
        self._stop_due_s = self.now_s + STOP_S

    def end_launcher(self, node: int, signal: int) -> None:
        """Send a signal to a node's launcher, which ends its ranks by it or takes them with it."""
        self.nodes[node].end_launcher_by(signal, self.now_s)

    def next_attempt(self) -> None:
        """Start the job anew, with new processes."""
        self.attempt += 1
        self._begun_s = self.now_s
        self._losses, self._stop_due_s = {}, float("inf")
        self.ranks = self._make_ranks()
        for node in self.nodes:
            node.ranks = [self.ranks[rank.rank] for rank in node.ranks]
            node.admit("demo", self.attempt, self.now_s)

    # What a test sees.

    def view(self) -> View:
        """Return the rows of now, of the job that the cluster runs."""
        return View(self.cluster, self.diagnosis, self.now_s, self.nodes[0].job[0])

    def verdicts(self) -> list[VerdictRow]:
        """Return the verdicts of now."""
        return self.view().verdicts()

    def causes(self) -> set[tuple[Cause, tuple[int, ...]]]:
        """Return cause and culprits of every verdict of now."""
        return {(verdict.cause, verdict.culprits) for verdict in self.diagnosis.verdicts}

    @property
    def elapsed_s(self) -> float:
        """Time since the start."""
        return self.now_s - START_S

    def _make_ranks(self) -> list[SimRank]:
        job = ("demo", self.attempt, self._seed)
        self._meetings = Meetings(self._groups, self.world_size)
        ranks = [
            SimRank(rank, rank % self._ranks_per_node, self.world_size, self._program, job)
            for rank in range(self.world_size)
        ]
        for rank in ranks:
            rank.know_groups(self._meetings)
        return ranks

    def _strike(self, rank: int, at_step: int | None, kind: str, value: float) -> None:
        if at_step is None:
            self.ranks[rank].strike(kind, value)
        else:
            self.ranks[rank].faults.setdefault(at_step, []).append((kind, value))

    def _tick(self) -> None:
        before_s, self.now_s = self.now_s, self.now_s + TICK_S
        self._launch()
        if self.now_s >= self._stop_due_s:
            for rank in self.ranks:
                rank.end = rank.end or (None, 15, "")
        self._run_ranks()
        self._end_what_waits_too_long()
        self._break_connections()
        for node in self.nodes:
            if not node.is_lost and self._is_born(node):
                node.watch(self.now_s)
            offset_s = 0.03 * node.node_rank
            if not node.is_lost and self._is_due(before_s, NODE_PERIOD_S, offset_s):
                if self._is_born(node):
                    node.sample(self.now_s)
                self._send(node)
            elif not node.is_lost and node.has_news and self.now_s - node.sent_at_s >= NEWS_GAP_S:
                self._send(node)
        while self._on_the_way and self._on_the_way[0][0] <= self.now_s:
            arrived_s, _, name, frame = heapq.heappop(self._on_the_way)
            self.heard.append((arrived_s, name, frame))
            self.cluster.apply(name, decode_frame(frame), arrived_s)
        if self._is_due(before_s, OBSERVE_PERIOD_S, 0.0):
            self._observe()

    def _is_due(self, before_s: float, period_s: float, offset_s: float) -> bool:
        return int((before_s - offset_s) / period_s + 1e-6) != int((self.now_s - offset_s) / period_s + 1e-6)

    def _is_born(self, node: SimNode) -> bool:
        return self.now_s - self._begun_s >= SPAWN_S + self._launch_late_s.get(node.node_rank, 0.0)

    def _launch(self) -> None:
        age_s = self.now_s - self._begun_s
        for node in self.nodes:
            if node.state is JobState.PREPARED and age_s >= LAUNCH_S + self._launch_late_s.get(node.node_rank, 0.0):
                node.go(JobState.RUNNING, self.now_s)
        if self.ranks[0].has_joined:
            for rank in self.ranks:
                self._probe(rank)
            return
        late_s = [self._launch_late_s.get(rank.rank // self._ranks_per_node, 0.0) for rank in self.ranks]
        imported_s = [
            IMPORT_S + 0.5 * ((7 * rank.rank) % 8) / 8 + launched_s
            for rank, launched_s in zip(self.ranks, late_s, strict=True)
        ]
        for rank, due_s in zip(self.ranks, imported_s, strict=True):
            is_due = age_s >= due_s + self._late_s.get(rank.rank, 0.2)
            rank.has_come = rank.has_come or (is_due and not rank.is_stuck)
        have_all_come = all(rank.has_come and not rank.is_stuck for rank in self.ranks)
        if have_all_come and not self._meetings.is_cut:
            for rank in self.ranks:
                rank.begin(self.now_s)
        for rank, due_s in zip(self.ranks, imported_s, strict=True):
            if age_s >= due_s:
                self._probe(rank)

    def _probe(self, rank: SimRank) -> None:
        node = self._node_of(rank)
        datagram = None if node.is_lost else rank.report(self.now_s)
        if datagram is not None and self._random.random() >= self.drop:
            node.receive(datagram, self.now_s)

    def _run_ranks(self) -> None:
        movable = [rank for rank in self.ranks if not self._node_of(rank).is_lost]
        is_moving = True
        while is_moving:
            is_moving = False
            for rank in movable:
                is_moving |= rank.advance(self._meetings, self.now_s, self.noise)
        for rank in self.ranks:
            if rank.is_alive and (rank.is_stuck or rank not in movable):
                rank.hold(TICK_S)
            if rank.finished_s is not None and rank.end is None:
                rank.end = (0, None, "")

    def _end_what_waits_too_long(self) -> None:
        """Let ranks fail that have waited in a collective for longer than its group allows."""
        ms = round(1000 * self.timeout_s) if self.timeout_s < float("inf") else 0
        for rank in self.ranks:
            meeting = rank.meeting
            if rank.failure is not None and rank.end is None and self.now_s >= rank.failure[0]:
                code, number, error = rank.failure[1]
                rank.end = (code, number, exception_line(error))
            if meeting is None or self.now_s - meeting.arrived_s[rank.rank] < self.timeout_s:
                continue
            if rank.is_stuck or meeting.is_agreed():
                continue
            if self.hangs_on_death:
                rank.end = (None, 6, WATCHDOG_ERROR.format(ms=ms, rank=rank.rank))
            else:
                error = TIMED_OUT_ERROR.format(ms=ms)
                rank.fail((1, None, error), self.now_s + self._random.uniform(*TEARDOWN_S))

    def _break_connections(self) -> None:
        """Let ranks die that wait in a collective of which a member is gone, as gloo does."""
        if self.hangs_on_death:
            return
        gone = self._closed | {rank.rank for rank in self.ranks if rank.end is not None}
        for rank in self.ranks if gone else ():
            meeting = rank.meeting
            if meeting is None or rank.is_stuck or not gone.intersection(meeting.members) or meeting.is_agreed():
                continue
            due_s = self._losses.setdefault(rank.rank, self.now_s + self._random.uniform(0.05, 0.4))
            if self.now_s >= due_s and gone <= self._closed and not rank.is_leaving:
                rank.fail((1, None, LOST_PEER_ERROR), self.now_s + self._random.uniform(*TEARDOWN_S))
            elif self.now_s >= due_s:
                rank.end = (1, None, LOST_PEER_ERROR)

    def _node_of(self, rank: SimRank) -> SimNode:
        return self.nodes[rank.rank // self._ranks_per_node]

    def _send(self, node: SimNode) -> None:
        frame = self._frame_of(node)
        node.sent_at_s = self.now_s
        if self._random.random() < self.drop or node.is_unheard:
            return
        self._num_sent += 1
        arrives_s = self.now_s + self._random.uniform(0.0, self.delay_s)
        heapq.heappush(self._on_the_way, (arrives_s, self._num_sent, node.name, frame))

    def _frame_of(self, node: SimNode) -> bytes:
        return node.publish(self.now_s)

    def _observe(self) -> None:
        self.diagnosis = self._diagnoser.observe(self.cluster, self.now_s)
        self.cluster.validate()
        self.diagnosis.validate()
        standing = self.causes()
        new = sorted(standing - self._standing)
        self.told += [(round(self.elapsed_s, 2), cause, culprits) for cause, culprits in new]
        self._standing = standing
        alarming = {(v.cause, v.culprits) for v in self.diagnosis.verdicts if v.severity is not Severity.QUIET}
        new = sorted(alarming - self.alarming)
        self.alarms += [(round(self.elapsed_s, 2), cause, culprits) for cause, culprits in new]
        self.alarming = alarming
        self.each_view(self.view())
