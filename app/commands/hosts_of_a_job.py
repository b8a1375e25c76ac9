"""How a command names the hosts of a job, and reaches them: all at once, with those that are away told of."""

from __future__ import annotations

import functools
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from app.commands.host_options import exclude_option, link_by, named_python, reaches
from app.commands.inventory_file import load_inventory, named_hosts
from app.commands.settings_options import NO_FILES_PARAMETER
from app.errors import AppError, UsageError
from app.headless import print_line
from app.inventory.inventory import HostEntry
from app.open_files import make_room_for_nodes
from app.sessions.hosts import Hosts
from app.sessions.workdir import workdir_on
from app.ssh.config import THIS_MACHINE, parse_destination
from app.ssh.link_group import LinkGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from app.ssh.agent_link import AgentLink

_choice_options = (
    click.option(
        "--host",
        "names",
        multiple=True,
        help="An alias of ~/.ssh/config, user@host, user@host:port, a pattern of the inventory, or "
        f"{THIS_MACHINE}: this machine, without SSH; may come again [all of the inventory]",
    ),
    exclude_option,
)


class HostsWanted(NamedTuple):
    """What a command line says of hosts.

    Attributes:
        entries: The hosts, each with what the inventory says of it.
        typed: What was typed to name them.
        is_named: Whether any was typed, and not only some to leave out.
        exclude: Patterns of those to leave out.
        python: As typed, or of the environment.
        named_python: As typed; empty where it was not.
        ssh_config: Read instead of ~/.ssh/config.
    """

    entries: tuple[HostEntry, ...]
    typed: str
    is_named: bool
    exclude: tuple[str, ...]
    python: str
    named_python: str
    ssh_config: str

    def with_workdirs(self, workdir: str) -> HostsWanted:
        """Return the hosts with the directories that a program runs in: this one on all, unless it is empty."""
        entries = (
            msgspec.structs.replace(entry, workdir=workdir_on(entry.host, workdir or entry.workdir))
            for entry in self.entries
        )
        return self._replace(entries=tuple(entries))

    def narrowed(self, patterns: tuple[str, ...]) -> HostsWanted:
        """Return those hosts that match any pattern, unless they were named one by one.

        Raises:
            UsageError: A pattern matches none.
        """
        if not patterns or self.is_named:
            return self
        typed = " ".join(filter(None, [shlex.join(_repeated("--host", patterns)), self.typed]))
        return self._replace(entries=load_inventory().chosen(patterns, self.exclude), typed=typed)

    @property
    def names(self) -> list[str]:
        """The hosts, as a person calls them."""
        return [entry.host for entry in self.entries]


def takes_hosts(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that name hosts and say how they are reached; give the command what they mean, as `wanted`."""

    @functools.wraps(command)
    def with_hosts(
        *, names: tuple[str, ...], exclude: tuple[str, ...], python: str, ssh_config: str, **how: Any
    ) -> None:
        typed = shlex.join([*_repeated("--host", names), *_repeated("--exclude", exclude)])
        has_no_files = click.get_current_context().params.get(NO_FILES_PARAMETER)
        entries = _without_inventory(names) if has_no_files else named_hosts(names, exclude)
        command(
            wanted=HostsWanted(entries, typed, bool(names), exclude, python, named_python(python), ssh_config), **how
        )

    wrapped = reaches(with_hosts)
    for option in reversed(_choice_options):
        wrapped = option(wrapped)
    return wrapped


@contextmanager
def reached(wanted: HostsWanted, then: Callable[[AgentLink], object], *, needs_all: bool) -> Iterator[Hosts]:
    """Lend the hosts, gone to and looked at; the `with` block lets go of them.

    Args:
        wanted: Which.
        then: Done on each: `AgentLink.find` or `bring_up`.
        needs_all: One that cannot be reached ends the command; else it is told of, as long as another can be.

    Raises:
        AppError: What keeps the only host away; of several each is told before.
    """
    make_room_for_nodes(len(wanted.entries))
    with LinkGroup() as group:
        for entry in wanted.entries:
            group.add(link_by(entry.host, wanted.named_python, entry.python, wanted.python, wanted.ssh_config))
        away = {host: error for host, error in group.connect(then) if error is not None}
        _tell(away, wanted, is_in_the_way=needs_all or len(away) == len(group.links))
        there = [(link, entry) for link, entry in zip(group.links, wanted.entries, strict=True) if link.is_somewhere]
        still_away = {link.host: away[link.host] for link, _ in there if link.host in away}
        yield Hosts(tuple(link for link, _ in there), tuple(entry for _, entry in there), wanted.typed, still_away)


def _tell(away: Mapping[str, AppError], wanted: HostsWanted, *, is_in_the_way: bool) -> None:
    if not away:
        return
    first = next(iter(away.values()))
    if len(wanted.entries) == 1:
        raise first
    for error in away.values():
        print_line(f"rankdeck: {error.whole}")
    if is_in_the_way:
        failure = AppError(f"{len(away)} of {len(wanted.entries)} hosts cannot take part", "or do without: --exclude")
        failure.exit_code = first.exit_code
        raise failure
    print_line(f"rankdeck: going on without {len(away)} of {len(wanted.entries)} hosts")


def _without_inventory(names: tuple[str, ...]) -> tuple[HostEntry, ...]:
    if not names:
        raise UsageError("without the inventory hosts are named one by one", "say --host")
    for name in names:
        parse_destination(name)
    return tuple(HostEntry(name) for name in dict.fromkeys(names))


def _repeated(option: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, value)]
