"""The options that several commands share: how hosts are reached, relays, and how an answer is printed.

`reaches` and `link_by` are for commands that reach a host. `relay_options` and `through_relay` are for a relay and the
nodes behind it. `audit_log` is the log of what commands do to jobs and agents (`app.session.audit`). Options such as
`since_option` choose among rows.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click
import msgspec
from click.core import ParameterSource

from app.cli.headless import print_line, waiting_for
from app.cli.inventory_file import SSH_CONFIG_VARIABLE, load_inventory
from app.cli.presenting import is_served, is_terminal, print_session, show_session
from app.errors import AppError, HostsBusyError, SessionError, UsageError
from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS
from app.filters.terms import NumberTerm, WrongFilter
from app.fleet.local_link import LocalLink
from app.inventory.inventory import LOCAL, NO_RELAY, Inventory
from app.inventory.program import check_job_id
from app.paths import make_room_for_nodes
from app.recording.evidence import check_directory, default_directory
from app.session.audit import AuditLog, default_path
from app.session.options import SessionOptions
from app.session.remote_job import WHERE_NONE_RUNS, ended_jobs, only_running_job
from app.ssh.config import THIS_MACHINE, parse_destination
from app.text import clean
from app.view.nodes import ended_jobs_text
from app.view.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.fleet.agent_link import AgentLink
    from app.fleet.relay_hub import RelayHub
    from app.inventory.inventory import HostEntry
    from app.session.remote_session import RemoteSession
    from app.settings.schema import Settings
    from app.ssh.questions import QuestionDesk


def audit_log() -> AuditLog:
    """Return this user's audit log."""
    return AuditLog(default_path())


def print_trouble(audit: AuditLog) -> None:
    """Print why the audit log cannot be written, if so."""
    for notice in audit.drain_notices():
        print_line(f"rankdeck: {notice}")


UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
HEADLESS_PATIENCE_S = 600.0
"""Seconds for which a script retries a lost connection; the screen retries without end."""
_access_options = (
    click.option(
        "--python",
        default="python3",
        envvar="RANKDECK_PYTHON",
        show_default=True,
        show_envvar=True,
        help="The Python there that has rankdeck; may begin with ~/",
    ),
    click.option(
        "--ssh-config",
        default="",
        envvar=SSH_CONFIG_VARIABLE,
        show_envvar=True,
        metavar="FILE",
        help="Read instead of ~/.ssh/config",
    ),
)
exclude_option = click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave hosts of the inventory out, as 'gpu1*'"
)
watch_option = click.option(
    "--watch",
    "is_watching",
    is_flag=True,
    help="Print it again every second until the job has ended; with --json an object each time",
)


