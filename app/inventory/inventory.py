"""The hosts of a cluster and its jobs, as `rankdeck.toml` names them, read and written.

Pure. `read_inventory` reads a file; tables that hold settings are those of `app.settings`. `inventory_text` writes one.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Never

import msgspec

from app.errors import UsageError
from app.inventory.jobs import JobEntry, read_jobs
from app.inventory.tables import TableReader, WrongValueError, text
from app.settings.keys import nearest_text
from app.settings.layers import Origin, Trouble
from app.settings.schema import TABLES, repeated
from app.settings.toml_lines import NotTomlError, parse
from app.ssh.config import THIS_MACHINE, parse_destination
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.inventory.tables import Fields

MAX_HOSTS = 4096
MAX_RANKS = 4096
"""Ranks of one host."""
GPU = "gpu"
"""Value of `nproc` for one rank for each GPU."""
LOCAL = "local"
"""Another name of this machine."""
NO_RELAY = "none"
"""Value of `--relay` for SSH to each host, whatever the inventory has."""


class HostEntry(msgspec.Struct, frozen=True):
    """A host and how it is used; empty fields leave the choice to the commands."""

    host: str
    """An alias of ~/.ssh/config, `user@host`, `user@host:port`, or `localhost`: this machine, without SSH."""
    num_ranks: int | None = None
    """Ranks; None is one for each GPU, without GPUs one for every two cores."""
    python: str = ""
    """Python there that has rankdeck; may begin with `~/`."""
    workdir: str = ""


class Inventory(msgspec.Struct, frozen=True):
    """All hosts of a cluster, in the order in which they get their ranks."""

    name: str = ""
    hosts: tuple[HostEntry, ...] = ()
    jobs: tuple[JobEntry, ...] = ()
    relay: str = ""
    """Host of the relay that its nodes connect to; empty where SSH goes to each."""
    relay_dir: str = ""
    """Directory of the relay there; empty is its usual one."""
    workdir: str = ""
    """Working directory of nodes without a table of their own."""
    num_ranks: int | None = None
    """Number of their ranks; None means one for each GPU, or for every two cores."""

    @property
    def kind(self) -> str:
        """Text that names the source of its hosts."""
        return f"the relay on {clean(self.relay)}" if self.relay else "the inventory"

    def behind_relay(self, nodes: Sequence[str]) -> Inventory:
        """Return an inventory of exactly these nodes, each with its entry here, if any."""
        known = {entry.host: entry for entry in self.hosts}
        hosts = tuple(known.get(node, HostEntry(node, self.num_ranks, workdir=self.workdir)) for node in nodes)
        return msgspec.structs.replace(self, hosts=hosts)

    def chosen(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> tuple[HostEntry, ...]:
        """Return the hosts that match any pattern of `include`, all without one, and none of `exclude`.

        Raises:
            UsageError: A pattern matches nothing, or no host is left.
        """
        for pattern in (*include, *exclude):
            if not any(_fits(entry, pattern) for entry in self.hosts):
                near = nearest_text(pattern, [entry.host for entry in self.hosts])
                raise UsageError(f"{clean(repeated(pattern))} matches no host of {self.kind}{near}")
        chosen = tuple(entry for entry in self.hosts if is_meant(entry, include, exclude))
        if not chosen:
            raise UsageError(f"no host of {self.kind} is left", "choose less narrowly")
        return chosen


def is_meant(entry: HostEntry, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Return whether patterns choose a host; see `Inventory.chosen`."""
    is_in = not include or any(_fits(entry, pattern) for pattern in include)
    return is_in and not any(_fits(entry, pattern) for pattern in exclude)


def _fits(entry: HostEntry, pattern: str) -> bool:
    return entry.host == pattern or fnmatchcase(entry.host, pattern)  # addresses contain brackets, too


class WrongInventoryError(UsageError):
    """A file holds no inventory, or a wrong one.

    Attributes:
        troubles: All errors, in the order of the file.
    """

    def __init__(self, troubles: Sequence[Trouble]) -> None:
        more = f"and {len(troubles) - 1} more" if len(troubles) > 1 else ""
        super().__init__(str(troubles[0]), more)
        self.troubles = list(troubles)


