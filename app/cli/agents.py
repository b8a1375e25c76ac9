"""The commands that manage the agents of hosts: `up`, `down`, `doctor`, `install`.

`up` and `down` start and end agents. `doctor` checks whether hosts are fit for a job, before one starts. `install`
installs rankdeck on hosts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from app.cli.chosen_hosts import on_each, print_each
from app.cli.headless import print_line, waiting_for
from app.cli.inventory_file import named_hosts
from app.cli.options import exclude_option, json_option, link_by, named_python, print_json, reaches, refuse_relay
from app.errors import AgentUnreachableError, ExitCode, NoAgentError, UsageError
from app.fleet.agent_link import DEFAULT_PYTHON, LinkGroup
from app.inventory.inventory import HostEntry
from app.paths import make_room_for_nodes
from app.preflight.examining import preflight
from app.preflight.findings import Wanted
from app.preflight.report_lines import Tone, report_lines
from app.session.control import workdir_on
from app.session.opening import OpeningProgress
from app.text import LINE_LIMIT, clean, nodes_text, own_color

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from app.fleet.agent_link import AgentLink, AgentPlace
    from app.install.installer import Installed, Plan
    from app.preflight.findings import HostFindings, Preflight


def _refuse_host_option(context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> None:
    """Refuse `--host`, by which the commands that watch or start a job name theirs."""
    if names:
        command = clean(shlex.join(["rankdeck", str(context.info_name), *names]), LINE_LIMIT)
        raise UsageError(f"{context.info_name} takes hosts without --host", command)


def lists_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add the argument and option that choose the hosts a command manages; no job is chosen."""
    host_option = click.option(
        "--host", multiple=True, hidden=True, expose_value=False, is_eager=True, callback=_refuse_host_option
    )
    return click.argument("hosts", nargs=-1, metavar="[HOST]...")(exclude_option(host_option(command)))


@click.command()
@lists_hosts
@json_option
@reaches
def up(*, hosts: tuple[str, ...], exclude: tuple[str, ...], is_json: bool, python: str, ssh_config: str) -> None:
    """Start the agent of each host.

    In the background, unless it serves already. A HOST is one that SSH reaches, localhost, or a pattern of the
    inventory, as 'gpu*'; without one it is all of the inventory, and without an inventory this machine.
    """
    if not hosts:
        refuse_relay("up")
    answers = on_each(named_hosts(hosts, exclude), python, ssh_config, lambda link: link.bring_up())
    raise SystemExit(print_each(answers, _up_result, "up", is_json=is_json))


@click.command()
@lists_hosts
@click.option("--kill-jobs", is_flag=True, help="Kill its jobs first; without this they go on")
@json_option
@reaches
def down(
    *,
    hosts: tuple[str, ...],
    exclude: tuple[str, ...],
    kill_jobs: bool,
    is_json: bool,
    python: str,
    ssh_config: str,
) -> None:
    """End the agent of each host.

    Its jobs go on without it, until the next agent takes them up. HOST is as for `up`. Jobs of other launchers are
    never killed: where one goes on in spite of --kill-jobs, the exit code is 4.
    """
    if not hosts:
        refuse_relay("down")
    chosen = named_hosts(hosts, exclude)
    answers = on_each(chosen, python, ssh_config, lambda link: _shut_down(link, kills_jobs=kill_jobs))
    spared: list[str] = []

    def result(host: str, done: _Down) -> tuple[str, Mapping[str, Any]]:
        if kill_jobs and done.num_jobs_left:
            spared.append(host)
        return _down_result(host, done)

    code = print_each(answers, result, "down", is_json=is_json)
    if spared:
        whose = nodes_text(spared)
        how = f"rankdeck up {spared[0]}; rankdeck kill --host {spared[0]}"
        print_line(f"rankdeck: a job of another launcher still runs on {whose}: --kill-jobs spares it (kill it: {how})")
        code = code or ExitCode.REFUSED
    raise SystemExit(code)


class _Down(NamedTuple):
    """How the agent of a host ended; `had_agent` is False where none ran."""

    had_agent: bool
    num_jobs_left: int = 0
    num_jobs_ended: int = 0


