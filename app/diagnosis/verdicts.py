"""A verdict: which ranks hold the others up, why, and what is known of it; and the rules that make one from evidence.

A rule names only ranks that no other rank explains: a waiting rank is never a culprit, except where two waits
contradict each other.
"""

from __future__ import annotations

import re
from operator import attrgetter
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agent.wire.reports import ProcessState, outside_place_of, place_of
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.memory import is_out_of_memory, last_growth, near_growths
from app.diagnosis.rank_facts import is_in_known_phase
from app.diagnosis.waits import that_go_on
from app.model.job_model import PHASE_CODE
from app.model.xids import facts_key
from ddpcore.wire import FIRST_GROUP, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.wire.reports import ExitReport
    from app.diagnosis.because.findings import Because, Comparison
    from app.diagnosis.known_phases import KnownPhases, RankPlaces
    from app.diagnosis.memory import Growth
    from app.diagnosis.rank_facts import AllNodes, Flags, RankFacts, Ranks, Thresholds
    from app.diagnosis.rank_pace import Habit
    from app.diagnosis.wait_fractions import EarlierCost
    from app.diagnosis.waits import Knot, Wait
    from app.model.cluster import Cluster
    from app.model.job_model import Death, JobModel
    from app.model.unreachable_reason import UnreachableReason
    from ddpcore.wire import ChildWait, ExitWait, PeerCall, Place

ENDS = frozenset({Cause.EXITED, Cause.OOM})
"""Causes that are a bad end of the culprits themselves."""
AT_EXIT = tuple(
    f"/{file}.py"
    for file in ("multiprocessing/util", "threading", "concurrent/futures/thread", "concurrent/futures/process")
)
"""Files whose code is the last of a Python process, below none of the program's own."""
LEARNED_CAUSES = {Phase.CHECKPOINT: Cause.CHECKPOINTING, Phase.EVAL: Cause.EVALUATING}
MAX_NODES_NAMED = 8
"""Limit of nodes up to which culprits of one cause get a verdict per node; beyond it, one together."""


class Side(msgspec.Struct, frozen=True):
    """Ranks that made the same call, where another side made a different one."""

    ranks: tuple[int, ...]
    group: str
    seq: int
    op: str
    label: str
    num_elements: int
    place: Place | None
    peer_call: PeerCall | None = None
    """The call, where it is a send or a receive between two ranks."""
    dtype: str = ""
    root: int | None = None
    """Source or destination that they have passed, where it is known."""
    reduce_op: str = ""
    phase: Phase | None = None
    """Phase in which they made that call."""


class MeetingSide(msgspec.Struct, frozen=True):
    """Ranks that have come to the same store of `init_process_group` in the same way."""

    ranks: tuple[int, ...]
    address: str
    port: int
    number: int | None
    """Rank number under which they have come; None where each has come as itself."""
    world_size: int


class CallCounts(msgspec.Struct, frozen=True):
    """How many calls the smallest side of a mismatch has made, compared with the largest, step by step."""

    equal_step: int | None
    """Last step by whose end both had made equally many; None where none is known."""
    difference: int
    """Difference by the last step that both have finished: negative where the smallest side has made fewer."""


