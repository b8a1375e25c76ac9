"""What happened, and when: verdicts that came and went, jobs, nodes, checkpoints, and actions.

Fed with every view of the model, live or of a recording; keeps the latest events.
"""

from __future__ import annotations

import math
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.jobs import ENDED_STATES, JobState
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.rank_facts import CONNECTING, DOWN, LOST, NODE_STATES, STALE
from app.diagnosis.verdicts import ENDS
from app.recording.note_watch import NoteWatch
from app.text import LINE_LIMIT, attempt_text, clean, nodes_text, ranks_text, seconds_text
from app.view.summary import end_text

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from app.view.rows import JobRow, VerdictRow
    from app.view.view import View

MAX_EVENTS = 10_000
MAX_CHANGES_KEPT = 64
MAX_NODES_NAMED = 4
"""Limit of nodes named when several change alike at one moment."""

SEAM_S = 1.0
"""Seconds by which two consoles may differ on the time of an event; within them, the same event is not repeated."""
NEWS_S = 3.0
"""Seconds within which a job's state is new: it stands behind the action that brought it about."""
CAUSE_GONE_S = 600.0
"""Seconds without a cause after which it is an event again."""
REPEAT_AFTER_S = 60.0
"""Seconds after which a verdict from before has been found again, also one that needs a longer watch."""

_REMEMBERED = "from before this moment only the start or end of a job's latest attempt is known"
_NOT_REACHED = "not reached"
_JUDGED_WITHOUT = ": verdicts of that time are judged, and events dated, by the other nodes alone"
_NODE_SEVERITY = {"up": Severity.OK, "stale": Severity.WARNING, "lost": Severity.CRITICAL}
_JOB_SEVERITY = {
    "succeeded": Severity.OK,
    "running": Severity.OK,
    "restarting": Severity.WARNING,
    "failed": Severity.CRITICAL,
    "lost": Severity.CRITICAL,
}


NO_LONGER = {
    Cause.STRAGGLER: "no longer holding the others up",
    Cause.FROZEN: "no longer frozen",
    Cause.SILENT: "no longer silent",
    Cause.NODE_LOST: "the node is back",
    Cause.NOT_JOINED: "no longer missing from the rendezvous",
    Cause.MISMATCH: "no longer in calls that do not match",
    Cause.TRANSPORT: "the collective that did not complete is over",
    Cause.STANDSTILL: "the ranks move again",
    Cause.NOT_EXITING: "no longer kept from ending",
    Cause.INPUT_BOUND: "no longer bound by the input",
    Cause.MEMORY_GROWTH: "memory no longer grows towards its limit",
    Cause.CHECKPOINTING: "no longer saving a checkpoint",
    Cause.EVALUATING: "no longer evaluating",
}
"""Text for the end of a verdict; one about a rank that is gone goes with its attempt, and is not undone by that."""
ENDINGS = frozenset({JobState.STOPPING, *ENDED_STATES})


class EventKind(StrEnum):
    """Subject of an event."""

    VERDICT = "verdict"
    OVER = "over"
    """A verdict has gone."""
    CAUSE = "cause"
    """What makes a rank slow has begun."""
    JOB = "job"
    NODE = "node"
    CHECKPOINT = "checkpoint"
    GPU = "gpu"
    NOTE = "note"
    """A limit of what can be seen of the ranks, or a setting that slows them down."""
    DONE = "done"
    """An action of a user or of the session."""
    BESIDE = "beside"
    """How a job stands that is not shown."""


_OF_JOB = frozenset({EventKind.VERDICT, EventKind.OVER, EventKind.CAUSE, EventKind.JOB, EventKind.CHECKPOINT})


class Event(msgspec.Struct, frozen=True):
    """Something that happened."""

    at_s: float
    """Time by the clock of the session that saw it."""
    kind: EventKind
    severity: Severity
    text: str
    """A clean sentence."""
    ranks: tuple[int, ...] = ()
    """Ranks that it is about."""
    wall_offset_s: float = 0.0
    """Seconds from that clock to the wall clock when the event was added."""
    job_id: str = ""
    """The job that it is about, clean; empty of nodes, GPUs and actions."""


