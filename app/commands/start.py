"""`rankdeck` alone, in a terminal: looks at what is there, and lets a person choose by a screen what to do."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from itertools import islice
from pathlib import Path

from app.commands.settings_options import read_settings
from app.commands.ssh_hosts import expanded, known_hosts, ssh_config_file
from app.errors import AppError
from app.evidence.store import default_directory
from app.ssh.local_link import LocalLink
from app.start import KeptFile, StartFacts

MAX_KEPT = 100


def ask_what_to_do() -> tuple[str, ...]:
    """Return the arguments of the command that a person has chosen; empty when they left.

    Raises:
        UsageError: The settings are wrong.
    """
    from app.tui.start_app import StartApp  # noqa: PLC0415 - only the screen pays for Textual
    from app.tui.theme import Look  # noqa: PLC0415 - as above

    look = Look.chosen(read_settings((), has_files=True).console)
    no_colour = os.environ.get("NO_COLOR")
    chosen = StartApp(look_around(), look_here, look).run() or ()
    if no_colour is not None:
        os.environ["NO_COLOR"] = no_colour  # Textual takes it away, and what was chosen looks for it
    return chosen


def look_around() -> StartFacts:
    """Return what is there, without importing torch and without asking any host."""
    config_file = ssh_config_file()
    directory = default_directory()
    return StartFacts(
        home=str(Path.home()),
        has_torch=importlib.util.find_spec("torch") is not None,
        python=sys.executable,
        config_file=config_file,
        hosts=known_hosts(expanded(config_file)),
        evidence_dir=str(directory),
        kept=tuple(kept_files(directory)),
    )


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
