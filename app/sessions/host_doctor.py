"""The doctor of a session: looks at its hosts over the connections that are there, beside the frames."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import ShowJob
from agent.wire.replies import Shown
from app.daemon_thread import in_daemon_thread
from app.errors import AppError
from app.preflight.asking import preflight
from app.preflight.findings import Step, Wanted
from app.program import Again, Program
from app.sessions.shares import even_shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.wire.jobs import JobSpec
    from app.preflight.findings import Preflight
    from app.roads.fleet import Fleet
    from app.sessions.hosts import Hosts
    from app.sessions.remote_job import RunRequest
    from app.ssh.agent_link import AgentLink


class HostDoctor:
    """What `app.tui.source.Doctor` asks for; in the session's loop."""

    def __init__(
        self,
        hosts: Hosts,
        absence: Callable[[str], AppError | None] = lambda _host: None,
        fleet: Callable[[], Fleet] | None = None,
    ) -> None:
        """Of some hosts.

        Args:
            hosts: Which.
            absence: Says why there is no way to a host now.
            fleet: Reaches the agents, which know what a job is made of that is to begin again.
        """
        self._hosts = hosts
        self._absence = absence
        self._fleet = fleet

    @property
    def hosts(self) -> list[str]:
        """Their names."""
        return self._hosts.names

    async def look(self, tell: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        """Return what is to be said of the hosts; see `app.tui.source.Doctor`."""
        all_wanted = wanted_of(self._hosts, job if isinstance(job, Program) else None)
        if isinstance(job, Again):
            all_wanted = await self._wanted_again(job, all_wanted)
        links = {link.host: link for link in self._hosts.links}
        looked_at: list[tuple[Wanted, AgentLink | AppError]] = [
            (wanted, self._absence(wanted.host) or links[wanted.host]) for wanted in all_wanted
        ]
        loop = asyncio.get_running_loop()

        def tell_there(host: str, step: Step) -> None:
            with suppress(RuntimeError):  # the console has gone meanwhile
                loop.call_soon_threadsafe(tell, host, step)

        return await in_daemon_thread(lambda: preflight(looked_at, tell=tell_there))

    async def _wanted_again(self, job: Again, all_wanted: list[Wanted]) -> list[Wanted]:
        """Return what the next attempt of a job would use, as far as its nodes know."""
        kept = [wanted for wanted in all_wanted if wanted.host not in job.without]
        specs = await asyncio.gather(*(self._spec(wanted.host, job.job_id) for wanted in kept))
        parts = {wanted.host: spec for wanted, spec in zip(kept, specs, strict=True) if spec is not None}
        shares = (
            dict(zip(parts, even_shares(job.num_ranks, len(parts)), strict=True)) if job.num_ranks and parts else {}
        )
        return [
            wanted
            if (spec := parts.get(wanted.host)) is None
            else msgspec.structs.replace(
                wanted,
                num_ranks=None if spec.shares_gpus else shares.get(wanted.host, spec.local_world_size),
                python=spec.python,
                workdir=spec.workdir,
            )
            for wanted in kept
            if wanted.host in parts or not parts or self._absence(wanted.host) is not None
        ]

    async def _spec(self, host: str, job_id: str) -> JobSpec | None:
        if self._fleet is None or self._absence(host) is not None:
            return None
        try:
            reply = await self._fleet().ask(host, ShowJob(job_id))
        except AppError:
            return None
        return reply.spec if isinstance(reply, Shown) else None


def wanted_of(hosts: Hosts, job: Program | RunRequest | None = None) -> list[Wanted]:
    """Return what a job would use on each host, by what is said of the job and what the inventory says."""
    every = [Wanted(entry.host, entry.num_ranks, "", entry.workdir) for entry in hosts.entries]
    if job is None:
        return every
    shares_gpus = not isinstance(job, Program) and job.shares_gpus
    return [
        msgspec.structs.replace(
            wanted,
            num_ranks=None if shares_gpus else job.num_ranks or wanted.num_ranks,
            python=job.python,
            workdir=job.workdir or wanted.workdir,
        )
        for wanted in every
    ]