def checked_job(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str:
    """Return the job's id, checked before any host is connected to; empty where none was typed."""
    return check_job_id(value) if value else ""


job_argument = click.argument("job_id", metavar="[JOB]", required=False, callback=checked_job)
json_option = click.option("--json", "is_json", is_flag=True, help="One JSON object on stdout")
evidence_option = click.option(
    "--evidence",
    "evidence_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep evidence of each incident there [~/.local/state/rankdeck/evidence, the latest 20]",
)
record_option = click.option(
    "--record",
    "recording",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Record all that is received, for rankdeck replay; what is full becomes FILE.1",
)
read_only_option = click.option(
    "--read-only", "is_read_only", is_flag=True, help="Only watch: nothing can be done to the job from the console"
)
SESSION_OPTIONS = ("evidence_dir", "keeps_none", "recording", "is_read_only", "settings")
"""Parameters of `session_options`."""
no_evidence_option = click.option("--no-evidence", "keeps_none", is_flag=True, help="Keep none")


def reaches(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of how a host is reached."""
    for option in _access_options:
        command = option(command)
    return command


def named_python(python: str) -> str:
    """Return the Python if it was typed; empty when it comes from elsewhere."""
    source = click.get_current_context().get_parameter_source("python")
    return python if source is ParameterSource.COMMANDLINE else ""


def link_by(host: str, named_python: str, inventory_python: str, default_python: str, ssh_config: str) -> AgentLink:
    """Return the link to a host; its Python is the first of the three that is not empty."""
    if host == THIS_MACHINE:
        return LocalLink(named_python or inventory_python)
    # Imported here: only another host needs paramiko.
    from app.cli.terminal import LOGINS  # noqa: PLC0415
    from app.fleet.host_link import Access, HostLink  # noqa: PLC0415

    return HostLink(Access(host, named_python or inventory_python or default_python, ssh_config), LOGINS)


def session_options(*, evidence_dir: Path | None, keeps_none: bool, **how: Any) -> SessionOptions:
    """Return the session's options, from those that the user typed.

    Raises:
        click.UsageError: See `evidence_place`.
        SessionError: See `evidence_place`.
    """
    place = evidence_place(evidence_dir, keeps_none=keeps_none)
    return SessionOptions(place, how["recording"], how["is_read_only"], how["settings"].thresholds, audit_log())


def evidence_place(evidence_dir: Path | None, *, keeps_none: bool) -> Path | None:
    """Return the directory in which a session keeps evidence; None when it keeps none.

    Raises:
        click.UsageError: The user typed both --evidence and --no-evidence.
        SessionError: The directory that the user typed cannot be used.
    """
    if evidence_dir is not None and keeps_none:
        raise click.UsageError("--evidence and --no-evidence contradict each other")
    if keeps_none:
        return None
    place = evidence_dir or default_directory()
    try:
        check_directory(place)
    except SessionError as error:
        if evidence_dir is not None:
            raise
        print_line(f"rankdeck: no evidence of incidents is kept: {error}")
        return None
    return place


def present(session: RemoteSession, settings: Settings, *, is_json: bool, is_headless: bool) -> NoReturn:
    """Show a session on the screen, or print it without one; exit with its code."""
    session.guards_rest = True
    if is_headless or is_json or not is_terminal():
        follow_one_job(session)
        raise SystemExit(asyncio.run(print_session(session, is_json=is_json)))
    raise SystemExit(asyncio.run(show_session(on_screen(session), settings.console)))


def on_screen(session: RemoteSession) -> RemoteSession:
    """Return a session prepared for a screen: it retries lost connections without end, and replays the past."""
    session.guards_rest = session.backfills = True
    session.patience_s = math.inf
    session.asked_at = desk_of(session)
    session.show_outside()
    return session


def follow_one_job(session: RemoteSession) -> None:
    """Make a script follow the shown job to its end; call it before the session connects."""
    session.patience_s = HEADLESS_PATIENCE_S
    session.choice.stays = True


beside_option = click.option(
    "--beside", "is_beside", is_flag=True, help="Start it though other jobs of rankdeck run there"
)


def agrees_to_share(job_id: str, error: HostsBusyError) -> bool:
    """Return whether the user, asked at a terminal, lets a job start beside others; False where nobody can be asked."""
    can_ask = sys.stdin.isatty() and sys.stderr.isatty()
    return can_ask and click.confirm(f"rankdeck: {error}. Start {job_id} there too?", err=True)


async def job_under_way(session: RemoteSession, job_id: str | None, verb: str = "") -> str:
    """Return the job's id as typed, else that of the only job under way, which is printed; after `connect`.

    Args:
        session: Reaches the hosts.
        job_id: What was typed.
        verb: The command, where it takes jobs that have ended, too: then those are named if none runs.

    Raises:
        UsageError: None was typed, and none or several run.
    """
    if job_id:
        return job_id
    reports = await session.reports()
    ended = [(job_id, "") for job_id in ended_jobs(reports)] if verb else []
    past = ended_jobs_text(ended, session.attach_command, verb)
    job_id = only_running_job(reports, "name one: JOB", past or WHERE_NONE_RUNS)
    print_line(f"rankdeck: job {job_id}, the only one under way")
    return job_id


def desk_of(session: RemoteSession) -> QuestionDesk | None:
    """Return where a screen asks hosts' questions; None in a read-only session, without SSH, or on a served page."""
    return None if session.is_read_only or not session.goes_to_other_machines else question_desk()


def question_desk() -> QuestionDesk | None:
    """Return where questions of other machines arrive; None on a page of `rankdeck serve`."""
    if is_served():
        return None
    from app.cli.terminal import DESK  # noqa: PLC0415 - only another machine needs paramiko

    return DESK


def print_json(fields: dict[str, Any]) -> None:
    """Print an object as JSON, with the schema's number."""
    click.echo(msgspec.json.encode({"schema": SCHEMA, **fields}).decode())


relay_options = (
    click.option(
        "--relay",
        default="",
        metavar="HOST",
        help="The hosts are the nodes of the relay there, as `python -P -m agent relay` serves; --host and --exclude "
        f"choose among them; {THIS_MACHINE}: on this machine, without SSH; {NO_RELAY}: SSH goes to each host, whatever "
        "the inventory has [the inventory's]",
    ),
    click.option("--relay-dir", default="", metavar="DIR", help="Of the relay there [its usual one, the inventory's]"),
    click.option("--slurm", default="", metavar="JOBID", help="The hosts are those of this Slurm job"),
)


def relay_inventory(relay: str, relay_dir: str, *, has_no_files: bool) -> Inventory | None:
    """Return an inventory whose hosts are behind a relay, not yet contacted; None when SSH goes to each host.

    Raises:
        UsageError: The relay's name is no host, or --relay-dir is given without a relay.
    """
    inventory = Inventory() if has_no_files else load_inventory()
    relay = THIS_MACHINE if relay == LOCAL else relay
    if relay == NO_RELAY or not (relay or inventory.relay):
        if relay_dir:
            raise UsageError("--relay-dir is of a relay, and none is named", "give --relay")
        return None
    if relay:
        parse_destination(relay)
        if relay != inventory.relay:
            inventory = msgspec.structs.replace(inventory, relay_dir="")
    return msgspec.structs.replace(
        inventory, relay=relay or inventory.relay, relay_dir=relay_dir or inventory.relay_dir
    )


class RelayWay(NamedTuple):
    """How a relay is reached."""

    host: str
    """Empty is the inventory's, `NO_RELAY` none."""
    directory: str
    """Empty is the usual one."""
    python: str
    """Python on its host, unless the inventory has another."""
    why_gone: Callable[[], AppError | None] = lambda: None
    """See `RelayHub`."""


@contextmanager
def through_relay(inventory: Inventory, way: RelayWay, named_python: str, ssh_config: str) -> Iterator[RelayHub]:
    """Yield the connection to an inventory's relay; raises as `RelayHub.connect`."""
    from app.fleet.relay_hub import RelayHub  # noqa: PLC0415 - only who goes through one pays for paramiko

    own = next((entry for entry in inventory.hosts if entry.host == inventory.relay), None)
    link = link_by(inventory.relay, named_python, own.python if own else "", way.python, ssh_config)
    with RelayHub(link, inventory.relay_dir, way.why_gone) as hub:
        with waiting_for(lambda: f"going to the relay on {clean(hub.host)}"):
            hub.connect()
        make_room_for_nodes(len(hub.nodes), least_a_node=0)
        yield hub


def relayed_hosts(
    inventory: Inventory, hub: RelayHub, names: Sequence[str], exclude: Sequence[str]
) -> tuple[HostEntry, ...]:
    """Return the chosen nodes of a relay.

    Raises:
        UsageError: The relay knows no nodes, or not those.
    """
    nodes = hub.nodes
    num_here = sum(entry.is_here for node in nodes if (entry := hub.entry(node)) is not None)
    if not nodes:
        raise UsageError(
            f"no agent has come to the relay on {clean(hub.host)} yet",
            "start them: srun --ntasks-per-node=1 python -P -m agent serve --relay INVITATION",
        )
    if hub.num_expected > num_here:
        print_line(f"rankdeck: {num_here} of the {hub.num_expected} nodes that are to come are there")
    return inventory.behind_relay(nodes).chosen(names, exclude)


def refuse_relay(action: str) -> None:
    """Refuse an action that does not go through a relay, when the inventory has one.

    Raises:
        UsageError: The inventory has a relay.
    """
    if relay := load_inventory().relay:
        raise UsageError(
            f"{action} does not go through the relay on {clean(relay)}",
            "agents behind a relay begin and end with what starts them: "
            "srun --ntasks-per-node=1 python -P -m agent serve --relay INVITATION",
        )


def _ranks(context: click.Context, _parameter: click.Parameter, value: str | None) -> NumberTerm | None:
    """Return the chosen ranks: `0,3-5`, `8-` or `launcher`, as in the console's filters."""
    if value is None:
        return None
    found = read_filter(f"rank={value}", LOG_KEYS)
    if isinstance(found, WrongFilter) or len(found.terms) != 1 or not isinstance(found.terms[0], NumberTerm):
        launcher = " or launcher" if context.command.name == "logs" else ""
        raise click.BadParameter(f"'{clean(value)}' is no rank: numbers and ranges, as in 0,3-5{launcher}")
    return found.terms[0]


def _pattern(_context: click.Context, _parameter: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{clean(value or '')}: {error}") from error


def _duration(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """Return the seconds of `90s`, `10m` or `1h30m`, or since the last `14:05` or `14:05:30` by the clock here."""
    if value is None:
        return None
    if re.fullmatch(r"([01]?[0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?", value) is not None:
        hours, minutes, seconds = map(int, f"{value}:0".split(":")[:3])
        now = datetime.now().astimezone()
        since_s = (now - now.replace(hour=hours, minute=minutes, second=seconds, microsecond=0)).total_seconds()
        return since_s if since_s >= 0 else since_s + UNITS_S["d"]
    if re.fullmatch(r"([0-9]{1,9}[smhd])+", value) is None:
        raise click.BadParameter(f"{clean(value)} is no time, as 90s, 10m, 1h30m, 2d or 14:05")
    return float(sum(int(number) * UNITS_S[unit] for number, unit in re.findall(r"(\d+)(\D)", value)))


def _complete_duration(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    if typed.isdecimal():
        return [f"{typed}{unit}" for unit in UNITS_S]
    return [text for text in ("1m", "10m", "1h", "1d") if text.startswith(typed)]


rank_option = click.option(
    "--rank", "wanted_ranks", callback=_ranks, metavar="RANKS", help="Only these, as 0,3-5 or 8- [all]"
)

follow_option = click.option("-f", "--follow", "is_following", is_flag=True, help="Go on until the job has ended")
since_option = click.option(
    "--since",
    "max_age_s",
    callback=_duration,
    shell_complete=_complete_duration,
    metavar="TIME",
    help="Only what is no older, as 90s, 10m or 2h, or since 14:05",
)
grep_option = click.option(
    "--grep", "pattern", callback=_pattern, metavar="RE", help="Only lines in which this is found"
)


def last_option(what: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option for how many of the last rows are printed; `what` follows `Only the last N` in its help."""
    only = f"Only the last N{what} [all]"
    return click.option("-n", "--tail", "num_last", type=click.IntRange(min=0), metavar="N", help=only)
