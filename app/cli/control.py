"""The commands that act on a job on some hosts: stop, kill, restart, fault."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import click

from agent.wire.commands import RefusalReason
from agent.wire.jobs import ENDED_STATES, MAX_LOCAL_WORLD_SIZE, JobState
from app.cli.chosen_hosts import HostsWanted, reached, takes_hosts
from app.cli.headless import print_line, waiting_for, with_progress
from app.cli.options import (
    agrees_to_share,
    audit_log,
    beside_option,
    checked_job,
    job_argument,
    job_under_way,
    json_option,
    print_json,
    print_trouble,
)
from app.errors import AgentRefusedError, AppError, ExitCode, HostsBusyError
from app.fleet.agent_link import AgentLink
from app.session.options import SessionOptions
from app.session.remote_job import (
    check_room,
    end_states,
    latest_status,
    node_of_rank,
    of_latest_attempt,
    only_running_job,
)
from app.session.remote_session import RemoteSession
from app.text import nodes_text
from app.view.actions import fault_text, make_fault
from ddpcore.wire import DEFAULT_HOLD_S, DEFAULT_SLOW_FACTOR, FaultKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

    from agent.wire.jobs import JobStatus
    from app.session.control import JobControl
    from app.session.hosts import Hosts
    from ddpcore.wire import Fault

POLL_S = 0.1
_WORST_FIRST = (JobState.FAILED, JobState.LOST, JobState.STOPPED, JobState.SUCCEEDED)
"""States of an ended job on one node, the worst first."""


@click.command()
@job_argument
@click.option("--now", is_flag=True, help="SIGTERM at once, without an agreed step and a checkpoint")
@json_option
@partial(takes_hosts, is_control=True)
def stop(*, job_id: str, wanted: HostsWanted, now: bool, is_json: bool) -> None:
    """End a job in an orderly way.

    A program with the engine finishes a step and writes a checkpoint first. Any other is sent SIGTERM, and SIGKILL when
    its grace period is over.
    """
    _end(wanted, job_id, lambda control, job_id: control.stop(job_id, is_agreed=not now), is_json=is_json)


@click.command()
@job_argument
@json_option
@partial(takes_hosts, is_control=True)
def kill(*, job_id: str, wanted: HostsWanted, is_json: bool) -> None:
    """Kill every process of a job immediately."""
    _end(wanted, job_id, lambda control, job_id: control.kill(job_id), is_json=is_json)


@click.command()
@job_argument
@click.option("--now", is_flag=True, help="Kill it at once, without an agreed step and a checkpoint")
@click.option(
    "--nproc-per-node", "num_ranks", type=click.IntRange(1, MAX_LOCAL_WORLD_SIZE), help="Ranks of each host [as before]"
)
@click.option(
    "--on-these-hosts", "is_here", is_flag=True, help="On those named here, whichever of its hosts it ran on before"
)
@beside_option
@json_option
@partial(takes_hosts, is_control=True)
def restart(*, job_id: str, wanted: HostsWanted, is_json: bool, is_beside: bool, **how: Any) -> None:
    """End a job if it runs, and start its next attempt.

    It ends in an orderly way, and starts with the same options.
    """
    try:
        done, begun, watch = _restart_once(wanted, job_id, is_beside=is_beside, **how)
    except HostsBusyError as error:
        if is_json or not agrees_to_share(job_id, error):
            raise
        done, begun, watch = _restart_once(wanted, job_id, is_beside=True, **how)
    if is_json:
        fields = {"job_id": begun.job_id, "attempt": begun.attempt, "num_ranks": begun.world_size}
        print_json({"hosts": wanted.names, **fields})
    else:
        click.echo(done)
        print_line(f"rankdeck: watch it: {watch}")


@click.command()
@click.argument("kind", type=click.Choice([kind.value for kind in FaultKind]))
@click.option("--job", "job_id", callback=checked_job, help="Id of the job [the one that runs there]")
@click.option("--rank", type=click.IntRange(min=0), required=True, help="Global rank")
@click.option("--at-step", type=click.IntRange(min=0), help="Strike at this step [now, or at the next step]")
@click.option(
    "--factor",
    type=click.FloatRange(1, 1000),
    help=f"For slow: how many times as long a step takes [{DEFAULT_SLOW_FACTOR:g}]; 1 heals",
)
@click.option(
    "--for", "duration_s", type=click.FloatRange(0, 3600, min_open=True), help=f"For gil: seconds [{DEFAULT_HOLD_S:g}]"
)
@json_option
@partial(takes_hosts, is_control=True)
def fault(*, wanted: HostsWanted, kind: str, job_id: str, is_json: bool, **how: Any) -> None:
    """Inject a fault into one rank of a job.

    The job has to allow it: `run --allow-faults`.
    """
    harm = make_fault(FaultKind(kind), **how)
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        job_id, node = asyncio.run(_inject(_session(hosts), job_id, harm))
    if is_json:
        print_json({"host": node, "job_id": job_id, "kind": kind, "rank": harm.rank, "at_step": harm.at_step})
    else:
        click.echo(f"job {job_id} on {node}: rank {harm.rank} {fault_text(harm)}")


async def _inject(session: RemoteSession, job_id: str, harm: Fault) -> tuple[str, str]:
    """Inject a fault into a rank of a job, or of the only running one; return the job's id and the rank's node."""
    try:
        await session.connect()
        if not job_id:
            job_id = only_running_job(await session.reports())
        node = node_of_rank(of_latest_attempt(await session.job_control.statuses(job_id)), harm.rank)
        await session.inject_on(node, job_id, harm)
        return job_id, node
    finally:
        await session.close()
        print_trouble(session.audit)


def _session(hosts: Hosts) -> RemoteSession:
    return RemoteSession(hosts, None, SessionOptions(audit=audit_log()))


def _end(wanted: HostsWanted, job_id: str, ask: Callable[[JobControl, str], Awaitable[str]], *, is_json: bool) -> None:
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        job_id, states, num_unknown = asyncio.run(_wait_for_end(_session(hosts), job_id, ask))
    if is_json:
        state = min(states.values(), key=_WORST_FIRST.index)
        rows = [{"host": host, "state": its_state.value} for host, its_state in states.items()]
        print_json({"job_id": job_id, "state": state.value, "hosts": rows, "num_unknown_hosts": num_unknown})
    else:
        for state in dict.fromkeys(states.values()):
            nodes = [host for host, its_state in states.items() if its_state is state]
            click.echo(f"job {job_id} on {nodes_text(nodes)}: {state.value}")
    if num_unknown:
        print_line(f"rankdeck: how it stands on {num_unknown} more of its hosts is not known: it may run there")
        raise SystemExit(ExitCode.UNREACHABLE)


async def _wait_for_end(
    session: RemoteSession, job_id: str, ask: Callable[[JobControl, str], Awaitable[str]]
) -> tuple[str, dict[str, JobState], int]:
    """End a job and wait; return its id, its state on each node, and the number of nodes whose state is unknown."""
    done = ""
    try:
        await session.connect()
        job_id = await job_under_way(session, job_id)
        done = await ask(session.job_control, job_id)
        print_line(f"rankdeck: {done}")
        with waiting_for(lambda: f"{session.title}: waiting for the end of job {job_id}"):
            return job_id, *await _end_of(session, job_id)
    except AgentRefusedError as error:
        if not done or error.reason != RefusalReason.UNKNOWN_JOB:
            raise
        # The job was prepared but never started, and no agent knows it any more.
        return job_id, dict.fromkeys(await session.reports(), JobState.STOPPED), 0
    finally:
        await session.close()
        print_trouble(session.audit)


async def _end_of(session: RemoteSession, job_id: str) -> tuple[dict[str, JobState], int]:
    """Wait until a job that was asked to end has ended; return its states as `_wait_for_end`."""
    patience_s = await session.end_patience_s(job_id)
    deadline_s = time.monotonic() + patience_s
    shown = [JobState.STOPPING]  # how it stops was printed
    while True:
        statuses = of_latest_attempt(await session.job_control.statuses(job_id))
        states = end_states(statuses)
        moving = [state for state in dict.fromkeys(states.values()) if state not in ENDED_STATES]
        if not moving:
            return states, latest_status(statuses).num_nodes - len(states)
        if moving != shown:
            print_line(f"rankdeck: job {job_id} is {' and '.join(state.value for state in moving)}")
            shown = moving
        if time.monotonic() > deadline_s:
            raise AppError(f"job {job_id} has not ended in {patience_s:.0f} s", f"rankdeck kill {job_id}")
        await asyncio.sleep(POLL_S)


def _restart_once(wanted: HostsWanted, job_id: str, **how: Any) -> tuple[str, JobStatus, str]:
    """Return what `_restart` does, and the command that watches it, over connections of its own."""
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        done, begun = asyncio.run(_restart(_session(hosts), job_id, **how))
        return done, begun, hosts.command(f"attach {begun.job_id}")


async def _restart(
    session: RemoteSession, job_id: str, *, num_ranks: int | None, now: bool, is_here: bool, is_beside: bool
) -> tuple[str, JobStatus]:
    """Return what was done, and the job's status after it; `num_ranks` counts per node.

    Raises:
        HostsBusyError: It has ended, and other jobs run on its hosts.
    """
    try:
        await session.connect()
        job_id, control = await job_under_way(session, job_id, "restart"), session.job_control
        statuses, reports = await control.statuses(job_id), await session.reports(needs_all=False)
        check_room(job_id, {node: reports[node] for node in statuses if node in reports}, is_beside=is_beside)
        if num_ranks is not None:
            num_ranks *= len(statuses) if is_here else latest_status(statuses).num_nodes
        begin = control.restart(job_id, num_ranks, is_immediate=now, without=() if is_here else None)
        done = await with_progress(begin, session)
        return done, latest_status(await control.statuses(job_id))
    finally:
        await session.close()
        print_trouble(session.audit)
