"""What a user does to a job: start, stop, kill, or restart it with the same number of ranks or another.

`JobControl` sends the commands to the agents; the reports show their replies, and what the job does then.

`JobStarter` starts another program on hosts that have no running job, and lists what was started before. `workdir_on`
is where a program runs on a host.

`AssignmentGuard` ends what is left of a job that has failed on another node: its ranks would wait for ranks that are
gone. torchrun ends the ranks of its own node; those of the others hang until torch gives up, after ten minutes by
default.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING

from agent.wire.commands import RefusalReason, ShowJob, Shown
from agent.wire.jobs import ENDED_STATES, JobState
from app.errors import AgentRefusedError, AgentUnreachableError, AppError, UsageError
from app.inventory.program import Program, check_command, make_job_id
from app.session.audit import AuditedAction
from app.session.master_addr import master_addrs
from app.session.remote_job import (
    RunRequest,
    ended_before_text,
    in_order,
    latest_status,
    next_attempt,
    next_split,
    of_latest_attempt,
    unknown_job_text,
)
from app.ssh.config import THIS_MACHINE
from app.text import attempt_text, clean_name, nodes_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from agent.wire.commands import PrepareAgain
    from agent.wire.jobs import JobStatus
    from app.fleet.fleet import Fleet
    from app.session.audit import AuditLog

POLL_S = 0.25
AWAY_PATIENCE_S = 20.0
"""Seconds without a reply of a node while its job ends; a broken connection comes back sooner."""
LEFTOVERS_PATIENCE_S = 15.0
"""Seconds for leftovers of the last attempt to go; an agent refuses to begin the next one before."""


class JobControl:
    """Acts on the jobs of some nodes; the latest request replaces those before it.

    Attributes:
        doing: Action in progress, as short cleaned text; empty when idle.
    """

    def __init__(
        self,
        fleet: Callable[[], Fleet],
        nodes: Sequence[str],
        notify: Callable[[str], None],
        audit: AuditLog,
        addresses: Callable[[str], Sequence[str]] = lambda _node: (),
    ) -> None:
        """Set up for some nodes.

        Args:
            fleet: Reaches them.
            nodes: Their names.
            notify: Takes a sentence about each action done.
            audit: Logs all actions, also failed ones.
            addresses: Returns the addresses at which others may reach a node; see `app.session.master_addr`.
        """
        self.doing = ""
        self._fleet = fleet
        self._nodes = list(nodes)
        self._notify = notify
        self._audit = audit
        self._addresses = addresses
        self._num_wishes = 0
        self._beginning = asyncio.Lock()
        """Held while the nodes are asked to begin an attempt."""

    async def stop(self, job_id: str, *, is_agreed: bool) -> str:
        """End a job in an orderly way; return what was requested, before the job has ended.

        Args:
            job_id: The job.
            is_agreed: End after a step and a checkpoint, where its ranks can; else by SIGTERM.

        Raises:
            AppError: No node knows it, or one did not answer.
        """
        return await self._kept("stop", job_id, self._stop(job_id, is_agreed=is_agreed))

    async def _stop(self, job_id: str, *, is_agreed: bool) -> str:
        await self._wish()
        statuses = await self.statuses(job_id)
        await self._fleet().stop(job_id, list(statuses), is_agreed=is_agreed)
        asked, num_nodes = of_latest_attempt(statuses), latest_status(statuses).num_nodes
        how = ended_before_text(asked) if has_ended(statuses) else await self._how_it_ends(job_id)
        few = f"; only {nodes_text(list(asked))} of its {num_nodes} nodes could be asked"
        return self._logged(f"job {job_id} {how}{few if len(asked) < num_nodes else ''}")

    async def _how_it_ends(self, job_id: str) -> str:
        """Return how a job that was asked to end ends, by its first node: it knows whether its ranks can agree."""
        try:
            statuses = await self.statuses(job_id)
        except AgentRefusedError:  # it was prepared and never begun, and is forgotten now
            statuses = {}
        stopping = [status for status in statuses.values() if status.state is JobState.STOPPING and status.detail]
        return f"is {stopping[0].detail}" if stopping else "was asked to end"

    async def kill(self, job_id: str) -> str:
        """Kill every process of a job, on every node that can be reached; return what was done, or how it had ended.

        Raises:
            AppError: No node knows it, or one did not answer.
        """
        return await self._kept("kill", job_id, self._kill(job_id))

    async def _kill(self, job_id: str) -> str:
        await self._wish()
        asked_s = time.monotonic()
        nodes = await self._fleet().kill(job_id)
        how = f"was killed on {nodes_text(nodes)}"
        with contextlib.suppress(AppError):
            statuses = of_latest_attempt(await self._of(job_id, nodes))
            before_s = time.monotonic() - asked_s
            if has_ended(statuses) and min(one.state_s for one in statuses.values()) > before_s:
                how = ended_before_text(statuses)
        return self._logged(f"job {job_id} {how}")

    async def restart(
        self,
        job_id: str,
        num_ranks: int | None = None,
        *,
        is_immediate: bool = False,
        without: Collection[str] | None = None,
    ) -> str:
        """End a job if it still runs, and begin its next attempt; return what was done.

        A stop, a kill or another restart that is requested while it waits replaces it.

        Args:
            job_id: The job.
            num_ranks: None is as many as before.
            is_immediate: Kill it without a step and a checkpoint.
            without: None restarts on the nodes of the last attempt. Else the next one runs on all nodes that answer and
                know the job, except these.

        Raises:
            AppError: A node refused or did not answer; what had been prepared is taken back.
        """
        doing = self._restart(job_id, num_ranks, is_immediate=is_immediate, without=without)
        return await self._kept("restart", job_id, doing)

    async def _restart(
        self, job_id: str, num_ranks: int | None, *, is_immediate: bool, without: Collection[str] | None
    ) -> str:
        wish = await self._wish()
        statuses = await self._begun(job_id)
        found = {node: one for node, one in statuses.items() if node not in (without or ())}
        if any(one.is_adopted for one in found.values()):
            what = f"job {job_id} was started by another launcher, which rankdeck can stop and not restart"
            raise UsageError(what, "start it again the way it was started")
        if not found:
            raise UsageError(f"no node is left on which job {job_id} could go on", "rankdeck up starts agents")
        nodes = list(next_split(found, num_ranks, takes_any=without is not None))
        # The nodes of the attempt are settled here: one that comes back while the job ends was not part of the request.
        statuses = {node: found[node] for node in nodes}
        addresses = [None] if without is None else self._master_addrs(statuses)
        try:
            if not has_ended(statuses):
                self.doing = "restart: waiting for the job to end"
                if is_immediate:
                    await self._fleet().kill(job_id, list(found))
                else:
                    await self._fleet().stop(job_id, list(found))
                await self._ended(job_id, nodes, wish)
            begun = await self._begin(job_id, nodes, num_ranks, wish, addresses)
        finally:
            if wish == self._num_wishes:
                self.doing = ""
        if begun is None:
            return self._logged(f"the restart of job {job_id} was given up for another wish")
        ranks = f"{begun.world_size} rank{'' if begun.world_size == 1 else 's'}"
        return self._logged(f"job {job_id} restarts with {ranks} ({attempt_text(begun.attempt)})")

    def _master_addrs(self, statuses: Mapping[str, JobStatus]) -> list[str | None]:
        """Return the master addresses to try for the next attempt, best first; an empty one keeps the last.

        Raises:
            UsageError: The first node has no usable address.
        """
        nodes = in_order(statuses)
        are_of_one_attempt = len({(one.attempt, one.num_nodes) for one in statuses.values()}) == 1
        if len(nodes) > 1 and statuses[nodes[0]].node_rank == 0 and are_of_one_attempt:
            return [""]
        return [*master_addrs(nodes, self._addresses)]

    async def statuses(self, job_id: str) -> dict[str, JobStatus]:
        """Return the status of a job on each node that answers and knows it.

        Raises:
            AgentRefusedError: No node knows it.
            AgentUnreachableError: No node that answers knows it, and others do not answer.
        """
        asked = (self._fleet().report(node) for node in self._nodes)
        results = dict(zip(self._nodes, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        reports = {node: result for node, result in results.items() if not isinstance(result, BaseException)}
        found = {node: status for node, report in reports.items() for status in report.jobs if status.job_id == job_id}
        failures = [result for result in results.values() if isinstance(result, BaseException)]
        if any(not isinstance(failure, AppError) for failure in failures) or (failures and not found):
            raise failures[0]
        if not found:
            known = sorted({clean_name(status.job_id) for report in reports.values() for status in report.jobs})
            refusal_text = unknown_job_text(job_id, known, list(reports))
            raise AgentRefusedError(nodes_text(self._nodes), RefusalReason.UNKNOWN_JOB, refusal_text)
        return found

    async def _wish(self) -> int:
        """Replace the request in progress; return the number of the new one.

        Waits until an attempt that is being begun has begun: a command that ends the job would else come too early.
        """
        self.doing = ""
        self._num_wishes += 1
        wish = self._num_wishes
        async with self._beginning:
            return wish

    async def _begun(self, job_id: str) -> dict[str, JobStatus]:
        """Return the status of a job by node; what a lost console has prepared and not begun is aborted first."""
        statuses = await self.statuses(job_id)
        prepared = [node for node, status in statuses.items() if status.state is JobState.PREPARED]
        if not prepared:
            return statuses
        await self._fleet().abort(job_id, prepared)
        return await self.statuses(job_id)

    async def _of(self, job_id: str, nodes: Sequence[str]) -> dict[str, JobStatus]:
        """Return the status of a job on some nodes, each of which has to answer."""
        reports = await asyncio.gather(*(self._fleet().report(node) for node in nodes))
        found = {}
        for node, report in zip(nodes, reports, strict=True):
            status = next((status for status in report.jobs if status.job_id == job_id), None)
            if status is None:
                raise AgentRefusedError(node, RefusalReason.UNKNOWN_JOB, f"it no longer knows job {job_id}")
            found[node] = status
        return found

    async def _ended(self, job_id: str, nodes: Sequence[str], wish: int) -> None:
        """Return once a job has ended on its nodes, or another request has come."""
        loop = asyncio.get_running_loop()
        last_reply_s = loop.time()
        while wish == self._num_wishes:
            try:
                if has_ended(await self._of(job_id, nodes)):
                    return
                last_reply_s = loop.time()
            except AgentUnreachableError:
                if loop.time() > last_reply_s + AWAY_PATIENCE_S:
                    raise
            await asyncio.sleep(POLL_S)

    async def _begin(
        self, job_id: str, nodes: Sequence[str], num_ranks: int | None, wish: int, addresses: Sequence[str | None]
    ) -> PrepareAgain | None:
        """Begin the next attempt, once nothing of the last one is left.

        Each node may once name a later attempt: it keeps logs of one that it no longer reports.

        Returns:
            The command to the first node; None, and nothing is begun, if another request has come.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + LEFTOVERS_PATIENCE_S
        meet_at, *others = addresses
        free_attempt, names_left = 0, len(nodes)
        while True:
            statuses = await self._of(job_id, nodes)
            try:
                async with self._beginning:
                    if wish != self._num_wishes:
                        return None
                    self.doing = "restart: starting again"
                    commands = next_attempt(statuses, num_ranks, meet_at, free_attempt)
                    await self._fleet().start_again(commands)
            except AgentRefusedError as error:
                if error.reason == RefusalReason.UNREACHABLE and others:
                    meet_at, *others = others
                elif names_left and error.next_attempt is not None:
                    free_attempt, names_left = max(free_attempt, error.next_attempt), names_left - 1
                elif error.reason != RefusalReason.WRONG_STATE or loop.time() > deadline_s:
                    raise
                await asyncio.sleep(POLL_S)
            else:
                return next(iter(commands.values()))

    def _kept(self, action: str, job_id: str, doing: Awaitable[str]) -> Awaitable[str]:
        return self._audit.kept(AuditedAction(action, tuple(self._nodes), job_id), doing)

    def _logged(self, sentence: str) -> str:
        self._notify(sentence)
        return sentence


