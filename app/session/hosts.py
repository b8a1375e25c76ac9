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
from app.model.new_nodes import NewNodes
from app.model.unreachable_reason import UnreachableReason
from app.preflight.examining import preflight
from app.preflight.findings import Step, Wanted
from app.session.reconnector import Reconnector, unreachable_reason_of
from app.session.remote_job import even_shares
from app.text import nodes_text
from app.threads import in_daemon_thread, run_parallel

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
        new_nodes: Says which nodes have come that were meant, too, and are not among these; may be called often.
    """

    links: tuple[AgentLink, ...]
    entries: tuple[HostEntry, ...]
    typed: str
    away: Mapping[str, AppError]
    new_nodes: Callable[[], NewNodes] = NewNodes

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

    def command(self, arguments: str) -> str:
        """Return a command of ours that is about them: `rankdeck status --host gpu1`."""
        return " ".join(filter(None, ["rankdeck", arguments, self.typed]))


class Connections:
    """The connections of a session, in its loop."""

    def __init__(self, hosts: Hosts, notify: Callable[[str], None]) -> None:
        """`notify` takes a sentence about each change."""
        self._hosts = hosts
        self._notify = notify
        self._away = dict(hosts.away)
        self._reconnectors: dict[str, Reconnector] = {}
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
            take_frame: Called from a thread with a node, a report of it from a relay, and the report's age in seconds.
            patience_s: How long a connection that is lost is tried again; 0 is not at all.
            is_unheard: Tells whether a node says nothing.
            may_ask: Whether somebody can be asked what a host wants to know; see `keepers_that_wait`.

        Raises:
            AppError: No host can be reached.
        """

        def open_sockets(link: AgentLink) -> None:
            link.open_sockets(lambda frame, age_s=0.0: take_frame(link.host, frame, age_s))

        links = self._hosts.links
        opened = await asyncio.to_thread(lambda: list(run_parallel(links, open_sockets)))
        answers = zip(links, opened, strict=True)
        self._away |= {link.host: answer for link, answer in answers if isinstance(answer, AppError)}
        if len(self._away) == len(links):
            raise next(iter(self._away.values()))
        for link in links:
            if not link.is_forwarded:
                self._notify(f"sshd of {link.host} forwards no sockets: going through `agent proxy`")
        if patience_s:
            kept: dict[int, Reconnector] = {}
            for link in links:
                if id(link.kept) not in kept:  # hosts behind a relay have a connection in common
                    kept[id(link.kept)] = self._reconnector(link, patience_s, is_unheard, may_ask=may_ask)
                self._reconnectors[link.host] = kept[id(link.kept)]
            self._tasks = [
                asyncio.create_task(link_reconnector.run(), name="rankdeck-connection")
                for link_reconnector in kept.values()
            ]

    def _reconnector(
        self, link: AgentLink, patience_s: float, is_unheard: Callable[[str], bool], *, may_ask: bool
    ) -> Reconnector:
        """Return what keeps a link's connection; a common one knows by itself whether the other end lives."""
        if link.kept is not link:
            return Reconnector(link.kept, self._notify, patience_s, may_ask=may_ask)
        unreachable_reason, unheard = self._away.get(link.host), partial(is_unheard, link.host)
        return Reconnector(link, self._notify, patience_s, unreachable_reason, unheard, may_ask=may_ask)

    @property
    def absences(self) -> dict[str, UnreachableReason | None]:
        """Why a host cannot be heard at present; None where nothing is in the way."""
        own = {link.host: link.unreachable_reason for link in self._hosts.links if link.kept is not link}
        if not self._reconnectors:
            return {host: unreachable_reason_of(error, host) for host, error in self._away.items()} | own
        return {
            host: self._reconnector_unreachable(host, link_reconnector) or own.get(host)
            for host, link_reconnector in self._reconnectors.items()
        }

    @staticmethod
    def _reconnector_unreachable(host: str, link_reconnector: Reconnector) -> UnreachableReason | None:
        """Return what a keeper lacks: where it keeps what hosts have in common, that is in none of their ways alone."""
        if link_reconnector.unreachable_reason is None or link_reconnector.host == host:
            return link_reconnector.unreachable_reason
        return UnreachableReason(f"{link_reconnector.host}: {link_reconnector.unreachable_reason.why}")

    def unreachable_reason(self, host: str) -> AppError | None:
        """Return why there is no way to a host's agent at present; None where there is one."""
        unreachable_reason = self.absences.get(host)
        if unreachable_reason is None:
            return None
        link_reconnector = self._reconnectors.get(host)
        error = link_reconnector.error if link_reconnector is not None else self._away.get(host)
        return error or HostUnreachableError(host, unreachable_reason.why)

    @property
    def keepers_that_wait(self) -> dict[str, Reconnector]:
        """Those of hosts that want an answer of a person, who can be asked."""
        return {
            link_reconnector.host: link_reconnector
            for link_reconnector in self._reconnectors.values()
            if link_reconnector.wants_answer
        }

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
            link_reconnector = self._reconnectors.get(link.host)
            if link_reconnector is not None:
                if link_reconnector.failure is not None:
                    return link_reconnector.failure
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
        await asyncio.to_thread(lambda: list(run_parallel(self._hosts.links, lambda link: link.close())))


