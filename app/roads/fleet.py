"""The nodes of a session, spoken to together: what a person asks of a job is asked of every node it runs on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import (
    Abort,
    Command,
    Commit,
    GetStatus,
    InjectFault,
    Kill,
    Prepare,
    PrepareAgain,
    Shutdown,
    Stop,
)
from agent.wire.logs import LogLine, Logs, PullLogs
from agent.wire.replies import Accepted, Reply, Status
from app.errors import AgentRefusedError, AppError, IncompatibleAgentError
from app.roads.command_road import knows_no_job, taken
from app.words import nodes_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport
    from app.roads.command_road import CommandRoad
    from ddpcore.wire import Fault


class Fleet:
    """Roads to the agents by node name; every method is a coroutine of the session's loop."""

    def __init__(self, roads: Mapping[str, CommandRoad]) -> None:
        self._roads = dict(roads)

    async def start(self, specs: Mapping[str, JobSpec]) -> None:
        """Start a job: prepare it everywhere, commit it everywhere, or leave nothing of it anywhere.

        Args:
            specs: Each node's share, the one with node rank 0 first; a `master_port` of 0 there lets that node choose,
                and the others are told.

        Whatever ends the start early, a cancellation too, every node that was asked is asked to take it back.

        Raises:
            AgentRefusedError: A node refused; the others have forgotten the job.
            AgentUnreachableError: A node did not answer; those that do have forgotten or killed the job. The hint
                names those on which it may have begun to run and that cannot be told to end it.
        """
        start = _Start(self, next(iter(specs.values())).job_id)
        await self._start(start, {node: Prepare(spec) for node, spec in specs.items()})

    async def start_again(self, commands: Mapping[str, PrepareAgain]) -> None:
        """Start the next attempt of a job that has ended, all or nothing, as `start` does.

        Args:
            commands: By node, the one with node rank 0 first; it chooses the port unless the job has a fixed one.

        Raises:
            AgentRefusedError: A node refused; those that had prepared the attempt are where they were before.
            AgentUnreachableError: See `start`.
        """
        start = _Start(self, next(iter(commands.values())).job_id)
        await self._start(start, commands)

    async def _start(self, start: _Start, commands: Mapping[str, Prepare | PrepareAgain]) -> None:
        failure: AppError | None = None
        try:
            await start.run(commands)
        except AppError as error:
            failure = error
            raise
        finally:
            left = await start.undo()
            if failure and left:
                failure.hint = f"job {start.job_id} may run on {', '.join(left)}: look with rankdeck status"

    async def stop(self, job_id: str, nodes: Sequence[str], *, is_agreed: bool = True) -> None:
        """End a job in an orderly way on its nodes; returns when the nodes have agreed to, not when it has ended."""
        await self._ask_all(list(nodes), Stop(job_id, is_agreed))

    async def abort(self, job_id: str, nodes: Sequence[str]) -> None:
        """Have nodes forget what they have prepared of a job and not begun."""
        await self._ask_all(list(nodes), Abort(job_id))

    async def report(self, node: str) -> NodeReport:
        """Return what a node says of itself, now."""
        reply = await self.ask(node, GetStatus())
        if not isinstance(reply, Status):
            raise IncompatibleAgentError(node, f"it answered a request for its status with {type(reply).__name__}")
        return reply.report

    async def kill(self, job_id: str, nodes: Sequence[str] | None = None) -> list[str]:
        """End every process of a job, at once; return the nodes it was killed on: all that know it.

        Every node is asked, or each of some, whatever becomes of the others.

        Raises:
            AgentRefusedError: None of them knows it.
            AppError: The first failure of one that may; the hint names those it was killed on.
        """
        nodes = list(self._roads) if nodes is None else nodes
        asked = (self.ask(node, Kill(job_id)) for node in nodes)
        results = await asyncio.gather(*asked, return_exceptions=True)
        killed = [node for node, result in zip(nodes, results, strict=True) if isinstance(result, Accepted)]
        failures = [result for result in results if isinstance(result, BaseException)]
        failure = next((failure for failure in failures if not knows_no_job(failure)), None)
        if failure is None and not killed:
            raise failures[0]
        if failure is not None:
            if isinstance(failure, AppError) and killed:
                failure.hint = f"job {job_id} was killed on {nodes_text(killed)}"
            raise failure
        return killed

    async def inject(self, node: str, job_id: str, fault: Fault) -> None:
        """Do harm to one rank.

        Raises:
            AgentRefusedError: The job does not allow it, that node has no such rank, or it cannot be done to it.
        """
        command = InjectFault(job_id, fault.kind, fault.rank, fault.factor, fault.at_step, fault.duration_s)
        await self.ask(node, command)

    async def pull_logs(self, node: str, since_seq: int) -> tuple[list[LogLine], int]:
        """Return log lines after `since_seq`, and the number of the oldest line that the agent still keeps."""
        reply = await self.ask(node, PullLogs(since_seq))
        if not isinstance(reply, Logs):
            raise IncompatibleAgentError(node, f"it answered a request for logs with {type(reply).__name__}")
        return reply.lines, reply.first_seq

    async def close(self) -> None:
        """Let go of the roads; jobs and agents live on."""
        await asyncio.gather(*(road.close() for road in self._roads.values()))

    async def shut_down(self) -> None:
        """End the agents and all they run, as far as they can be reached."""
        await asyncio.gather(*(self.ask(node, Shutdown()) for node in self._roads), return_exceptions=True)

    async def ask(self, node: str, command: Command) -> Reply:
        """Ask one node.

        Raises:
            AgentRefusedError: It refused.
            AgentUnreachableError: No reply; whether the command was carried out is unknown.
        """
        return taken(node, await self._roads[node].request(command))

    async def _ask_all(self, nodes: list[str], command: Command) -> None:
        _raise_first(await asyncio.gather(*(self.ask(node, command) for node in nodes), return_exceptions=True))


