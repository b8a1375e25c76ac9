"""Replays a recording: folds its reports into the model again, up to any moment of it.

Pure: the caller has the reports, decides how far to play, and knows when each was received and when to diagnose.

`Playback` diagnoses the model as often as a live console does, so that a verdict that needs time comes at the same
moment. `ReplayModel` is that model. `timeline` lists what a recording's verdicts were, and when.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.digest import decode_frame
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import SETTLED_S, Cluster, ended_s
from app.model.job_choice import JobChoice
from app.recording.events import EventLog
from app.recording.history import History
from app.recording.records import LinesRecord, NoticeRecord, Recording, ReportRecord, StacksRecord
from app.stacks.groups import NodeStacks
from app.text import LINE_LIMIT, clean, clean_name
from app.view.verdict_text import sentence
from app.view.view import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.wire.digest import NodeFrame
    from agent.wire.logs import LogLine
    from app.diagnosis.diagnoser import Diagnosis
    from app.diagnosis.rank_facts import Thresholds
    from app.diagnosis.verdicts import Verdict
    from app.recording.events import Event
    from app.recording.records import Record

LOOK_S = 0.2
"""Seconds between two diagnoses of the model, as in a console."""
MAX_FIRST_SEQ = 60
"""Highest number of a report of an agent that has just begun: of 12 s; reports that are kept are up to 10 s apart."""
BEGIN_S = 1_000.0
"""The model's clock at the recording's begin: not zero, which would be before all ages."""


class Playback:
    """A recording at one moment of it.

    Attributes:
        at_s: Seconds since the recording's begin.
        length_s: Length of the recording.
        num_malformed: Reports in it that could not be decoded.
    """

    def __init__(self, recording: Recording, thresholds: Thresholds) -> None:
        self.length_s = recording.length_s
        self._recording = recording
        self._thresholds = thresholds
        self.begin()

    def begin(self) -> None:
        """Go back to the begin."""
        self.at_s = 0.0
        self.num_malformed = 0
        self._num_taken = 0
        opening = self._recording.opening
        self._replay = ReplayModel(opening.nodes, self._thresholds, job_id=opening.job_id)
        self._lines: list[tuple[str, LogLine]] = []
        self._notices: list[str] = []
        self._replay.look(BEGIN_S)

    @property
    def events(self) -> EventLog:
        """Events up to this moment, in the model's clock."""
        return self._replay.events

    @property
    def history(self) -> History:
        """Figures up to this moment, in the model's clock."""
        return self._replay.history

    @property
    def is_over(self) -> bool:
        """Whether the end is reached."""
        return self.at_s >= self.length_s

    def step(self, to_s: float) -> None:
        """Go on by one diagnosis of the model, at most to `to_s` and to the end."""
        self.at_s = max(self.at_s, min(self.at_s + LOOK_S, to_s, self.length_s))
        records = self._recording.records
        while self._num_taken < len(records) and records[self._num_taken].at_s <= self.at_s:
            self._take(records[self._num_taken])
            self._num_taken += 1
        self._replay.look(BEGIN_S + self.at_s)

    def view(self) -> View:
        """Return the rows of this moment."""
        return self._replay.view()

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts of this moment, the worst first."""
        return self._replay.verdicts

    def nearest_stacks(self) -> tuple[list[NodeStacks], float]:
        """Return the latest stacks up to this moment, else the first ones after it, and when they were taken."""
        taken = [record for record in self._recording.records if isinstance(record, StacksRecord)]
        past = [record.at_s for record in taken if record.at_s <= self.at_s]
        at_s = past[-1] if past else taken[0].at_s if taken else 0.0
        return [answer_of(record) for record in taken if record.at_s == at_s], at_s

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        """Return the (node, line) pairs since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def drain_notices(self) -> list[str]:
        """Return the sentences since the last call."""
        notices, self._notices = self._notices, []
        return notices

    def _take(self, record: Record) -> None:
        match record:
            case ReportRecord(node=node):
                try:
                    frame = decode_frame(record.frame)
                except MalformedMessageError:
                    self.num_malformed += 1
                    return
                self._replay.receive(node, frame, BEGIN_S + record.at_s)
            case LinesRecord():
                self._lines += ((record.node, line) for line in record.lines)
            case StacksRecord():
                pass  # shown when they are asked for
            case NoticeRecord():
                self._notices.append(clean(record.text, LINE_LIMIT))
                self.events.add_event(record.text, BEGIN_S + record.at_s)


def answer_of(record: StacksRecord) -> NodeStacks:
    """Return stacks as a node's answer; a recording's text is hostile until here."""
    return NodeStacks(record.node, record.stacks, clean(record.trouble, LINE_LIMIT))


class Moment(NamedTuple):
    """A verdict or a notice.

    Attributes:
        at_s: Seconds since the recording's begin.
        text: Text of the verdict, as it first was; or a notice.
    """

    at_s: float
    text: str


def timeline(playback: Playback) -> Iterator[Moment]:
    """Play to the end; yield each new verdict and notice."""
    known: set[tuple[object, ...]] = set()
    while True:
        yield from (Moment(playback.at_s, text) for text in playback.drain_notices())
        current = {verdict_key(verdict): verdict for verdict in playback.verdicts}
        for key, verdict in current.items():
            if key not in known:
                yield Moment(playback.at_s, sentence(verdict))
        known = set(current)  # what has ended may come again
        if playback.is_over:
            return
        playback.step(playback.length_s)