def has_ended(statuses: Mapping[str, JobStatus]) -> bool:
    """Return whether no process of a job runs any more."""
    return all(status.state in ENDED_STATES for status in statuses.values())


MAX_PAST = 8
"""Jobs of the host that are listed; each costs one command to its agent."""


class JobStarter:
    """Implements `app.tui.source.Starter`; usable once the session is connected.

    Attributes:
        hosts: Names of the hosts.
        where: Short text with some of the names and the number of the others.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        fleet: Callable[[], Fleet],
        usual_python: Callable[[], str],
        start: Callable[[RunRequest], Awaitable[str]],
    ) -> None:
        """Set up for hosts that all take part; the first one's agent knows what was started before.

        Args:
            hosts: Their names.
            fleet: Reaches them.
            usual_python: Returns the first agent's Python; empty until that agent is found.
            start: Starts a job and returns a sentence about it.
        """
        self.hosts = list(hosts)
        self.where = nodes_text(hosts)
        self._first = hosts[0]
        self._fleet = fleet
        self._usual_python = usual_python
        self._start = start
        self._own: dict[str, Program] = {}
        """Programs that this session has started, by job id, unmasked."""
        self._metrics: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Patterns for metrics with which a program's file was started last, as far as known."""

    def remember(self, request: RunRequest) -> None:
        """Remember a job that this session starts."""
        self._metrics[_file_of(request.command)] = request.metrics
        self._own[request.job_id] = Program(
            request.command,
            request.num_ranks,
            request.max_restarts,
            request.workdir,
            request.python,
        )

    async def past(self) -> list[Program]:
        """Return the programs of the first host's latest jobs, the latest first, each program once.

        Raises:
            AgentUnreachableError: The agent does not answer.
        """
        report = await self._fleet().report(self._first)
        found = [await self._program(job.job_id) for job in list(report.jobs)[: -MAX_PAST - 1 : -1]]
        return list(dict.fromkeys(program for program in found if program is not None))

    async def start(self, program: Program) -> str:
        """Start a program as `rankdeck run` does, under a generated job id; return a sentence about it.

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
            metrics=self._metrics.get(_file_of(command), ()),
        )
        done = await self._start(request)
        self.remember(request)
        return done

    def _workdir(self, typed: str) -> str:
        """Return a directory as `rankdeck run` resolves it: on this machine, relative to the current directory."""
        return workdir_on(THIS_MACHINE, typed) if typed and self.hosts == [THIS_MACHINE] else typed

    async def _program(self, job_id: str) -> Program | None:
        """Return the program of a job; None if it is no longer known."""
        if job_id in self._own:
            return self._own[job_id]
        try:
            reply = await self._fleet().ask(self._first, ShowJob(job_id))
        except AgentRefusedError:
            return None
        if not isinstance(reply, Shown):
            return None
        spec = reply.spec
        self._metrics[_file_of(spec.command)] = tuple(spec.metrics)
        python = "" if spec.python == self._usual_python() else spec.python
        if len(self.hosts) > 1:  # each host has its own number of ranks and its own directory
            return Program(tuple(spec.command), python=python)
        return Program(tuple(spec.command), spec.local_world_size, spec.max_restarts, spec.workdir, python)


def _file_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return the file of a program, or `-m` and its module, without its arguments."""
    return tuple(command[: 2 if command[0] == "-m" else 1])