class _Start:
    """One start of a job: which nodes may hold it, and how they are rid of it."""

    def __init__(self, fleet: Fleet, job_id: str) -> None:
        self.job_id = job_id
        self._fleet = fleet
        self._asked: list[str] = []
        self._is_committing = False

    async def run(self, commands: Mapping[str, Prepare | PrepareAgain]) -> None:
        (first, first_command), *others = commands.items()
        port = await self._prepare(first, first_command)
        prepared = (self._prepare(node, _with_port(command, port)) for node, command in others)
        _raise_first(await asyncio.gather(*prepared, return_exceptions=True))
        self._is_committing = True
        commits = (self._ask(node, Commit(self.job_id)) for node in self._asked)
        _raise_first(await asyncio.gather(*commits, return_exceptions=True))
        self._asked.clear()

    async def undo(self) -> list[str]:
        """Take back what was not done whole; return the nodes that may run the job all the same."""
        left = []
        # A node has either prepared the job or begun to run it. Before the first commit only an earlier job of the
        # same id can run, on a node whose reply was lost: that one is left alone.
        for command in (Abort(self.job_id), Kill(self.job_id))[: 1 + self._is_committing]:
            asked = (self._fleet.ask(node, command) for node in self._asked)
            results = await asyncio.gather(*asked, return_exceptions=True)
            left = [
                node
                for node, result in zip(self._asked, results, strict=True)
                if isinstance(result, BaseException) and not isinstance(result, AgentRefusedError)
            ]
        return left if self._is_committing else []

    async def _prepare(self, node: str, command: Prepare | PrepareAgain) -> int:
        self._asked.append(node)  # before it is asked: a reply that is lost leaves a job prepared
        try:
            reply = await self._ask(node, command)
        except AgentRefusedError:
            self._asked.remove(node)
            raise
        return reply.master_port if isinstance(reply, Accepted) else 0

    async def _ask(self, node: str, command: Command) -> Reply:
        # A cancelled exchange would leave its reply on the road, to be taken for that of the next command.
        return await asyncio.shield(self._fleet.ask(node, command))


def _raise_first(results: Sequence[object]) -> None:
    """Raise the first failure of several that were awaited together."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _with_port(command: Prepare | PrepareAgain, port: int) -> Prepare | PrepareAgain:
    if isinstance(command, Prepare):
        return msgspec.structs.replace(command, spec=msgspec.structs.replace(command.spec, master_port=port))
    return msgspec.structs.replace(command, master_port=port)
