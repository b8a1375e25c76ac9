"""Finds the inventory and the hosts that a command may name.

`inventory_path` is the nearest `rankdeck.toml`, from the directory that the command is run in upwards. `known_hosts`
are the hosts that a user's configuration of ssh names. `rankdeck` alone opens the console on the inventory's hosts
(`console_argv`), else it prints what to type first (`first_lines`).
"""

from __future__ import annotations

import glob
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.settings_options import read_settings
from app.errors import UsageError
from app.inventory.inventory import LOCAL, HostEntry, Inventory, WrongInventoryError, read_inventory
from app.paths import ForeignFileError, NotRegularError, TooLargeError, read_regular_file
from app.settings.loading import MAX_FILE_BYTES, project_file
from app.ssh.config import THIS_MACHINE, host_aliases, parse_destination
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.settings.layers import Trouble

INIT_HINT = "rankdeck init writes one; --no-config leaves it out"


def inventory_path() -> Path | None:
    """Return the path of the nearest file; None when there is none."""
    try:
        return project_file(Path.cwd())
    except OSError:
        return None  # the directory is gone


def load_inventory() -> Inventory:
    """Return the hosts and jobs of the nearest file; an empty inventory when there is none.

    Raises:
        UsageError: The file cannot be read, or has an error.
    """
    path = inventory_path()
    if path is None:
        return Inventory()
    inventory = read_inventory(text_of(path), clean(str(path), LINE_LIMIT))
    # The file names programs to run, there and here: whoever can write it can run any program.
    return inventory if inventory == Inventory() else read_inventory(text_of(path, is_own=True), str(path))


def inventory_troubles() -> list[Trouble]:
    """Return all errors of the nearest file in what is the inventory's; none where there is no file to read."""
    path = inventory_path()
    try:
        if path is not None:
            read_inventory(text_of(path), clean(str(path), LINE_LIMIT))
    except WrongInventoryError as error:
        return error.troubles
    except UsageError:
        pass  # it cannot be read, which is an error in its settings too
    return []


def text_of(path: Path, *, is_own: bool = False, hint: str = INIT_HINT) -> str:
    """Return the text of a user's file.

    Raises:
        UsageError: The file cannot be read, is no text, or, with `is_own`, can be written by others.
    """
    shown = clean(str(path), LINE_LIMIT)
    try:
        return read_regular_file(path, MAX_FILE_BYTES, is_own=is_own).decode().removeprefix("\ufeff")
    except OSError as error:
        raise UsageError(f"{shown} cannot be read: {error.strerror}", hint) from error
    except ForeignFileError:
        raise UsageError(f"{shown} names hosts, and somebody else may write it", "see to its owner and mode") from None
    except NotRegularError:
        raise UsageError(f"{shown} is not a file", hint) from None
    except TooLargeError:
        raise UsageError(f"{shown} is larger than {MAX_FILE_BYTES >> 20} MiB", hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown} is not UTF-8", hint) from None


def named_hosts(
    names: Sequence[str], exclude: Sequence[str] = (), inventory: Inventory | None = None
) -> tuple[HostEntry, ...]:
    """Return the named hosts: by patterns of the inventory, or any other host.

    Without a name they are all of the inventory, and where that names none, this machine.

    Args:
        names: Names and patterns, as typed.
        exclude: Patterns of hosts to leave out.
        inventory: The inventory; None loads that of this directory.

    Raises:
        UsageError: A name matches no host, or there is no inventory to leave hosts out of.
    """
    inventory = load_inventory() if inventory is None else inventory
    if not inventory.hosts and exclude:
        raise UsageError("there is no inventory to choose hosts from", "name a host, or write one: rankdeck init")
    if not inventory.hosts and not names:
        return (HostEntry(THIS_MACHINE),)
    if not names:
        return inventory.chosen((), exclude)
    found: dict[str, HostEntry] = {}
    for name in names:
        name = THIS_MACHINE if name == LOCAL else name  # noqa: PLW2901
        same = [entry for entry in inventory.hosts if entry.host == name]
        matching = same or [entry for entry in inventory.hosts if fnmatchcase(entry.host, name)]
        if not matching:
            parse_destination(name)
            matching = [HostEntry(name)]
        found.update((entry.host, entry) for entry in matching)
    left = Inventory("", tuple(found.values()))
    return left.chosen((), exclude) if exclude else left.hosts


SSH_CONFIG = "~/.ssh/config"
SSH_CONFIG_VARIABLE = "RANKDECK_SSH_CONFIG"
MAX_CONFIG_FILES = 256
MAX_CONFIG_BYTES = 1 << 20


def ssh_config_file() -> str:
    """Return the name of the ssh configuration file, as the user wrote it."""
    return os.environ.get(SSH_CONFIG_VARIABLE) or SSH_CONFIG


def expanded(path: str) -> Path:
    """Return a path with `~` expanded, where it can be."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib's raises for a user who is not there


def known_hosts(config_file: Path) -> tuple[str, ...] | None:
    """Return the hosts that an ssh configuration and its included files name; None when it cannot be read."""
    num_left = MAX_CONFIG_FILES

    def included(pattern: str) -> Iterator[str]:
        nonlocal num_left
        place = expanded(pattern)
        # ssh includes relative to ~/.ssh for a user's own file, wherever that file is.
        for path in sorted(glob.glob(str(expanded("~/.ssh") / place))):  # noqa: PTH207 - it may be absolute
            if num_left and (text := _text(Path(path))) is not None:
                num_left -= 1
                yield text

    text = _text(config_file)
    return None if text is None else tuple(host_aliases(text, included))


def _text(path: Path) -> str | None:
    try:
        if not path.is_file():
            return None  # reading a pipe would block
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_CONFIG_BYTES)
    except OSError:
        return None


FIRST_LINES = """\
rankdeck names, live, the rank of a PyTorch DDP job that holds the others up.
{why}. What to type first:

  rankdeck demo                              4 ranks train here: F freezes one
  rankdeck run train.py                      your program here, under torchrun
  rankdeck run --host HOST train.py          the same on a host, by SSH
  rankdeck attach --host HOST                the job that runs on a host
  rankdeck init                              write rankdeck.toml for a cluster
  rankdeck replay FILE                       evidence, or a recording
  rankdeck help                              the manual; --help: all commands"""


def console_argv(assignments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that open the console on the nearest `rankdeck.toml`; empty when it names no hosts.

    Args:
        assignments: Settings as `KEY=VALUE`, as typed.

    Raises:
        UsageError: The file has an error.
    """
    inventory = load_inventory()
    if not inventory.hosts and not inventory.relay:
        return ()
    return ("attach", *(f"--set={assignment}" for assignment in assignments))


def inventory_text() -> str:
    """Return the path of the nearest `rankdeck.toml`, clean; empty when there is none."""
    path = inventory_path()
    return "" if path is None else clean(str(path), LINE_LIMIT)


def first_lines(assignments: Sequence[str], *, has_files: bool) -> str:
    """Return what to type first, for a user without a cluster.

    Raises:
        UsageError: The settings have an error.
    """
    read_settings(assignments, has_files=has_files)
    if not has_files:
        why = "There is no rankdeck.toml: --no-config is set"
    elif path := inventory_text():
        why = f"{path} names no hosts"
    else:
        why = "There is no rankdeck.toml here, nor above"
    return FIRST_LINES.format(why=why)