class EventLog:
    """The events of one session, or of a recording up to one moment.

    Attributes:
        num_dropped: Number of older events that are no longer kept.
        num_late: Number of events that were added in front of others, whose places changed.
        begun_s: Time of the first view; None before it.
        now_s: Time of the last view.
        seam: Note of how far these events reach back; None where they begin with this log.
    """

    def __init__(self, wall_offset: Callable[[], float] = float, comes_up: Callable[[str], bool] | None = None) -> None:
        """Start before the first view.

        Args:
            wall_offset: Seconds from the clock of the views to the wall clock, 0 where there is none.
            comes_up: Whether a node with its first report here has come up then, or was up before; None: then.
        """
        self._wall_offset, self._comes_up = wall_offset, comes_up
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.num_dropped = self.num_late = 0
        self.begun_s: float | None = None
        self.now_s = 0.0
        self.seam: Event | None = None
        self._standing: dict[tuple[Hashable, ...], tuple[VerdictRow, float]] = {}
        """Verdicts that are shown, and since when."""
        self._silent_s: dict[Hashable, float] = {}
        """Seconds for which the nodes of a lost one had not reported when it came."""
        self._completed: set[Hashable] = set()
        """Those of them whose event names what was known only later: the usual line, or who waits."""
        self._caused_s: dict[Hashable, float] = {}
        """Causes of slowness, and when each was last seen."""
        self._node_codes: NDArray[np.int8] | None = None
        self._node_names: Sequence[str] = ()
        self._node_changes: dict[Event, tuple[str, str, list[str]]] = {}
        """States before and after, and names of the nodes, of the first events about nodes: the past comes soon."""
        self._not_reached: set[str] = set()
        """Nodes that have not reported and cannot be reached."""
        self._broken_gpus: set[str] = set()
        self._job: JobRow | None = None
        self._notes, self._besides = NoteWatch(), NoteWatch()
        self._reported_before_s: dict[tuple[Hashable, ...], float] = {}
        """Verdicts that stood before, and since when: they may need a while to be found again."""
        self._reached_back_s = 0.0

    def still(self) -> EventLog:
        """Return a copy of the events until now, to which nothing will be added."""
        copied = EventLog()
        copied._events, copied.num_dropped, copied.now_s = self._events.copy(), self.num_dropped, self.now_s
        return copied

    def reaching_back(self, past: EventLog, began_s: float, beside: Sequence[Event] = ()) -> EventLog:
        """Return these events behind those of before, to be continued.

        Args:
            past: What happened up to its last view, which is later than `began_s`: up to there it prevails.
            began_s: When this log began.
            beside: Events of other jobs, in any order, that are wanted among them.
        """
        whole, offset_s = EventLog(self._wall_offset), self._wall_offset()
        own = list(self._news_since(past))
        if len(past):
            missing = f", without {nodes_text(past.unreported)}{_JUDGED_WITHOUT}" if past.unreported else ""
            reach_s = began_s - (began_s if past.begun_s is None else past.begun_s)
            sentence = f"attached; above are the nodes' last {seconds_text(reach_s)}{missing}"
            whole.seam = Event(began_s, EventKind.NOTE, Severity.QUIET, sentence, wall_offset_s=offset_s)
            own.append(whole.seam)
        before = [msgspec.structs.replace(event, wall_offset_s=offset_s) for event in (*past._events, *beside)]
        if past.begun_s is not None and any(event.at_s < past.begun_s for event in before):
            own.append(Event(past.begun_s, EventKind.NOTE, Severity.QUIET, _REMEMBERED, wall_offset_s=offset_s))
        events = sorted((*before, *own), key=lambda event: event.at_s)
        whole._events.extend(events)
        whole.num_dropped = self.num_dropped + past.num_dropped + len(events) - len(whole)
        whole.now_s = whole._reached_back_s = self.now_s
        whole.begun_s = self.begun_s if past.begun_s is None else past.begun_s
        whole._node_codes, whole._broken_gpus, whole._job = self._node_codes, self._broken_gpus, self._job
        whole._node_names, whole._not_reached = self._node_names, self._not_reached
        whole._notes, whole._besides = self._notes, self._besides
        whole._caused_s = past._caused_s | self._caused_s
        whole._silent_s = self._silent_s | past._silent_s
        since_s = {key: since_s for key, (_, since_s) in past._standing.items()}
        whole._standing = {key: (verdict, since_s.pop(key, at_s)) for key, (verdict, at_s) in self._standing.items()}
        whole._reported_before_s = since_s
        return whole

    @property
    def unreported(self) -> list[str]:
        """Nodes that had reported nothing by the last view."""
        codes = self._node_codes
        return [] if codes is None else [self._node_names[at] for at in np.flatnonzero(codes == CONNECTING).tolist()]

    def _news_since(self, past: EventLog) -> Iterator[Event]:
        """Yield the events that are not among those of before; of a node that could not be asked for its past, all."""
        unasked = past.unreported
        for event in self._events:
            before, state, names = self._node_changes.get(event, ("", "", []))
            if self._is_news(event, past):
                yield event
            elif left := [name for name in names if name in unasked]:
                yield msgspec.structs.replace(event, text=clean(_node_text(before, state, left), LINE_LIMIT))

    def _is_news(self, event: Event, past: EventLog) -> bool:
        """Return whether an event is not among those of before, nor only the state at the start of this log."""
        if event.kind is EventKind.DONE:
            return True
        for key, (verdict, at_s) in self._standing.items():
            if (event.kind, event.at_s, event.ranks) == (EventKind.VERDICT, at_s, tuple(verdict.culprits)):
                # On a job that had ended before, the past knows more than a look at its end alone.
                is_past = self.begun_s is not None and at_s < self.begun_s
                known = {one[:2] for one in past._standing} if is_past else set()
                return key not in past._standing and key[:2] not in known
        if event.kind is EventKind.CAUSE:
            # It is dated by its beginning, which is before it could be known.
            return all((event.kind, event.text) != (other.kind, other.text) for other in past._events)
        if event.at_s <= past.now_s - SEAM_S:
            return False
        return not any(_is_same(event, other) for other in past._events)

    def __len__(self) -> int:
        return len(self._events)

    def __getitem__(self, index: int) -> Event:
        """Return an event; the oldest that is kept is 0."""
        return self._events[index]

    def latest_first(self) -> Iterator[Event]:
        return reversed(self._events)

    def add_event(
        self,
        text: str,
        now_s: float,
        kind: EventKind = EventKind.DONE,
        severity: Severity = Severity.OK,
        ranks: Sequence[int] = (),
        job_id: str = "",
    ) -> Event:
        """Add an action, as a sentence, or another event; return it."""
        if len(self._events) == MAX_EVENTS:
            self.num_dropped += 1
        is_late = bool(self._events) and now_s < self._events[-1].at_s
        whose = self._job.job_id if self._job is not None and kind in _OF_JOB else job_id
        event = Event(now_s, kind, severity, clean(text, LINE_LIMIT), tuple(ranks), self._wall_offset(), whose)
        self._events.append(event)
        if is_late:
            self.num_late += 1
            self._events = deque(sorted(self._events, key=lambda event: event.at_s), maxlen=MAX_EVENTS)
        return event

    def observe(self, view: View) -> None:
        """Compare a view with the last one, and keep what is new."""
        self.begun_s = view.now_s if self.begun_s is None else self.begun_s
        self.now_s = view.now_s
        self._watch_nodes(view)
        job, ended_s = view.job(), 0.0
        if job is not None:
            if self._job is None and job.state in ENDED_STATES:
                ended_s = _past_s(view)  # so are the verdicts on it, which are new here
            self._watch_job(job, view)
            beside = view.beside()
            for sentence in self._besides.news({sentence: sentence for sentence in beside}, view.now_s):
                other = beside[sentence]
                self.add_event(sentence, self.now_s, EventKind.BESIDE, other.severity, job_id=other.job_id)
            for note in self._notes.news(view.remarks(), view.now_s):
                self.add_event(note, self.now_s, EventKind.NOTE, Severity.QUIET, job_id=job.job_id)
        self._watch_gpus(view.broken_gpus())
        # The verdicts of another job are not over: they are no longer shown.
        shown = "" if job is None else job.job_id
        self._standing = {key: one for key, one in self._standing.items() if one[0].job == shown}
        self._completed &= self._standing.keys()
        self._watch_verdicts(view, self.now_s - ended_s)

    def _watch_nodes(self, view: View) -> None:
        known, self._node_codes = self._node_codes, view.node_codes
        if known is None:
            known = np.full(len(self._node_codes), CONNECTING, np.int8)
        changed: dict[tuple[str, str], list[str]] = {}
        self._node_names = names = view.node_names
        for index in np.flatnonzero(known != self._node_codes).tolist():
            both = (NODE_STATES[known[index]], NODE_STATES[self._node_codes[index]])
            if _is_not_reached(*both):
                self._not_reached.add(names[index])
            elif names[index] in self._not_reached:
                self._not_reached.remove(names[index])
                both = (_NOT_REACHED, both[1])
            was_up = both == ("connecting", "up") and self._comes_up is not None and not self._comes_up(names[index])
            if not was_up:
                changed.setdefault(both, []).append(names[index])
        for (before, state), names in changed.items():
            text = _node_text(before, state, names)
            severity = Severity.WARNING if _is_not_reached(before, state) else _NODE_SEVERITY.get(state, Severity.QUIET)
            event = self.add_event(text, self.now_s, EventKind.NODE, severity)
            if len(self._node_changes) < MAX_CHANGES_KEPT:
                self._node_changes[event] = (before, state, names)

    def _watch_job(self, job: JobRow, view: View) -> None:
        """Compare a job with what was known of it; one that is new here has been in its state for a while."""
        before, self._job = self._job, job
        known = before if before and (before.job_id, before.attempt) == (job.job_id, job.attempt) else None
        past_s = _past_s(view) if known is None else 0.0
        at_s = self.now_s - past_s
        if before is not None and before.job_id != job.job_id:
            text = f"from here on events are of job {job.job_id}, no longer of job {before.job_id}"
            self.add_event(text, self.now_s, EventKind.NOTE, Severity.QUIET)
        # A node that a stop has not reached yet, and that reports again, starts nothing.
        is_left = known is not None and known.state in {"stopping", "stopped"} and job.state == "running"
        if (known is None or known.state != job.state) and not is_left:
            attempt = f", {attempt_text(job.attempt)}" if job.attempt else ""
            # An agent that has launched a job knows when, but not when the ranks had come to their process group.
            is_launch = past_s > 0 and job.state == "running" and not job.is_adopted
            state = "started" if is_launch else end_text(job.state, job.exit_code)
            severity = _JOB_SEVERITY.get(job.state, Severity.QUIET)
            is_unexplained = job.state == "failed" and job.root_cause is None and not view.verdicts()
            why = f": {job.detail}" if is_unexplained and job.detail else ""
            why = f" ({job.detail})" if job.state == "stopped" and job.detail else why
            self.add_event(f"job {job.job_id}{attempt}: {state}{why}", at_s, EventKind.JOB, severity)
        cause = job.root_cause
        # A verdict that is as new, and has the same sentence, is an event itself; so is one on an end without words.
        is_verdict = cause is not None and any(
            (verdict.text == cause.text and _key(verdict) not in self._standing)
            or (verdict.cause in ENDS and cause.rank in verdict.culprits and not cause.exception)
            for verdict in view.verdicts()
        )
        if cause is not None and (known is None or known.root_cause is None) and not is_verdict:
            ranks = () if cause.rank is None else (cause.rank,)
            caused_s = at_s if job.state in ENDINGS else self.now_s
            self.add_event(f"root cause: {cause.text}", caused_s, EventKind.JOB, Severity.CRITICAL, ranks)
        # What a program finds on the disk when it begins is not an event.
        step = job.checkpoint_step
        if step is not None and known is not None and known.checkpoint_step != step:
            self.add_event(f"the checkpoint of step {step:,} is kept", self.now_s, EventKind.CHECKPOINT)

    def _watch_gpus(self, broken: Sequence[str]) -> None:
        for text in broken:
            if text not in self._broken_gpus:
                self.add_event(text, self.now_s, EventKind.GPU, Severity.CRITICAL)
        self._broken_gpus = set(broken)

    def _watch_verdicts(self, view: View, at_s: float) -> None:
        verdicts = view.verdicts()
        # A checkpoint or an evaluation that takes its usual time is no event.
        current = {_key(verdict): verdict for verdict in verdicts if verdict.severity is not Severity.QUIET}
        over = [key for key in self._standing if key not in current]
        blamed = {
            (verdict.job, verdict.cause, rank) for verdict in current.values() for rank in verdict.culprits if over
        }
        for key in over:
            verdict, since_s = self._standing.pop(key)
            stood_s = self.now_s - since_s + self._silent_s.pop(key, 0.0)
            is_on = any((verdict.job, verdict.cause, rank) in blamed for rank in verdict.culprits)
            # Who is to blame may have become known since.
            is_on |= not verdict.culprits and any(key[:3] == other[:3] for other in current)
            is_seen = not self._is_unseen(verdict)
            is_hidden = verdict.cause is Cause.STRAGGLER and (self._is_done() or _is_hung(verdict.job, verdicts))
            if verdict.cause in NO_LONGER and not is_on and not (is_seen and is_hidden) and self._may_recover(verdict):
                how = Severity.OK if is_seen else Severity.QUIET
                self.add_event(
                    _over_text(verdict, stood_s, is_seen=is_seen), self.now_s, EventKind.OVER, how, verdict.culprits
                )
        if self.now_s > self._reached_back_s + REPEAT_AFTER_S:
            self._reported_before_s.clear()
        for key, verdict in current.items():
            if (before_s := self._reported_before_s.pop(key, None)) is not None:
                self._standing[key] = (verdict, before_s)
            elif key not in self._standing:
                self._standing[key] = (verdict, at_s)
                if verdict.cause is Cause.NODE_LOST:
                    self._silent_s[key] = _silent_s(verdict, view)
                self.add_event(verdict.text, at_s, EventKind.VERDICT, verdict.severity, verdict.culprits)
            # A slow rank is named before its usual line is known, a frozen one before others wait for it.
            is_placed = verdict.cause is Cause.STRAGGLER and any(map(view.usual_place, verdict.culprits[:1]))
            has_victims = verdict.cause is Cause.FROZEN and bool(verdict.waiting)
            if key not in self._completed and (is_placed or has_victims):
                self._completed.add(key)
                self._put_text(verdict, self._standing[key][1])
        self._watch_causes(verdicts)

    def _put_text(self, verdict: VerdictRow, since_s: float) -> None:
        """Let the event of a verdict that stands since then have the text of now, which names more."""
        own = EventKind.VERDICT, since_s, tuple(verdict.culprits)
        for place in range(len(self._events) - 1, -1, -1):
            event = self._events[place]
            if (event.kind, event.at_s, event.ranks) == own:
                self._events[place] = msgspec.structs.replace(event, text=clean(verdict.text, LINE_LIMIT))
                return

    def _is_unseen(self, verdict: VerdictRow) -> bool:
        """Return whether a node of a verdict's culprits no longer reports: what became of them is not known."""
        if self._node_codes is None or verdict.cause is Cause.NODE_LOST:
            return False
        late = {self._node_names[at] for at in np.flatnonzero(self._node_codes >= STALE).tolist()}
        return not late.isdisjoint(verdict.node.split(", "))

    def _is_done(self) -> bool:
        """Return whether the job's rate of steps is not known any more, as once its ranks have ended."""
        return self._job is not None and self._job.step is not None and self._job.steps_per_s is None

    def _may_recover(self, verdict: VerdictRow) -> bool:
        """Return whether the end of a verdict is a recovery: the end of its attempt is none."""
        if verdict.cause is Cause.NOT_EXITING or self._job is None:
            return True
        is_same = (self._job.job_id, self._job.attempt) == (verdict.job, verdict.attempt)
        return is_same and self._job.state not in ENDINGS

    def _watch_causes(self, verdicts: Sequence[VerdictRow]) -> None:
        """Add each cause of slowness once, at the time at which it began."""
        for verdict in verdicts:
            for because in verdict.because:
                subject, _, _ = because.event.partition(";")
                key = (verdict.job, verdict.attempt, because.signal, subject)
                is_news = self.now_s - self._caused_s.get(key, -math.inf) > CAUSE_GONE_S
                self._caused_s[key] = self.now_s
                if is_news:
                    at_s = self.now_s - (because.since_s or 0.0)
                    self.add_event(because.event, at_s, EventKind.CAUSE, Severity.WARNING, because.ranks)