class Aftermath(msgspec.Struct, frozen=True):
    """How a hang ended: ranks that died because they waited, or because their launcher was ended."""

    ranks: tuple[int, ...]
    is_timeout: bool = False
    """Whether they timed out. Otherwise they lost a connection, or a signal ended them."""
    timeout_s: float | None = None
    """Timeout in seconds, where their error names it."""
    signal: int | None = None
    """Signal that ended them."""
    code: int | None = None
    """Exit code of those that gave up themselves."""
    is_with_launcher: bool = False
    """Whether their launcher was ended from outside."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A culprit and the evidence."""

    cause: Cause
    culprits: tuple[int, ...]
    is_everyone: bool = False
    """Whether all ranks of the job, several, ended alike: none is to blame more than another."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait for the culprits, directly or through others."""
    waiting_here: tuple[int, ...] = ()
    """Ranks of `waiting` that wait in the call that is named, where others wait in other calls; else empty."""
    nodes: tuple[str, ...] = ()
    """Nodes of the culprits, sorted."""
    job: str
    attempt: int
    group: str = ""
    seq: int | None = None
    called_seq: int | None = None
    """Last collective of the group that one of `waiting` had called."""
    op: str = ""
    label: str = ""
    waited_s: float = 0.0
    """Longest wait of `waiting`."""
    for_s: float | None = None
    """How long the cause has held; None when it is an event."""
    severity: Severity = Severity.CRITICAL
    place: Place | None = None
    """Where the first culprit stands, or was last seen; where it is seen most often if `is_usual_place`."""
    is_usual_place: bool = False
    is_seen_outside: bool = False
    """Whether the place has been seen from outside, since the rank has not reported."""
    seen_before_s: float | None = None
    """Seconds from the last sample of the first culprit to its end: place, step and calls are of that sample."""
    phase: Phase | None = None
    """Phase of the first culprit."""
    step: int | None = None
    exit: ExitReport | None = None
    held_bytes: int | None = None
    """For OOM: the most that a culprit held of the host's memory."""
    growth: Growth | None = None
    """Growth of memory, for MEMORY_GROWTH; for OOM, and EXITED by SIGKILL, the growth before the end."""
    lost_connection: tuple[int, ...] = ()
    """For EXITED and FEWER_CALLS: ranks that lost their connection to a culprit."""
    waiting_place: Place | None = None
    """For FEWER_CALLS: where the first that waits, or lost its connection, stands or stood."""
    has_closed: bool = False
    """For FEWER_CALLS: whether the culprit has closed its connections and keeps running."""
    sides: tuple[Side, ...] = ()
    """Sides of a MISMATCH; places of a STANDSTILL, the most common one first."""
    ended: tuple[int, ...] = ()
    """For STANDSTILL: ranks that have ended before, with code 0."""
    counts: CallCounts | None = None
    """Calls of the smallest and the largest side, for MISMATCH where steps are known."""
    aborted: tuple[int, ...] = ()
    """For MISMATCH: ranks that gloo ended because more came than they expected."""
    is_shifted: bool = False
    """For MISMATCH with `aborted`: every side's call is one that all make, so that one has left out or doubled one."""
    meetings: tuple[MeetingSide, ...] = ()
    """For MISMATCH and TRANSPORT in `init_process_group`: the stores that ranks go to, and under which numbers."""
    store_port_owner: str = ""
    """For TRANSPORT in `init_process_group`: the listener at the store's port, where that is on one of their nodes."""
    num_hosts: int = 0
    """For TRANSPORT: machines that take part, where all members are in the same call; else 0."""
    num_members: int = 0
    """For TRANSPORT in a collective: ranks of its group."""
    away: tuple[str, float, float] | None = None
    """For TRANSPORT: a node that did not report during the wait, for how long, and how long it is back, in s."""
    is_root_unknown: bool = False
    """For TRANSPORT: whether its members may have passed different sources or destinations, which are not recorded."""
    unreachable_reason: UnreachableReason | None = None
    """For NODE_LOST: why the nodes cannot be reached, where one reason is known for all."""
    is_back: bool = False
    """For NODE_LOST that stands as the reason of a failure: whether the nodes report again."""
    others_step: bool = False
    """For NODE_LOST: whether the other ranks make steps, which need those of the nodes."""
    unreported: tuple[str, ...] | None = None
    """For STRAGGLER whose culprits no node has, although the others have called with them: nodes that must."""
    cost_frac: float | None = None
    """For STRAGGLER: its cost as a fraction of the step time. For INPUT_BOUND: the fraction of time spent on input."""
    earlier_cost: EarlierCost | None = None
    """For STRAGGLER: its cost some time ago, where that was notably more or less."""
    habit: Habit | None = None
    """For STRAGGLER: the phase in which it spends more time than the others."""
    usual_s: float | None = None
    """For CHECKPOINTING and EVALUATING: the longest that one has taken before."""
    wait_frac: float | None = None
    """For STRAGGLER: the fraction of time it waits itself."""
    last_frac: float | None = None
    """For STRAGGLER: the fraction of the collectives to which they come last, where that is known."""
    is_in_turns: bool = False
    """For STRAGGLER: whether they are slow at different times."""
    is_at_times: bool = False
    """For STRAGGLER: whether they are slow in some steps only."""
    slow_factor: float = 1.0
    because: tuple[Because, ...] = ()
    """For STRAGGLER: causes that its signals show, the best first."""
    comparison: Comparison | None = None
    """For STRAGGLER: how much was compared to find them; None where nothing was, or not often enough yet."""
    is_behind_work: bool = False
    """For STRAGGLER: whether the culprits' GPUs are in work before the call. For STANDSTILL: whether all ranks' are."""
    is_blocked: bool = False
    """Whether the first culprit's process is in uninterruptible sleep."""
    cpu_cores: float | None = None
    """Cores that it keeps busy, of all culprits of a STANDSTILL the most; None where that is not known."""
    child: ChildWait | None = None
    """Process that the first culprit waits for."""
    child_place: Place | None = None
    """Line at which that process stands, as seen from outside."""
    exit_wait: ExitWait | None = None
    """What keeps the process from ending, for NOT_EXITING."""
    is_born: bool = True
    """For NOT_JOINED: whether its process runs."""
    aftermath: Aftermath | None = None
    """How the hang ended; None while it lasts, and for causes that are an end themselves."""


