"""The verbs that reach one host and do no harm to a job there: run, attach, status, stacks."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agent.wire.jobs import MAX_LOCAL_WORLD_SIZE, MAX_RESTARTS
from app.commands.host_options import (
    SESSION_OPTIONS,
    evidence_option,
    host_entry,
    host_option,
    json_option,
    link_to,
    no_evidence_option,
    print_json,
    reaches,
    read_only_option,
    record_option,
    session_options,
    workdir_on,
)
from app.commands.settings_options import takes_settings
from app.errors import AgentUnreachableError, ExitCode
from app.headless import exit_code, print_line
from app.presenting import is_terminal, print_session, print_summary, show_session
from app.program import check_command
from app.sessions.options import SessionOptions
from app.sessions.remote_job import (
    RunRequest,
    check_job_id,
    check_metrics,
    make_job_id,
)
from app.sessions.remote_session import RemoteSession
from app.ssh.config import THIS_MACHINE
from app.stacks.groups import picture_of, stacks_object
from app.stacks.words import picture_lines, summary_text
from app.status_object import status_object

if TYPE_CHECKING:
    from app.settings.schema import Settings
    from app.stacks.groups import StackPicture
    from app.view import View

POLL_S = 0.1
HEADLESS_PATIENCE_S = 600.0
"""A script wants an end: for so long a connection that is lost is tried again. The screen never gives up."""
STATUS_PATIENCE_S = 5.0
"""For the first reports of a node that has said that it serves."""
STATUS_REPORTS_S = 1.0
"""A second of reports: rates need two, and a wait must have been seen twice to be one."""


@click.command()
@host_option
@click.option(
    "--nproc-per-node",
    "num_ranks",
    type=click.IntRange(1, MAX_LOCAL_WORLD_SIZE),
    help="Ranks [the inventory's, else one for each GPU, without GPUs one for every two cores]",
)
@click.option("--share-gpus", "shares_gpus", is_flag=True, help="Let there be more ranks than GPUs")
@click.option(
    "--workdir",
    default="",
    help=f"Directory there that the program runs in [the inventory's, else home; on {THIS_MACHINE} this one]",
)
@click.option("--job-python", default="", help="The Python there that has torch [the agent's own]")
@click.option("--name", default="", help="What to call the job [the program's name and a number]")
@click.option(
    "--max-restarts", type=click.IntRange(0, MAX_RESTARTS), default=0, show_default=True, help="After a failure"
)
@click.option(
    "--abandon-after",
    "abandon_s",
    type=click.FloatRange(0),
    default=0.0,
    help="End ranks that hang for so many seconds while nobody watches [never]",
)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="REGEX",
    help="Find figures in what the ranks print: 'loss=([0-9.e+-]+)' is the loss, (?P<NAME>...) any other; RE2's syntax",
)
@click.option("--no-probe", is_flag=True, help="Leave the ranks as they are: watch their processes and output only")
@click.option("--allow-faults", is_flag=True, help="Let harm be done to its ranks, by `fault` or in the console")
@click.option("--detach", is_flag=True, help="Start it, say its name, and leave")
@evidence_option
@no_evidence_option
@record_option
@read_only_option
@click.option("--headless", is_flag=True, help="No screen: lines on stderr, a summary on stdout")
@json_option
@takes_settings
@reaches
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(*, host: str, python: str, ssh_config: str, is_json: bool, headless: bool, detach: bool, **job: Any) -> None:
    """Start COMMAND under torchrun on a host, and watch it: `run --host gpu1 -- train.py --epochs 3`."""
    if detach and job["recording"] is not None:
        raise click.UsageError("--detach leaves, so there is nothing to --record")
    options = session_options(**{name: job[name] for name in SESSION_OPTIONS})
    command = check_command(tuple(job["command"]))
    entry = host_entry(host)
    request = RunRequest(
        command=command,
        job_id=check_job_id(job["name"] or make_job_id(command, secrets.token_hex(2))),
        num_ranks=job["num_ranks"] or entry.num_ranks,
        python=job["job_python"],
        workdir=workdir_on(host, job["workdir"] or entry.workdir),
        max_restarts=job["max_restarts"],
        abandon_s=job["abandon_s"],
        shares_gpus=job["shares_gpus"],
        metrics=check_metrics(job["metrics"]),
        is_probed=not job["no_probe"],
        allow_faults=job["allow_faults"],
    )
    with link_to(host, python, ssh_config) as link:
        link.connect()
        place = link.bring_up()
        if place.is_new:
            print_line(f"rankdeck: the agent on {host} is up (pid {place.pid})")
        session = RemoteSession(link, request, options)
        if detach:
            asyncio.run(_start(session))
            print_line(session.farewell())
            if is_json:
                print_json({"host": host, "job_id": request.job_id})
            else:
                click.echo(request.job_id)
            return
        _present(session, job["settings"], is_json=is_json, is_headless=headless)


@click.command()
@host_option
@evidence_option
@no_evidence_option
@record_option
@read_only_option
@click.option("--headless", is_flag=True, help="No screen: lines on stderr until the job ends, a summary on stdout")
@json_option
@takes_settings
@reaches
def attach(*, host: str, headless: bool, is_json: bool, python: str, ssh_config: str, **how: Any) -> None:
    """Watch the job of a host, whoever has started it."""
    options = session_options(**how)
    with link_to(host, python, ssh_config) as link:
        link.connect()
        link.find()
        _present(RemoteSession(link, None, options), how["settings"], is_json=is_json, is_headless=headless)


@click.command()
@host_option
@json_option
@takes_settings
@reaches
def status(*, host: str, is_json: bool, python: str, ssh_config: str, settings: Settings) -> None:
    """Print how a host and its job stand; exit code 10 while a verdict stands, 1 if the job has failed."""
    with link_to(host, python, ssh_config) as link:
        link.connect()
        link.find()
        view = asyncio.run(_look(RemoteSession(link, None, SessionOptions(thresholds=settings.thresholds))))
    raise SystemExit(_print_status(view, is_json=is_json))


@click.command()
@click.argument("job_id", metavar="JOB")
@host_option
@click.option(
    "--all",
    "is_whole",
    is_flag=True,
    help="Every frame of every thread, the flight recorder, versions, and what the kernel says",
)
@click.option("--native", "is_native", is_flag=True, help="With C and C++ frames, by py-spy; stops each rank shortly")
@json_option
@reaches
def stacks(*, job_id: str, host: str, is_json: bool, python: str, ssh_config: str, **how: bool) -> None:
    """Print where every rank of a job stands, frame by frame: identical stacks together, the odd one first."""
    check_job_id(job_id)
    with link_to(host, python, ssh_config) as link:
        link.connect()
        link.find()
        picture = asyncio.run(_take_stacks(RemoteSession(link), job_id, is_native=how["is_native"]))
    if is_json:
        click.echo(msgspec.json.encode(stacks_object(picture)).decode())
        return
    print_line(f"rankdeck: {summary_text(picture)}")
    click.echo("\n".join(line.text for line in picture_lines(picture, is_whole=how["is_whole"])))


HOST_VERBS = (run, attach, status, stacks)


async def _take_stacks(session: RemoteSession, job_id: str, *, is_native: bool) -> StackPicture:
    try:
        await session.connect()
        return picture_of(await session.session.stacks(job_id=job_id, is_native=is_native))
    finally:
        await session.close()


async def _start(session: RemoteSession) -> None:
    try:
        await session.start()
    finally:
        await session.close()


async def _look(session: RemoteSession) -> View:
    """Return the rows after a second of reports."""
    try:
        await session.connect()
        deadline_s = time.monotonic() + STATUS_PATIENCE_S
        enough_s = deadline_s
        while True:
            view = session.view()
            now_s = time.monotonic()
            if view.nodes()[0].state == "up":
                enough_s = min(enough_s, now_s + STATUS_REPORTS_S)
            elif now_s > deadline_s:
                raise AgentUnreachableError(view.nodes()[0].node, f"no report in {STATUS_PATIENCE_S:.0f} s")
            if now_s >= enough_s:
                return view
            await asyncio.sleep(POLL_S)
    finally:
        await session.close()


def _present(session: RemoteSession, settings: Settings, *, is_json: bool, is_headless: bool) -> None:
    if is_headless or is_json or not is_terminal():
        session.patience_s = HEADLESS_PATIENCE_S
        raise SystemExit(asyncio.run(print_session(session, is_json=is_json)))
    session.patience_s = math.inf
    raise SystemExit(asyncio.run(show_session(session, settings.console)))


def _print_status(view: View, *, is_json: bool) -> ExitCode:
    if is_json:
        click.echo(msgspec.json.encode(status_object(view)).decode())
    else:
        (node,) = view.nodes()
        click.echo(f"{node.node}: {node.state}; {view.headline().text}")
        if view.job() is not None:
            print_summary(view, is_json=False)
    return exit_code(view)
