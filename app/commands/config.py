"""The verb `config`: every setting, its value, and where that comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from app.commands.host_options import json_option, print_json
from app.commands.settings_options import load_settings, settings_options
from app.errors import ExitCode
from app.headless import print_line
from app.safe_text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.settings.loading import Loaded


@click.command()
@click.option("--show-origin", "shows_origin", is_flag=True, help="Where each comes from, instead of what it is for")
@click.option("--keys", "is_keys", is_flag=True, help="Only the keys: every action, its name, its keys, what it does")
@click.option("--check", "is_check", is_flag=True, help="Only say all that is wrong; exit code 2 if something is")
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
    """Print every setting; files are config.toml of your own and the nearest rankdeck.toml."""
    loaded = load_settings(assignments, has_files=not has_no_files)
    if is_check:
        raise SystemExit(_check(loaded, is_json=is_json))
    loaded.settings()
    if is_json:
        print_json({"files": _paths(loaded), "settings": [dict(row) for row in _objects(loaded)]})
        return
    rows = _key_rows(loaded) if is_keys else _rows(loaded, shows_origin=shows_origin)
    click.echo("\n".join(_columns(rows)))


def _check(loaded: Loaded, *, is_json: bool) -> ExitCode:
    troubles = [str(trouble) for trouble in loaded.troubles]
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