def read_inventory(written: str, place: str) -> Inventory:
    """Return the inventory of a file.

    Args:
        written: TOML.
        place: File name, for error messages.

    Raises:
        WrongInventoryError: It is not TOML, or something in it is invalid.
    """
    try:
        content, lines = parse(written)
    except NotTomlError as error:
        raise WrongInventoryError([Trouble(Origin(place, error.line), f"it is not TOML: {error}")]) from None
    reader = TableReader(lines, place)
    _look_for_strangers(content, reader)
    cluster = reader.values(content.get("cluster", {}), _CLUSTER, ("cluster",), "[cluster]")
    hosts = _read_hosts(content.get("node", []), cluster, reader)
    own = {key: cluster[key] for key in ("name", "relay", "relay_dir", "workdir", "num_ranks") if key in cluster}
    inventory = Inventory(hosts=hosts, jobs=read_jobs(content.get("job", {}), reader), **own)
    if reader.troubles:
        raise WrongInventoryError(sorted(reader.troubles, key=lambda trouble: trouble.origin.line))
    return inventory


def _look_for_strangers(content: Mapping[str, Any], reader: TableReader) -> None:
    known = [*TABLES, *_TABLES]
    for name in content:
        if name not in known:
            reader.complain((name,), f"{name}: no such table; there are {', '.join(known)}{nearest_text(name, known)}")


def _read_hosts(tables: object, cluster: Mapping[str, Any], reader: TableReader) -> tuple[HostEntry, ...]:
    if not isinstance(tables, list):
        reader.complain(("node",), "node is a list of tables: write [[node]] above each host")
        return ()
    if len(tables) > MAX_HOSTS:
        reader.complain(("node",), f"{len(tables)} hosts are more than {MAX_HOSTS}")
    seen: dict[str, int] = {}
    hosts = []
    for number, table in enumerate(tables[:MAX_HOSTS]):
        path = ("node", str(number))
        values = reader.values(table, _NODE, path, "[[node]]")
        host = values.get("host")
        if host is None:
            if isinstance(table, dict) and "host" not in table:
                reader.complain(path, 'a node has a host: host = "gpu1"')
            continue
        if host in seen:
            reader.complain((*path, "host"), f"host: {host!r} is also the host of line {seen[host]}")
            continue
        seen[host] = reader.line((*path, "host"))
        shared: dict[str, Any] = {key: cluster[key] for key in _SHARED if key in cluster}
        hosts.append(HostEntry(**(shared | values)))
    return tuple(hosts)


def _telemetry(_value: object) -> Never:
    raise WrongValueError(
        'no longer a key: reports come by SSH; for hundreds of hosts start a relay and name its host: relay = "HOST"'
    )


def _host(value: object) -> str:
    name = text(value)
    try:
        parse_destination(name)
    except UsageError as error:
        raise WrongValueError(str(error)) from None
    return THIS_MACHINE if name == LOCAL else name


def _num_ranks(value: object) -> int | None:
    if value == GPU:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise WrongValueError(f'{repeated(value)} is neither "{GPU}" nor a number from 1 to {MAX_RANKS}')
    return value


_TELEMETRY: Fields = dict.fromkeys(("telemetry", "telemetry_interface", "telemetry_port"), ("", _telemetry))
"""Keys of a removed transport."""
_CLUSTER: Fields = {
    "name": ("name", text),
    "nproc": ("num_ranks", _num_ranks),
    "python": ("python", text),
    "workdir": ("workdir", text),
    **_TELEMETRY,
    "relay": ("relay", _host),
    "relay_dir": ("relay_dir", text),
}
_NODE: Fields = {
    "host": ("host", _host),
    "nproc": ("num_ranks", _num_ranks),
    "python": ("python", text),
    "workdir": ("workdir", text),
    **_TELEMETRY,
}
_SHARED = ("num_ranks", "python", "workdir")
"""Fields of [cluster] that apply to each host without its own."""
_TABLES = ("cluster", "node", "job")
"""Tables beside those of settings."""


_HEAD = """\
# The hosts of this cluster, in the order in which they get their ranks: see `rankdeck init --help`.

[cluster]
"""
_HINTS = """\
# python = "~/venvs/train/bin/python"   # on the hosts: has torch; rankdeck is installed into it
# workdir = "~/project"
#
# nproc, here or of a node, is how many ranks a node has; without it one for each GPU, or for every two cores.
"""


def inventory_text(inventory: Inventory) -> str:
    """Return the text of a file that `read_inventory` reads as this inventory."""
    head = _HEAD + (f"name = {_quoted(inventory.name)}\n" if inventory.name else "") + _HINTS
    return head + "".join(f"\n{_node(entry)}" for entry in inventory.hosts)


def _node(entry: HostEntry) -> str:
    fields = {"host": _quoted(entry.host)}
    if entry.num_ranks is not None:
        fields["nproc"] = str(entry.num_ranks)
    for name in ("python", "workdir"):
        if value := getattr(entry, name):
            fields[name] = _quoted(value)
    return "[[node]]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())


def _quoted(text: str) -> str:
    # A JSON string is a basic string of TOML: both escape by \\", \\\\ and \\uXXXX.
    return json.dumps(text, ensure_ascii=False)