def _shut_down(link: AgentLink, *, kills_jobs: bool) -> _Down:
    """End the agent if one runs; an agent that ended before may have left jobs, which a new one takes up to kill."""
    try:
        reply, had_agent = link.shut_down(kill_jobs=kills_jobs), True
    except AgentUnreachableError:
        try:
            link.find()
        except NoAgentError:
            if not kills_jobs:
                return _Down(had_agent=False)
            link.bring_up()
            reply, had_agent = link.shut_down(kill_jobs=True), False
        else:
            raise
    return _Down(had_agent, reply.num_jobs_left or 0, reply.num_jobs_ended or 0)


def _up_result(host: str, place: AgentPlace) -> tuple[str, Mapping[str, Any]]:
    epoch, directory = clean(place.epoch), clean(place.dir, LINE_LIMIT)
    how = "is up" if place.is_new else "was up already"
    fields = {"is_new": place.is_new, "pid": place.pid, "epoch": epoch, "dir": directory}
    return clean(f"the agent on {host} {how} (pid {place.pid}, {place.dir})"), fields


def _down_result(host: str, done: _Down) -> tuple[str, Mapping[str, Any]]:
    agent = f"the agent on {host} is down" if done.had_agent else f"no agent runs on {host}"
    num_left, num_ended = done.num_jobs_left, done.num_jobs_ended
    ended = "1 job was ended" if num_ended == 1 else f"{num_ended} jobs were ended" if num_ended else ""
    left = jobs_left(num_left) if num_left or (done.had_agent and not ended) else ""
    if num_left:
        left += f": rankdeck up {host} takes {'it' if num_left == 1 else 'them'} up again"
    return "; ".join(filter(None, (agent, ended, left))), done._asdict()


def jobs_left(num_left: int) -> str:
    """Return what happens to the jobs of an agent that ends."""
    return {0: "no job runs", 1: "one job goes on"}.get(num_left, f"{num_left} jobs go on")


_STYLES: dict[Tone, dict[str, Any]] = {
    Tone.PLAIN: {},
    Tone.TITLE: {"bold": True},
    Tone.FAINT: {"dim": True},
    Tone.BAD: {"fg": "red", "bold": True},
    Tone.WARN: {"fg": "yellow"},
    Tone.OK: {"fg": "green"},
}


@click.command()
@lists_hosts
@click.option("--workdir", default="", help="Compare the program there [the inventory's]")
@click.option("--job-python", default="", help="The Python there that has torch [the one that has rankdeck]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Reach each other at this port [a free one]")
@click.option("--all", "shows_all", is_flag=True, help="Show also what is well")
@json_option
@reaches
def doctor(
    *, hosts: tuple[str, ...], exclude: tuple[str, ...], python: str, ssh_config: str, is_json: bool, **how: Any
) -> None:
    """Check hosts before a job starts, and compare them.

    It prints how to fix what is wrong. It changes nothing, and needs no agent that runs. HOST is as for `up`.
    """
    if not hosts:
        refuse_relay("doctor")
    chosen = named_hosts(hosts, exclude)
    wanted = [_wanted(entry, how["workdir"], how["job_python"]) for entry in chosen]
    named, progress = named_python(python), OpeningProgress([entry.host for entry in chosen])
    make_room_for_nodes(len(chosen))
    with waiting_for(lambda: progress.text), LinkGroup() as group:
        for entry in chosen:
            group.add(link_by(entry.host, named, entry.python, python, ssh_config))
        away = progress.connect(group, lambda _link: None)
        reached = [away.get(link.host, link) for link in group.links]
        found = preflight([*zip(wanted, reached, strict=True)], how["port"], progress.move)
    if is_json:
        print_json(json_object(found))
    else:
        _print(found, shows_all=how["shows_all"])
    raise SystemExit(found.exit_code)


def _wanted(entry: HostEntry, workdir: str, job_python: str) -> Wanted:
    workdir = workdir or entry.workdir
    where = workdir and workdir_on(entry.host, workdir)
    return Wanted(entry.host, entry.num_ranks, job_python, where)


def _print(found: Preflight, *, shows_all: bool) -> None:
    width = shutil.get_terminal_size().columns
    for line in report_lines(found, width, shows_all=shows_all):
        click.echo(
            "".join(click.style(text, **_STYLES[tone]) if _STYLES[tone] else text for text, tone in line),
            color=own_color(os.environ),
        )


def json_object(found: Preflight) -> dict[str, Any]:
    """Return the object of `--json`, without the schema's number."""
    return {
        "exit_code": int(found.exit_code),
        "rows": msgspec.to_builtins(found.rows),
        "hosts": [_json_host(one) for one in found.hosts],
    }