def is_at_exit(place: Place | None) -> bool:
    """Return whether a place is where Python ends: it waits for threads and runs exit handlers."""
    return place is not None and place.file.endswith(AT_EXIT)


class Evidence(msgspec.Struct, frozen=True, eq=False):
    """Input of the rules: one job at one moment."""

    job: JobModel
    cluster: Cluster
    facts: RankFacts
    nodes: AllNodes
    waits: list[Wait]
    knots: list[Knot]
    thresholds: Thresholds
    now_s: float

    def place_of(self, rank: int) -> Place | None:
        """Return where a fatal signal ended a rank, or where it was last seen: by itself, or else from outside.

        None of a rank at its end that was last seen where Python ends: that is no line of its program.
        """
        worker = self.job.worker(rank)
        if worker is None:
            return None
        place = place_of(worker)
        is_at_end = worker.exit is not None or (worker.report is not None and worker.report.is_ending)
        return None if is_at_end and is_at_exit(place) else place

    def end_place_of(self, rank: int) -> Place | None:
        """Return where a fatal signal ended a rank; None where that is not known."""
        worker = self.job.worker(rank)
        return None if worker is None or worker.exit is None else worker.exit.place

    def outside_place_of(self, rank: int) -> Place | None:
        """Return where a rank that does not report has been seen from outside."""
        worker = self.job.worker(rank)
        return None if worker is None or self.end_place_of(rank) else outside_place_of(worker)

    def child_of(self, rank: int) -> dict[str, Any]:
        """Return the facts on the process that a rank waits for, as fields of a verdict."""
        worker = self.job.worker(rank)
        wait = worker.report.child_wait if worker is not None and worker.report is not None else None
        if worker is None or wait is None:
            return {}
        is_seen = worker.outside is not None and worker.outside.pid == wait.pid
        return {"child": wait, "child_place": worker.outside.place if is_seen and worker.outside else None}

    def are_behind_work(self, group: str, ranks: Ranks) -> bool:
        """Return whether ranks have called what is waited for in a group, and their GPUs have not begun it."""
        table = self.job.groups.get(group)
        if table is None:
            return False
        slots, is_member = table.slots(ranks)
        return bool(is_member.all()) and bool((table.is_behind_work & table.is_waiting)[slots].all())

    def held_up_by(self, culprits: Ranks) -> tuple[list[int], Wait | None, float]:
        """Return the ranks whose waits lead to the culprits, the wait that explains it best, and the longest, in s."""
        is_culprit = np.zeros(self.job.world_size, np.bool_)
        is_culprit[culprits] = True
        knots = [knot for knot in self.knots if is_culprit[knot.roots].any()]
        if not knots:
            return [], None, 0.0
        is_victim = np.zeros(self.job.world_size, np.bool_)
        for knot in knots:
            is_victim[knot.wait.waiting] = True
        waits = [knot.wait for knot in knots]
        # Roots may belong to another wait of the chain: the one that is named is the culprits' own.
        own = [wait for wait in waits if self._holds(wait.group, culprits)]
        direct = [wait for wait in own if is_culprit[wait.missing].any() or is_culprit[wait.stuck].any()]
        shown = max(direct or own, key=lambda wait: wait.waited_s, default=None)
        longest_s = max(wait.waited_s for wait in waits)
        return np.flatnonzero(is_victim & ~is_culprit).tolist(), shown, longest_s

    def _holds(self, group: str, ranks: Ranks) -> bool:
        """Return whether ranks are members of a group, as far as known: a group without collectives is not known."""
        table = self.job.groups.get(group)
        return table is None or bool(np.isin(ranks, table.members).all())


