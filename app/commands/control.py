"""The verbs that act on a host's job over SSH: stop, kill, restart, fault."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from agent.wire.jobs import ENDED_STATES, MAX_LOCAL_WORLD_SIZE, JobState
from app.commands.host_options import host_option, json_option, link_to, print_json, reaches
from app.errors import AppError
from app.faults import make_fault, told
from app.headless import print_line
from app.sessions.remote_job import check_job_id, only_running_job
from app.sessions.remote_session import RemoteSession
from ddpcore.wire import DEFAULT_HOLD_S, DEFAULT_SLOW_FACTOR, FaultKind

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any

    from agent.wire.jobs import JobStatus
    from app.sessions.control import JobControl
    from app.ssh.agent_link import AgentLink
    from ddpcore.wire import Fault

POLL_S = 0.1
END_PATIENCE_S = 300.0
"""`stop` waits for a step, a checkpoint and a grace period, which the job's own limits bound further."""


@click.command()
@click.argument("job_id", metavar="JOB")
@host_option
@click.option("--now", is_flag=True, help="SIGTERM at once, without an agreed step and a checkpoint")
@json_option
@reaches
def stop(*, job_id: str, host: str, now: bool, is_json: bool, python: str, ssh_config: str) -> None:
    """End a job in an orderly way: a step and a checkpoint if it can, else SIGTERM, then SIGKILL."""
    _end(
        link_to(host, python, ssh_config),
        job_id,
        lambda control: control.stop(job_id, is_agreed=not now),
        is_json=is_json,
    )


@click.command()
@click.argument("job_id", metavar="JOB")
@host_option
@json_option
@reaches
def kill(*, job_id: str, host: str, is_json: bool, python: str, ssh_config: str) -> None:
    """End every process of a job at once."""
    _end(link_to(host, python, ssh_config), job_id, lambda control: control.kill(job_id), is_json=is_json)


@click.command()
@click.argument("job_id", metavar="JOB")
@host_option
@click.option("--now", is_flag=True, help="Kill it at once, without an agreed step and a checkpoint")
@click.option(
    "--nproc-per-node", "num_ranks", type=click.IntRange(1, MAX_LOCAL_WORLD_SIZE), help="Ranks [as many as before]"
)
@json_option
@reaches
def restart(*, job_id: str, host: str, is_json: bool, python: str, ssh_config: str, **how: Any) -> None:
    """End a job in an orderly way if it runs, and begin its next attempt, with what it was started with."""
    check_job_id(job_id)
    with link_to(host, python, ssh_config) as link:
        link.connect()
        link.find()
        done, begun = asyncio.run(_restart(RemoteSession(link), job_id, how["num_ranks"], is_at_once=how["now"]))
    if is_json:
        print_json({"host": host, "job_id": job_id, "attempt": begun.attempt, "num_ranks": begun.world_size})
    else:
        click.echo(done)
        print_line(f"rankdeck: watch it: rankdeck attach --host {host}")


@click.command()
@click.argument("kind", type=click.Choice([kind.value for kind in FaultKind]))
@host_option
@click.option("--job", "job_id", default="", help="Id of the job [the one that runs there]")
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
@reaches
def fault(*, host: str, kind: str, job_id: str, is_json: bool, python: str, ssh_config: str, **how: Any) -> None:
    """Do harm to one rank of a job that allows it (`run --allow-faults`), to see what follows."""
    wanted = make_fault(FaultKind(kind), **how)
    with link_to(host, python, ssh_config) as link:
        if job_id:
            check_job_id(job_id)
        link.connect()
        link.find()
        job_id = asyncio.run(_inject(RemoteSession(link), host, job_id, wanted))
    if is_json:
        print_json({"host": host, "job_id": job_id, "kind": kind, "rank": wanted.rank, "at_step": wanted.at_step})
    else:
        click.echo(f"job {job_id} on {host}: rank {wanted.rank} {told(wanted)}")


async def _inject(session: RemoteSession, host: str, job_id: str, wanted: Fault) -> str:
    """Do harm to a rank of a job, or of the only one that runs; return the job's id."""
    try:
        await session.connect()
        fleet = session.session.fleet
        if not job_id:
            job_id = only_running_job(await fleet.report(host))
        await fleet.inject(host, job_id, wanted)
        return job_id
    finally:
        await session.close()


CONTROL_VERBS = (stop, kill, restart, fault)


def _end(link: AgentLink, job_id: str, ask: Callable[[JobControl], Awaitable[str]], *, is_json: bool) -> None:
    with link:
        check_job_id(job_id)
        link.connect()
        link.find()
        state = asyncio.run(_wait_for_end(RemoteSession(link), job_id, ask))
    if is_json:
        print_json({"host": link.host, "job_id": job_id, "state": state.value})
    else:
        click.echo(f"job {job_id} on {link.host}: {state.value}")


async def _wait_for_end(session: RemoteSession, job_id: str, ask: Callable[[JobControl], Awaitable[str]]) -> JobState:
    """Ask for a job's end, and return how it stands once it has come."""
    try:
        await session.connect()
        control = session.session.control
        await ask(control)
        deadline_s = time.monotonic() + END_PATIENCE_S
        said: JobState | None = None
        while True:
            (status,) = (await control.statuses(job_id)).values()
            if status.state in ENDED_STATES:
                return status.state
            if status.state is not said:
                print_line(f"rankdeck: job {job_id} is {status.state.value}")
                said = status.state
            if time.monotonic() > deadline_s:
                raise AppError(f"job {job_id} has not ended in {END_PATIENCE_S:.0f} s", f"rankdeck kill {job_id}")
            await asyncio.sleep(POLL_S)
    finally:
        await session.close()


async def _restart(
    session: RemoteSession, job_id: str, num_ranks: int | None, *, is_at_once: bool
) -> tuple[str, JobStatus]:
    """Return what was done, and how the job stands on its node then."""
    try:
        await session.connect()
        control = session.session.control
        done = await control.restart(job_id, num_ranks, is_at_once=is_at_once)
        (status,) = (await control.statuses(job_id)).values()
        return done, status
    finally:
        await session.close()
