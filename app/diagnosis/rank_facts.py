"""The state of every node's reports and of every rank, as arrays.

`all_nodes` returns the states by node, `NodeFacts` is one node on demand. `rank_facts` returns the states by rank, by
evidence in order of strength: its node, its process, its reports.
"""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.causes import RankState
from app.model.farewells import is_clean
from app.model.job_model import Process, which_phases
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from app.model.cluster import Cluster, Node
    from app.model.job_model import JobModel

    Flags = NDArray[np.bool_]
    Ranks = NDArray[np.int64]
    Moments = NDArray[np.float64]

NODE_STATES = ("connecting", "up", "stale", "lost", "down")
CONNECTING, UP, STALE, LOST, DOWN = range(len(NODE_STATES))


class NodeFacts(NamedTuple):
    """The state of one node's reports."""

    state: str
    """connecting, up, stale, lost, or down where its agent was stopped."""
    age_s: float | None
    """Seconds since its last report; None before the first."""


class AllNodes:
    """The states of all nodes, in the order of the cluster.

    Attributes:
        codes: Index into `NODE_STATES`.
        age_s: Age of the latest report; NaN before the first.
        is_lost: Whether nothing is known of their ranks any more: of nodes that are lost, and in time of those down.
    """

    def __init__(self, codes: NDArray[np.int8], age_s: NDArray[np.float64], is_lost: NDArray[np.bool_]) -> None:
        self.codes = codes
        self.age_s = age_s
        self.is_lost = is_lost

    @property
    def is_up(self) -> NDArray[np.bool_]:
        """Which nodes report."""
        is_up: NDArray[np.bool_] = self.codes == UP
        return is_up

    @property
    def is_late(self) -> NDArray[np.bool_]:
        """Which nodes no longer report."""
        is_late: NDArray[np.bool_] = self.codes >= STALE
        return is_late

    @property
    def is_unheard(self) -> NDArray[np.bool_]:
        """Which nodes are known to be unreachable and have never reported."""
        is_unheard: NDArray[np.bool_] = (self.codes == LOST) & np.isnan(self.age_s)
        return is_unheard

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int) -> NodeFacts:
        """Return the facts of a node."""
        state = NODE_STATES[self.codes[index]]
        age_s = float(self.age_s[index])
        return NodeFacts(state, None if isnan(age_s) else age_s)

    def __iter__(self) -> Iterator[NodeFacts]:
        return (self[index] for index in range(len(self)))


def all_nodes(cluster: Cluster, thresholds: Thresholds, now_s: float) -> AllNodes:
    """Return the state of every node."""
    is_seen = np.isfinite(cluster.last_report_s)
    age_s = np.where(is_seen, np.maximum(0.0, now_s - cluster.last_report_s), np.nan)
    codes = np.where(is_seen, UP, CONNECTING).astype(np.int8)
    is_lost = (age_s > thresholds.lost_s) | (~is_seen & cluster.is_cut_off)
    codes[age_s > thresholds.silent_s] = STALE
    codes[is_lost] = LOST
    codes[cluster.has_left] = DOWN
    return AllNodes(codes, age_s, is_lost)


STATES = tuple(RankState)
STATE_CODE = {state: code for code, state in enumerate(STATES)}

KNOWN_PHASES = (Phase.STARTING, Phase.JOINING, Phase.CHECKPOINT, Phase.EVAL)
"""Phases in which a rank may rightly keep the others waiting for a while."""
MAX_PATIENCE = 5.0
"""Multiple of `silent_s`: a rank that does not report is named after 10 s at the latest."""
_IS_KNOWN_PHASE = which_phases(*KNOWN_PHASES)


class Thresholds(msgspec.Struct, frozen=True):
    """Limits of normal operation. Durations in seconds; the defaults fit a node's 5 reports a second."""

    stall_s: float = 10.0
    """A wait longer than this is a stall: a live rank that causes it is a straggler."""
    silent_s: float = 2.0
    """Ten of a node's reports, eight of a probe's: a loaded machine loses some, not this many."""
    farewell_s: float = 30.0
    """Longest time from a rank's farewell to its end before it counts as silent."""
    lost_s: float = 6.0
    """Three times `silent_s`: past it a node that has stopped reporting is taken for lost."""
    short_s: float = 0.2
    """A shorter wait is normal in a collective, and no rank's fault."""
    confirm_s: float = 0.5
    """Reports of two ranks are taken up to about this much apart: a shorter contradiction is not reported."""
    join_s: float = 60.0
    """Ranks in `init_process_group` wait this long for the others before that is a verdict: an import from a network
    file system takes its time. The first line shows the missing ranks immediately."""
    patience_s: float = 300.0
    """Patience for the first checkpoint, or evaluation, of a job, whose usual time is not known."""
    deadlock_s: float = 1.5
    """Ranks that wait for each other in different groups do so for this long before it is reported."""
    instant_s: float = 0.3
    """Deaths closer than this have no order: the ages that date them are sampled."""
    grace_s: float = 1.0
    """Time that a death that looks like a consequence waits for its cause to be reported."""