class HostQuestions:
    """What `app.tui.source.Questions` asks for; in the session's loop."""

    def __init__(self, desk: QuestionDesk, connections: Connections, notify: Callable[[str], None]) -> None:
        """Take the questions from the terminal; `notify` takes what is said beside them."""
        self._desk = desk
        self._connections = connections
        self._notify = notify
        self._is_question_open = False
        desk.attend()

    @property
    def waiting(self) -> list[str]:
        """Hosts that want an answer; empty while the person is asked."""
        return [] if self._is_question_open else list(self._connections.keepers_that_wait)

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
        if self._is_question_open:
            return
        self._is_question_open = True
        try:
            self._connections.forget_refusals()
            gone_to: set[str] = set()
            while left := {
                host: link_reconnector
                for host, link_reconnector in self._connections.keepers_that_wait.items()
                if host not in gone_to
            }:
                host, link_reconnector = next(iter(left.items()))
                gone_to.add(host)
                self._desk.begin(host)
                try:
                    await link_reconnector.try_now(asks=True)
                finally:
                    is_put_off = self._desk.end()
                for sentence in self._desk.drain_notes():
                    self._notify(f"{host}: {sentence}")
                if is_put_off:
                    return
                if not link_reconnector.wants_answer:
                    others = (other for name, other in left.items() if name not in gone_to)
                    await asyncio.gather(*(other.try_now(asks=False) for other in others))
        finally:
            self._is_question_open = False

    def close(self) -> None:
        """Ask nothing more, here or elsewhere."""
        self._desk.leave()


class HostDoctor:
    """What `app.tui.source.Doctor` asks for; in the session's loop."""

    def __init__(
        self,
        hosts: Hosts,
        unreachable_reason: Callable[[str], AppError | None] = lambda _host: None,
        fleet: Callable[[], Fleet] | None = None,
    ) -> None:
        """Of some hosts.

        Args:
            hosts: Which.
            unreachable_reason: Says why there is no way to a host now.
            fleet: Reaches the agents, which know what a job is made of that is to begin again.
        """
        self._hosts = hosts
        self._unreachable = unreachable_reason
        self._fleet = fleet

    @property
    def hosts(self) -> list[str]:
        """Their names."""
        return self._hosts.names

    async def look(self, notify: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        """Return what is to be said of the hosts; see `app.tui.source.Doctor`."""
        all_wanted = wanted_of(self._hosts, job if isinstance(job, Program) else None)
        if isinstance(job, Again):
            all_wanted = await self._wanted_again(job, all_wanted)
        links = {link.host: link for link in self._hosts.links}
        looked_at: list[tuple[Wanted, AgentLink | AppError]] = [
            (wanted, self._unreachable(wanted.host) or links[wanted.host]) for wanted in all_wanted
        ]
        loop = asyncio.get_running_loop()

        def notify_there(host: str, step: Step) -> None:
            with suppress(RuntimeError):  # the console has gone meanwhile
                loop.call_soon_threadsafe(notify, host, step)

        return await in_daemon_thread(lambda: preflight(looked_at, notify=notify_there))

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
            if wanted.host in parts or not parts or self._unreachable(wanted.host) is not None
        ]

    async def _spec(self, host: str, job_id: str) -> JobSpec | None:
        if self._fleet is None or self._unreachable(host) is not None:
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