def name(evidence: Evidence, cause: Cause, culprits: Iterable[int], **known: object) -> Verdict:
    """Return a verdict on some ranks with the facts of the evidence; `known` overrides them."""
    ranks = np.array(sorted(culprits), np.int64)
    waiting, wait, longest_s = evidence.held_up_by(ranks)
    first = int(ranks[0])
    worker = evidence.job.worker(first)
    report = None if worker is None else worker.report
    facts: dict[str, object] = {
        "culprits": tuple(ranks.tolist()),
        "waiting": tuple(waiting),
        "waited_s": longest_s,
        "nodes": nodes_of(evidence, ranks),
        "place": evidence.place_of(first),
        "is_seen_outside": evidence.outside_place_of(first) is not None,
        "seen_before_s": evidence.job.seen_before_s(first),
    }
    if worker is not None and worker.exit is None:
        facts |= {"is_blocked": worker.process is ProcessState.BLOCKED, "cpu_cores": evidence.job.busy_cores(ranks[:1])}
    if report is not None:
        facts |= {"phase": report.phase, "step": report.step, "slow_factor": report.slow_factor}
        facts |= evidence.child_of(first)
    if wait is not None:
        facts |= {"group": wait.group, "seq": wait.seq, "op": wait.op, "label": wait.label, "waited_s": wait.waited_s}
        facts["called_seq"] = _last_call(evidence, wait, waiting)
        here = tuple(np.intersect1d(wait.waiting, waiting).tolist())
        facts["waiting_here"] = here if len(here) < len(waiting) else ()
    facts |= known
    job = evidence.job
    return Verdict(cause=cause, job=job.job_id, attempt=job.attempt, **facts)  # type: ignore[arg-type]


def _last_call(evidence: Evidence, wait: Wait, waiting: Sequence[int]) -> int | None:
    """Return the last call that one of all that are held up has made in a wait's group: some may be further than it."""
    table = evidence.job.groups.get(wait.group)
    if table is None or wait.called_seq is None:
        return wait.called_seq
    return int(table.enqueued[np.isin(table.members, waiting)].max(initial=wait.called_seq))


def nodes_of(evidence: Evidence, ranks: Ranks) -> tuple[str, ...]:
    """Return the names of the nodes of some ranks."""
    indices = np.unique(evidence.job.node_of[ranks]).tolist()
    return tuple(evidence.cluster.node_names[index] for index in indices if index >= 0)


