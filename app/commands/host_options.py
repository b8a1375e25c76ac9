"""What the verbs that reach a host have in common: how it is reached, and how their answer is printed."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec
from click.core import ParameterSource

from app.commands.audited import audit_log
from app.commands.ssh_hosts import SSH_CONFIG_VARIABLE
from app.errors import SessionError
from app.evidence.store import check_directory, default_directory
from app.headless import print_line
from app.presenting import is_served, is_terminal, print_session, show_session
from app.rows import SCHEMA
from app.sessions.options import SessionOptions
from app.ssh.config import THIS_MACHINE
from app.ssh.local_link import LocalLink

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.sessions.remote_session import RemoteSession
    from app.settings.schema import Settings
    from app.ssh.agent_link import AgentLink
    from app.ssh.question_desk import QuestionDesk

HEADLESS_PATIENCE_S = 600.0
"""A script wants an end: for so long a connection that is lost is tried again. The screen never gives up."""
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
json_option = click.option("--json", "is_json", is_flag=True, help="One JSON object on stdout")
evidence_option = click.option(
    "--evidence",
    "evidence_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep evidence of each incident there [~/.local/state/rankdeck/evidence, the newest 20]",
)
record_option = click.option(
    "--record",
    "recording",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Record all that is heard, for rankdeck replay; what is full becomes FILE.1",
)
read_only_option = click.option(
    "--read-only", "is_read_only", is_flag=True, help="Only look on: nothing can be done to the job from the console"
)
SESSION_OPTIONS = ("evidence_dir", "keeps_none", "recording", "is_read_only", "settings")
"""What `session_options` takes."""
no_evidence_option = click.option("--no-evidence", "keeps_none", is_flag=True, help="Keep none")


def reaches(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say how a host is reached."""
    for option in _access_options:
        command = option(command)
    return command


def named_python(python: str) -> str:
    """Return the Python if the command line names it; empty where it comes from anywhere else."""
    source = click.get_current_context().get_parameter_source("python")
    return python if source is ParameterSource.COMMANDLINE else ""


def link_by(host: str, named_python: str, inventory_python: str, default_python: str, ssh_config: str) -> AgentLink:
    """Return the way to a host, by what is said of its Python: the first of the three that is not empty."""
    if host == THIS_MACHINE:
        return LocalLink(named_python or inventory_python)
    # Only who goes to another host pays for paramiko.
    from app.commands.terminal_logins import LOGINS  # noqa: PLC0415
    from app.ssh.host_link import Access, HostLink  # noqa: PLC0415

    return HostLink(Access(host, named_python or inventory_python or default_python, ssh_config), LOGINS)


def session_options(*, evidence_dir: Path | None, keeps_none: bool, **how: Any) -> SessionOptions:
    """Return what a person wants of a session.

    Raises:
        click.UsageError: See `evidence_place`; and so `SessionError`.
    """
    place = evidence_place(evidence_dir, keeps_none=keeps_none)
    return SessionOptions(place, how["recording"], how["is_read_only"], how["settings"].thresholds, audit_log())


def evidence_place(evidence_dir: Path | None, *, keeps_none: bool) -> Path | None:
    """Return where a session keeps evidence, None where it keeps none.

    Raises:
        click.UsageError: A person wants both.
        SessionError: A person wants it where it cannot be kept.
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
    """Show a session on the screen, or print it where there is none, and end with its code."""
    session.guards_rest = True
    if is_headless or is_json or not is_terminal():
        session.patience_s = HEADLESS_PATIENCE_S
        session.session.choice.stays = True
        raise SystemExit(asyncio.run(print_session(session, is_json=is_json)))
    session.patience_s = math.inf
    session.looks_back = True
    session.asked_at = desk_of(session)
    raise SystemExit(asyncio.run(show_session(session, settings.console)))


def desk_of(session: RemoteSession) -> QuestionDesk | None:
    """Return where a screen asks what hosts want to know; None where it may not, as on a page of `rankdeck serve`."""
    if is_served() or session.is_read_only or not session.goes_to_other_machines:
        return None
    from app.commands.terminal_logins import DESK  # noqa: PLC0415 - it is there already, with paramiko

    return DESK


def print_json(fields: dict[str, Any]) -> None:
    """Print an object with the schema's number."""
    click.echo(msgspec.json.encode({"schema": SCHEMA, **fields}).decode())
