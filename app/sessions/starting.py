"""Another program on a host whose last job has ended, or that has none: what was started before, and the start."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from agent.wire.commands import ShowJob
from agent.wire.replies import Shown
from app.errors import AgentRefusedError
from app.program import Program, check_command, make_job_id
from app.sessions.remote_job import RunRequest
from app.sessions.workdir import workdir_on
from app.ssh.config import THIS_MACHINE
from app.words import nodes_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from app.roads.fleet import Fleet

MAX_PAST = 8
"""Jobs of the host that are looked at: each is a command to its agent."""


class JobStarter:
    """What `app.tui.source.Starter` asks for; after the session is connected.

    Attributes:
        hosts: Their names.
        where: Some of them, and how many more.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        fleet: Callable[[], Fleet],
        usual_python: Callable[[], str],
        start: Callable[[RunRequest], Awaitable[str]],
    ) -> None:
        """On hosts that all take part; what was started before is asked of the first one.

        Args:
            hosts: Their names.
            fleet: Reaches them.
            usual_python: Returns the first agent's own; empty while that has not been found.
            start: Starts a job and returns a sentence about it.
        """
        self.hosts = list(hosts)
        self.where = nodes_text(hosts)
        self._first = hosts[0]
        self._fleet = fleet
        self._usual_python = usual_python
        self._start = start
        self._own: dict[str, Program] = {}
        """By job: what this session has started, with nothing hidden."""

    def remember(self, request: RunRequest) -> None:
        """Keep what this session starts by itself."""
        self._own[request.job_id] = Program(
            request.command,
            request.num_ranks,
            request.max_restarts,
            request.workdir,
            request.python,
        )

    async def past(self) -> list[Program]:
        """Return what the host's newest jobs are made of, the newest first, each program once.

        Raises:
            AgentUnreachableError: The agent does not answer.
        """
        report = await self._fleet().report(self._first)
        found = [await self._program(job.job_id) for job in list(report.jobs)[: -MAX_PAST - 1 : -1]]
        return list(dict.fromkeys(program for program in found if program is not None))

    async def start(self, program: Program) -> str:
        """Start a program as `rankdeck run` does, with a name made for it; return a sentence that says so.

        Raises:
            UsageError: A job runs there already.
            AppError: The host refused, or did not answer.
        """
        command = check_command(program.command)
        request = RunRequest(
            command=command,
            job_id=make_job_id(command, secrets.token_hex(2)),
            num_ranks=program.num_ranks,
            python=program.python,
            workdir=self._workdir(program.workdir),
            max_restarts=program.max_restarts,
        )
        told = await self._start(request)
        self.remember(request)
        return told

    def _workdir(self, typed: str) -> str:
        """Return a directory of this machine as `rankdeck run` understands it: from where the person is."""
        return workdir_on(THIS_MACHINE, typed) if typed and self.hosts == [THIS_MACHINE] else typed

    async def _program(self, job_id: str) -> Program | None:
        """Return what a job is made of, None where that is no longer known."""
        if job_id in self._own:
            return self._own[job_id]
        try:
            reply = await self._fleet().ask(self._first, ShowJob(job_id))
        except AgentRefusedError:
            return None
        if not isinstance(reply, Shown):
            return None
        spec = reply.spec
        python = "" if spec.python == self._usual_python() else spec.python
        if len(self.hosts) > 1:  # each has a number and a directory of its own
            return Program(tuple(spec.command), python=python)
        return Program(tuple(spec.command), spec.local_world_size, spec.max_restarts, spec.workdir, python)
