"""The hosts of a session, and the connections to them: opened together, each brought back when it is lost."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from app.at_once import at_once
from app.errors import AppError, HostUnreachableError
from app.inventory.inventory import CURVE
from app.sessions.connection_keeper import ConnectionKeeper
from app.ssh.config import THIS_MACHINE
from app.words import nodes_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from app.inventory.inventory import HostEntry
    from app.ssh.agent_link import AgentLink


class Hosts(NamedTuple):
    """Where a session is.

    Attributes:
        links: In the order in which hosts get their ranks; each connected, and its agent found, unless it is away.
        entries: What the inventory says of each.
        typed: How a person names them on a command line: `--host gpu1`; empty where they are all of the inventory.
        away: Hosts that cannot be reached so far, and why.
    """

    links: tuple[AgentLink, ...]
    entries: tuple[HostEntry, ...]
    typed: str
    away: Mapping[str, AppError]

    @property
    def names(self) -> list[str]:
        """The hosts, as a person calls them."""
        return [link.host for link in self.links]

    @property
    def direct(self) -> list[tuple[AgentLink, HostEntry]]:
        """Those whose reports are to come straight over TCP; this machine's own have no way to go."""
        both = zip(self.links, self.entries, strict=True)
        return [(link, entry) for link, entry in both if entry.telemetry == CURVE and link.host != THIS_MACHINE]

    @property
    def text(self) -> str:
        """Some of them, and how many more."""
        return nodes_text(self.names)

    def addresses(self, host: str) -> Sequence[str]:
        """Return under which addresses a host may be reached by others, as far as its agent was found."""
        places = (link.place for link in self.links if link.host == host)
        return next((place.addresses for place in places if place is not None), ())

    def python_of_first(self) -> str:
        """Return the Python that the first agent runs in; empty as long as it has not been found."""
        place = self.links[0].place
        return "" if place is None else place.python

    def command(self, words: str) -> str:
        """Return a command of ours that is about them: `rankdeck status --host gpu1`."""
        return " ".join(filter(None, ["rankdeck", words, self.typed]))


class Connections:
    """The connections of a session, in its loop."""

    def __init__(self, hosts: Hosts, tell: Callable[[str], None]) -> None:
        """`tell` takes a sentence about each change."""
        self._hosts = hosts
        self._tell = tell
        self._away = dict(hosts.away)
        self._keepers: dict[str, ConnectionKeeper] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def open(
        self,
        take_frame: Callable[[str, bytes], None],
        patience_s: float,
        is_unheard: Callable[[str], bool],
        *,
        may_ask: bool = False,
    ) -> None:
        """Bring the agents' sockets here.

        Args:
            take_frame: Called from a thread with a node and a frame of its telemetry, where it comes by no socket.
            patience_s: How long a connection that is lost is tried again; 0 is not at all.
            is_unheard: Tells whether a node says nothing.
            may_ask: Whether somebody can be asked what a host wants to know; see `keepers_that_wait`.

        Raises:
            AppError: No host can be reached.
        """
        direct = {link.host for link, _ in self._hosts.direct}

        def open_road(link: AgentLink) -> None:
            link.open_road(lambda frame: take_frame(link.host, frame), has_telemetry=link.host not in direct)

        links = self._hosts.links
        opened = await asyncio.to_thread(lambda: list(at_once(links, open_road)))
        answers = zip(links, opened, strict=True)
        self._away |= {link.host: answer for link, answer in answers if isinstance(answer, AppError)}
        if len(self._away) == len(links):
            raise next(iter(self._away.values()))
        for link in links:
            if not link.is_forwarded:
                ways = "`agent proxy`" if link.host in direct else "`agent proxy` and `agent relay`"
                self._tell(f"sshd of {link.host} forwards no sockets: going through {ways}")
        if patience_s:
            self._keepers = {
                link.host: ConnectionKeeper(
                    link,
                    self._tell,
                    patience_s,
                    self._away.get(link.host),
                    partial(is_unheard, link.host),
                    may_ask=may_ask,
                )
                for link in links
            }
            self._tasks = [
                asyncio.create_task(keeper.run(), name="rankdeck-connection") for keeper in self._keepers.values()
            ]

    @property
    def troubles(self) -> dict[str, str]:
        """Why there is no way to a host at present, in words; empty where there is one."""
        kept = {host: keeper.trouble for host, keeper in self._keepers.items()}
        words = kept or {host: error.whole for host, error in self._away.items()}
        return {host: trouble.removeprefix(f"{host}: ") for host, trouble in words.items()}

    def absence(self, host: str) -> AppError | None:
        """Return why there is no way to a host at present; None where there is one."""
        trouble = self.troubles.get(host, "")
        keeper = self._keepers.get(host)
        error = keeper.error if keeper is not None else self._away.get(host)
        return (error or HostUnreachableError(host, trouble)) if trouble else None

    @property
    def keepers_that_wait(self) -> dict[str, ConnectionKeeper]:
        """Those of hosts that want an answer of a person, who can be asked."""
        return {host: keeper for host, keeper in self._keepers.items() if keeper.wants_answer}

    def forget_refusals(self) -> None:
        """Let the person be asked again what they have left unanswered."""
        for link in self._hosts.links:
            link.forget_refusals()

    @property
    def failure(self) -> AppError | None:
        """What ended the hope for a connection; None while there is hope for each, or none was there from the start."""
        for link in self._hosts.links:
            if link.host in self._away:
                continue  # whoever looks on knows that it is without it
            keeper = self._keepers.get(link.host)
            if keeper is not None:
                if keeper.failure is not None:
                    return keeper.failure
            elif not link.is_alive:
                return HostUnreachableError(link.host, "the connection is lost")
        return None

    async def keep_no_more(self) -> None:
        """Leave what is lost from now on lost."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Let go of the hosts; returns when the last of them is let go."""
        await self.keep_no_more()
        await asyncio.to_thread(lambda: list(at_once(self._hosts.links, lambda link: link.close())))
