"""A session on a job of some hosts: started or found there, watched from here, and left running."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from agent.wire.commands import RefusalReason, ShowJob, Shown
from agent.wire.machine import GpuWatchState
from app.errors import AgentRefusedError, AgentUnreachableError, AppError, UsageError
from app.model.job_choice import NEVER, JobChoice
from app.model.new_nodes import NewNodeWatch
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.recording.backfill import PAUSE_S
from app.session.audit import AuditedAction
from app.session.control import AssignmentGuard, JobStarter
from app.session.hosts import Connections, HostDoctor, HostQuestions
from app.session.master_addr import master_addrs
from app.session.outside import OutsideSession
from app.session.remote_job import (
    JobHost,
    check_room,
    has_loss_pattern,
    in_order,
    job_specs,
    of_latest_attempt,
    running_jobs,
    started_text,
    unknown_job_text,
)
from app.session.session import DEFAULT_OPTIONS, UNHEARD_S, Session
from app.ssh.config import THIS_MACHINE
from app.text import NAME_LIMIT, clean, clean_name
from app.threads import in_daemon_thread
from app.view.actions import NOT_AGAIN
from app.view.nodes import new_nodes_notice
from app.view.summary import is_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from agent.wire.jobs import JobSpec, JobState, JobStatus
    from agent.wire.reports import NodeReport
    from app.session.hosts import Hosts
    from app.session.options import SessionOptions
    from app.session.remote_job import RunRequest
    from app.ssh.questions import QuestionDesk
    from app.view.view import View


GPU_PATIENCE_S = 3.0
"""Seconds for the first look at the GPUs of a node whose agent has just started: NVML takes a second or two."""
POLL_S = 0.1
GUARD_PERIOD_S = 1.0
END_PATIENCE_S = 120.0
"""Seconds for a job to end, beyond its times for a checkpoint and a grace period."""
USUAL_END_S = 180.0
"""Seconds for a checkpoint and a grace period of a job whose own times are unknown."""


class RemoteSession(Session):
    """A session over agents on some hosts. Closing it closes their links; agents and jobs keep running."""

    when_idle: Callable[[], str] | None = None
    """Called in a thread where no job is under way at the start; returns which jobs of other launchers run there, or
    nothing. Set it before `start`."""
    outside: OutsideSession | None = None
    """Jobs that rankdeck did not start, for the console."""
    _offering: asyncio.Task[None] | None = None

    def __init__(
        self,
        hosts: Hosts,
        request: RunRequest | None = None,
        options: SessionOptions = DEFAULT_OPTIONS,
        job_id: str = "",
    ) -> None:
        """Watch a job of some hosts.

        Args:
            hosts: The hosts of the session.
            request: Job that `start` starts; without one there is a job already, or none.
            options: Options of the session.
            job_id: Existing job to show; empty lets `JobChoice` choose.

        Raises:
            SessionError: See `Session`.
        """
        self._hosts = hosts
        self._request = request
        self.must_succeed = request is not None
        directories = {link.host: link.directory for link in hosts.links}
        relayed = {link.host for link in hosts.links if link.is_relayed}
        super().__init__(directories, options, hosts.addresses, relayed)
        self.attach_command = hosts.command("attach JOB")
        self.choice = JobChoice(request.job_id, NEVER) if request is not None else JobChoice(job_id)
        self._connections = Connections(hosts, self._notify)
        self._job_id = self._own_job_id = ""
        self._is_certain = True
        self._is_ended = self._is_stopping = self._is_open = False
        self.patience_s = 0.0
        """Seconds for which a lost connection is tried again before `view` raises. While it is infinite, `view` shows
        the last known state whatever becomes of the connection. Set it before `start`."""
        self.guards_rest = False
        """Whether the rest of a job that failed on another node is ended, while this session is open and when it
        closes. Set it before `start`."""
        self.backfills = False
        """Whether events and charts of a found job reach back to before this session. Set it before `start`."""
        self._guard = AssignmentGuard()
        self._new_node_watch = NewNodeWatch()
        self._reported_rest: set[tuple[tuple[str, int, JobState], str]] = set()
        """Reports on ending parts of jobs; an end that fails is tried again and reported once."""
        self._guarding: asyncio.Task[None] | None = None
        self._is_restarting = False
        """Whether a restart was under way at the last look; leaving gives it up."""
        self.asked_at: QuestionDesk | None = None
        """Where the user answers questions of lost hosts; None where nobody is asked. Set it before `start`."""
        self.questions: HostQuestions | None = None
        """Questions of hosts; None where nobody is asked."""
        if all(link.runs_programs for link in hosts.links):
            self.doctor = HostDoctor(hosts, self._connections.unreachable_reason, lambda: self.fleet)
        self.can_inject = False
        """True while the shown job allows faults."""
        self._loss_readers: dict[tuple[str, int], bool] = {}
        """Whether patterns find the loss, by job and attempt; False until a node has answered."""
        if not self.is_read_only:
            self.starter = JobStarter(hosts.names, lambda: self.fleet, hosts.python_of_first, self.start_another)

    @property
    def is_alone(self) -> bool:
        """True for a session on one host."""
        return len(self._hosts.links) == 1

    @property
    def goes_to_other_machines(self) -> bool:
        """True unless all of it is this machine."""
        return any(link.host != THIS_MACHINE for link in self._hosts.links)

    @property
    def away(self) -> set[str]:
        """Hosts that are unreachable at present: without a connection, or without an agent."""
        return {host for host, reason in self._connections.unreachable_reasons.items() if reason is not None}

    def put_silent(self, hosts: Iterable[str], reason: UnreachableReason) -> None:
        """Note hosts that count as unreachable until they report, although their agents are connected."""
        self._connections.put_silent(hosts, reason)

    @property
    def title(self) -> str:
        return f"rankdeck on {self._hosts.text}"

    @property
    def leaving(self) -> str:
        if self._request and not self._own_job_id:
            return "no job was started"
        if self._is_restarting:
            return NOT_AGAIN
        if not self._job_id:
            return "no job was seen there"
        if self.cut_off:
            return f"{self.cut_off}: whether the job goes on is not known"
        if self._is_ended:
            is_keeping = self._incident_recorder is not None and self._incident_recorder.is_keeping
            return f"the job has ended{', its evidence is being written' if is_keeping else ''}"
        return f"the job {self._how_it_goes_on}"

    @property
    def _how_it_goes_on(self) -> str:
        return "is being stopped" if self._is_stopping else "goes on" if self._is_certain else "may run"

    @property
    def how_to_begin(self) -> str:
        return "" if self._request is not None else f"{self._hosts.command('run')} train.py"

    @property
    def watched_job(self) -> str:
        """Job that this session has started, or was asked for; empty for whichever is shown."""
        return self._request.job_id if self._request else self.choice.wanted

    async def start(self) -> None:
        """Open the channels to the agents' sockets, and start the requested job, if any.

        Raises:
            HostsBusyError: Other jobs run there.
            AppError: The start failed; see `Fleet.start` for what may be left of the job.
        """
        await self.connect()
        if self._request is None:
            await self.check_job()
            self._offering = asyncio.create_task(self._offer(), name="rankdeck-offer")
            self.replay_history_soon(PAUSE_S if self.backfills else 0.0)
            if self.backfills:
                self.backfill()
            return
        reports = await self._reports(self._request.num_ranks)
        check_room(self._request.job_id, reports, is_beside=self._request.is_beside)
        reported = await self._start_and_report(self._request, reports)
        if self.starter is not None:
            self.starter.remember(self._request)
        self._notices.append(f"{reported}; importing torch takes some seconds")

    async def _offer(self) -> None:
        """Report what `when_idle` finds, unless a job is under way."""
        with suppress(AppError):
            if not self.when_idle or running_jobs(await self.reports()):
                return
            found = await in_daemon_thread(self.when_idle)
            if self.outside is not None:
                self.outside.offer = found
            elif found:
                self._notices.append(f"{found}: rankdeck inspect")

    def show_outside(self) -> None:
        """Let the console show jobs that rankdeck did not start; call it before `start`."""
        links = [link for link in self._hosts.links if link.runs_programs]
        if links:
            self.outside = OutsideSession(self, self.title, links, self.own_pids)

    async def check_job(self) -> None:
        """Check that the requested job exists; after `connect`.

        Raises:
            UsageError: No host that can be asked knows it.
            AgentUnreachableError: No agent answers.
        """
        job_id = self.choice.wanted
        if not job_id:
            return
        reports = await self.reports(needs_all=False)
        known = sorted({clean_name(job.job_id) for report in reports.values() for job in report.jobs})
        if job_id not in known:
            unasked = sorted(set(self._hosts.names) - set(reports))
            unknown = unknown_job_text(job_id, known, list(reports), unasked)
            raise UsageError(unknown, self._hosts.command("status JOB") + " shows one of them" if known else "")

    async def start_another(self, request: RunRequest) -> str:
        """Start another job where none runs, and follow it from now on; return a sentence about it.

        Raises:
            UsageError: A job runs there.
            AppError: See `start`.
        """
        reports = await self._reports(request.num_ranks)
        running = running_jobs(reports)
        if running or self.job_control.doing:
            where = self._hosts.text
            problem = f"job {running[0]} runs on {where}" if running else f"{where} has something under way"
            raise UsageError(problem, "end it first, from the console or by rankdeck stop")
        followed = (self._job_id, self._own_job_id, self._is_ended)
        try:
            started = await self._start_and_report(request, reports)
        except AgentRefusedError:
            self._job_id, self._own_job_id, self._is_ended = followed
            self._is_certain = True
            raise
        self._request = request
        reported = f"{started}: {clean(shlex.join(request.command), NAME_LIMIT)}"
        self.log_done(reported)
        return reported

    async def _start_and_report(self, request: RunRequest, reports: Mapping[str, NodeReport]) -> str:
        """Start a job, and return a sentence about it."""
        audited = AuditedAction("start", tuple(self._hosts.names), request.job_id, request.command)
        return await self.audit.kept(audited, self._started(request, reports))

    async def _started(self, request: RunRequest, reports: Mapping[str, NodeReport]) -> str:
        return started_text(next(iter((await self._start_on_hosts(request, reports)).values())), self._hosts.text)

    async def reports(self, *, needs_all: bool = True) -> dict[str, NodeReport]:
        """Return the report of each host that is reachable.

        Raises:
            AgentUnreachableError: An agent does not answer, or with `needs_all=False` none does.
        """
        away = self.away
        names = [name for name in self._hosts.names if name not in away]
        answers = await asyncio.gather(*(self.fleet.report(name) for name in names), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and (needs_all or len(errors) == len(names)):
            raise errors[0]
        answered = zip(names, answers, strict=True)
        return {name: answer for name, answer in answered if not isinstance(answer, BaseException)}

    async def _reports(self, num_ranks: int | None) -> dict[str, NodeReport]:
        """Return the report of each host; where the number of GPUs counts, once it is known."""
        deadline_s = time.monotonic() + GPU_PATIENCE_S
        fleet, names = self.fleet, self._hosts.names
        while True:
            reports = await asyncio.gather(*(fleet.report(name) for name in names))
            is_known = all(report.gpus.state is not GpuWatchState.STARTING for report in reports)
            if is_known or num_ranks or time.monotonic() > deadline_s:
                return dict(zip(names, reports, strict=True))
            await asyncio.sleep(POLL_S)

    async def _start_on_hosts(self, request: RunRequest, reports: Mapping[str, NodeReport]) -> dict[str, JobSpec]:
        """Start a job at the first master address that its nodes reach; return the spec of each node.

        Each host may once name a later attempt: it keeps logs of a job of this name that it no longer reports.
        """
        job_hosts = []
        for link, entry in zip(self._hosts.links, self._hosts.entries, strict=True):
            if link.place is None:
                raise AgentUnreachableError(link.host, "it has not been found yet")
            job_hosts.append(JobHost(entry, link.place, reports[link.host]))
        named = [request.master_addr] if request.master_addr else []
        address, *others = named or master_addrs(self._hosts.names, self._hosts.addresses)
        attempt, names_left = 0, len(job_hosts)
        while True:
            specs = job_specs(request, job_hosts, address, attempt)
            try:
                await self._start_own_job(specs)
            except AgentRefusedError as error:
                if error.reason == RefusalReason.UNREACHABLE and others:
                    address, *others = others
                elif names_left and error.next_attempt is not None:
                    attempt, names_left = max(attempt, error.next_attempt), names_left - 1
                else:
                    raise
            else:
                return specs

    async def _start_own_job(self, specs: Mapping[str, JobSpec]) -> None:
        first = next(iter(specs.values()))
        self._job_id = self._own_job_id = first.job_id
        self._is_ended = self._is_certain = False  # uncertain until the agents have answered
        before, self.choice = self.choice, JobChoice(first.job_id, first.attempt)
        try:
            await self.start_job(specs)
        except AgentRefusedError:
            self._job_id = self._own_job_id = ""
            self.choice = before
            raise
        self._is_certain = True

    async def connect(self) -> None:
        """Open the channels to the agents' sockets and begin to listen.

        Raises:
            AppError: No host can be reached.
        """
        if self.asked_at is not None and not self.is_read_only:
            self.questions = HostQuestions(self.asked_at, self._connections, self._notify)
        may_ask = self.questions is not None
        await self._connections.open(self.take_frame, self.patience_s, self.is_unheard, may_ask=may_ask)
        await super().connect()
        self._is_open = True
        if self.guards_rest and not self.is_alone and not self.is_read_only:
            self._guarding = asyncio.create_task(self._keep_guard(), name="rankdeck-guard")

    async def _keep_guard(self) -> None:
        """End what is left of a job that has failed on another node, until cancelled."""
        while True:
            await asyncio.sleep(GUARD_PERIOD_S)
            await self._end_what_hangs(time.monotonic())

    async def _end_what_hangs(self, now_s: float) -> None:
        for assignments in self.assignments():
            for node in self._guard.to_end(assignments, now_s):
                await self._end_rest(node, assignments[node])

    async def _end_rest(self, node: str, status: JobStatus) -> None:
        """End a node's part of a job, unless the node now reports that it is over, or another one."""
        audited = AuditedAction("stop", (node,), status.job_id)
        where = f"what was left of job {clean_name(status.job_id)} on {node}"
        try:
            jobs = (await self.fleet.report(node)).jobs
            if not any((job.job_id, job.attempt, job.state) == _identity(status) for job in jobs):
                return
            await self.fleet.stop(status.job_id, [node], is_agreed=False)
        except AppError as error:
            reported, is_done = f"{where} was not ended: {error}", False
        else:
            reported, is_done = f"{where} was ended: it has failed on another node", True
            self._guard.end_has_come(status, node)
        if (_identity(status), reported) not in self._reported_rest:
            self._reported_rest.add((_identity(status), reported))
            self._notify(reported)
            self.audit.add(audited, reported, is_done=is_done)

    async def end_patience_s(self, job_id: str) -> float:
        """Return how many seconds an orderly end of a job may take, by the spec that a node reports."""
        node = in_order(of_latest_attempt(await self.job_control.statuses(job_id)))[0]
        with suppress(AppError):  # a node that does not answer now does not prevent the end
            if isinstance(reply := await self.fleet.ask(node, ShowJob(job_id)), Shown):
                return reply.spec.save_s + reply.spec.grace_s + END_PATIENCE_S
        return USUAL_END_S + END_PATIENCE_S

    def _unreadable_reason(self, host: str) -> UnreachableReason | None:
        """Return why a host's reports cannot be read, if that has been so for `UNHEARD_S`."""
        since_s, why = self.telemetry.unreadable.get(host, (math.inf, ""))
        if time.monotonic() < since_s + UNHEARD_S:
            return None
        return UnreachableReason(f"what it sends is no report: {why}", UnreachableKind.REPORT)

    def view(self) -> View:
        """Return the rows of now.

        Raises:
            AppError: The connection is lost permanently.
        """
        for host, unreachable_reason in self._connections.unreachable_reasons.items():
            self.put_unreachable(host, unreachable_reason or self._unreadable_reason(host))
        if self.patience_s:  # a console for one look finds new nodes at its next start
            self._look_for_new_nodes()
            for sentence in self._hosts.news():
                self._notify(sentence)
        view = super().view()
        if self._is_open:
            self._is_restarting = bool(self.job_control.doing)
        job = view.job()
        if self.backfills and self._is_open and job is not None and job.loss is None:
            self._look_for_patterns(job.job_id, job.attempt)
        if job is not None and self._own_job_id in {"", job.job_id}:
            self._job_id = job.job_id
            self._is_ended, self._is_stopping = is_over(view), job.state == "stopping"
            model = self._cluster.jobs.get(job.job_id)
            hosts = [self._cluster.node_names[node] for node in sorted(model.assignments)] if model else []
            missing = self._connections.missing_text(hosts) if self._is_open else self.cut_off  # closing looks again
            self.cut_off = "" if self._is_ended else missing
            self.can_inject = job.allow_faults and not self.is_read_only
        if self._is_open and math.isfinite(self.patience_s):
            self._raise_for_lost_connection()
        return view

    def _look_for_patterns(self, job_id: str, attempt: int) -> None:
        """Ask once in the background whether an attempt of a job has patterns that find its loss."""
        key = (job_id, attempt)
        self.reads_loss = self._loss_readers.get(key, False)
        if key not in self._loss_readers:
            self._loss_readers[key] = False
            self._tasks.append(asyncio.create_task(self._ask_for_patterns(key), name="rankdeck-patterns"))

    async def _ask_for_patterns(self, key: tuple[str, int]) -> None:
        for node in self._hosts.names:
            with suppress(AppError):  # a node without the job, or out of reach
                reply = await self.fleet.ask(node, ShowJob(key[0]))
                if isinstance(reply, Shown):
                    self._loss_readers[key] = has_loss_pattern(reply.spec.metrics)
                    return

    def _look_for_new_nodes(self) -> None:
        new_nodes = self._hosts.new_nodes()
        self.put_new_nodes(new_nodes)
        news = self._new_node_watch.news(new_nodes, time.monotonic())
        if news.nodes:
            self._notify(new_nodes_notice(news, self._hosts.command("attach")))

    def take_notices(self, sentences: Iterable[str]) -> None:
        """Take sentences about what came before this session."""
        self._notices += sentences

    def _notify(self, sentence: str) -> None:
        self._notices.append(sentence)  # each drain replaces the list

    def _raise_for_lost_connection(self) -> None:
        if (failure := self._connections.failure) is not None:
            if (back := self._way_back()) not in failure.hint:
                failure.hint = "; ".join(filter(None, [failure.hint, back]))
            raise failure

    def farewell(self) -> str:
        return "" if self._is_ended or not self._job_id else f"rankdeck: {self._way_back()}"

    async def close(self) -> None:
        """Stop listening and close the connections."""
        self._is_open = False
        if self.outside is not None:
            self.outside.leave()
        if self.questions is not None:
            self.questions.close()
        if self._guarding is not None:
            self._guarding.cancel()
            await asyncio.gather(self._guarding, return_exceptions=True)
            await self._end_what_hangs(math.inf)  # the last check: no console watches from here on
        if self._offering is not None:
            self._offering.cancel()
            await asyncio.gather(self._offering, return_exceptions=True)
        await self._connections.keep_no_more()
        await super().close()
        await self._connections.close()

    def _way_back(self) -> str:
        job, command = self._job_id, self._hosts.command
        if not job:
            return f"come back by: {command('attach')}"
        look = f"watch it: {command(f'attach {job}')}, look: {command(f'status {job}')}"
        if self._is_restarting:
            return f"{NOT_AGAIN}; {look}, begin it again: {command(f'restart {job}')}"
        if self.cut_off:
            look = f"look: {command(f'status {job}')}" if self.cut_off.startswith(UnreachableKind.AGENT) else look
            return f"{self.cut_off}: whether job {job} goes on is not known; {look}"
        return f"job {job} {self._how_it_goes_on}; {look}, end it: {command(f'stop {job}')}"


def _identity(status: JobStatus) -> tuple[str, int, JobState]:
    return status.job_id, status.attempt, status.state
