"""The nodes of a session, spoken to together: what a person asks of a job is asked of every node it runs on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import Abort, Command, Commit, GetStatus, InjectFault, Kill, Prepare, Shutdown, Stop
from agent.wire.logs import LogLine, Logs, PullLogs
from agent.wire.replies import Accepted, Reply, Status
from app.command_road import taken
from app.errors import AppError, IncompatibleAgentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport
    from app.command_road import CommandRoad
    from ddpcore.wire import FaultKind


class Fleet:
    """Roads to the agents by node name; every method is a coroutine of the session's loop."""

    def __init__(self, roads: Mapping[str, CommandRoad]) -> None:
        self._roads = dict(roads)

    async def start(self, specs: Mapping[str, JobSpec]) -> None:
        """Start a job: prepare it everywhere, commit it everywhere, or leave nothing of it anywhere.

        Args:
            specs: Each node's share, the one with node rank 0 first; a `master_port` of 0 there lets that node choose,
                and the others are told.

        Raises:
            AgentRefusedError: A node refused; the others have forgotten the job.
            AgentUnreachableError: A node did not answer; the others have forgotten or killed the job.
        """
        (first, first_spec), *others = specs.items()
        prepared: list[str] = []
        try:
            port = await self._prepare(first, first_spec)
            prepared.append(first)
            for node, spec in others:
                await self._prepare(node, msgspec.structs.replace(spec, master_port=port))
                prepared.append(node)
            await self._ask_all(prepared, Commit(first_spec.job_id))
        except AppError:
            await self._forget(prepared, first_spec.job_id)
            raise

    async def stop(self, job_id: str, *, is_agreed: bool = True) -> None:
        """End a job in an orderly way, on all nodes; returns when they have agreed to, not when it has ended."""
        await self._ask_all(list(self._roads), Stop(job_id, is_agreed))

    async def report(self, node: str) -> NodeReport:
        """Return what a node says of itself, now."""
        reply = await self._ask(node, GetStatus())
        if not isinstance(reply, Status):
            raise IncompatibleAgentError(node, f"it answered a request for its status with {type(reply).__name__}")
        return reply.report

    async def kill(self, job_id: str, nodes: Sequence[str] | None = None) -> None:
        """End every process of a job, at once; ask all nodes even if one fails, then raise the first failure."""
        await self._ask_all(list(nodes or self._roads), Kill(job_id))

    async def inject(self, node: str, job_id: str, kind: FaultKind, rank: int, factor: float) -> None:
        """Do harm to one rank.

        Raises:
            AgentRefusedError: There is no such rank on that node, or it cannot be done to it.
        """
        await self._ask(node, InjectFault(job_id, kind, rank, factor))

    async def pull_logs(self, node: str, since_seq: int) -> tuple[list[LogLine], int]:
        """Return log lines after `since_seq`, and the number of the oldest line that the agent still keeps."""
        reply = await self._ask(node, PullLogs(since_seq))
        if not isinstance(reply, Logs):
            raise IncompatibleAgentError(node, f"it answered a request for logs with {type(reply).__name__}")
        return reply.lines, reply.first_seq

    async def close(self) -> None:
        """Let go of the roads; jobs and agents live on."""
        await asyncio.gather(*(road.close() for road in self._roads.values()))

    async def shut_down(self) -> None:
        """End the agents and all they run, as far as they can be reached."""
        await asyncio.gather(*(self._ask(node, Shutdown()) for node in self._roads), return_exceptions=True)

    async def _prepare(self, node: str, spec: JobSpec) -> int:
        reply = await self._ask(node, Prepare(spec))
        return reply.master_port if isinstance(reply, Accepted) else spec.master_port

    async def _ask(self, node: str, command: Command) -> Reply:
        return taken(node, await self._roads[node].request(command))

    async def _ask_all(self, nodes: list[str], command: Command) -> None:
        results = await asyncio.gather(*(self._ask(node, command) for node in nodes), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _forget(self, nodes: list[str], job_id: str) -> None:
        """Undo a start that failed half way: a node has either prepared the job or begun to run it."""
        for command in (Abort(job_id), Kill(job_id)):
            await asyncio.gather(*(self._ask(node, command) for node in nodes), return_exceptions=True)