def verdict_key(verdict: Verdict) -> tuple[object, ...]:
    """Return the key that distinguishes a verdict from others."""
    return verdict.job, verdict.attempt, verdict.cause, verdict.culprits


def from_its_job_on(recording: Recording) -> Recording:
    """Return a recording from the first report of its job on: before that the nodes may have run other jobs.

    Each node's last report before that comes first. Nothing is left out of a recording of no certain job.
    """
    job_id, records = recording.opening.job_id, recording.records
    first = next((place for place, record in enumerate(records) if job_id and _is_of_job(record, job_id)), 0)
    if not first:
        return recording
    begin_s, before = records[first].at_s, records[:first]
    last_reports = {record.node: record for record in before if isinstance(record, ReportRecord)}
    kept = [msgspec.structs.replace(report, at_s=0.0) for report in last_reports.values()]
    rest = [msgspec.structs.replace(record, at_s=record.at_s - begin_s) for record in records[first:]]
    return Recording(recording.opening, [*kept, *rest], recording.is_cut)


def _is_of_job(record: Record, job_id: str) -> bool:
    """Return whether a record is a report with a job."""
    if not isinstance(record, ReportRecord):
        return False
    try:
        return any(status.job_id == job_id for status in decode_frame(record.frame).jobs)
    except MalformedMessageError:
        return False


def clock_text(recording: Recording, at_s: float) -> str:
    """Return when a moment of a recording was, in UTC: `03:12:34Z`; empty where the recording has no time."""
    try:
        made_at = datetime.fromisoformat(recording.opening.made_at)
        behind_s = at_s if recording.opening.is_live else at_s - recording.length_s
        return f"{made_at + timedelta(seconds=behind_s):%H:%M:%S}Z"
    except (ValueError, OverflowError):
        return ""


class ReplayModel:
    """A model at the moment of its last diagnosis.

    Attributes:
        at_s: That moment.
        diagnosis: The diagnosis then.
        events: Events until then.
        history: Figures until then.
        cluster: The model.
        diagnoser: Source of the diagnosis.
    """

    diagnosis: Diagnosis

    def __init__(
        self,
        nodes: Sequence[str],
        thresholds: Thresholds,
        history: History | None = None,
        job_id: str = "",
        *,
        is_excerpt: bool = False,
        is_of_all: bool = False,
    ) -> None:
        """Start before the first diagnosis.

        Args:
            nodes: Their names.
            thresholds: When a verdict is due.
            history: Figures are added to it; None begins one.
            job_id: The job to show; empty is whichever is to be shown.
            is_excerpt: Whether the reports begin in the middle of what the nodes' agents have sent.
            is_of_all: Whether the events of the other jobs are kept, too.
        """
        self.at_s = 0.0
        self.events = EventLog(comes_up=self._has_begun if is_excerpt else None)
        self.history = history or History()
        self.cluster = Cluster(nodes)
        self.diagnoser = Diagnoser(thresholds)
        self._choice = JobChoice(job_id)
        self._beside: dict[str, EventLog] | None = {} if is_of_all else None
        self._received: dict[str, tuple[str, NodeFrame, float]] = {}
        """Reports still to be folded in, by node: together it is cheaper."""

    def receive(self, node: str, frame: NodeFrame, at_s: float) -> None:
        """Take a report; those of a node come in order."""
        if node in self._received:
            self._fold()
        self._received[node] = (node, frame, at_s)

    def look(self, now_s: float) -> None:
        """Diagnose the model, and update events and history."""
        self._fold()
        self.at_s = now_s
        self.diagnosis = self.diagnoser.observe(self.cluster, now_s)
        view = self.view()
        self.events.observe(view)
        self.history.observe(view)
        if self._beside is not None:
            self._look_beside(self._beside, view.job_id)

    def _look_beside(self, logs: dict[str, EventLog], shown: str) -> None:
        """Update the events of the other jobs, of each until a while after its end."""
        for job_id, job in self.cluster.jobs.items():
            is_long_over = job.is_ended() and self.at_s - ended_s(job) > SETTLED_S
            if job_id != shown and not is_long_over:
                view = View(self.cluster, self.diagnosis, self.at_s, job_id, attach="")
                logs.setdefault(job_id, EventLog()).observe(view)

    @property
    def events_beside(self) -> list[Event]:
        """The events of the jobs that are not shown, in no order."""
        logs = {} if self._beside is None else self._beside
        return [
            event for job_id, log in logs.items() for event in log.latest_first() if event.job_id == clean_name(job_id)
        ]

    def _has_begun(self, node: str) -> bool:
        """Return whether a node's agent has begun just now, by the number of its first report."""
        report = self.cluster.nodes[node].report
        return report is not None and report.report_seq <= MAX_FIRST_SEQ

    def view(self) -> View:
        """Return the rows of that moment."""
        return View(self.cluster, self.diagnosis, self.at_s, self._choice.choose(self.cluster, self.at_s), attach="")

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts on the job that is shown, the worst first."""
        found = self.diagnosis.jobs.get(self._choice.choose(self.cluster, self.at_s))
        return [] if found is None else found.verdicts

    def _fold(self) -> None:
        self.cluster.apply_all(list(self._received.values()))
        self._received.clear()
