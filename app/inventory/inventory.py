"""The hosts of a cluster, as `rankdeck.toml` names them. Pure.

Tables that hold settings (`app.settings`), and those of jobs, are others'.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from app.errors import UsageError
from app.safe_text import clean
from app.settings.layers import Origin, Trouble
from app.settings.nearness import nearest_text
from app.settings.schema import repeated
from app.settings.toml_lines import NotTomlError, parse
from app.ssh.config import THIS_MACHINE, parse_destination

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from app.settings.toml_lines import Path

    _Fields = Mapping[str, tuple[str, Callable[[object], object]]]

MAX_HOSTS = 4096
MAX_RANKS = 4096
"""Of one host."""
GPU = "gpu"
"""What `nproc` says for one rank for each GPU."""
LOCAL = "local"
"""Another name of this machine."""


class HostEntry(msgspec.Struct, frozen=True):
    """A host and how it is used; empty fields leave the choice to the commands."""

    host: str
    """An alias of ~/.ssh/config, `user@host`, `user@host:port`, or `localhost`: this machine, without SSH."""
    num_ranks: int | None = None
    """None is one for each GPU, without GPUs one for every two cores."""
    python: str = ""
    """The one there that has rankdeck; may begin with `~/`."""
    workdir: str = ""


class Inventory(msgspec.Struct, frozen=True):
    """All hosts of a cluster, in the order in which they get their ranks."""

    name: str = ""
    hosts: tuple[HostEntry, ...] = ()

    def chosen(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> tuple[HostEntry, ...]:
        """Return the hosts that match any pattern of `include`, all without one, and none of `exclude`.

        Raises:
            UsageError: A pattern matches nothing, or no host is left.
        """
        for pattern in (*include, *exclude):
            if not any(_fits(entry, pattern) for entry in self.hosts):
                near = nearest_text(pattern, [entry.host for entry in self.hosts])
                raise UsageError(f"{clean(repeated(pattern))} matches no host of the inventory{near}")
        chosen = tuple(
            entry
            for entry in self.hosts
            if (not include or any(_fits(entry, pattern) for pattern in include))
            and not any(_fits(entry, pattern) for pattern in exclude)
        )
        if not chosen:
            raise UsageError("no host of the inventory is left", "choose less narrowly")
        return chosen


def _fits(entry: HostEntry, pattern: str) -> bool:
    return entry.host == pattern or fnmatchcase(entry.host, pattern)  # brackets stand in addresses, too


class WrongInventoryError(UsageError):
    """A file holds no inventory, or a wrong one.

    Attributes:
        troubles: All that is wrong, in the order of the file.
    """

    def __init__(self, troubles: Sequence[Trouble]) -> None:
        more = f"and {len(troubles) - 1} more" if len(troubles) > 1 else ""
        super().__init__(str(troubles[0]), more)
        self.troubles = list(troubles)


def read_inventory(text: str, place: str) -> Inventory:
    """Return what a file says of hosts.

    Args:
        text: TOML.
        place: The file's name, for what is said of it.

    Raises:
        WrongInventoryError: It is not TOML, or something in it cannot be.
    """
    try:
        content, lines = parse(text)
    except NotTomlError as error:
        raise WrongInventoryError([Trouble(Origin(place, error.line), f"it is not TOML: {error}")]) from None
    reader = _Reader(content, lines, place)
    inventory = reader.inventory()
    if reader.troubles:
        raise WrongInventoryError(sorted(reader.troubles, key=lambda trouble: trouble.origin.line))
    return inventory


class _WrongError(ValueError):
    """A value cannot be; the message says why."""


class _Reader:
    """Takes a file apart and keeps all that is wrong with it."""

    def __init__(self, content: Mapping[str, Any], lines: Mapping[Path, int], place: str) -> None:
        self.troubles: list[Trouble] = []
        self._content = content
        self._lines = lines
        self._place = place

    def inventory(self) -> Inventory:
        cluster = self._table(self._content.get("cluster", {}), _CLUSTER, ("cluster",))
        tables = self._content.get("node", [])
        if not isinstance(tables, list):
            self._trouble(("node",), "node is a list of tables: write [[node]] above each host")
            tables = []
        if len(tables) > MAX_HOSTS:
            self._trouble(("node",), f"{len(tables)} hosts are more than {MAX_HOSTS}")
            tables = tables[:MAX_HOSTS]
        seen: dict[str, int] = {}
        hosts = []
        for number, table in enumerate(tables):
            path = ("node", str(number))
            values = self._table(table, _NODE, path)
            host = values.get("host")
            if host is None:
                if isinstance(table, dict) and "host" not in table:
                    self._trouble(path, 'a node has a host: host = "gpu1"')
                continue
            if host in seen:
                self._trouble((*path, "host"), f"host: {host!r} is also the host of line {seen[host]}")
                continue
            seen[host] = self._line((*path, "host"))
            shared: dict[str, Any] = {key: cluster[key] for key in ("python", "workdir") if key in cluster}
            hosts.append(HostEntry(**(shared | values)))
        return Inventory(cluster.get("name", ""), tuple(hosts))

    def _table(self, table: object, known: _Fields, path: Path) -> dict[str, Any]:
        """Return the right values of a table, by the fields that take them."""
        if not isinstance(table, dict):
            brackets = f"[[{path[0]}]]" if len(path) > 1 else f"[{path[0]}]"
            self._trouble(path, f"{path[0]} is a table: write {brackets} above its keys")
            return {}
        values = {}
        for key, value in table.items():
            if key not in known:
                self._trouble((*path, key), f"{key}: no such key of {path[0]}{nearest_text(key, list(known))}")
                continue
            field, take = known[key]
            try:
                values[field] = take(value)
            except _WrongError as error:
                self._trouble((*path, key), f"{key}: {error}")
        return values

    def _trouble(self, path: Path, what: str) -> None:
        self.troubles.append(Trouble(Origin(self._place, self._line(path)), what))

    def _line(self, path: Path) -> int:
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise _WrongError(f"{repeated(value)} is no text of one line")
    return value


def _host(value: object) -> str:
    text = _text(value)
    try:
        parse_destination(text)
    except UsageError as error:
        raise _WrongError(str(error)) from None
    return THIS_MACHINE if text == LOCAL else text


def _num_ranks(value: object) -> int | None:
    if value == GPU:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
        raise _WrongError(f'{repeated(value)} is neither "{GPU}" nor a number from 1 to {MAX_RANKS}')
    return value


_CLUSTER: _Fields = {
    "name": ("name", _text),
    "python": ("python", _text),
    "workdir": ("workdir", _text),
}
_NODE: _Fields = {
    "host": ("host", _host),
    "nproc": ("num_ranks", _num_ranks),
    "python": ("python", _text),
    "workdir": ("workdir", _text),
}
"""By key of the file: the field, and what takes its value."""
