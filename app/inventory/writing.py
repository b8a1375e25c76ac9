"""An inventory as the text of a `rankdeck.toml`. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from app.inventory.inventory import GPU

if TYPE_CHECKING:
    from app.inventory.inventory import HostEntry, Inventory

_HEAD = """\
# The hosts of this cluster, in the order in which they get their ranks: see `rankdeck init --help`.

[cluster]
"""
_HINTS = """\
# python = "~/venvs/train/bin/python"   # on the hosts: the one that has rankdeck
# workdir = "~/project"
"""


def inventory_text(inventory: Inventory) -> str:
    """Return the text of a file that `read_inventory` reads as this inventory."""
    head = _HEAD + (f"name = {_quoted(inventory.name)}\n" if inventory.name else "") + _HINTS
    return head + "".join(f"\n{_node(entry)}" for entry in inventory.hosts)


def _node(entry: HostEntry) -> str:
    ranks = f'"{GPU}"' if entry.num_ranks is None else str(entry.num_ranks)
    fields = {"host": _quoted(entry.host), "nproc": ranks}
    for name in ("python", "workdir"):
        if value := getattr(entry, name):
            fields[name] = _quoted(value)
    return "[[node]]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())


def _quoted(text: str) -> str:
    # What JSON writes as a string is a basic string of TOML: both escape by \\", \\\\ and \\uXXXX.
    return json.dumps(text, ensure_ascii=False)
