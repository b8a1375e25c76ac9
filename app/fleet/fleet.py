"""Sends commands to all nodes of a session: a user's command for a job goes to every node it runs on.

`Fleet` holds the connections. `fetch_stacks` fetches the stacks of a job from all its nodes, over connections of its
own: an agent answers only after its last rank, and a connection carries one command at a time. A user who kills the job
during that does not wait for the stacks.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import (
    Abort,
    Accepted,
    Command,
    Commit,
    GetStatus,
    InjectFault,
    Kill,
    Prepare,
    PrepareAgain,
    Reply,
    Shutdown,
    Status,
    Stop,
)
from agent.wire.logs import LogLine, Logs, PullLogs
from agent.wire.stacks import GetStacks, Stacks
from app.errors import AgentRefusedError, AgentUnreachableError, AppError, IncompatibleAgentError
from app.fleet import commands
from app.fleet.commands import StreamChannel, knows_no_job, taken
from app.fleet.start_progress import MIN_NODES_SHOWN, NodeStage, StartProgress
from app.stacks.groups import NodeStacks
from app.text import LINE_LIMIT, attempt_text, clean, clean_name, nodes_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport
    from app.fleet.commands import CommandChannel
    from ddpcore.wire import Fault


class Fleet:
    """Channels to the agents by node name; every method is a coroutine of the session's loop.

    Attributes:
        starting: Progress or outcome of the latest start; None before the first.
    """

    def __init__(
        self, channels: Mapping[str, CommandChannel], on_progress: Callable[[StartProgress], None] = lambda _: None
    ) -> None:
        """`on_progress` is called with each step of a start, in the loop."""
        self.starting: StartProgress | None = None
        self._channels = dict(channels)
        self._on_progress = on_progress

    async def start(self, specs: Mapping[str, JobSpec]) -> None:
        """Start a job: prepare it everywhere, commit it everywhere, or leave nothing of it anywhere.

        Takes as long as the slowest node: a silent one delays it by four replies at most, each with a timeout. Whatever
        ends the start early, a cancellation too, every node that was asked is asked to take it back.

        Args:
            specs: Spec of each node, the one with node rank 0 first; with a `master_port` of 0 there that node chooses,
                and the others receive its choice.

        Raises:
            AgentRefusedError: A node refused; the others have forgotten the job.
            AgentUnreachableError: A node did not answer; those that do have forgotten or killed the job. The hint
                names those on which it may have begun to run and that cannot be reached to end it.

        With several nodes, the hint gives the outcome of each.
        """
        job_id = next(iter(specs.values())).job_id
        progress = StartProgress(f"job {clean_name(job_id)}", list(specs))
        await self._start(job_id, {node: Prepare(spec) for node, spec in specs.items()}, progress)

    async def start_again(self, commands: Mapping[str, PrepareAgain]) -> None:
        """Start the next attempt of a job that has ended, all or nothing, as `start` does.

        Args:
            commands: By node, the one with node rank 0 first; it chooses the port unless the job has a fixed one.

        Raises:
            AgentRefusedError: A node refused; those that had prepared the attempt are where they were before.
            AgentUnreachableError: See `start`.
        """
        first = next(iter(commands.values()))
        progress = StartProgress(f"{attempt_text(first.attempt)} of job {clean_name(first.job_id)}", list(commands))
        await self._start(first.job_id, commands, progress)

    async def _start(
        self, job_id: str, commands: Mapping[str, Prepare | PrepareAgain], progress: StartProgress
    ) -> None:
        self.starting = progress
        start = _Start(self, job_id, progress, lambda: self._on_progress(progress))
        failure: AppError | None = None
        try:
            await start.run(commands)
        except AppError as error:
            failure = error
            raise
        finally:
            left = await start.undo()
            progress.is_over = True
            self._on_progress(progress)
            if failure:
                account = progress.account(but_for=start.blamed) if len(commands) >= MIN_NODES_SHOWN else ""
                may_run = f"job {job_id} may run on {', '.join(left)}: look with rankdeck status" if left else ""
                failure.hint = "; ".join(filter(None, (failure.hint, account, may_run)))

    async def stop(self, job_id: str, nodes: Sequence[str], *, is_agreed: bool = True) -> None:
        """End a job in an orderly way on its nodes; return when the nodes have agreed to, not when it has ended."""
        await self._ask_all(list(nodes), Stop(job_id, is_agreed))

    async def abort(self, job_id: str, nodes: Sequence[str]) -> None:
        """Make nodes forget what they have prepared of a job and not begun."""
        await self._ask_all(list(nodes), Abort(job_id))

    async def report(self, node: str) -> NodeReport:
        """Return the current report of a node."""
        reply = await self.ask(node, GetStatus())
        if not isinstance(reply, Status):
            raise IncompatibleAgentError(node, f"it answered a request for its status with {type(reply).__name__}")
        return reply.report

    async def kill(self, job_id: str, nodes: Sequence[str] | None = None) -> list[str]:
        """Kill every process of a job immediately; return the nodes it was killed on: all that know it.

        Every node is asked, or each of `nodes`, whatever becomes of the others.

        Raises:
            AgentRefusedError: None of them knows it.
            AppError: The first other failure of a node; the hint names those it was killed on.
        """
        nodes = list(self._channels) if nodes is None else nodes
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
        """Inject a fault into one rank.

        Raises:
            AgentRefusedError: The job forbids it, the node has no such rank, or the fault cannot be injected.
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
        """Close the channels; jobs and agents keep running."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def shut_down(self) -> None:
        """End the agents and all they run, as far as they can be reached."""
        await asyncio.gather(*(self.ask(node, Shutdown()) for node in self._channels), return_exceptions=True)

    async def ask(self, node: str, command: Command) -> Reply:
        """Send a command to one node and return its reply.

        Raises:
            AgentRefusedError: It refused.
            AgentUnreachableError: No reply; whether the command was carried out is unknown.
        """
        return taken(node, await self._channels[node].request(command))

    async def _ask_all(self, nodes: list[str], command: Command) -> None:
        _raise_first(await asyncio.gather(*(self.ask(node, command) for node in nodes), return_exceptions=True))


class _Start:
    """One start of a job: which nodes may hold it, and how it is taken back there.

    Attributes:
        blamed: Node whose failure is raised; empty while there is none.
    """

    def __init__(self, fleet: Fleet, job_id: str, progress: StartProgress, on_change: Callable[[], None]) -> None:
        self.job_id = job_id
        self.blamed = ""
        self._fleet = fleet
        self._progress = progress
        self._on_change = on_change
        self._asked: list[str] = []
        self._prepared_s: dict[str, float] = {}
        self._is_committing = False

    async def run(self, commands: Mapping[str, Prepare | PrepareAgain]) -> None:
        (first, first_command), *others = commands.items()
        port = 0
        for accepted in await self._all([first], self._prepare(first, first_command)):
            port = accepted.master_port if isinstance(accepted, Accepted) else 0
        prepared = (self._prepare(node, _with_port(command, port)) for node, command in others)
        await self._all([node for node, _ in others], *prepared)
        self._is_committing = True
        await self._all(self._asked, *(self._commit(node) for node in self._asked))
        self._asked.clear()

    async def undo(self) -> list[str]:
        """Take an incomplete start back; return the nodes that may run the job all the same."""
        if not self._asked:
            return []
        left: list[str] = []
        forgotten: set[str] = set()
        # A node has either prepared the job or begun to run it. Before the first commit only an earlier job of the
        # same id can run, on a node whose reply was lost: that one is left alone.
        for command in (Abort(self.job_id), Kill(self.job_id))[: 1 + self._is_committing]:
            asked = (self._fleet.ask(node, command) for node in self._asked)
            results = await asyncio.gather(*asked, return_exceptions=True)
            answers = dict(zip(self._asked, results, strict=True))
            left = [node for node, answer in answers.items() if _is_unheard(answer)]
            forgotten |= {node for node, answer in answers.items() if isinstance(answer, Accepted)}
            forgotten |= {node for node, answer in answers.items() if knows_no_job(answer)}
        for node in left:
            self._move(node, NodeStage.UNKNOWN)
        for node in forgotten - set(left):
            self._move(node, NodeStage.TAKEN_BACK)
        return left if self._is_committing else []

    async def _prepare(self, node: str, command: Prepare | PrepareAgain) -> Reply:
        self._asked.append(node)  # before it is asked: a lost reply leaves the job prepared there
        self._move(node, NodeStage.ASKED)
        try:
            reply = await self._ask(node, command)
        except AgentRefusedError:
            self._asked.remove(node)
            raise
        self._prepared_s[node] = time.monotonic()
        self._move(node, NodeStage.PREPARED)
        return reply

    async def _commit(self, node: str) -> None:
        self._move(node, NodeStage.BEGINNING)
        # From its Prepare until this console gives up: a node that sleeps until then must not start alone.
        within_s = time.monotonic() + commands.REPLY_TIMEOUT_S - self._prepared_s[node]
        await self._ask(node, Commit(self.job_id, within_s=within_s))
        self._move(node, NodeStage.BEGUN)

    async def _ask(self, node: str, command: Command) -> Reply:
        try:
            # A cancelled exchange would leave its reply on the channel, to be taken for that of the next command.
            asked = asyncio.ensure_future(self._fleet.ask(node, command))
            asked.add_done_callback(_retrieve)
            return await asyncio.shield(asked)
        except AgentRefusedError as error:
            self._move(node, NodeStage.REFUSED, clean(error.message, LINE_LIMIT))
            raise
        except AppError as error:
            self._move(
                node,
                NodeStage.SILENT,
                clean(error.detail, LINE_LIMIT) if isinstance(error, AgentUnreachableError) else "",
            )
            raise

    async def _all(self, nodes: Sequence[str], *asked: Awaitable[Reply | None]) -> list[Reply | None]:
        """Return the replies once all nodes have replied; raise the first failure, and note its node."""
        results = await asyncio.gather(*asked, return_exceptions=True)
        replies: list[Reply | None] = []
        for node, result in zip(nodes, results, strict=True):
            if isinstance(result, BaseException):
                self.blamed = node
                raise result
            replies.append(result)
        return replies

    def _move(self, node: str, stage: NodeStage, why: str = "") -> None:
        self._progress.move(node, stage, why)
        self._on_change()


def _retrieve(asked: asyncio.Future[Reply]) -> None:
    """Retrieve an exception that nobody waits for once a start is cancelled: asyncio would print its traceback."""
    if not asked.cancelled():
        asked.exception()


def _is_unheard(answer: object) -> bool:
    """Return whether it is unknown what a node does with a command."""
    return isinstance(answer, BaseException) and not isinstance(answer, AgentRefusedError)


def _raise_first(results: Sequence[object]) -> None:
    """Raise the first exception among the results of a `gather`."""
    for result in results:
        if isinstance(result, BaseException):
            raise result


def _with_port(command: Prepare | PrepareAgain, port: int) -> Prepare | PrepareAgain:
    if isinstance(command, Prepare):
        return msgspec.structs.replace(command, spec=msgspec.structs.replace(command.spec, master_port=port))
    return msgspec.structs.replace(command, master_port=port)


async def fetch_stacks(directories: Mapping[str, Path], job_id: str, *, is_native: bool) -> list[NodeStacks]:
    """Return what each node of a job answers; nodes that do not know the job are left out.

    Args:
        directories: Directory of each node's agent.
        job_id: The job.
        is_native: Includes the frames of C and C++.

    Raises:
        AppError: No node has stacks of it; the first node's reason.
    """
    asked = (_of_node(node, path, GetStacks(job_id, is_native)) for node, path in directories.items())
    answers = await asyncio.gather(*asked)
    errors = [answer for answer in answers if isinstance(answer, AppError)]
    if len(errors) == len(answers):
        # A node that does not know the job explains less than one that does not answer.
        raise next((error for error in errors if not knows_no_job(error)), errors[0])
    return [
        NodeStacks(node, None, trouble_text(answer)) if isinstance(answer, AppError) else NodeStacks(node, answer)
        for node, answer in zip(directories, answers, strict=True)
        if not knows_no_job(answer)
    ]


def trouble_text(error: AppError) -> str:
    """Return why a node has no stacks, cleaned; the text need not name the node."""
    return clean(error.message if isinstance(error, AgentRefusedError) else str(error), LINE_LIMIT)


async def _of_node(node: str, directory: Path, command: GetStacks) -> Stacks | AppError:
    channel = StreamChannel(node, directory)
    try:
        reply = taken(node, await channel.request(command))
    except AppError as error:
        return error
    finally:
        await channel.close()
    if not isinstance(reply, Stacks):
        return IncompatibleAgentError(node, f"it answered a request for stacks with {type(reply).__name__}")
    return reply
