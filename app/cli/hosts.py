"""The commands that watch jobs on some hosts: `attach`, `status`, `stacks`, `inspect`, and `serve`, for a browser."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from app.cli.chosen_hosts import HostsWanted, Watch, link, on_each, reached, takes_hosts, watch
from app.cli.headless import print_line, waiting_for
from app.cli.options import (
    audit_log,
    evidence_option,
    follow_one_job,
    job_argument,
    job_under_way,
    json_option,
    no_evidence_option,
    print_json,
    read_only_option,
    record_option,
    session_options,
    watch_option,
)
from app.cli.presenting import ending_signals, is_terminal, show_session
from app.cli.settings_options import NO_FILES, read_settings, settings_options, takes_settings
from app.diagnosis.causes import Severity
from app.errors import AgentUnreachableError, AppError, ExitCode, NoAgentError, SessionError, UsageError
from app.fleet.agent_link import AgentLink, LinkGroup
from app.inspect.comparison import finding_of, standing_of
from app.inspect.dump_files import read_dumps
from app.inspect.dumps import compared
from app.inspect.inspection_text import job_lines, job_object, unseen_lines
from app.inspect.inspector import look_at_host, offer, own_py_spy
from app.inspect.nccl_ras import ranks_behind
from app.inspect.outside_reports import distinction
from app.inspect.seen import jobs_of
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.session.options import SessionOptions
from app.session.outside import InspectSession
from app.session.remote_session import RemoteSession
from app.stacks.groups import picture_of, stacks_object
from app.stacks.stack_text import picture_lines, summary_text
from app.text import clean, nodes_text
from app.view.nodes import ended_jobs_text
from app.view.summary import (
    ended_beside,
    exit_code,
    headline_hint,
    headline_text,
    is_over,
    status_object,
    summary_lines,
    summary_object,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from app.inspect.seen import HostSeen, SeenJob
    from app.session.hosts import Hosts
    from app.settings.schema import Settings
    from app.stacks.groups import StackPicture
    from app.view.view import View

POLL_S = 0.1
FIRST_REPORTS_S = 5.0
"""Seconds to wait for the first report of a node whose agent serves."""
WATCH_PERIOD_S = 1.0
STATUS_REPORTS_S = 1.0
"""Seconds of reports before a status: rates need two reports, and a wait must be seen twice."""


@click.command()
@evidence_option
@no_evidence_option
@record_option
@read_only_option
@click.option("--headless", is_flag=True, help="No screen: lines on stderr until the job ends, a summary on stdout")
@json_option
@takes_settings
@takes_hosts
@job_argument
def attach(*, wanted: HostsWanted, job_id: str, headless: bool, is_json: bool, **how: Any) -> None:
    """Watch a job that rankdeck runs, from any console.

    Without JOB it is the one that was started last of those under way. `inspect` looks at jobs of other launchers.
    """
    options = session_options(**how)
    with contextlib.suppress(UsageError):  # watching works even where this directory is gone
        wanted = wanted.with_workdirs("")

    def find(link: AgentLink) -> None:
        try:
            link.find()
        except NoAgentError as error:
            found = offer([link])
            error.hint = " or ".join(filter(None, [found and f"{found}: rankdeck inspect", error.hint]))
            raise

    def make(hosts: Hosts) -> RemoteSession:
        session = RemoteSession(hosts, None, options, job_id)
        session.when_idle = partial(offer, hosts.links)
        return session

    job = Watch(find, needs_all=False, look=lambda _hosts, _notify: None, make=make)
    watch(wanted, job, how["settings"], is_json=is_json, is_headless=headless)


@click.command()
@watch_option
@json_option
@takes_settings
@takes_hosts
@job_argument
def status(*, wanted: HostsWanted, job_id: str, is_json: bool, is_watching: bool, settings: Settings) -> None:
    """Print the state of hosts, and of a job.

    Without JOB it is the one that was started last of those under way, else the one that ended last while an agent
    watched. Exit code 10 while a verdict stands, as for a lost host of the job, 1 if the job has failed. A wait below
    10 s is a WARNING and no verdict yet: 0. See `help exit-codes`.
    """
    with looking_on(wanted, job_id, settings) as session:
        show = partial(_print_status, is_json=is_json, attach="" if job_id else session.attach_command)
        code = asyncio.run(look(session, show, is_watching=is_watching))
    raise SystemExit(code)


@contextlib.contextmanager
def looking_on(wanted: HostsWanted, job_id: str, settings: Settings) -> Iterator[RemoteSession]:
    """Yield a session that watches a job on some hosts; raises as `reached`."""
    with reached(wanted, AgentLink.find, needs_all=False) as hosts:
        options = SessionOptions(thresholds=settings.thresholds, audit=audit_log())
        yield RemoteSession(hosts, None, options, job_id)


@click.command()
@job_argument
@click.option(
    "--all",
    "is_whole",
    is_flag=True,
    help="Every frame of every thread, the flight recorder, versions, and the kernel's facts",
)
@click.option("--native", "is_native", is_flag=True, help="With C and C++ frames, by py-spy; stops each rank shortly")
@json_option
@takes_hosts
def stacks(*, job_id: str, wanted: HostsWanted, is_json: bool, **how: bool) -> None:
    """Print where every rank of a job stands, frame by frame.

    Identical stacks are together, the odd one comes first.
    """
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
        job_id = await job_under_way(session, job_id)
        with waiting_for(lambda: f"{session.title}: waiting for the stacks of job {job_id}"):
            return picture_of(await session.stacks(job_id=job_id, is_native=is_native))
    finally:
        await session.close()


async def first_view(session: RemoteSession, *, replays: bool = True) -> View:
    """Connect, and return the view after a second of reports; the caller closes the session.

    Hosts that do not report in time are named on standard error, and are lost to the job. Without `replays` verdicts
    are not based on what the nodes remember.

    Raises:
        AppError: No host can be reached, none reports, or none knows the job.
    """
    doing = "asking the agents"
    with waiting_for(lambda: f"{session.title}: {doing}"):
        await session.connect()
        await session.check_job()
        if replays:
            doing = "reading what the agents remember"
            await session.replay_history()
        doing = "waiting for the first reports"
        return await _first_reports(session)


async def _first_reports(session: RemoteSession) -> View:
    """Return the view after a second of reports; see `first_view`."""
    deadline_s = time.monotonic() + FIRST_REPORTS_S
    enough_s = deadline_s
    while True:
        view = session.view()
        now_s = time.monotonic()
        silent = [row.node for row in view.nodes() if row.state != "up" and row.node not in session.away]
        if not silent:
            enough_s = min(enough_s, now_s + STATUS_REPORTS_S)
        elif now_s > deadline_s:
            error = AgentUnreachableError(nodes_text(silent), f"no report in {FIRST_REPORTS_S:.0f} s")
            if all(row.state != "up" for row in view.nodes()):
                raise error
            print_line(f"rankdeck: {error}; going on without {len(silent)} of {len(view.nodes())} hosts")
            session.put_silent(silent, UnreachableReason(error.detail, UnreachableKind.ANSWER))
            return session.view()
        if now_s >= enough_s:
            return view
        await asyncio.sleep(POLL_S)


async def look(session: RemoteSession, show: Callable[[View], object], *, is_watching: bool) -> ExitCode:
    """Show the current rows, once or every second until the job has ended; return the exit code.

    Raises:
        AppError: As `first_view`, or the connection is permanently lost.
    """
    if is_watching:
        follow_one_job(session)
    try:
        view = await first_view(session)
        while True:
            if is_watching and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
                click.clear()
            show(view)
            for notice in session.drain_notices():
                print_line(f"rankdeck: {notice}")
            if not is_watching or is_over(view):
                return exit_code(view)
            await asyncio.sleep(WATCH_PERIOD_S)
            view = session.view()
    finally:
        await session.close()


def _nodes_line(view: View) -> str:
    """Return `gpu1: up`; of many nodes, some names and the number of the others, by state."""
    by_state: dict[str, list[str]] = {}
    for row in view.nodes():
        by_state.setdefault(row.state, []).append(row.node)
    return ", ".join(f"{nodes_text(nodes)}: {state}" for state, nodes in by_state.items())


def _print_status(view: View, *, is_json: bool, attach: str = "") -> None:
    """Print the status; where the job shown has ended, with the names of others if `attach` shows one of them."""
    if is_json:
        click.echo(msgspec.json.encode(status_object(view)).decode())
    else:
        click.echo(f"{_nodes_line(view)}; {headline_text(view)}")
        if hint := headline_hint(view):
            click.echo(f"  {hint}")
        if view.other_jobs_text:
            click.echo(view.other_jobs_text)
        if attach and is_over(view) and (ended := ended_jobs_text(ended_beside(view), attach)):
            click.echo(f"also {ended}")
        if view.job() is not None:
            click.echo("\n".join(summary_lines(summary_object(view), headline=view.headline().text)))


LOOK_PERIOD_S = 1.0
"""Seconds between two looks at a rank from outside."""


@click.command()
@click.option("--looks", type=click.IntRange(2, 60), default=3, show_default=True, help="How often to look, 1 s apart")
@click.option("--watch", "is_watching", is_flag=True, help="Inspect until Ctrl-C; with --json an object each time")
@click.option("--console", "is_on_screen", is_flag=True, help="Show it in the console, with a look every 1.5 s")
@read_only_option
@click.option(
    "--evidence",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write all that the latest looks have seen into a new file, as JSON",
)
@click.option(
    "--dumps",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="DIR",
    help="Compare the files that torch's flight recorder left there, one a rank, of ranks that are gone",
)
@click.option(
    "--nccl", "asks_nccl", is_flag=True, help="Ask NCCL (2.28.7 or newer) which rank has launched fewer calls"
)
@json_option
@takes_settings
@functools.partial(takes_hosts, goes_to_each=True)
@click.argument("which", metavar="[PID|JOB]", required=False)
def inspect(*, wanted: HostsWanted, which: str | None, is_json: bool, **how: Any) -> None:
    """Name the rank that holds up training of any launcher.

    Nothing has to be prepared. Reads /proc and, by py-spy, the stacks of all ranks, several times; pauses nothing. Exit
    code 10 when a rank holds the others up: a CRITICAL. A WARNING is 0, as after a few looks: see `help exit-codes`.
    """
    if how["dumps"] is not None:
        raise SystemExit(_print_dumps(how["dumps"], is_json=is_json))
    if wanted.hub is not None:
        raise UsageError("inspect does not go through a relay", "name the hosts: --relay none --host gpu1")
    spy, evidence = own_py_spy(), how["evidence"]
    if how["is_read_only"] and not how["is_on_screen"]:
        raise UsageError("--read-only is for --console: without it inspect only looks", "leave it out")
    if how["is_on_screen"]:
        if which is not None or is_json or how["is_watching"] or how["asks_nccl"] or evidence is not None:
            raise UsageError("--console takes no job, no --nccl and no other output", "its key i goes from job to job")
        _show_inspection(wanted, how["settings"], is_read_only=how["is_read_only"])
    if evidence is not None:
        _write(evidence, {}, is_new=True)
    see = partial(look_at_host, spy=spy, num_looks=how["looks"], period_s=LOOK_PERIOD_S, asks_nccl=how["asks_nccl"])
    while True:
        code = _inspect(wanted, which, see, is_json=is_json, evidence=evidence)
        if not how["is_watching"]:
            raise SystemExit(code)
        time.sleep(LOOK_PERIOD_S)


def _show_inspection(wanted: HostsWanted, settings: Settings, *, is_read_only: bool) -> NoReturn:
    """Show what runs on some hosts in the console, without their agents, and exit.

    Raises:
        AppError: No host can be reached, or there is no terminal.
    """
    if not is_terminal():
        raise UsageError("there is no terminal for a console", "leave --console out")
    with LinkGroup() as group:
        link(wanted, group)
        away = [error for _, error in group.connect(lambda _link: None) if error is not None]
        if len(away) == len(group.links):
            raise away[0]
        options = SessionOptions(is_read_only=is_read_only, audit=audit_log())
        session = InspectSession(group.links, f"rankdeck on {nodes_text(wanted.names)}", options)
        raise SystemExit(asyncio.run(show_session(session, settings.console)))


def _inspect(
    wanted: HostsWanted,
    which: str | None,
    see: Callable[[AgentLink], HostSeen],
    *,
    is_json: bool,
    evidence: Path | None,
) -> ExitCode:
    """Look once, print what is found, and return the exit code; `evidence` is a file of our own."""
    seen, rows, code = _seen_on(wanted, see)
    if evidence is not None:
        _write(evidence, seen)
    jobs = [job for job in jobs_of(seen.items()) if which is None or _is_meant(job, which)]
    if which is not None and not jobs and seen:
        error = UsageError(f"no rank of {clean(which)} runs on {nodes_text(list(seen))}", "rankdeck inspect shows all")
        if code is ExitCode.WELL:
            raise error
        print_line(f"rankdeck: {error.whole}")  # it may run on the host that was not reached
    found = [(job, [standing_of(rank) for rank in job.ranks]) for job in jobs]
    findings = [(job, standings, finding_of(job, standings, ranks_behind(job))) for job, standings in found]
    if is_json:
        print_json({"jobs": [job_object(*one) for one in findings], "unseen": unseen_lines(seen), "hosts": rows})
    else:
        for one in findings:
            click.echo("\n".join(job_lines(*one, distinction(one[0], jobs))))
        if not findings and seen and which is None:
            elsewhere = "" if wanted.typed else "on another host: --host; "
            hint = f"{elsewhere}what ranks that are gone may have left: rankdeck help inspect"
            click.echo(f"no training ranks run on {nodes_text(list(seen))} ({hint})")
        for line in unseen_lines(seen):
            print_line(f"rankdeck: {line}")
    is_alarm = any(finding.severity is Severity.CRITICAL for _, _, finding in findings)
    return ExitCode.VERDICT_STANDS if is_alarm else code


def _print_dumps(directory: Path, *, is_json: bool) -> ExitCode:
    """Print what the dumps in a directory show, and return the exit code."""
    finding = compared(*read_dumps(directory))
    if is_json:
        print_json({"dumps": finding._asdict()})
    else:
        click.echo(f"{finding.severity.name}  {finding.text}")
    return ExitCode.VERDICT_STANDS if finding.severity is Severity.CRITICAL else ExitCode.WELL


def _seen_on(
    wanted: HostsWanted, see: Callable[[AgentLink], HostSeen]
) -> tuple[dict[str, HostSeen], list[dict[str, str | None]], ExitCode]:
    """Return what each host has shown, a row a host for `--json`, and the exit code of the first that failed.

    Errors are printed.
    """
    seen: dict[str, HostSeen] = {}
    rows: list[dict[str, str | None]] = []
    code = ExitCode.WELL
    for host, answer in on_each(wanted.entries, wanted.python, wanted.ssh_config, see):
        if isinstance(answer, AppError):
            code = code or ExitCode(answer.exit_code)
            rows.append({"host": host, "error": str(answer), "hint": answer.hint})
            print_line(f"rankdeck: {answer.whole}")
        else:
            rows.append({"host": host, "error": None, "hint": ""})
            seen[host] = answer
    return seen, rows, code


def _is_meant(job: SeenJob, which: str) -> bool:
    """Return whether a job is what a user has typed: its key or run id, its script with or without path, or a pid."""
    program, run_id = job.ranks[0].program, job.name.partition(" ")[0]
    return which in {job.name, run_id, program, Path(program).name, *(str(rank.pid) for rank in job.ranks)}


def _write(path: Path, seen: dict[str, HostSeen], *, is_new: bool = False) -> None:
    text = msgspec.json.format(msgspec.json.encode(seen))
    try:
        if is_new:
            path.touch(0o600, exist_ok=False)
        path.write_bytes(text)
    except OSError as error:
        raise UsageError(f"{clean(str(path))} cannot be written: {error.strerror}", "name a new file") from error


SERVED_VERBS = ("attach", "demo", "replay")
"""Commands that open a console, and may run once more for each page."""


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On loopback [a free one]")
@click.option("--control", is_flag=True, help="Let the page act on the job too; without this it only watches")
@settings_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def serve(
    *, port: int, control: bool, command: tuple[str, ...], assignments: tuple[str, ...], has_no_files: bool
) -> None:
    """Serve the console to a browser of this machine.

    As in `serve -- attach --host gpu1`, or `serve -- replay FILE`. The printed address holds a secret; whoever has it
    may watch. From another machine: `ssh -L`.
    """
    # Errors of the settings are reported here, before any page exists that could show them.
    read_settings(assignments, has_files=not has_no_files and NO_FILES not in command)
    verb, *others = served_command(command, may_control=control)
    chosen = [*([NO_FILES] if has_no_files else []), *(f"--set={assignment}" for assignment in assignments)]
    argv = [sys.executable, "-P", "-m", "app", verb, *chosen, *others]
    if importlib.util.find_spec("textual_serve") is None:
        raise SessionError("textual-serve is not installed", "pip install '.[web]' in rankdeck's clone")
    try:
        raise SystemExit(asyncio.run(_serve(argv, " ".join(("rankdeck", *command)), port)))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UsageError(f"port {port} cannot be listened on: {why}", "name another, or none") from error


def served_command(command: tuple[str, ...], *, may_control: bool) -> list[str]:
    """Return the command that runs for each page.

    Raises:
        UsageError: The command opens no console, or one that cannot be opened twice.
    """
    verb, *others = command
    if verb not in SERVED_VERBS:
        raise UsageError(f"serve shows {', '.join(SERVED_VERBS)}, not {verb!r}", "serve -- attach --host gpu1")
    for option in ("--headless", "--json"):
        if option in others:
            raise UsageError(f"{option} opens no screen that could be served", f"leave {option} out")
    only_looks = verb != "replay" and not may_control and "--read-only" not in others
    return [verb, *(["--read-only"] if only_looks else []), *others]


async def _serve(argv: list[str], title: str, port: int) -> ExitCode:
    from app.web.server import WebConsole  # noqa: PLC0415 - only who serves pays for it

    def show_address(address: str) -> None:
        click.echo(address)
        print_line("rankdeck: open it in a browser of this machine; Ctrl-C ends it")

    serving = asyncio.create_task(WebConsole(argv, title).run(port, show_address))
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return ExitCode.INTERRUPTED
    return ExitCode.WELL