def _json_host(one: HostFindings) -> dict[str, Any]:
    """Return a host as `up --json` prints it, with its rows; its files are left out, they are thousands of lines."""
    facts = one.facts
    if facts is not None and facts.code is not None:
        facts = msgspec.structs.replace(facts, code=msgspec.structs.replace(facts.code, files=[]))
    return {
        "host": one.host,
        "error": one.failure.message if one.failure else None,
        "hint": one.failure.hint if one.failure else "",
        "health": one.health.value,
        "rows": msgspec.to_builtins(one.rows),
        "facts": None if facts is None else msgspec.to_builtins(facts),
        "clock": None if one.clock is None else msgspec.to_builtins(one.clock),
    }


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
    """Install this rankdeck into the Python of each host.

    By pip there; where it is already, nothing is done. HOST is as for `up`. The packages that it requires come with it,
    but no torch: the Python of a job has that. With --venv the Python is that of a new virtual environment, which sees
    the torch of the one that makes it.

    Nothing is installed into a Python that belongs to the operating system.
    """
    if not hosts:
        refuse_relay("install")
    entries = chosen = named_hosts(hosts, exclude)
    named = python = named_python(how["python"])
    if how["venv"]:
        # The Python of the inventory or the environment may be the one to be created.
        chosen = tuple(HostEntry(entry.host) for entry in entries)
        named, python = f"{how['venv'].rstrip('/')}/bin/python", python or DEFAULT_PYTHON
    with tempfile.TemporaryDirectory(prefix="rankdeck-wheel-") as directory:
        plan = _plan(Path(directory), how["wheelhouse"], how["wheel_file"])
        plan = msgspec.structs.replace(plan, venv=how["venv"], restarts_agent=how["restarts_agent"])
        answers = on_each(chosen, python or how["python"], how["ssh_config"], lambda link: _install(link, plan))
        installed: list[str] = []

        def result(host: str, done: Installed) -> tuple[str, Mapping[str, Any]]:
            installed.append(host)
            return _install_result(host, done, named)

        code = print_each(answers, result, "install", is_json=is_json)
    if how["venv"] and installed:
        _advise(named, [entry for entry in entries if entry.host in installed])
    raise SystemExit(code)


def _plan(directory: Path, wheelhouse: Path | None, wheel_file: Path | None) -> Plan:
    from app.install.installer import Plan  # noqa: PLC0415 - who installs nothing does not pay for it
    from app.install.own_wheel import checkout, named_wheel, own_wheel, wheels_in  # noqa: PLC0415

    wheels = () if wheelhouse is None else tuple(wheels_in(wheelhouse))
    if wheel_file is None and (root := checkout()) is not None:
        print_line(f"rankdeck: builds the wheel of {clean(str(root), LINE_LIMIT)}")
    own = own_wheel(directory) if wheel_file is None else named_wheel(wheel_file)
    return Plan(own, "" if wheelhouse is None else str(wheelhouse), wheels)


def _install(link: AgentLink, plan: Plan) -> Installed:
    from app.install.installer import Installer  # noqa: PLC0415

    return Installer(link, plan, lambda what: print_line(f"rankdeck: {link.host}: {what}")).install()


def _install_result(host: str, done: Installed, named: str) -> tuple[str, Mapping[str, Any]]:
    """Return a sentence and JSON fields.

    Args:
        host: The host.
        done: The result of the installation.
        named: The host's Python, if later commands do not find it by themselves.
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
        parts.append(f"pip reports: {done.clash}")
    if done.is_agent_restarted:
        parts.append(f"its agent is a new one, {jobs_left(done.num_jobs_left)}")
    if done.is_agent_older:
        access = f" --python {shlex.quote(named)}" if named else ""
        commands = f"rankdeck down {host}{access}; rankdeck up {host}{access}"
        parts.append(f"an older agent serves there, the new one comes by: {commands} (jobs go on)")
    return "; ".join(parts), msgspec.structs.asdict(done)


def _advise(python: str, entries: Sequence[HostEntry]) -> None:
    """Print where to configure the Python of a new virtual environment, unless it is configured."""
    if any(entry.python != python for entry in entries):
        line = f"python = {msgspec.json.encode(python).decode()}"
        print_line(f"rankdeck: so that every command finds it, write {line} into rankdeck.toml, or name it by --python")
