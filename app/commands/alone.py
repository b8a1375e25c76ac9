"""`rankdeck` alone: the console on the hosts of the nearest rankdeck.toml, else what to type first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.commands.inventory_file import inventory_path, load_inventory
from app.commands.settings_options import read_settings
from app.safe_text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_LINES = """\
rankdeck names, live, the rank of a PyTorch DDP job that holds the others up.
{why}. What to type first:

  rankdeck demo                              4 ranks train here: F freezes one
  rankdeck run train.py                      your program here, under torchrun
  rankdeck run --host HOST -- train.py       the same on a host, by SSH
  rankdeck attach --host HOST                the job that runs on a host
  rankdeck init                              write rankdeck.toml for a cluster
  rankdeck replay FILE                       evidence, or a recording
  rankdeck --help                            all commands"""


def console_argv(assignments: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that open the console on the nearest `rankdeck.toml`; empty where it names no hosts.

    Args:
        assignments: Settings as `KEY=VALUE`, as typed.

    Raises:
        UsageError: Something is wrong with the file.
    """
    inventory = load_inventory()
    if not inventory.hosts and not inventory.relay:
        return ()
    return ("attach", *(f"--set={assignment}" for assignment in assignments))


def inventory_text() -> str:
    """Return the path of the nearest `rankdeck.toml`, clean; empty where there is none."""
    path = inventory_path()
    return "" if path is None else clean(str(path), LINE_LIMIT)


def first_lines(assignments: Sequence[str], *, has_files: bool) -> str:
    """Return what to type first, where there is no cluster.

    Raises:
        UsageError: Something is wrong with the settings.
    """
    read_settings(assignments, has_files=has_files)
    if not has_files:
        why = "There is no rankdeck.toml: --no-config is set"
    elif path := inventory_text():
        why = f"{path} names no hosts"
    else:
        why = "There is no rankdeck.toml here, nor above"
    return FIRST_LINES.format(why=why)
