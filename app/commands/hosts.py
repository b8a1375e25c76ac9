"""The verbs that look at a job of some hosts: attach, status, stacks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from app.commands.audited import audit_log
from app.commands.host_options import (
    evidence_option,
    json_option,
    no_evidence_option,
    present,
    read_only_option,
    record_option,
    session_options,
)
from app.commands.hosts_of_a_job import HostsWanted, reached, takes_hosts
from app.commands.settings_options import takes_settings
from app.errors import AgentUnreachableError, ExitCode, UsageError
from app.headless import exit_code, headline_text, print_line
from app.presenting import print_summary
from app.program import check_job_id
from app.sessions.options import SessionOptions
from app.sessions.remote_session import RemoteSession
from app.ssh.agent_link import AgentLink
from app.stacks.groups import picture_of, stacks_object
from app.stacks.words import picture_lines, summary_text
from app.status_object import status_object
from app.words import nodes_text

if TYPE_CHECKING:
    from app.settings.schema import Settings
    from app.stacks.groups import StackPicture
    from app.view import View

POLL_S = 0.1
FIRST_REPORTS_S = 5.0
"""Waited for the first report of a node whose agent serves."""
STATUS_REPORTS_S = 1.0
"""A second of reports: rates need two, and a wait must have been seen twice to be one."""


@click.command()
@evidence_option
@no_evidence_option
@record_option
@read_only_option
@click.option("--headless", is_flag=True, help="No screen: lines on stderr until the job ends, a summary on stdout")
@json_option
@takes_settings
@takes_hosts
@click.argument("job_id", metavar="[JOB]", required=False)
def attach(*, wanted: HostsWanted, job_id: str | None, headless: bool, is_json: bool, **how: Any) -> None:
    """Watch JOB, or the job that was started last of those under way, whoever has started it."""
    options = session_options(**how)
    job_id = check_job_id(job_id) if job_id else ""
    with contextlib.suppress(UsageError):  # where this directory is gone one can still look on
        wanted = wanted.with_workdirs("")
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        session = RemoteSession(hosts, None, options, job_id)
        present(session, how["settings"], is_json=is_json, is_headless=headless)


@click.command()
@json_option
@takes_settings
@takes_hosts
@click.argument("job_id", metavar="[JOB]", required=False)
def status(*, wanted: HostsWanted, job_id: str | None, is_json: bool, settings: Settings) -> None:
    """Print how hosts and JOB stand, or the job that was started last of those under way.

    Exit code 10 while a verdict stands, 1 if the job has failed.
    """
    job_id = check_job_id(job_id) if job_id else ""
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        options = SessionOptions(thresholds=settings.thresholds, audit=audit_log())
        view = asyncio.run(_look(RemoteSession(hosts, None, options, job_id)))
    raise SystemExit(_print_status(view, is_json=is_json))


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option(
    "--all",
    "is_whole",
    is_flag=True,
    help="Every frame of every thread, the flight recorder, versions, and what the kernel says",
)
@click.option("--native", "is_native", is_flag=True, help="With C and C++ frames, by py-spy; stops each rank shortly")
@json_option
@takes_hosts
def stacks(*, job_id: str, wanted: HostsWanted, is_json: bool, **how: bool) -> None:
    """Print where every rank of a job stands, frame by frame: identical stacks together, the odd one first."""
    check_job_id(job_id)
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        session = RemoteSession(hosts, None, SessionOptions(audit=audit_log()))
        picture = asyncio.run(_take_stacks(session, job_id, is_native=how["is_native"]))
    if is_json:
        click.echo(msgspec.json.encode(stacks_object(picture)).decode())
        return
    print_line(f"rankdeck: {summary_text(picture)}")
    click.echo("\n".join(line.text for line in picture_lines(picture, is_whole=how["is_whole"])))


async def _take_stacks(session: RemoteSession, job_id: str, *, is_native: bool) -> StackPicture:
    try:
        await session.connect()
        return picture_of(await session.session.stacks(job_id=job_id, is_native=is_native))
    finally:
        await session.close()


async def _look(session: RemoteSession) -> View:
    """Return the rows after a second of reports."""
    try:
        await session.connect()
        await session.check_job()
        await session.session.replay_history()
        deadline_s = time.monotonic() + FIRST_REPORTS_S
        enough_s = deadline_s
        while True:
            view = session.view()
            now_s = time.monotonic()
            silent = [row.node for row in view.nodes() if row.state != "up" and row.node not in session.away]
            if not silent:
                enough_s = min(enough_s, now_s + STATUS_REPORTS_S)
            elif now_s > deadline_s:
                raise AgentUnreachableError(nodes_text(silent), f"no report in {FIRST_REPORTS_S:.0f} s")
            if now_s >= enough_s:
                return view
            await asyncio.sleep(POLL_S)
    finally:
        await session.close()


def _nodes_line(view: View) -> str:
    """Return `gpu1: up`, or of several how many are in each state, and some of their names."""
    by_state: dict[str, list[str]] = {}
    for row in view.nodes():
        by_state.setdefault(row.state, []).append(row.node)
    return ", ".join(f"{nodes_text(nodes)}: {state}" for state, nodes in by_state.items())


def _print_status(view: View, *, is_json: bool) -> ExitCode:
    if is_json:
        click.echo(msgspec.json.encode(status_object(view)).decode())
    else:
        click.echo(f"{_nodes_line(view)}; {headline_text(view)}")
        if view.other_jobs_text:
            click.echo(view.other_jobs_text)
        if view.job() is not None:
            print_summary(view, is_json=False)
    return exit_code(view)
