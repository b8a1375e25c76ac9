"""A host's job in front of a person: started or found there, watched from here, and left running."""

from __future__ import annotations

import asyncio
import math
import shlex
import time
from typing import TYPE_CHECKING

from agent.wire.jobs import ENDED_STATES
from agent.wire.machine import GpuWatchState
from app.deeds import NOT_AGAIN
from app.errors import AgentRefusedError, HostUnreachableError, UsageError
from app.headless import is_over
from app.safe_text import NAME_LIMIT, clean, clean_name
from app.sessions.connection_keeper import ConnectionKeeper
from app.sessions.live import LiveSession
from app.sessions.remote_job import job_spec
from app.sessions.session import DEFAULT_OPTIONS
from app.sessions.starting import JobStarter

if TYPE_CHECKING:
    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport
    from app.errors import AppError
    from app.sessions.options import SessionOptions
    from app.sessions.remote_job import RunRequest
    from app.ssh.agent_link import AgentLink
    from app.view import View


GPU_PATIENCE_S = 3.0
"""For the first look at the GPUs of a node whose agent has just begun: NVML takes a second or two to start."""
POLL_S = 0.1


class RemoteSession(LiveSession):
    """A session over an agent that an `AgentLink` has found. Closing it closes the link; agent and job live on."""

    def __init__(
        self,
        link: AgentLink,
        request: RunRequest | None = None,
        options: SessionOptions = DEFAULT_OPTIONS,
    ) -> None:
        """`request` is started by `start`; without one there is a job already, or none.

        Raises:
            SessionError: See `Session`.
        """
        self._link = link
        self._request = request
        super().__init__({link.host: link.directory}, options, [])
        self._job_id = ""
        self._own_job_id = ""
        self._is_certain = True
        self._is_ended = False
        self._is_open = False
        self.patience_s = 0.0
        """How long a connection that is lost is tried again before `view` raises; while it is infinite, `view` shows
        what was known last, whatever becomes of the connection. Say it before `start`."""
        self._keeper: ConnectionKeeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._is_restarting = False
        """Whether a restart was under way when the console last looked: leaving gives it up."""
        self.can_inject = False
        """True while the job that is shown allows faults."""
        if not self.is_read_only:
            assert link.place is not None
            self.starter = JobStarter(link.host, lambda: self.session.fleet, link.place.python, self.start_another)

    @property
    def title(self) -> str:
        """What this session is."""
        return f"rankdeck on {self._link.host}"

    @property
    def leaving(self) -> str:
        """What becomes of the job when the person leaves."""
        if self._request and not self._own_job_id:
            return "no job was started"
        if self._is_restarting:
            return NOT_AGAIN
        return "the job goes on" if self._is_certain else "the job may run"

    @property
    def how_to_begin(self) -> str:
        """How a job comes to a host that has none."""
        if self._request is not None:
            return ""
        by_key = "" if self.starter is None else "x starts a program here; or: "
        return f"{by_key}rankdeck run --host {self._link.host} -- train.py"

    @property
    def watched_job(self) -> str:
        """The job that this session has started; empty for whichever is shown."""
        return self._request.job_id if self._request else ""

    async def start(self) -> None:
        """Bring the agent's sockets here, and start the job if there is one to start.

        Raises:
            AppError: Something is in the way; see `Fleet.start` for what may be left of the job.
        """
        place = self._link.place
        assert place is not None
        await self.connect()
        if self._request is None:
            return
        spec = job_spec(self._request, place, await self._report(self._request.num_ranks))
        await self._start_job(spec)
        if self.starter is not None:
            self.starter.remember(self._request)
        self._notices.append(f"{self._started_text(spec)}; importing torch takes some seconds")

    async def start_another(self, request: RunRequest) -> str:
        """Start another job where none runs, and follow it from now on; return a sentence that says so.

        Raises:
            UsageError: A job runs there.
            AppError: See `start`.
        """
        place = self._link.place
        assert place is not None
        host = self._link.host
        report = await self._report(request.num_ranks)
        running = [clean_name(job.job_id) for job in report.jobs if job.state not in ENDED_STATES]
        if running or self.session.control.doing:
            words = f"job {running[0]} runs on {host}" if running else f"{host} has something under way"
            raise UsageError(words, "end it first: x in the console, or rankdeck stop")
        spec = job_spec(request, place, report)
        followed = (self._job_id, self._own_job_id, self._is_ended)
        try:
            await self._start_job(spec)
        except AgentRefusedError:
            self._job_id, self._own_job_id, self._is_ended = followed
            self._is_certain = True
            raise
        self._request = request
        told = f"{self._started_text(spec)}: {clean(shlex.join(request.command), NAME_LIMIT)}"
        self.session.tell_done(told)
        return told

    def _started_text(self, spec: JobSpec) -> str:
        ranks = f"{spec.world_size} rank{'' if spec.world_size == 1 else 's'}"
        return f"job {spec.job_id} started on {self._link.host} with {ranks}"

    async def _report(self, num_ranks: int | None) -> NodeReport:
        """Return the node's report; once it knows its GPUs, where their number counts."""
        deadline_s = time.monotonic() + GPU_PATIENCE_S
        while True:
            report = await self.session.fleet.report(self._link.host)
            is_known = report.gpus.state is not GpuWatchState.STARTING
            if is_known or num_ranks or time.monotonic() > deadline_s:
                return report
            await asyncio.sleep(POLL_S)

    async def _start_job(self, spec: JobSpec) -> None:
        self._job_id = self._own_job_id = spec.job_id
        self._is_ended = self._is_certain = False  # until the agent has answered, nobody knows
        try:
            await self.session.start_job({self._link.host: spec})
        except AgentRefusedError:
            self._job_id = self._own_job_id = ""
            raise
        self._is_certain = True

    async def connect(self) -> None:
        """Bring the agent's sockets here and begin to listen."""
        host = self._link.host
        await asyncio.to_thread(self._link.open_road, lambda frame: self.session.take_frame(host, frame))
        await self.session.connect()
        self._is_open = True
        if self.patience_s:
            self._keeper = ConnectionKeeper(self._link, self._tell, self.patience_s)
            self._keeping = asyncio.create_task(self._keeper.run(), name="rankdeck-connection")
        if not self._link.is_forwarded:
            self._notices.append(f"sshd of {host} forwards no sockets: going through `agent proxy` and `agent relay`")

    def view(self) -> View:
        """Return the rows of now.

        Raises:
            AppError: The connection is lost for good.
        """
        if self._keeper is not None:
            self.session.put_trouble(self._link.host, self._keeper.trouble)
        view = super().view()
        if self._is_open:
            self._is_restarting = bool(self.session.control.doing)
        job = view.job()
        if job is not None and self._own_job_id in {"", job.job_id}:
            self._job_id = job.job_id
            self._is_ended = is_over(view)
            self.can_inject = job.allow_faults and not self.is_read_only
        if self._is_open and math.isfinite(self.patience_s):
            self._raise_for_lost_connection()
        return view

    def _tell(self, sentence: str) -> None:
        self._notices.append(sentence)  # another list after each drain

    def _raise_for_lost_connection(self) -> None:
        failure: AppError | None = None
        if self._keeper is not None:
            failure = self._keeper.failure
        elif not self._link.is_alive:
            failure = HostUnreachableError(self._link.host, "the connection is lost")
        if failure is not None:
            if self._way_back() not in failure.hint:
                failure.hint = f"{failure.hint}; {self._way_back()}" if failure.hint else self._way_back()
            raise failure

    def farewell(self) -> str:
        """Return how to come back to a job that goes on."""
        return "" if self._is_ended or not self._job_id else f"rankdeck: {self._way_back()}"

    async def close(self) -> None:
        """Stop listening and let go of the host."""
        self._is_open = False
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self.session.close()
        await asyncio.to_thread(self._link.close)

    def _way_back(self) -> str:
        host, job = self._link.host, self._job_id
        if not job:
            return f"come back by: rankdeck attach --host {host}"
        look = f"watch it: rankdeck attach --host {host}, look: rankdeck status --host {host}"
        if self._is_restarting:
            return f"{NOT_AGAIN}; {look}, begin it again: rankdeck restart {job} --host {host}"
        how = "goes on" if self._is_certain else "may run"
        return f"job {job} {how}; {look}, end it: rankdeck stop {job} --host {host}"
