"""The hosts of a session, and the connections to them: opened together, each brought back when it is lost.

`Connections` holds them. `HostQuestions` holds the questions of hosts that cannot be reached without the user: they are
asked one by one when the user wants it. `HostDoctor` examines the session's hosts over the connections that are there,
beside the frames.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.commands import ShowJob, Shown
from app.errors import AppError, HostUnreachableError
from app.inventory.program import Again, Program
from app.model.absence import Absence
from app.model.newcomers import Newcomers
from app.preflight.asking import preflight
from app.preflight.findings import Step, Wanted
from app.session.reconnector import ConnectionKeeper, absence_of
from app.session.remote_job import even_shares
from app.text import nodes_text
from app.threads import at_once, in_daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agent.wire.jobs import JobSpec
    from app.fleet.agent_link import AgentLink
    from app.fleet.fleet import Fleet
    from app.inventory.inventory import HostEntry
    from app.preflight.findings import Preflight
    from app.session.remote_job import RunRequest
    from app.ssh.questions import Question, QuestionDesk


class Hosts(NamedTuple):
    """Where a session is.

    Attributes:
        links: In the order in which hosts get their ranks; each connected, and its agent found, unless it is away.
        entries: What the inventory says of each.
        typed: How a person names them on a command line: `--host gpu1`; empty where they are all of the inventory.
        away: Hosts that cannot be reached so far, and why.
        newcomers: Says which nodes have come that were meant, too, and are not among these; may be called often.
    """

    links: tuple[AgentLink, ...]
    entries: tuple[HostEntry, ...]
    typed: str
    away: Mapping[str, AppError]
    newcomers: Callable[[], Newcomers] = Newcomers

    @property
    def names(self) -> list[str]:
        """The hosts, as a person calls them."""
        return [link.host for link in self.links]

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
        take_frame: Callable[[str, bytes, float], None],
        patience_s: float,
        is_unheard: Callable[[str], bool],
        *,
        may_ask: bool = False,
    ) -> None:
        """Bring the agents' sockets here.

        Args:
            take_frame: Called from a thread with a node, a frame of its telemetry, and how old that is, where it comes
                by no socket.
            patience_s: How long a connection that is lost is tried again; 0 is not at all.
            is_unheard: Tells whether a node says nothing.
            may_ask: Whether somebody can be asked what a host wants to know; see `keepers_that_wait`.

        Raises:
            AppError: No host can be reached.
        """

        def open_road(link: AgentLink) -> None:
            link.open_road(lambda frame, age_s=0.0: take_frame(link.host, frame, age_s))

        links = self._hosts.links
        opened = await asyncio.to_thread(lambda: list(at_once(links, open_road)))
        answers = zip(links, opened, strict=True)
        self._away |= {link.host: answer for link, answer in answers if isinstance(answer, AppError)}
        if len(self._away) == len(links):
            raise next(iter(self._away.values()))
        for link in links:
            if not link.is_forwarded:
                self._tell(
                    f"sshd of {link.host} forwards no sockets: going through `agent proxy` and `agent telemetry`"
                )
        if patience_s:
            kept: dict[int, ConnectionKeeper] = {}
            for link in links:
                if id(link.kept) not in kept:  # hosts behind a relay have a connection in common
                    kept[id(link.kept)] = self._keeper(link, patience_s, is_unheard, may_ask=may_ask)
                self._keepers[link.host] = kept[id(link.kept)]
            self._tasks = [asyncio.create_task(keeper.run(), name="rankdeck-connection") for keeper in kept.values()]

    def _keeper(
        self, link: AgentLink, patience_s: float, is_unheard: Callable[[str], bool], *, may_ask: bool
    ) -> ConnectionKeeper:
        """Return what keeps a link's connection; a common one knows by itself whether the other end lives."""
        if link.kept is not link:
            return ConnectionKeeper(link.kept, self._tell, patience_s, may_ask=may_ask)
        absence, unheard = self._away.get(link.host), partial(is_unheard, link.host)
        return ConnectionKeeper(link, self._tell, patience_s, absence, unheard, may_ask=may_ask)

    @property
    def absences(self) -> dict[str, Absence | None]:
        """Why a host cannot be heard at present; None where nothing is in the way."""
        own = {link.host: link.absence for link in self._hosts.links if link.kept is not link}
        if not self._keepers:
            return {host: absence_of(error, host) for host, error in self._away.items()} | own
        return {host: self._kept_absence(host, keeper) or own.get(host) for host, keeper in self._keepers.items()}

    @staticmethod
    def _kept_absence(host: str, keeper: ConnectionKeeper) -> Absence | None:
        """Return what a keeper lacks: where it keeps what hosts have in common, that is in none of their ways alone."""
        if keeper.absence is None or keeper.host == host:
            return keeper.absence
        return Absence(f"{keeper.host}: {keeper.absence.why}")

    def absence(self, host: str) -> AppError | None:
        """Return why there is no way to a host's agent at present; None where there is one."""
        absence = self.absences.get(host)
        if absence is None:
            return None
        keeper = self._keepers.get(host)
        error = keeper.error if keeper is not None else self._away.get(host)
        return error or HostUnreachableError(host, absence.why)

    @property
    def keepers_that_wait(self) -> dict[str, ConnectionKeeper]:
        """Those of hosts that want an answer of a person, who can be asked."""
        return {keeper.host: keeper for keeper in self._keepers.values() if keeper.wants_answer}

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


