"""One job under watch: the reports of some nodes folded into a model, their logs, and a connection for actions.

The same `Session` serves the screen and the printed lines. It decides nothing: `app.model`, `app.diagnosis` and
`app.view.view` do.

`DrainRounds` decides, without a clock, how many of a fleet's reports are folded in at a time.
"""

from __future__ import annotations

import asyncio
import math
import time
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from agent.wire.codec import REPORTS_SOCKET
from app.diagnosis.causes import Severity
from app.diagnosis.diagnoser import Diagnoser
from app.errors import AppError, IncompatibleAgentError, UsageError
from app.fleet.commands import StreamChannel
from app.fleet.fleet import Fleet, fetch_stacks, trouble_text
from app.fleet.start_progress import Milestones
from app.fleet.telemetry import Telemetry
from app.model.cluster import Cluster
from app.model.job_choice import JobChoice
from app.recording.backfill import PastWish, replayed
from app.recording.bundle import masked
from app.recording.events import EventKind, EventLog
from app.recording.evidence import Answers, ask_agents, put_together
from app.recording.history import History
from app.recording.history_replay import replay_history
from app.recording.incident_recorder import IncidentRecorder
from app.recording.recorder import Past, Recorder
from app.recording.records import NoticeRecord, ReportRecord, StacksRecord
from app.session.audit import AuditedAction
from app.session.control import JobControl
from app.session.log_pulls import AttemptMarks, Begun, LogPulls
from app.session.options import SessionOptions
from app.session.reconnector import Trouble
from app.stacks.groups import NodeStacks
from app.view.actions import fault_text
from app.view.nodes import reading_text
from app.view.view import View

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from agent.wire.jobs import JobSpec, JobStatus
    from agent.wire.logs import LogLine
    from app.fleet.start_progress import StartProgress
    from app.model.new_nodes import NewNodes
    from app.model.unreachable_reason import UnreachableReason
    from app.recording.bundle import Evidence
    from app.recording.events import Event
    from app.recording.records import Record
    from app.session.control import JobStarter
    from app.session.hosts import HostDoctor, HostQuestions
    from app.view.nodes import Progress
    from ddpcore.wire import Fault

MAX_DRAINED = 128
"""Reports folded in together; more are cheaper each, but delay a key press. So many of eight ranks take 2 ms, and 16 at
a time half as much again each (`bench_fold`)."""
ROUND_S = 0.8
"""Seconds of a round: a fleet too large for one take is read in several, and only the latest report of each node in a
round is folded in. Even with half a second between two reports of a node this is below `app.model.cluster.GAP_S`, from
which on a node counts as having been away."""


