"""`rankdeck` alone, in a terminal: looks at what is there, and lets a person choose by a screen what to do."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from app.commands.inventory_file import load_inventory
from app.commands.settings_options import NO_FILES, load_settings
from app.commands.ssh_hosts import expanded, known_hosts, ssh_config_file
from app.errors import AppError, UsageError
from app.evidence.store import default_directory
from app.inventory.inventory import Inventory
from app.settings.loading import project_file
from app.settings.schema import settings_of
from app.ssh.local_link import LocalLink
from app.start import KeptFile, StartFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.settings.schema import ConsoleSettings

MAX_KEPT = 100


def ask_what_to_do(assignments: Sequence[str], *, has_files: bool) -> tuple[str, ...]:
    """Return the arguments of the command that a person has chosen; empty when they left.

    Args:
        assignments: Settings as `KEY=VALUE`; they hold for the command, too.
        has_files: False leaves config.toml and rankdeck.toml out, also of the command.

    Raises:
        UsageError: The settings are wrong.
    """
    from app.tui.start_app import StartApp  # noqa: PLC0415 - only the screen pays for Textual
    from app.tui.theme import Look  # noqa: PLC0415 - as above

    facts = look_around(assignments, has_files=has_files)
    look = Look.chosen(start_settings(facts, assignments))
    no_colour = os.environ.get("NO_COLOR")
    chosen = StartApp(facts, look_here, look).run() or ()
    if no_colour is not None:
        os.environ["NO_COLOR"] = no_colour  # Textual takes it away, and what was chosen looks for it
    return chosen


def start_settings(facts: StartFacts, assignments: Sequence[str]) -> ConsoleSettings:
    """Return how the screen looks. What is wrong with the file of the inventory is told on it, and not in its place.

    Raises:
        UsageError: Something else is wrong with the settings.
    """
    loaded = load_settings(assignments, has_files=not facts.has_no_files)
    if facts.inventory_trouble and all(trouble.origin.place == _project_place() for trouble in loaded.troubles):
        return settings_of({name: entry.value for name, entry in loaded.entries.items()}).console
    return loaded.settings().console


def look_around(assignments: Sequence[str] = (), *, has_files: bool = True) -> StartFacts:
    """Return what is there, without importing torch and without asking any host; arguments as above."""
    config_file = ssh_config_file()
    directory = default_directory()
    inventory, trouble = Inventory(), ""
    if has_files:
        try:
            inventory = load_inventory()
        except UsageError as error:
            trouble = error.whole
    return StartFacts(
        inventory=inventory,
        inventory_file=_as_written(_project_place()) if has_files else "",
        inventory_trouble=trouble,
        settings=(*(() if has_files else (NO_FILES,)), *(f"--set={text}" for text in assignments)),
        has_no_files=not has_files,
        home=str(Path.home()),
        has_torch=importlib.util.find_spec("torch") is not None,
        python=sys.executable,
        config_file=config_file,
        hosts=known_hosts(expanded(config_file)),
        evidence_dir=str(directory),
        kept=tuple(kept_files(directory)),
    )


def _project_place() -> str:
    try:
        path = project_file(Path.cwd())
    except OSError:
        return ""  # the directory is gone
    return "" if path is None else str(path)


def _as_written(path: str) -> str:
    """Return a path as a person writes it: below the home by `~/`."""
    home = str(Path.home()).rstrip("/")
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path


def look_here() -> str:
    """Return what is known of the agent on this machine; blocks for as long as a Python takes to start."""
    try:
        LocalLink().find()
    except AppError:
        return "this machine; no agent serves here yet"
    return "this machine; its agent serves"


def kept_files(directory: Path) -> list[KeptFile]:
    """Return the evidence in a directory, the newest first."""
    now = time.time()  # noqa: TID251 - files carry wall time
    found = []
    try:
        for path in islice(directory.iterdir(), 10_000):
            status = path.lstat()
            if path.suffix == ".zip" and path.is_file() and not path.is_symlink():
                found.append(KeptFile(str(path), max(0.0, now - status.st_mtime), status.st_size))
    except OSError:
        pass  # there is none, or it is another's: then there is nothing to show
    return sorted(found, key=lambda file: file.age_s)[:MAX_KEPT]