def by_node(evidence: Evidence, ranks: Ranks) -> list[Ranks]:
    """Split ranks by node, while the nodes are few."""
    owners = evidence.job.node_of[ranks]
    nodes = np.unique(owners)
    if len(nodes) > MAX_NODES_NAMED:
        return [ranks]
    return [ranks[owners == node] for node in nodes]


def exited(evidence: Evidence, culprits: Sequence[Death], lost_connection: Sequence[int]) -> list[Verdict]:
    """Name ranks that died first, those of one node and one end together; all ranks of a job with one end at once.

    Errors that differ in numbers alone are one end: many name their rank, or a file of its own.
    """
    alike: dict[tuple[object, ...], list[Death]] = {}
    owners = evidence.job.node_of[[death.rank for death in culprits]].tolist()
    ends = {
        (death.exit.signal, death.exit.code, _unnumbered(death.exit.error), _unnumbered(death.exit.last_line))
        for death in culprits
    }
    are_few = len(set(owners)) <= MAX_NODES_NAMED and not (len(culprits) == evidence.job.world_size and len(ends) == 1)
    for death, owner in zip(culprits, owners, strict=True):
        end = death.exit
        node = owner if are_few else -1
        key = (node, end.signal, end.code, _unnumbered(end.error), bool(end.oom_kills), *facts_key(end))
        alike.setdefault(key, []).append(death)
    guilty = {death.rank for death in culprits}
    victims = tuple(rank for rank in sorted(lost_connection) if rank not in guilty)
    return [_ended(evidence, deaths, victims) for deaths in alike.values()]


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+", "", text)


def _ended(evidence: Evidence, deaths: Sequence[Death], victims: tuple[int, ...]) -> Verdict:
    ranks, end = [death.rank for death in deaths], min(deaths, key=attrgetter("rank")).exit
    is_everyone = len(ranks) == evidence.job.world_size > 1
    is_memory = is_out_of_memory(end)
    growth = last_growth(evidence.job, ranks, end) if is_memory or end.signal == SIGKILL else None
    if not is_memory:
        facts = {"exit": end, "lost_connection": victims, "growth": growth, "is_everyone": is_everyone}
        return name(evidence, Cause.EXITED, ranks, **facts)
    held_bytes = evidence.job.peak_rss_bytes[ranks]
    known = held_bytes[~np.isnan(held_bytes)]
    most = int(known.max()) if len(known) else None
    return name(evidence, Cause.OOM, ranks, exit=end, lost_connection=victims, held_bytes=most, growth=growth)


def memory_growth(evidence: Evidence) -> list[Verdict]:
    """Name ranks whose memory comes to a limit within minutes."""
    known = {"severity": Severity.WARNING, "waiting": ()}
    return [
        name(evidence, Cause.MEMORY_GROWTH, growth.ranks, growth=growth, for_s=growth.report.for_s, **known)
        for growth in near_growths(evidence.job, evidence.facts.is_alive)
    ]