def workdir_on(host: str, workdir: str) -> str:
    """Return where a program runs: by default a host's home, and on this machine the current directory.

    Raises:
        UsageError: That directory is gone.
    """
    if host != THIS_MACHINE:
        return workdir or "~"
    try:
        return os.path.abspath(os.path.expanduser(workdir))  # noqa: PTH100, PTH111 - the user decides on `..` of a link
    except FileNotFoundError as error:
        raise UsageError("this directory is gone", "name one: --workdir") from error


PATIENCE_S = 12.0
"""Seconds from the first failure: ranks that notice it exit by themselves, and evidence is complete after ten."""
_HAS_FAILED = frozenset({JobState.FAILED, JobState.LOST})


class AssignmentGuard:
    """Watches the node assignments of all jobs of a session."""

    def __init__(self) -> None:
        self._failed_at_s: dict[tuple[str, int], float] = {}
        self._done: set[tuple[str, int, str]] = set()

    def to_end(self, assignments: Mapping[str, JobStatus], now_s: float) -> list[str]:
        """Return the nodes on which a job should be ended now.

        Args:
            assignments: Status of one attempt of a job, by node, as far as nodes have reported it.
            now_s: Monotonic; infinite on the last call.
        """
        first = next(iter(assignments.values()), None)
        if first is None or first.is_elastic or first.is_adopted:
            return []
        if not any(status.state in _HAS_FAILED for status in assignments.values()):
            return []
        key = (first.job_id, first.attempt)
        failed_at_s = self._failed_at_s.setdefault(key, now_s)
        if now_s < failed_at_s + PATIENCE_S:
            return []
        running = (node for node, status in assignments.items() if status.state is JobState.RUNNING)
        return [node for node in running if (*key, node) not in self._done]

    def end_has_come(self, status: JobStatus, node: str) -> None:
        """Note that a node has agreed to end its part, so that it is asked once."""
        self._done.add((status.job_id, status.attempt, node))