class HostQuestions:
    """What `app.tui.source.Questions` asks for; in the session's loop."""

    def __init__(self, desk: QuestionDesk, connections: Connections, tell: Callable[[str], None]) -> None:
        """Take the questions from the terminal; `tell` takes what is said beside them."""
        self._desk = desk
        self._connections = connections
        self._tell = tell
        self._is_asking = False
        desk.attend()

    @property
    def waiting(self) -> list[str]:
        """Hosts that want an answer; empty while the person is asked."""
        return [] if self._is_asking else list(self._connections.keepers_that_wait)

    @property
    def question(self) -> Question | None:
        """What the person is asked now."""
        return self._desk.question

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question, unless it is over already; None is not now, for all hosts of this time."""
        self._desk.answer(number, text)

    async def begin(self) -> None:
        """Go to the hosts that want an answer, one after the other; an answer may open others, too.

        One at a time: a host that has asked waits for its answer, and for no other one's.
        """
        if self._is_asking:
            return
        self._is_asking = True
        try:
            self._connections.forget_refusals()
            gone_to: set[str] = set()
            while left := {
                host: keeper for host, keeper in self._connections.keepers_that_wait.items() if host not in gone_to
            }:
                host, keeper = next(iter(left.items()))
                gone_to.add(host)
                self._desk.begin(host)
                try:
                    await keeper.try_now(asks=True)
                finally:
                    is_put_off = self._desk.end()
                for sentence in self._desk.drain_told():
                    self._tell(f"{host}: {sentence}")
                if is_put_off:
                    return
                if not keeper.wants_answer:
                    others = (other for name, other in left.items() if name not in gone_to)
                    await asyncio.gather(*(other.try_now(asks=False) for other in others))
        finally:
            self._is_asking = False

    def close(self) -> None:
        """Ask nothing more, here or elsewhere."""
        self._desk.leave()


class HostDoctor:
    """What `app.tui.source.Doctor` asks for; in the session's loop."""

    def __init__(
        self,
        hosts: Hosts,
        absence: Callable[[str], AppError | None] = lambda _host: None,
        fleet: Callable[[], Fleet] | None = None,
    ) -> None:
        """Of some hosts.

        Args:
            hosts: Which.
            absence: Says why there is no way to a host now.
            fleet: Reaches the agents, which know what a job is made of that is to begin again.
        """
        self._hosts = hosts
        self._absence = absence
        self._fleet = fleet

    @property
    def hosts(self) -> list[str]:
        """Their names."""
        return self._hosts.names

    async def look(self, tell: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        """Return what is to be said of the hosts; see `app.tui.source.Doctor`."""
        all_wanted = wanted_of(self._hosts, job if isinstance(job, Program) else None)
        if isinstance(job, Again):
            all_wanted = await self._wanted_again(job, all_wanted)
        links = {link.host: link for link in self._hosts.links}
        looked_at: list[tuple[Wanted, AgentLink | AppError]] = [
            (wanted, self._absence(wanted.host) or links[wanted.host]) for wanted in all_wanted
        ]
        loop = asyncio.get_running_loop()

        def tell_there(host: str, step: Step) -> None:
            with suppress(RuntimeError):  # the console has gone meanwhile
                loop.call_soon_threadsafe(tell, host, step)

        return await in_daemon_thread(lambda: preflight(looked_at, tell=tell_there))

    async def _wanted_again(self, job: Again, all_wanted: list[Wanted]) -> list[Wanted]:
        """Return what the next attempt of a job would use, as far as its nodes know."""
        kept = [wanted for wanted in all_wanted if wanted.host not in job.without]
        specs = await asyncio.gather(*(self._spec(wanted.host, job.job_id) for wanted in kept))
        parts = {wanted.host: spec for wanted, spec in zip(kept, specs, strict=True) if spec is not None}
        shares = (
            dict(zip(parts, even_shares(job.num_ranks, len(parts)), strict=True)) if job.num_ranks and parts else {}
        )
        return [
            wanted
            if (spec := parts.get(wanted.host)) is None
            else msgspec.structs.replace(
                wanted,
                num_ranks=None if spec.shares_gpus else shares.get(wanted.host, spec.local_world_size),
                python=spec.python,
                workdir=spec.workdir,
            )
            for wanted in kept
            if wanted.host in parts or not parts or self._absence(wanted.host) is not None
        ]

    async def _spec(self, host: str, job_id: str) -> JobSpec | None:
        if self._fleet is None or self._absence(host) is not None:
            return None
        try:
            reply = await self._fleet().ask(host, ShowJob(job_id))
        except AppError:
            return None
        return reply.spec if isinstance(reply, Shown) else None


def wanted_of(hosts: Hosts, job: Program | RunRequest | None = None) -> list[Wanted]:
    """Return what a job would use on each host, by what is said of the job and what the inventory says."""
    every = [Wanted(entry.host, entry.num_ranks, "", entry.workdir) for entry in hosts.entries]
    if job is None:
        return every
    shares_gpus = not isinstance(job, Program) and job.shares_gpus
    return [
        msgspec.structs.replace(
            wanted,
            num_ranks=None if shares_gpus else job.num_ranks or wanted.num_ranks,
            python=job.python,
            workdir=job.workdir or wanted.workdir,
        )
        for wanted in every
    ]
