"""The commands for configuration: `config` shows every setting and its origin, `init` writes `rankdeck.toml`.

`init` asks the user before it writes the hosts of a cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from app.cli.headless import print_line
from app.cli.inventory_file import (
    SSH_CONFIG,
    SSH_CONFIG_VARIABLE,
    expanded,
    inventory_troubles,
    known_hosts,
    ssh_config_file,
    text_of,
)
from app.cli.options import json_option, print_json
from app.cli.presenting import is_terminal
from app.cli.settings_options import load_settings, settings_options
from app.errors import ExitCode, UsageError
from app.inventory.hostfile import NODE_LIST, allocated_hosts, allocation, read_hostfile
from app.inventory.inventory import HostEntry, Inventory, inventory_text, read_inventory
from app.settings.loading import PROJECT_FILE
from app.settings.toml_lines import parse
from app.slurm.client import slurm_hostnames
from app.ssh.way import moved_home_hint
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.settings.loading import Loaded


@click.command()
@click.option("--show-origin", "shows_origin", is_flag=True, help="Where each comes from, instead of what it is for")
@click.option("--keys", "is_keys", is_flag=True, help="Only the keys: every action, its name, its keys, what it does")
@click.option("--check", "is_check", is_flag=True, help="Only print all that is wrong; exit code 2 if something is")
@settings_options
@json_option
def config(
    *,
    shows_origin: bool,
    is_keys: bool,
    is_check: bool,
    is_json: bool,
    assignments: tuple[str, ...],
    has_no_files: bool,
) -> None:
    """Print every setting.

    Files are config.toml of your own and the nearest rankdeck.toml.
    """
    loaded = load_settings(assignments, has_files=not has_no_files)
    if is_check:
        raise SystemExit(_check(loaded, is_json=is_json, has_files=not has_no_files))
    loaded.settings()
    if is_json:
        print_json({"files": _paths(loaded), "settings": [dict(row) for row in _objects(loaded)]})
        return
    rows = _key_rows(loaded) if is_keys else _rows(loaded, shows_origin=shows_origin)
    click.echo("\n".join(_columns(rows)))


def _check(loaded: Loaded, *, is_json: bool, has_files: bool) -> ExitCode:
    of_inventory = inventory_troubles() if has_files else []
    troubles = list(dict.fromkeys(str(trouble) for trouble in [*loaded.troubles, *of_inventory]))
    if is_json:
        print_json({"files": _paths(loaded), "troubles": troubles})
    else:
        for trouble in troubles:
            print_line(f"rankdeck: {trouble}")
        if not troubles:
            click.echo(f"the settings are well: {', '.join(_paths(loaded)) or 'no file'}")
    return ExitCode.USAGE if troubles else ExitCode.WELL


def _paths(loaded: Loaded) -> list[str]:
    return [clean(str(path), LINE_LIMIT) for path in loaded.files]


def _rows(loaded: Loaded, *, shows_origin: bool) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, entry in loaded.entries.items():
        setting = loaded.known[name]
        beside = clean(str(entry.origin), LINE_LIMIT) if shows_origin else setting.sentence
        rows.append((name, setting.shown(entry.value), beside))
    return rows


def _key_rows(loaded: Loaded) -> list[tuple[str, ...]]:
    from app.tui.actions import ACTIONS  # noqa: PLC0415 - `--help` does not pay for it

    rows: list[tuple[str, ...]] = []
    for action in ACTIONS:
        name = f"keys.{action.name}"
        rows.append((action.name, loaded.known[name].shown(loaded.entries[name].value), action.help))
    return rows


def _objects(loaded: Loaded) -> Iterator[dict[str, Any]]:
    for name, entry in loaded.entries.items():
        setting = loaded.known[name]
        origin = clean(entry.origin.place, LINE_LIMIT)
        yield {
            "name": name,
            "value": entry.value,
            "default": setting.default,
            "origin": origin,
            "line": entry.origin.line or None,
            "sentence": setting.sentence,
        }


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


SOURCES = ("ssh", "slurm", "hostfile")


@click.command()
@click.option(
    "--from",
    "source",
    type=click.Choice(SOURCES),
    help="Where hosts are known from [a --hostfile, the Slurm allocation of this shell, else ~/.ssh/config]",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="As DeepSpeed and MPI take it: 'host slots=8'")
@click.option("--ssh-config", default="", metavar="FILE", help="Read the hosts of this file instead of ~/.ssh/config")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only hosts that match, as 'gpu*'")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No hosts that match")
@click.option("--name", default="", help="What to call the cluster")
@click.option("--output", type=click.Path(path_type=Path), default=PROJECT_FILE, show_default=True)
@click.option("--yes", "is_agreed", is_flag=True, help="Write without asking")
def init(
    *, source: str | None, hostfile: Path | None, ssh_config: str, output: Path, is_agreed: bool, **which: Any
) -> None:
    """Write the hosts of a cluster into rankdeck.toml.

    They come from ~/.ssh/config, a hostfile or a Slurm allocation. An existing file keeps its settings; a file that
    already names hosts is not changed.
    """
    if source is None:
        is_slurm = bool(os.environ.get(NODE_LIST)) and not ssh_config
        source = "hostfile" if hostfile is not None else "slurm" if is_slurm else "ssh"
    if (source == "hostfile") != (hostfile is not None):
        raise UsageError(f"--hostfile and --from {source} do not fit together", "name the file by --hostfile alone")
    if ssh_config and source != "ssh":
        raise UsageError(f"--ssh-config and hosts of a {source} do not fit together", "leave one of them out")
    found, where = _known(source, hostfile, ssh_config or ssh_config_file())
    known = Inventory(which["name"], tuple(found))
    inventory = msgspec.structs.replace(known, hosts=known.chosen(which["include"], which["exclude"]))
    hosts = inventory.hosts
    shown = clean(str(output), LINE_LIMIT)
    before = _before(output, shown)
    text = inventory_text(inventory)
    whole = _checked(f"{before.rstrip()}\n\n{text}" if before.strip() else text, inventory, shown)
    click.echo(text, nl=False)
    if not is_agreed and not _agrees(f"write {len(hosts)} host{'' if len(hosts) == 1 else 's'} of {where} to {shown}?"):
        raise UsageError("nothing was written", "--yes writes without asking")
    _write(output, whole, shown)
    if ssh_config or (source == "ssh" and ssh_config_file() == SSH_CONFIG and moved_home_hint()):
        whole = clean(str(expanded(ssh_config or SSH_CONFIG).absolute()), LINE_LIMIT)
        print_line(f"rankdeck: the other commands read that file, too, after: export {SSH_CONFIG_VARIABLE}={whole}")
    print_line(f"rankdeck: {shown} is written; name there the python that has torch, and the workdir")
    print_line("rankdeck: then: rankdeck install, rankdeck doctor, rankdeck up")


def _known(source: str, hostfile: Path | None, ssh_config: str) -> tuple[Sequence[HostEntry], str]:
    """Return the hosts of a source, and its clean name."""
    if hostfile is not None:
        found: Sequence[HostEntry] = read_hostfile(
            text_of(hostfile, hint="name a file with a host in each line: --hostfile FILE"),
            clean(str(hostfile), LINE_LIMIT),
        )
        where = clean(str(hostfile), LINE_LIMIT)
    elif source == "slurm":
        return allocated_hosts(slurm_hostnames(allocation(os.environ)), os.environ), "this Slurm allocation"
    else:
        where = clean(ssh_config, LINE_LIMIT)
        found = [HostEntry(alias) for alias in known_hosts(expanded(ssh_config)) or ()]
    if not found:
        todo = "add a Host to ~/.ssh/config, or name a file: --ssh-config FILE or --hostfile FILE"
        raise UsageError(f"{where} names no host", f"{todo}, or export {SSH_CONFIG_VARIABLE}=FILE")
    return found, where


def _before(output: Path, shown: str) -> str:
    """Return the file's present text; empty when there is no file."""
    if not os.path.lexists(output):
        return ""
    text = text_of(output)
    read_inventory(text, shown)
    if parse(text)[0].keys() & {"cluster", "node"}:
        raise UsageError(f"{shown} describes a cluster already", "edit it, or write another by --output")
    return text


def _checked(text: str, inventory: Inventory, shown: str) -> str:
    """Return the text to write, after reading it back.

    Raises:
        UsageError: It would be read differently.
    """
    read = read_inventory(text, shown)
    if (read.name, read.hosts) != (inventory.name, inventory.hosts):
        raise UsageError(f"{shown} would not be read as it is meant", "write another by --output")
    return text


def _agrees(question: str) -> bool:
    if not is_terminal():
        return False
    return click.confirm(question, err=True)


def _write(output: Path, text: str, shown: str) -> None:
    """Write a file completely or not at all."""
    target = Path(os.path.realpath(output))
    new = target.with_name(f".{target.name}.new")
    try:
        new.write_bytes(text.encode())
        if target.exists():
            shutil.copymode(target, new)
        new.replace(target)
    except (OSError, UnicodeEncodeError) as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else "it would not be UTF-8"
        raise UsageError(f"{shown} cannot be written: {why}") from error