class DrainRounds:
    """Counts the takes that are due, however long the turns take in which they are made."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._last_s: float | None = None
        self._num_due = 0.0
        """Nodes whose reports are due and not yet taken."""

    @property
    def is_one_take(self) -> bool:
        """Whether one take reads the reports of all nodes."""
        return self._num_nodes <= MAX_DRAINED

    def num_takes(self, now_s: float) -> int:
        """Return how many takes are due in this turn, at least one; call it once a turn."""
        since_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._num_due = min(self._num_due + self._num_nodes * since_s / ROUND_S, self._num_nodes)
        num_takes = max(1, int(self._num_due / MAX_DRAINED))
        self._num_due = max(0.0, self._num_due - num_takes * MAX_DRAINED)
        return num_takes


DEFAULT_OPTIONS = SessionOptions()
UNHEARD_S = 3.0
"""Seconds of fifteen reports of a node: even on a busy machine a live agent sends one in that time."""
TAKE_PERIOD_S = 0.05
"""Seconds between two takes: half of the least time between two reports of a node, so that none is missed."""


class Session:
    """A view of some agents, given the directories with their sockets; it implements `app.tui.source.ConsoleSource`.

    `view` and `drain_logs` are called from the frame loop and never block; the coroutines run on the same loop.
    """

    player = None
    starter: JobStarter | None = None
    questions: HostQuestions | None = None
    doctor: HostDoctor | None = None
    must_succeed = False
    """Whether this session has started the job that it shows: then a stop from elsewhere is no success."""
    cut_off = ""
    """What is missing where no host of the shown job answers; empty while one does, or once the job has ended."""
    reads_loss = False
    """Whether patterns find the loss in what the shown job prints."""

    def __init__(
        self,
        directories: Mapping[str, Path],
        options: SessionOptions = DEFAULT_OPTIONS,
        addresses: Callable[[str], Sequence[str]] = lambda _node: (),
        relayed_nodes: Container[str] = (),
    ) -> None:
        """Set up for agents by their directories.

        Args:
            directories: Directory with the sockets of each node.
            options: Options of the session.
            addresses: For `JobControl`.
            relayed_nodes: Nodes whose reports are given to `take_frame`; those of the others come by their sockets.

        Raises:
            SessionError: The recording's file cannot be written.
        """
        self.is_read_only = options.is_read_only
        self.started_at_s = time.monotonic()
        self._notices: list[str] = []
        """Sentences that nobody has drained yet."""
        self._num_added = 0
        """Number of them that are among the events already."""
        self._directories = dict(directories)
        self._cluster = Cluster(list(self._directories))
        self._thresholds = options.thresholds
        self.choice = JobChoice()
        """Chooses the job to show."""
        self.attach_command = "rankdeck attach JOB"
        """Command that shows another job; JOB stands for its id."""
        self._diagnoser = Diagnoser(self._thresholds)
        received = {
            node: path / REPORTS_SOCKET for node, path in self._directories.items() if node not in relayed_nodes
        }
        self.telemetry = Telemetry(received)
        """Receives the reports of the nodes."""
        self._fleet = Fleet({})
        self._milestones = Milestones()
        self.audit = options.audit
        """Log of the actions taken from here."""
        self.job_control = JobControl(
            lambda: self._fleet, list(self._directories), self.log_done, self.audit, addresses
        )
        """Acts on the jobs; usable after `connect`."""
        self.events = EventLog(wall_offset_s)
        """Events since this session began."""
        self.history = History()
        """Past figures of its jobs."""
        self._listening_since_s = math.inf
        self._unread: dict[str, None] | None = None
        """Nodes whose past is still to be read; None while none is read."""
        self._past = Past()
        self._evidence_dir = options.evidence_dir
        self._incident_recorder: IncidentRecorder | None = None
        self._recorder = Recorder(options.recording, list(self._directories), masked) if options.recording else None
        self._rounds = DrainRounds(len(self._directories))
        self._marks = AttemptMarks()
        self._logs = LogPulls(list(self._directories), lambda: self._fleet, self._record)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def control(self) -> JobControl | None:
        """What acts on the job; None in a read-only session."""
        return None if self.is_read_only else self.job_control

    @property
    def how_to_begin(self) -> str:
        """Command that starts a job while there is none; empty where one starts by itself."""
        return ""

    @property
    def fleet(self) -> Fleet:
        """Command channels to the nodes; usable after `connect`."""
        return self._fleet

    @property
    def starting(self) -> Progress | None:
        """Progress of a start that is under way; None while none is."""
        starting = self._fleet.starting
        return None if starting is None or starting.is_over else starting

    @property
    def stall_s(self) -> float:
        """Seconds from which a wait is a stall."""
        return self._thresholds.stall_s

    async def connect(self) -> None:
        """Begin to listen to the agents."""
        channels = {node: StreamChannel(node, path) for node, path in self._directories.items()}
        self._fleet = Fleet(channels, self._take_progress)
        self._incident_recorder = IncidentRecorder(self, self._evidence_dir) if self._evidence_dir else None
        self.telemetry.start()
        self._listening_since_s = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._follow_reports(), name="rankdeck-reports"),
            asyncio.create_task(self._logs.follow(), name="rankdeck-logs"),
        ]

    def backfill(self) -> None:
        """Extend events and history back in time, in the background; after `connect`."""
        self._tasks.append(asyncio.create_task(self.reach_back(), name="rankdeck-backfill"))

    async def reach_back(self, until_s: float | None = None, *, is_of_all: bool = False) -> None:
        """Extend events and history back to what the nodes remember; after `connect`. See `backfill.replayed`."""
        nodes = list(self._directories)
        self._unread = unread = dict.fromkeys(nodes)
        wish = PastWish(lambda: self.choice.wanted or self.choice.shown, is_of_all, until_s)
        try:
            before = await replayed(self._fleet, nodes, self._thresholds, wish, unread.pop)
        finally:
            self._unread = None
        if before is not None:
            self.history.reach_back(before.history, before.at_s)
            own, began_s = self.events, self._listening_since_s
            self.events = own.reaching_back(before.events, began_s, before.events_beside)

    @property
    def reading(self) -> str:
        """Line about what is being read of the time before this session; empty when nothing is."""
        return "" if self._unread is None else reading_text(list(self._directories), list(self._unread))

    async def replay_history(self, pause_s: float = 0.0) -> None:
        """Base verdicts on what the nodes remember, as if this session had watched then; after `connect`.

        Args:
            pause_s: Seconds left to other tasks between two pieces of work.
        """
        nodes = list(self._directories)
        self._cluster.awaits_past = True
        try:
            replayed = await replay_history(self._fleet, nodes, self._thresholds, pause_s=pause_s)
        finally:
            self._cluster.awaits_past = False
        if replayed is not None:
            before, self._cluster, self._diagnoser = self._cluster, replayed.cluster, replayed.diagnoser
            self._cluster.go_on_from(before)

    def replay_history_soon(self, pause_s: float) -> None:
        """Run `replay_history` in the background; after `connect`."""
        self._tasks.append(asyncio.create_task(self.replay_history(pause_s), name="rankdeck-history-replay"))

    async def start_job(self, specs: Mapping[str, JobSpec]) -> None:
        """Start a job over its nodes, all or nothing; see `Fleet.start`."""
        await self._fleet.start(specs)
        first = next(iter(specs.values()))
        self._cluster.begin(first.job_id, first.attempt)

    def view(self) -> View:
        """Take arrived reports and return the rows of now; a large fleet's other reports are taken in the background.

        Raises:
            IncompatibleAgentError: An agent speaks another version.
        """
        if self._rounds.is_one_take:
            self._take_reports()
        for node, detail in self.telemetry.incompatible.items():
            raise IncompatibleAgentError(node, detail)
        now_s = time.monotonic()
        diagnosis = self._diagnoser.observe(self._cluster, now_s)
        shown = self.choice.choose(self._cluster, now_s)
        if self._incident_recorder is not None:
            live = [(job.job_id, job.attempt) for job in self._cluster.jobs.values() if not job.is_ended()]
            found = diagnosis.jobs.get(shown)
            self._incident_recorder.observe([] if found is None else found.verdicts, live, now_s)
        view = View(self._cluster, diagnosis, now_s, shown, self.attach_command)
        self.events.observe(view)
        self.history.observe(view)
        return view

    def assignments(self) -> list[dict[str, JobStatus]]:
        """Return the status of each job on each node that has reported its latest attempt."""
        names = self._cluster.node_names
        return [
            {names[node]: assignment.status for node, assignment in job.assignments.items()}
            for job in self._cluster.jobs.values()
        ]

    def put_unreachable(self, node: str, unreachable_reason: UnreachableReason | None) -> None:
        """Note why a node is unreachable at present; None when it is not."""
        self._cluster.put_unreachable(node, unreachable_reason)

    def put_new_nodes(self, new_nodes: NewNodes) -> None:
        """Note the new nodes that this session has not taken in."""
        self._cluster.put_new_nodes(new_nodes)

    def is_unheard(self, node: str) -> bool:
        """Return whether a node has sent no report for `UNHEARD_S`."""
        last_report_s = self.telemetry.last_report_s.get(node, -math.inf)
        return time.monotonic() > max(last_report_s, self._listening_since_s) + UNHEARD_S

    def take_frame(self, node: str, frame: bytes, age_s: float = 0.0) -> None:
        """Take a report that came through a relay; may be called from any thread."""
        self.telemetry.take(node, frame, age_s)

    def own_pids(self) -> dict[str, set[int]]:
        """Return the pids of the ranks that each node's agent reports; may be called from any thread."""
        reports = {name: node.report for name, node in list(self._cluster.nodes.items())}
        return {
            name: set() if report is None else {worker.pid for worker in report.workers}
            for name, report in reports.items()
        }

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        """Return the (node, line) pairs that have come since the last call, merged by time, with `AttemptMarks`."""
        lines = self._logs.drain_dated()
        attempts = list(self.later_attempts())
        if attempts and (lines or self._logs.has_all):
            lines = self._marks.marked(lines, attempts)
        return [(node, line) for _, node, line in lines]

    def later_attempts(self) -> Iterator[Begun]:
        """Yield the latest attempt of each job that an agent has launched more than once, for `AttemptMarks`."""
        for job in self._cluster.jobs.values():
            if job.attempt and job.assignments and not job.together.is_adopted and math.isfinite(job.started_s):
                node, at = self._cluster.node_names[min(job.assignments)], _time_text(job.started_s + wall_offset_s())
                yield Begun(job.job_id, job.attempt, node, job.started_s, at, not job.is_ended())

    def drain_dated_logs(self) -> list[tuple[float, str, LogLine]]:
        """Return the lines that have come since the last call, with the moment at which each was read."""
        return self._logs.drain_dated()

    def drain_notices(self) -> list[str]:
        """Return sentences since the last call: about actions, starts, and what was kept."""
        recorders = (self._incident_recorder, self._recorder, self.audit)
        self._notices += [notice for source in recorders if source is not None for notice in source.drain_notices()]
        self._add_notices()
        notices, self._notices, self._num_added = self._notices, [], 0
        return notices

    def _take_progress(self, progress: StartProgress) -> None:
        """Take the progress of a start: its sentences stand before those of what follows."""
        self._milestones.take(progress)
        self._notices += self._milestones.drain_notices()

    def _add_notices(self) -> None:
        """Add the sentences to the events that are not among them yet."""
        for notice in self._notices[self._num_added :]:
            kind = (EventKind.NODE, Severity.WARNING) if isinstance(notice, Trouble) else (EventKind.DONE, Severity.OK)
            self.events.add_event(notice, time.monotonic(), *kind)
        self._num_added = len(self._notices)

    def time_text(self, event: Event) -> str:
        """Return when an event was by this machine's wall clock, as that stood when the event was added."""
        return _time_text(event.at_s + event.wall_offset_s)

    @property
    def evidence_notices(self) -> list[str]:
        """Sentences about evidence that was kept, one for each file."""
        return self._incident_recorder.sentences if self._incident_recorder is not None else []

    async def inject(self, fault: Fault) -> str:
        """Inject a fault into a rank of the shown job; return a sentence about it.

        Raises:
            UsageError: No node has that rank, or the session is read-only.
            AgentRefusedError: The agent refused.
        """
        if self.is_read_only:
            raise UsageError("this console only watches", "open it without --read-only")
        view = self.view()
        job, rows = view.job(), view.ranks([fault.rank])
        if job is None or not rows or not rows[0].node:
            raise UsageError(f"no node has rank {fault.rank}", "rankdeck ranks lists them")
        return await self.inject_on(rows[0].node, job.job_id, fault)

    async def inject_on(self, node: str, job_id: str, fault: Fault) -> str:
        """Inject a fault into a rank of a node's job; as `inject`.

        Raises:
            AgentRefusedError: The agent refused.
        """
        return await self.audit.kept(AuditedAction("fault", (node,), job_id), self._inject(node, job_id, fault))

    async def _inject(self, node: str, job_id: str, fault: Fault) -> str:
        await self._fleet.inject(node, job_id, fault)
        done = f"rank {fault.rank} on {node} {fault_text(fault)}"
        self.log_done(done)
        return done

    def log_done(self, done: str) -> None:
        """Add a sentence about a user's action to the events, and to the evidence of what follows."""
        self._add_notices()
        now_s = time.monotonic()
        self._keep(NoticeRecord(now_s, f"on request: {done}"))
        self.events.add_event(f"on request: {done}", now_s)

    async def stacks(self, *, is_native: bool, job_id: str = "") -> list[NodeStacks]:
        """Return the stacks of the ranks of a job, or of the shown one; see `fetch_stacks`.

        Raises:
            UsageError: No job is shown.
        """
        job = self.view().job()
        wanted = job_id or (job.job_id if job else "")
        if not wanted:
            raise UsageError("there is no job yet", "rankdeck run starts one")
        answers = await fetch_stacks(self._directories, wanted, is_native=is_native)
        for record in _stack_records(answers):
            self._record(record)
        return answers

    async def take_stacks(self, job_id: str, into: Answers) -> None:
        """Fetch the stacks of a job into `into`, or why there are none."""
        try:
            answers = await fetch_stacks(self._directories, job_id, is_native=False)
        except AppError as error:
            answers = [NodeStacks(node, None, trouble_text(error)) for node in self._directories]
        into.stacks = _stack_records(answers)

    async def ask_agents(self, job_id: str, into: Answers) -> None:
        """Ask the agents for what they remember; see `app.recording.evidence.ask_agents`."""
        await ask_agents(self._fleet, list(self._directories), self._past.records(), job_id, into)

    async def evidence(self, job_id: str, why: str, answers: Answers) -> Evidence:
        """Return the evidence collected so far; see `put_together`."""
        received = [*self._past.records(), *self._logs.printed.records()]
        evidence = await put_together(list(self._directories), self.view(), received, answers, (job_id, why))
        return msgspec.structs.replace(evidence, thresholds=self._thresholds)

    @property
    def has_all_lines(self) -> bool:
        """True when every line that the nodes have reported is here."""
        return self._logs.has_all

    async def close(self) -> None:
        """Stop listening and close the channels; the agents keep running."""
        if self._incident_recorder is not None:
            await self._incident_recorder.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.close()
        await asyncio.to_thread(self.telemetry.close)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    def _keep(self, record: Record) -> None:
        self._past.add(record)
        self._record(record)

    def _record(self, record: Record) -> None:
        if self._recorder is not None:
            self._recorder.add(record)

    async def _follow_reports(self) -> None:
        while True:
            num_takes = self._rounds.num_takes(time.monotonic())
            for _ in range(num_takes if self.telemetry.num_waiting else 0):
                self._take_reports()
                await asyncio.sleep(0)
            await asyncio.sleep(TAKE_PERIOD_S)

    def _take_reports(self) -> None:
        """Fold in some of the reports that have arrived."""
        received = self.telemetry.drain(MAX_DRAINED)
        self._cluster.apply_all([(node, report, received_at_s) for node, report, received_at_s, _ in received])
        for node, report, received_at_s, frame in received:
            self._logs.want(node, report.epoch, report.log_seq)
            self._keep(ReportRecord(received_at_s, node, frame))


def wall_offset_s() -> float:
    """Return the seconds from the monotonic to the wall clock: more after a sleep, others once the clock is set."""
    return time.time() - time.monotonic()  # noqa: TID251 - for users


def _time_text(wall_s: float) -> str:
    """Return a moment of the wall clock, with its day instead of its seconds where that is over a day ago."""
    at = datetime.fromtimestamp(wall_s)  # noqa: DTZ006 - for users, in their own time zone
    return f"{at:%H:%M:%S}" if time.time() - wall_s < 86_400.0 else f"{at:%m-%d %H:%M}"  # noqa: TID251 - the same


def _stack_records(answers: Sequence[NodeStacks]) -> list[StacksRecord]:
    now_s = time.monotonic()
    return [StacksRecord(now_s, answer.node, answer.stacks, answer.trouble[:4096]) for answer in answers]
