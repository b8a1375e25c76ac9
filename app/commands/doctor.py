"""Whether hosts are fit for a job, before there is one: `doctor`."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from app.commands.host_options import json_option, link_by, named_python, print_json, reaches
from app.commands.inventory_file import named_hosts
from app.commands.relay_options import refuse_relay
from app.commands.up_down import lists_hosts
from app.headless import print_line
from app.open_files import make_room_for_nodes
from app.preflight.asking import preflight
from app.preflight.findings import Wanted
from app.preflight.report_lines import Tone, report_lines
from app.sessions.workdir import workdir_on
from app.ssh.link_group import LinkGroup

if TYPE_CHECKING:
    from app.inventory.inventory import HostEntry
    from app.preflight.findings import HostFindings, Preflight

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
@click.option("--all", "shows_all", is_flag=True, help="Say also what is well")
@json_option
@reaches
def doctor(
    *, hosts: tuple[str, ...], exclude: tuple[str, ...], python: str, ssh_config: str, is_json: bool, **how: Any
) -> None:
    """Look at each HOST before a job does, compare them, and say what to do about what is wrong.

    It changes nothing, and needs no agent that runs. HOST is as for `up`.
    """
    if not hosts:
        refuse_relay("doctor")
    chosen = named_hosts(hosts, exclude)
    wanted = [_wanted(entry, how["workdir"], how["job_python"]) for entry in chosen]
    if sys.stderr.isatty():
        print_line(f"rankdeck: {len(chosen)} host{'s' * (len(chosen) != 1)} to look at ...")
    named = named_python(python)
    make_room_for_nodes(len(chosen))
    with LinkGroup() as group:
        for entry in chosen:
            group.add(link_by(entry.host, named, entry.python, python, ssh_config))
        answers = (error for _, error in group.connect(lambda _link: None))
        reached = [link if error is None else error for link, error in zip(group.links, answers, strict=True)]
        found = preflight([*zip(wanted, reached, strict=True)], how["port"])
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
    color = False if os.environ.get("NO_COLOR") else None
    for line in report_lines(found, width, shows_all=shows_all):
        click.echo(
            "".join(click.style(text, **_STYLES[tone]) if _STYLES[tone] else text for text, tone in line), color=color
        )


def json_object(found: Preflight) -> dict[str, Any]:
    """Return what `--json` prints, but for the schema's number."""
    return {
        "exit_code": int(found.exit_code),
        "rows": msgspec.to_builtins(found.rows),
        "hosts": [_json_host(one) for one in found.hosts],
    }


def _json_host(one: HostFindings) -> dict[str, Any]:
    """Return a host as `up --json` has it, with its rows; its files one by one would be thousands of lines."""
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