def _past_s(view: View) -> float:
    """Return for how long the job, which is new here, has been in its state; 0 if that is news."""
    return state_s if (state_s := view.job_state_s) > NEWS_S else 0.0


def _is_not_reached(before: str, state: str) -> bool:
    """Return whether a node has not reported since this log began: when it was lost, if it was, is not known."""
    return (before, state) == (NODE_STATES[CONNECTING], NODE_STATES[LOST])


def _node_text(before: str, state: str, names: Sequence[str]) -> str:
    """Return `nodes h1, h2: up, now stale`, `node h1: agent stopped`, or `node h1: not reached`."""
    more = f" and {len(names) - MAX_NODES_NAMED} more" if len(names) > MAX_NODES_NAMED else ""
    who = f"node{'' if len(names) == 1 else 's'} {', '.join(names[:MAX_NODES_NAMED])}{more}"
    if state == NODE_STATES[DOWN]:
        return f"{who}: agent stopped"
    if _is_not_reached(before, state):
        return f"{who}: {_NOT_REACHED}"
    return f"{who}: {state}" if before == NODE_STATES[CONNECTING] else f"{who}: {before}, now {state}"


def _is_same(event: Event, other: Event) -> bool:
    """Return whether two consoles have reported the same event; the text of a verdict has figures in it."""
    has_same_text = event.kind in {EventKind.VERDICT, EventKind.OVER} or event.text == other.text
    is_alike = (event.kind, event.ranks) == (other.kind, other.ranks) and has_same_text
    return is_alike and abs(event.at_s - other.at_s) <= SEAM_S


def _key(verdict: VerdictRow) -> tuple[Hashable, ...]:
    return verdict.job, verdict.attempt, verdict.cause, tuple(verdict.culprits)


def _silent_s(verdict: VerdictRow, view: View) -> float:
    """Return for how long a verdict's nodes had not reported when it came; 0 where that is not known."""
    names = set(verdict.node.split(", "))
    return max((row.age_s or 0.0 for row in view.nodes() if row.node in names), default=0.0)


def _is_hung(job_id: str, verdicts: Sequence[VerdictRow]) -> bool:
    """Return whether a job stands: how fast its ranks are does not show then."""
    return any(verdict.job == job_id and verdict.severity is Severity.CRITICAL for verdict in verdicts)


def _over_text(verdict: VerdictRow, stood_s: float, *, is_seen: bool) -> str:
    """Return `rank 2: no longer frozen, after 4.2 s`, or `no longer seen` of ranks whose node does not report."""
    who = f"{ranks_text(verdict.culprits)}: " if verdict.culprits else ""
    return f"{who}{NO_LONGER[verdict.cause] if is_seen else 'no longer seen'}, after {seconds_text(stood_s)}"
