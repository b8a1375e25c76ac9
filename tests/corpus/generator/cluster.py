"""The simulated cluster of a story: ranks that run generated programs, and what lost peers and time-outs do to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from agent.wire.machine import HostReport
from app.diagnosis.causes import Severity
from ddpcore.wire import NEW_GROUP
from tests.corpus.generator.exchange import TRANSFERS, Exchange
from tests.corpus.generator.kinds import RESTARTED, Kind
from tests.corpus.generator.memories import GpuMemories, NodeMemory
from tests.corpus.generator.mutations import events_of, strikes
from tests.corpus.generator.program import GATE, Collective, Semantics
from tests.corpus.generator.rank import StoryRank
from tests.support.sim import IMPORT_S, LOST_PEER_ERROR, TEARDOWN_S, TIMED_OUT_ERROR, WATCHDOG_ERROR, SimCluster
from tests.support.sim_node import START_S

if TYPE_CHECKING:
    from app.diagnosis.causes import Cause
    from app.diagnosis.verdicts import Verdict
    from tests.corpus.generator.lives import OtherCluster
    from tests.corpus.generator.program import Harm
    from tests.corpus.generator.stories import Story
    from tests.support.sim_node import SimNode
    from tests.support.sim_rank import SimRank

ABORT_ERROR = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet' what(): [enforce fail at "
    "../third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. {sent} vs {asked}"
)
REMOTE_ERROR = (
    "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error, "
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely."
)
GATE_ERROR = "ddpcore.errors.BarrierDeadlockError: barrier 'part done': rank {ranks} has ended and can never come"
"""Of a gate of ddpcore that is given up since a rank has ended."""
NOT_PASSED_ERROR = "RuntimeError: [Rank 0]: Rank {ranks} failed to pass monitoredBarrier in {ms} ms"
CHECK_RANK_0_ERROR = (
    "RuntimeError: [Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
    "for send/recv from rank 0. Please check rank 0 logs for faulty rank."
)
STORE_ERROR = "torch.distributed.DistStoreError: wait timeout after {ms}ms, keys: /default_pg/0//1//cpu//1/rank_{peer}"
SIGTERM = 15
JOINED_S = 0.7
"""From its import to where a rank waits for the others."""
ABSENT_S = 400.0
CROWDED_LOAD = 40.0
"""Of a node of eight CPUs."""
MEMORY_KINDS = frozenset({Kind.LEAK, Kind.LEAK_OF_ALL, Kind.LOADS, Kind.CACHE_FILLS, Kind.EPOCH_MEMORY})
CONNECTIONS_S = 0.05
"""Between two looks at who has lost a peer or waited too long."""


@dataclass(frozen=True)
class PastReport:
    """An alarm as it came up."""

    at_s: float
    verdict: Verdict
    pending: frozenset[tuple[str, int]]
    """(group, seq) of what held ranks up then."""
    differing: frozenset[tuple[str, int]] = frozenset()
    """(group, seq) of the first calls that differed between the members of a group."""
    are_roots_even: bool = False
    """Of the ranks that waited in the named call, as many had passed one root as another."""


class StoryCluster(SimCluster):
    """Plays a story."""

    def __init__(self, story: Story, job_id: str = "demo") -> None:
        shape = story.shape
        self._story, self._job_id = story, job_id
        self._lives = Random(story.seed)
        self.told_alarms: list[PastReport] = []
        self.last_told: dict[tuple[Cause, tuple[int, ...]], PastReport] = {}
        """Each alarm as it was at the last look at which ranks waited, and none had died of it."""
        self.struck: list[tuple[float, int, str]] = []
        """When a fault struck (seconds since the start), at which rank, what."""
        self._mute: set[int] = set()
        self._stood: dict[int, float] = {}
        """Ranks that died of what they waited in: since when they did."""
        self._first_end_s = float("inf")
        self._connections_due_s = 0.0
        self.has_aborted = False
        """Whether gloo has ended a rank that received too much."""
        self._num_looks = 0
        super().__init__(
            shape.num_nodes,
            shape.ranks_per_node,
            groups=shape.members(),
            seed=story.seed,
            noise=shape.noise,
            drop=shape.drop,
            hangs_on_death=shape.semantics is Semantics.NCCL,
        )
        self._late_s = {shape.world_size - 1: shape.late_s} if shape.late_s else {}
        self.other: OtherCluster | None = None
        if shape.spread_s:
            spread = {rank: self._lives.uniform(0.0, shape.spread_s) for rank in range(shape.world_size)}
            self._late_s = spread | self._late_s
        kind = story.faults[0].kind if story.faults else Kind.NONE
        self._memories = [NodeMemory(self, node, kind) for node in self.nodes] if kind in MEMORY_KINDS else []
        self._gpus = GpuMemories(self) if kind is Kind.GPU_LEAK else None
        if kind is Kind.CROWDED:
            for node in self.nodes:
                node.host = HostReport(load_1min=CROWDED_LOAD)
        if shape.launch_late_s and shape.num_nodes > 1:
            self._launch_late_s[shape.num_nodes - 1] = shape.launch_late_s
        for fault in story.faults:
            if fault.kind is Kind.NEVER_LAUNCHED:
                launched = range(shape.world_size - shape.ranks_per_node)
                first_s = min(self._late_s.get(rank, 0.0) for rank in launched)
                self.struck.append((IMPORT_S + JOINED_S + first_s, shape.world_size - 1, "never launched"))
            if fault.kind is Kind.ABSENT:
                self._late_s[fault.rank] = ABSENT_S
                others = [self._late_s.get(rank, 0.0) for rank in range(shape.world_size) if rank != fault.rank]
                # Nobody is late before somebody waits.
                self.struck.append((IMPORT_S + min(others), fault.rank, "absent"))

    @property
    def story_ranks(self) -> list[StoryRank]:
        """The ranks."""
        return self.ranks  # type: ignore[return-value]

    def pending(self) -> frozenset[tuple[str, int]]:
        """Return (group, seq) of what holds ranks up now.

        With NCCL that is the first call of each group that is not over: a kernel that waits behind another group's is
        held up by the same rank, and the recorder does not tell which of the two comes first.
        """
        return frozenset(
            (operation.group, operation.seq)
            for rank in self.story_ranks
            for operation in (*rank.waits_in(self.now_s), *rank.first_pending(self.now_s))
            if operation.group != TRANSFERS
        )

    def _make_ranks(self) -> list[SimRank]:
        story, shape = self._story, self._story.shape
        exchange = Exchange(
            shape.semantics,
            shape.members(),
            shape.world_size,
            mismatch_hangs=story.mismatch_hangs,
            root_runs_ahead=story.root_runs_ahead,
        )
        self._meetings = exchange  # type: ignore[assignment]
        self._exchange = exchange
        if story.faults and story.faults[0].kind in RESTARTED:
            faults = story.faults[1:] if self.attempt else story.faults[:1]
            story = replace(story, faults=faults)
        job = (self._job_id, self.attempt, story.seed)
        ranks = [StoryRank(rank, shape, events_of(story, rank), job) for rank in range(shape.world_size)]
        for rank in ranks:
            rank.know_groups(exchange)
        return list(ranks)

    def _launch(self) -> None:
        """Bring the ranks to their start, and let those probes look whose time has come."""
        if not self.ranks[-1].has_joined:
            super()._launch()
            return
        now_s = self.now_s
        for rank in self.story_ranks:
            if rank.probe_due_s <= now_s:
                self._probe(rank)
                if self._story.shape.late_probes_s:
                    rank.probe_due_s += self._lives.uniform(0.0, self._story.shape.late_probes_s)

    def _run_ranks(self) -> None:
        """Let those ranks move whose time has come, and those that they let go on."""
        now_s, exchange, ranks = self.now_s, self._exchange, self.story_ranks
        due = {rank.rank for rank in ranks if rank.due_s <= now_s}
        while due:
            index = min(due)
            due.discard(index)
            rank = ranks[index]
            if self._node_of(rank).is_lost:
                rank.due_s = float("inf")
                continue
            rank.advance(exchange, now_s, self.noise)
            rank.plan()
            due |= {moved for moved in exchange.moved if ranks[moved].plan() <= now_s and moved != index}
            exchange.moved.clear()
            self._take_harms(rank)
        for rank in ranks:
            if rank.finished_s is not None and rank.end is None:
                rank.end = (0, None, "")

    def _take_harms(self, rank: StoryRank) -> None:
        for at_s, harm in rank.harms:
            if not harm.is_odd:
                self.struck.append((at_s - START_S, rank.rank, harm.kind))
            self._strike_around(rank, harm)
        rank.harms.clear()

    def _strike_around(self, rank: StoryRank, harm: Harm) -> None:
        """Do what a harm does beyond its rank."""
        index = rank.rank // self._ranks_per_node
        kind = harm.kind
        if kind == "host":
            self.lose_node(index)
        elif kind == "agent":
            self._mute.add(index)
        elif kind == "agent anew":
            self.restart_agent(index)
        elif kind == "link":
            self._exchange.cut()
        elif kind == "launcher":
            self.end_launcher(index, SIGTERM)
        elif kind == "leak":
            num_leaking = sum(
                strikes(self._story.faults[0], self._story.shape, one.rank) for one in self.nodes[index].ranks
            )
            self._memories[index].leak(rank.rank, harm.value, num_leaking)
        elif kind == "cache":
            self._memories[index].fill(rank.rank, harm.value)
        elif kind == "gpu leak":
            assert self._gpus is not None
            self._gpus.leak(rank.rank, harm.value)

    def node_of(self, rank: SimRank) -> SimNode:
        """Return the node of a rank."""
        return self._node_of(rank)

    def next_attempt(self) -> None:
        """Start the job anew, with new processes."""
        super().next_attempt()
        self._stood, self._first_end_s, self.has_aborted = {}, float("inf"), False
        self.struck.clear()

    def _tick(self) -> None:
        super()._tick()
        if self.other is not None:
            self.other.advance(self.now_s)

    def _frame_of(self, node: SimNode) -> bytes:
        others = [] if self.other is None else self.other.statuses(node.node_rank, self.now_s)
        return node.publish(self.now_s, others)

    def _send(self, node: SimNode) -> None:
        if node.node_rank in self._mute:
            node.sent_at_s = self.now_s
            return
        super()._send(node)

    def _break_connections(self) -> None:
        """Let ranks die that a lost peer, a time-out or too much data reaches."""
        if self.now_s < self._connections_due_s:
            return
        self._connections_due_s = self.now_s + CONNECTIONS_S
        timeout_s = self._story.shape.timeout_s
        gone = {rank.rank for rank in self.ranks if rank.end is not None}
        for rank in self.story_ranks:
            if not rank.is_alive or rank.failure is not None:
                continue
            waits = rank.waits_in(self.now_s)
            lengths = [operation.lengths[rank.rank] for operation in waits if rank.rank in operation.aborted]
            if lengths:
                self.has_aborted = True
                self._end_waiting(rank, (None, 6, ABORT_ERROR.format(sent=lengths[0][0], asked=lengths[0][1])))
                continue
            if not waits or rank.is_stuck:
                continue
            if self._is_connection_lost(rank, gone):
                is_gloo = self._story.shape.semantics is Semantics.GLOO
                if any(operation.meets_in == GATE for operation in waits):
                    error = GATE_ERROR.format(ranks=", ".join(map(str, sorted(gone))))
                    self._end_waiting(rank, (1, None, error))
                else:
                    self._end_waiting(rank, (1, None, LOST_PEER_ERROR) if is_gloo else (None, 6, REMOTE_ERROR))
                continue
            if any(operation.meets_in == GATE for operation in waits):
                # It has a time-out of its own, of half an hour.
                continue
            if timeout_s and self.now_s - self._waits_since_s(rank) >= timeout_s:
                self._end_waiting(rank, self._time_out(rank))

    def _waits_since_s(self, rank: StoryRank) -> float:
        return min(operation.come_s.get(rank.rank, self.now_s) for operation in rank.waits_in(self.now_s))

    def _end_waiting(self, rank: StoryRank, end: tuple[int | None, int | None, str]) -> None:
        self._stood[rank.rank] = self._waits_since_s(rank) - START_S
        self._first_end_s = min(self._first_end_s, self.elapsed_s)
        if end[1] is None:
            rank.fail(end, self.now_s + self._lives.uniform(*TEARDOWN_S))
        else:
            rank.end = end

    def stood_s(self, at_least_s: float = 0.0) -> float | None:
        """Return when the last of the ranks that wait for good, or died waiting, came to its wait; None without any.

        A wait counts that has lasted `at_least_s`.
        """
        since = dict(self._stood)
        for rank in self.story_ranks:
            if rank.is_alive and rank.waits_in(self.now_s):
                since_s = self._waits_since_s(rank) - START_S
                if self.elapsed_s - since_s >= at_least_s:
                    since[rank.rank] = since_s
        return min(max(since.values()), self._first_end_s) if since else None

    def _is_connection_lost(self, rank: StoryRank, gone: set[int]) -> bool:
        """Return whether a rank is told now that a peer of what it waits in is gone.

        gloo: the closed connection. NCCL: ncclRemoteError comes where the peer is on another node, seconds later; a
        peer of the same node is only missed (shared memory says nothing).
        """
        waits = rank.waits_in(self.now_s)
        if any(operation.meets_in == NEW_GROUP for operation in waits):
            # It reads from the store, which does not know who has ended.
            return False
        is_store_barrier = any(operation.meets_in == GATE for operation in waits)
        lost = {peer for operation in waits for peer in operation.members} & gone
        if self._story.shape.semantics is Semantics.NCCL and not is_store_barrier:
            lost = {peer for peer in lost if self._node_of(self.ranks[peer]) is not self._node_of(rank)}
        if not lost or self._exchange.is_cut:
            return False
        span = (0.05, 0.4) if self._story.shape.semantics is Semantics.GLOO else (2.0, 8.0)
        if is_store_barrier:  # the gates' own look at who can never come
            span = (1.5, 4.0)
        due_s = self._losses.setdefault(rank.rank, self.now_s + self._lives.uniform(*span))
        return self.now_s >= due_s

    def _time_out(self, rank: StoryRank) -> tuple[int | None, int | None, str]:
        timeout_ms = int(1000 * self._story.shape.timeout_s)
        meeting = next((operation for operation in rank.waits_in(self.now_s) if operation.meets_in), None)
        if meeting is not None:
            absent = [peer for peer in meeting.members if peer not in meeting.come_s]
            if meeting.meets_in == NEW_GROUP:
                return (1, None, STORE_ERROR.format(ms=timeout_ms, peer=absent[0]))
            error = NOT_PASSED_ERROR if rank.rank == 0 else CHECK_RANK_0_ERROR
            return (1, None, error.format(ms=timeout_ms, ranks=absent[0], rank=rank.rank))
        if self._story.shape.semantics is Semantics.GLOO:
            return (1, None, TIMED_OUT_ERROR.format(ms=timeout_ms))
        return (None, 6, WATCHDOG_ERROR.format(rank=rank.rank, ms=timeout_ms))

    def _observe(self) -> None:
        # Half as often as the other simulations: a third of a story's time goes into looks.
        self._num_looks += 1
        if self._num_looks % 2:
            return
        before = self.alarming
        super()._observe()
        if not self.alarming:
            return
        pending, differing = self.pending(), frozenset(self._exchange.differing.items())
        for verdict in self.diagnosis.verdicts:
            if verdict.job != self._job_id or verdict.severity is Severity.QUIET:
                continue
            key = (verdict.cause, verdict.culprits)
            told = PastReport(self.elapsed_s, verdict, pending, differing, self._are_roots_even(verdict))
            if key not in before:
                self.told_alarms.append(told)
            if pending and self._first_end_s == float("inf"):
                self.last_told[key] = told

    def _are_roots_even(self, verdict: Verdict) -> bool:
        passed = Counter(
            call.root
            for rank in self.story_ranks
            for operation in rank.waits_in(self.now_s)
            if (operation.group, operation.seq) == (verdict.group, verdict.seq)
            and isinstance(call := operation.calls[rank.rank], Collective)
        )
        counts = [count for _, count in passed.most_common(2)]
        return len(counts) == 2 and counts[0] == counts[1]