def stalled(evidence: Evidence, excused_s: Ranks, known: KnownPhases, places: RankPlaces) -> list[Verdict]:
    """Name live ranks that have kept others waiting for longer than a stall, and could have come all that time.

    One that moves on through its program does something that the others do not, and may come yet.
    """
    facts, thresholds = evidence.facts, evidence.thresholds
    is_late = (facts.is_fresh | facts.is_starting) & (evidence.now_s - excused_s > thresholds.stall_s)
    is_late &= ~facts.is_frozen & ~facts.is_silent & ~facts.is_dead
    is_late &= ~known.have_just_left(evidence.job, evidence.now_s - thresholds.stall_s)
    # One that is about to end has waited itself, and given up, or is reported by its end.
    is_late &= ~evidence.job.is_ending
    # A GPU that waits in a send or a receive is held up by a peer that no report names.
    is_late &= ~evidence.job.has_open_transfers
    is_late &= ~that_go_on(evidence.job, evidence.waits, evidence.now_s - thresholds.stall_s)
    is_known = is_in_known_phase(evidence.job, facts) | facts.is_starting
    roots = roots_of(evidence, is_late, thresholds.stall_s)
    if len(roots) > 1 and len(roots) > sum(len(wait.waiting) for wait in evidence.waits):
        # Most stand elsewhere, as in NCCL's sends and receives, which are not seen: the few may be the odd ones.
        return []
    verdicts = []
    for some in by_node(evidence, roots):
        _, wait, _ = evidence.held_up_by(some)
        if shown := _in_learned_phase(evidence, some, known):
            verdicts.append(shown)
            continue
        # A rank that goes first in a first-block is meant to keep the others waiting, and may stand at a long line.
        is_meant = wait is not None and wait.group.startswith(FIRST_GROUP)
        mild, grave = (Severity.QUIET, Severity.WARNING) if is_meant else (Severity.WARNING, Severity.CRITICAL)
        stood_s = max(places.stood_s(rank, evidence.now_s) for rank in some.tolist())
        is_mild = stood_s < thresholds.stall_s / (1 if is_meant else 2) or bool(is_known[some].all())
        is_elsewhere = bool(evidence.job.is_elsewhere[some].all())
        known_more = {
            "severity": mild if is_mild else grave,
            "is_behind_work": wait is not None and evidence.are_behind_work(wait.group, some),
            "unreported": evidence.cluster.unreported_of(evidence.job) if is_elsewhere else None,
        }
        verdicts.append(name(evidence, Cause.STRAGGLER, some.tolist(), **known_more))
    return verdicts


def _in_learned_phase(evidence: Evidence, some: Ranks, known: KnownPhases) -> Verdict | None:
    """Return the verdict on ranks that all save a checkpoint, or all evaluate; None for others."""
    job = evidence.job
    for phase, cause in LEARNED_CAUSES.items():
        if (job.phase[some] == PHASE_CODE[phase]).all():
            for_s = max(0.0, evidence.now_s - float(job.phase_since_s[some].min()))
            severity = Severity.QUIET if known.is_usual(phase, for_s) else Severity.WARNING
            return name(evidence, cause, some.tolist(), severity=severity, for_s=for_s, usual_s=known.usual_s(phase))
    return None


def input_place(evidence: Evidence) -> Place | None:
    """Return the line at which a rank waits for its input now, None while none does."""
    in_data = np.flatnonzero(evidence.facts.is_fresh & (evidence.job.phase == PHASE_CODE[Phase.DATA]))
    return evidence.place_of(int(in_data[0])) if len(in_data) else None


def input_bound(evidence: Evidence, frac: float, place: Place | None) -> Verdict:
    """Return the verdict that the input decides how fast the job is."""
    job = evidence.job
    return Verdict(
        cause=Cause.INPUT_BOUND,
        culprits=(),
        job=job.job_id,
        attempt=job.attempt,
        severity=Severity.WARNING,
        cost_frac=frac,
        place=place,
        step=job.lowest_step(),
    )


def hosts_of(evidence: Evidence, ranks: Ranks) -> set[str]:
    """Return the machines of some ranks: two nodes may be on one."""
    nodes = (evidence.cluster.nodes[name] for name in nodes_of(evidence, ranks))
    return {node.report.hostname if node.report is not None else node.name for node in nodes}


def roots_of(evidence: Evidence, is_eligible: Flags, longer_than_s: float) -> Ranks:
    """Return the eligible ranks for which others wait longer than a time, themselves and not through a third.

    A rank for whose victim others have waited long has not kept any rank waiting that long.
    """
    found = [knot.ends[is_eligible[knot.ends]] for knot in evidence.knots if knot.wait.waited_s > longer_than_s]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