NOWHERE = -1
"""Node index of a rank that no node has reported; it points behind all nodes."""


class RankFacts(msgspec.Struct, frozen=True):
    """One flag per rank and state; the flags of frozen, silent, dead, lost and starting exclude each other."""

    is_alive: Flags
    is_frozen: Flags
    is_silent: Flags
    """Its process runs, its node reports, and its probe does not."""
    is_dead: Flags
    """Its process has ended, cleanly or not."""
    is_lost: Flags
    is_starting: Flags
    is_fresh: Flags
    """Its last report is recent on this console's clock: the rank lives and its facts still hold."""

    @property
    def is_immobile(self) -> Flags:
        """Whether a rank's last report holds however old it is: it cannot have called anything since."""
        return self.is_frozen | self.is_dead | self.is_lost | self.is_silent


def unheard_nodes(cluster: Cluster, nodes: AllNodes) -> list[Node]:
    """Return the unreachable nodes that have never reported: ranks that no other node has may be theirs."""
    return [cluster.nodes[cluster.node_names[index]] for index in np.flatnonzero(nodes.is_unheard).tolist()]


def is_over(job: JobModel, nodes: AllNodes) -> bool:
    """Return whether a job has ended, and no node that has never reported and is unreachable may run the rest."""
    may_go_on = job.num_nodes > len(job.assignments) and bool(nodes.is_unheard.any()) and job.state() != "succeeded"
    return job.is_ended() and not may_go_on


def is_cause_unseen(job: JobModel, nodes: AllNodes) -> bool:
    """Return whether a rank may have ended first on a node without reports, or without its root cause yet."""
    dead = {int(job.node_of[rank]) for rank, death in job.deaths.items() if not is_clean(death)}
    late = np.flatnonzero(nodes.is_late & job.may_be_on(len(nodes))).tolist()
    is_open = bool(dead.difference(job.together.nodes_with_cause, job.together.over_nodes))
    return is_open or not all(job.is_over_on(node) for node in late) or bool(job.is_elsewhere.any())


def rank_facts(job: JobModel, cluster: Cluster, nodes: AllNodes, thresholds: Thresholds, now_s: float) -> RankFacts:
    """Return the state of every rank of a job."""
    # One more than there are nodes: for the ranks that no node claims.
    node_is_settled, node_is_lost = np.zeros((2, len(nodes) + 1), np.bool_)
    node_is_settled[:-1] = (now_s - cluster.back_s > thresholds.silent_s) & nodes.is_up
    if not is_over(job, nodes):
        node_is_lost[:-1] = nodes.is_lost
        reported_s = job.reported_s[: len(nodes)]
        # A node may report and no longer hold the job.
        node_is_lost[: len(reported_s)] |= cluster.last_report_s[: len(reported_s)] - reported_s > thresholds.lost_s
        if nodes.is_unheard.any():
            # How many nodes an adopted job has is not known: its ranks that have joined and are nowhere are lost.
            node_is_lost[NOWHERE] = job.num_nodes > len(job.assignments) or bool(job.is_elsewhere.any())
    is_dead = job.process == Process.EXITED
    is_lost = node_is_lost[job.node_of] & ~is_dead
    is_alive = (job.process != Process.UNSEEN) & ~is_dead & ~is_lost
    is_frozen = is_alive & (job.process == Process.FROZEN)
    has_report = ~np.isnan(job.report_at_s)
    # A probe on an overloaded machine is late, not silent, and of its few reports one may be lost.
    patience = 2.0 * np.append(cluster.crowding, 1.0) - 1.0
    if (is_frozen | is_dead | job.has_raised).any():
        # Such a rank explains why others wait; some reports of another one may have been lost.
        patience *= 2
    patience_s = thresholds.silent_s * np.minimum(patience, MAX_PATIENCE)
    is_quiet = has_report & (job.report_age_s > patience_s[job.node_of])
    was_frozen = now_s - job.last_frozen_s <= thresholds.silent_s
    is_silent = is_alive & ~is_frozen & is_quiet & node_is_settled[job.node_of] & ~was_frozen
    # The interpreter's end may take seconds: memory is given back, threads are joined.
    is_silent &= ~(job.is_ending & (job.report_age_s <= thresholds.farewell_s))
    is_early = ~has_report | job.is_outside
    is_starting = ~is_dead & ~is_lost & ~is_frozen & ~is_silent & is_early
    is_recent = has_report & (now_s - job.report_at_s <= thresholds.silent_s + thresholds.confirm_s)
    return RankFacts(
        is_alive=is_alive,
        is_frozen=is_frozen,
        is_silent=is_silent,
        is_dead=is_dead,
        is_lost=is_lost,
        is_starting=is_starting,
        is_fresh=is_alive & is_recent,
    )


def is_in_known_phase(job: JobModel, facts: RankFacts) -> Flags:
    """Return which live ranks start, save a checkpoint or evaluate."""
    return facts.is_alive & _IS_KNOWN_PHASE[job.phase]
