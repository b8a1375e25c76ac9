"""rankdeck put onto hosts: `install`."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from app.commands.each_host import on_each, tell_each
from app.commands.host_options import json_option, named_python, reaches
from app.commands.inventory_file import named_hosts
from app.commands.relay_options import refuse_relay
from app.commands.up_down import jobs_left, lists_hosts
from app.headless import print_line
from app.inventory.inventory import HostEntry
from app.safe_text import LINE_LIMIT, clean
from app.ssh.agent_link import DEFAULT_PYTHON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.installing.installer import Installed, Plan
    from app.ssh.agent_link import AgentLink


@click.command()
@lists_hosts
@click.option(
    "--wheelhouse",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Wheels of what rankdeck requires, brought along for hosts that reach no package index",
)
@click.option(
    "--wheel",
    "wheel_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Install this wheel of rankdeck [the one that runs here]",
)
@click.option("--venv", metavar="DIR", default="", help="Make a virtual environment there first; may begin with ~/")
@click.option("--restart-agent", "restarts_agent", is_flag=True, help="Restart an older agent; its jobs go on")
@json_option
@reaches
def install(*, hosts: tuple[str, ...], exclude: tuple[str, ...], is_json: bool, **how: Any) -> None:
    """Install this rankdeck on each HOST, by pip, in the Python there; where it is already, nothing is done.

    HOST is as for `up`. The packages that it requires come with it, but no torch: the Python of a job has that.
    With --venv the Python is that of a new virtual environment, which sees the torch of the one that makes it.

    Nothing is installed into a Python that belongs to the operating system.
    """
    if not hosts:
        refuse_relay("install")
    entries = chosen = named_hosts(hosts, exclude)
    named = python = named_python(how["python"])
    if how["venv"]:
        # The Python that the inventory or the environment names may be the one that is to be made.
        chosen = tuple(HostEntry(entry.host) for entry in entries)
        named, python = f"{how['venv'].rstrip('/')}/bin/python", python or DEFAULT_PYTHON
    with tempfile.TemporaryDirectory(prefix="rankdeck-wheel-") as directory:
        plan = _plan(Path(directory), how["wheelhouse"], how["wheel_file"])
        plan = msgspec.structs.replace(plan, venv=how["venv"], restarts_agent=how["restarts_agent"])
        answers = on_each(chosen, python or how["python"], how["ssh_config"], lambda link: _install(link, plan))
        installed: list[str] = []

        def told(host: str, done: Installed) -> tuple[str, Mapping[str, Any]]:
            installed.append(host)
            return _told(host, done, named)

        code = tell_each(answers, told, "install", is_json=is_json)
    if how["venv"] and installed:
        _advise(named, [entry for entry in entries if entry.host in installed])
    raise SystemExit(code)


def _plan(directory: Path, wheelhouse: Path | None, wheel_file: Path | None) -> Plan:
    from app.installing.installer import Plan  # noqa: PLC0415 - who installs nothing does not pay for it
    from app.installing.own_wheel import checkout, named_wheel, own_wheel, wheels_in  # noqa: PLC0415

    wheels = () if wheelhouse is None else tuple(wheels_in(wheelhouse))
    if wheel_file is None and (root := checkout()) is not None:
        print_line(f"rankdeck: builds the wheel of {clean(str(root), LINE_LIMIT)}")
    own = own_wheel(directory) if wheel_file is None else named_wheel(wheel_file)
    return Plan(own, "" if wheelhouse is None else str(wheelhouse), wheels)


def _install(link: AgentLink, plan: Plan) -> Installed:
    from app.installing.installer import Installer  # noqa: PLC0415

    return Installer(link, plan, lambda what: print_line(f"rankdeck: {link.host}: {what}")).install()


def _told(host: str, done: Installed, named: str) -> tuple[str, Mapping[str, Any]]:
    """Return a sentence and JSON fields.

    Args:
        host: Where.
        done: How it went there.
        named: The Python, if later commands do not find it by themselves.
    """
    what = f"rankdeck {clean(done.version)}"
    if done.is_new:
        was = f" instead of {done.before}" if done.before not in {"", done.version} else ""
        parts = [f"{host} has {what} now{was} ({done.python})"]
    else:
        parts = [f"{host} {'runs' if done.is_this_one else 'has'} {what} already ({done.python})"]
    if not done.has_torch:
        parts.append("it has no torch, which ranks need")
    if done.clash:
        parts.append(f"pip says: {done.clash}")
    if done.is_agent_restarted:
        parts.append(f"its agent is a new one, {jobs_left(done.num_jobs_left)}")
    if done.is_agent_older:
        access = f" --python {shlex.quote(named)}" if named else ""
        commands = f"rankdeck down {host}{access}; rankdeck up {host}{access}"
        parts.append(f"an older agent serves there, the new one comes by: {commands} (jobs go on)")
    return "; ".join(parts), msgspec.structs.asdict(done)


def _advise(python: str, entries: Sequence[HostEntry]) -> None:
    """Say where to write the Python of a new virtual environment, unless it is there."""
    if any(entry.python != python for entry in entries):
        line = f"python = {msgspec.json.encode(python).decode()}"
        print_line(f"rankdeck: so that every command finds it, write {line} into rankdeck.toml, or name it by --python")
