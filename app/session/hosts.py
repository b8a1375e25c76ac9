"""The hosts of a session and the connections to them, opened in parallel and brought back when lost.

`Connections` holds them. `HostQuestions` holds the questions of hosts that need the user to log in; they are asked one
by one when the user wants it. `HostDoctor` examines the session's hosts over the open connections, beside the frames.
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
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.preflight.examining import preflight
from app.preflight.findings import Step, Wanted
from app.session.reconnector import Reconnector, no_forwarding_notice, unreachable_reason_of
from app.session.remote_job import even_split
from app.text import nodes_text
from app.threads import in_daemon_thread, run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from agent.wire.jobs import JobSpec
    from app.fleet.agent_link import AgentLink
    from app.fleet.fleet import Fleet
    from app.inventory.inventory import HostEntry
    from app.preflight.findings import Preflight
    from app.session.remote_job import RunRequest
    from app.ssh.questions import Question, QuestionDesk


LOST = "the connection is lost"


class Hosts(NamedTuple):
    """The hosts of a session.

    Attributes:
        links: In the order in which hosts get their ranks; each connected, and its agent found, unless it is away.
        entries: Inventory entry of each host.
        typed: Command-line options that name them, as `--host gpu1`; empty where they are the whole inventory.
        away: Hosts not reached so far, and why.
        new_nodes: Returns the nodes that have come and are not among these hosts; may be called often.
        news: Returns sentences about hosts, from those who manage them, since the last call; may be called often.
    """

    links: tuple[AgentLink, ...]
    entries: tuple[HostEntry, ...]
    typed: str
    away: Mapping[str, AppError]
    new_nodes: Callable[[], NewNodes] = NewNodes
    news: Callable[[], Sequence[str]] = tuple

    @property
    def names(self) -> list[str]:
        """Names of the hosts, as the user typed them."""
        return [link.host for link in self.links]

    @property
    def text(self) -> str:
        """Short text with some of the names and the number of the others."""
        return nodes_text(self.names)

    def addresses(self, host: str) -> Sequence[str]:
        """Return the addresses at which others may reach a host; empty until its agent is found."""
        places = (link.place for link in self.links if link.host == host)
        return next((place.addresses for place in places if place is not None), ())

    def python_of_first(self) -> str:
        """Return the Python of the first host's agent; empty until that agent is found."""
        place = self.links[0].place
        return "" if place is None else place.python

    def command(self, arguments: str) -> str:
        """Return a rankdeck command for these hosts, as `rankdeck status --host gpu1`."""
        return " ".join(filter(None, ["rankdeck", arguments, self.typed]))


class Connections:
    """Connections of a session; used in its loop."""

    def __init__(self, hosts: Hosts, notify: Callable[[str], None]) -> None:
        """`notify` takes a sentence about each change."""
        self._hosts = hosts
        self._notify = notify
        self._away = dict(hosts.away)
        self._reconnectors: dict[str, Reconnector] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_unheard: Callable[[str], bool] = lambda _host: False
        self._silent: dict[str, UnreachableReason] = {}
        """Hosts with a connection and an agent, and without a report in the time that the user waits for one."""

    async def open(
        self,
        take_frame: Callable[[str, bytes, float], None],
        patience_s: float,
        is_unheard: Callable[[str], bool],
        *,
        may_ask: bool = False,
    ) -> None:
        """Open the channels to the agents' sockets.

        Args:
            take_frame: Called from a thread with a node, a report of it from a relay, and the report's age in seconds.
            patience_s: Seconds for which a lost connection is tried again; 0 is not at all.
            is_unheard: Returns whether reports of a node have stopped.
            may_ask: Whether a user can answer a host's questions; see `waiting_reconnectors`.

        Raises:
            AppError: No host can be reached.
        """

        def open_sockets(link: AgentLink) -> None:
            link.open_sockets(lambda frame, age_s=0.0: take_frame(link.host, frame, age_s))

        self._is_unheard = is_unheard
        links = self._hosts.links
        opened = await asyncio.to_thread(lambda: list(run_parallel(links, open_sockets)))
        answers = zip(links, opened, strict=True)
        self._away |= {link.host: answer for link, answer in answers if isinstance(answer, AppError)}
        if len(self._away) == len(links):
            raise next(iter(self._away.values()))
        for link in links:
            if not link.is_forwarded:
                self._notify(no_forwarding_notice(link.host))
        if patience_s:
            kept: dict[int, Reconnector] = {}
            for link in links:
                if id(link.kept) not in kept:  # hosts behind one relay share a connection
                    kept[id(link.kept)] = self._reconnector(link, patience_s, is_unheard, may_ask=may_ask)
                self._reconnectors[link.host] = kept[id(link.kept)]
            self._tasks = [
                asyncio.create_task(link_reconnector.run(), name="rankdeck-connection")
                for link_reconnector in kept.values()
            ]

    def _reconnector(
        self, link: AgentLink, patience_s: float, is_unheard: Callable[[str], bool], *, may_ask: bool
    ) -> Reconnector:
        """Return the reconnector of a link; a relay's shared connection detects by itself that its peer has ended."""
        if link.kept is not link:
            return Reconnector(link.kept, self._notify, patience_s, may_ask=may_ask)
        unreachable_reason, unheard = self._away.get(link.host), partial(is_unheard, link.host)
        return Reconnector(link, self._notify, patience_s, unreachable_reason, unheard, may_ask=may_ask)

    def put_silent(self, hosts: Iterable[str], reason: UnreachableReason) -> None:
        """Note hosts that are unreachable for a reason until they report, although they are connected."""
        self._silent |= dict.fromkeys(hosts, reason)

    @property
    def unreachable_reasons(self) -> dict[str, UnreachableReason | None]:
        """Why each host is unreachable at present; None where it is not."""
        return {
            host: reason or (self._silent.get(host) if self._is_unheard(host) else None)
            for host, reason in self._connection_reasons().items()
        }

    def missing_text(self, hosts: Sequence[str]) -> str:
        """Return what is missing where no host of some, or of all, answers: `no agent on h1 and h2`; else nothing."""
        hosts = hosts or self._hosts.names
        reasons, silent = self.unreachable_reasons, UnreachableReason("", UnreachableKind.ANSWER)
        missing = (reasons.get(host) or (silent if self._is_unheard(host) else None) for host in hosts)
        kinds = {reason and reason.unreachable_kind for reason in missing}
        return (
            "" if None in kinds else f"{kinds.pop() if len(kinds) == 1 else UnreachableKind.ANSWER} {nodes_text(hosts)}"
        )

    def _connection_reasons(self) -> dict[str, UnreachableReason | None]:
        """Return why each host is unreachable, by its connection and its agent."""
        own = {
            link.host: link.unreachable_reason
            for link in self._hosts.links
            if link.kept is not link or self._is_unheard(link.host)
        }
        if not self._reconnectors:
            away = {link.host: UnreachableReason(LOST) for link in self._hosts.links if not link.kept.is_alive}
            away |= {host: unreachable_reason_of(error, host) for host, error in self._away.items()}
            # Only a relay knows that a node came back: a link of its own says nothing of a host that it never reached.
            shared = {link.host for link in self._hosts.links if link.kept is not link}
            return away | {host: own[host] if host in shared else away.get(host) or own[host] for host in own}
        return {
            host: self._reconnector_unreachable(host, link_reconnector) or own.get(host)
            for host, link_reconnector in self._reconnectors.items()
        }

    @staticmethod
    def _reconnector_unreachable(host: str, link_reconnector: Reconnector) -> UnreachableReason | None:
        """Return why a host is unreachable; the text names the relay where hosts share its connection."""
        if link_reconnector.unreachable_reason is None or link_reconnector.host == host:
            return link_reconnector.unreachable_reason
        return UnreachableReason(f"{link_reconnector.host}: {link_reconnector.unreachable_reason.why}")

    def unreachable_reason(self, host: str) -> AppError | None:
        """Return the error that makes a host's agent unreachable at present; None if it is reachable."""
        unreachable_reason = self.unreachable_reasons.get(host)
        if unreachable_reason is None:
            return None
        link_reconnector = self._reconnectors.get(host)
        error = link_reconnector.error if link_reconnector is not None else self._away.get(host)
        return error or HostUnreachableError(host, unreachable_reason.why)

    @property
    def waiting_reconnectors(self) -> dict[str, Reconnector]:
        """Reconnectors of hosts that want an answer of the user, where one can be asked."""
        return {
            link_reconnector.host: link_reconnector
            for link_reconnector in self._reconnectors.values()
            if link_reconnector.wants_answer
        }

    def forget_refusals(self) -> None:
        """Allow questions that the user has left unanswered to be asked again."""
        for link in self._hosts.links:
            link.forget_refusals()

    @property
    def failure(self) -> AppError | None:
        """Error of a connection that is lost permanently, else None; hosts away from the start do not count.

        Where lost connections are not tried again, the last one counts.
        """
        known = [link for link in self._hosts.links if link.host not in self._away]
        for link in known:
            link_reconnector = self._reconnectors.get(link.host)
            if link_reconnector is not None and link_reconnector.failure is not None:
                return link_reconnector.failure
        if not known or self._reconnectors or any(link.is_alive for link in known):
            return None
        return HostUnreachableError(known[0].host, LOST)

    async def keep_no_more(self) -> None:
        """Stop reconnecting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections; return when the last one is closed."""
        await self.keep_no_more()
        await asyncio.to_thread(lambda: list(run_parallel(self._hosts.links, lambda link: link.close())))


class HostQuestions:
    """Implements `app.tui.source.Questions`; used in the session's loop."""

    def __init__(self, desk: QuestionDesk, connections: Connections, notify: Callable[[str], None]) -> None:
        """Take the questions over from the terminal; `notify` takes the remarks shown beside them."""
        self._desk = desk
        self._connections = connections
        self._notify = notify
        self._is_question_open = False
        desk.attend()

    @property
    def waiting(self) -> list[str]:
        """Hosts that want an answer; empty while a question is open."""
        return [] if self._is_question_open else list(self._connections.waiting_reconnectors)

    @property
    def question(self) -> Question | None:
        """The open question; None without one."""
        return self._desk.question

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question, unless it is over already; None puts off all hosts of this round."""
        self._desk.answer(number, text)

    async def begin(self) -> None:
        """Ask for the hosts that want an answer, one after the other; one answer may let in others, too.

        Only one login is open at a time, so that each host waits for its own answer only.
        """
        if self._is_question_open:
            return
        self._is_question_open = True
        try:
            self._connections.forget_refusals()
            gone_to: set[str] = set()
            while left := {
                host: link_reconnector
                for host, link_reconnector in self._connections.waiting_reconnectors.items()
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
        """Ask no more questions, here or in the terminal."""
        self._desk.leave()


class HostDoctor:
    """Implements `app.tui.source.Doctor`; used in the session's loop."""

    def __init__(
        self,
        hosts: Hosts,
        unreachable_reason: Callable[[str], AppError | None] = lambda _host: None,
        fleet: Callable[[], Fleet] | None = None,
    ) -> None:
        """Set up for some hosts.

        Args:
            hosts: The hosts to examine.
            unreachable_reason: Returns why a host is unreachable now.
            fleet: Reaches the agents, which know the spec of a job to restart.
        """
        self._hosts = hosts
        self._unreachable = unreachable_reason
        self._fleet = fleet

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts."""
        return self._hosts.names

    async def look(self, notify: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        """Examine the hosts and return the findings; see `app.tui.source.Doctor`."""
        all_wanted = wanted_of(self._hosts, job if isinstance(job, Program) else None)
        if isinstance(job, Again):
            all_wanted = await self._wanted_again(job, all_wanted)
        links = {link.host: link for link in self._hosts.links}
        looked_at: list[tuple[Wanted, AgentLink | AppError]] = [
            (wanted, self._unreachable(wanted.host) or links[wanted.host]) for wanted in all_wanted
        ]
        loop = asyncio.get_running_loop()

        def notify_there(host: str, step: Step) -> None:
            with suppress(RuntimeError):  # the console has closed by then
                loop.call_soon_threadsafe(notify, host, step)

        return await in_daemon_thread(lambda: preflight(looked_at, notify=notify_there))

    async def _wanted_again(self, job: Again, all_wanted: list[Wanted]) -> list[Wanted]:
        """Return what the next attempt of a job would use, as far as its nodes know."""
        kept = [wanted for wanted in all_wanted if wanted.host not in job.without]
        specs = await asyncio.gather(*(self._spec(wanted.host, job.job_id) for wanted in kept))
        parts = {wanted.host: spec for wanted, spec in zip(kept, specs, strict=True) if spec is not None}
        local_sizes = (
            dict(zip(parts, even_split(job.num_ranks, len(parts)), strict=True)) if job.num_ranks and parts else {}
        )
        return [
            wanted
            if (spec := parts.get(wanted.host)) is None
            else msgspec.structs.replace(
                wanted,
                num_ranks=None
                if spec.shares_gpus or _VISIBLE in spec.env
                else local_sizes.get(wanted.host, spec.local_world_size),
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


_VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Where a job sets it, the agents alone know how many GPUs its ranks would see, and refuse what does not fit."""


def wanted_of(hosts: Hosts, job: Program | RunRequest | None = None) -> list[Wanted]:
    """Return what a job would use on each host: the job's own options, else those of the inventory."""
    every = [Wanted(entry.host, entry.num_ranks, "", entry.workdir) for entry in hosts.entries]
    if job is None:
        return every
    is_free = not isinstance(job, Program) and (job.shares_gpus or _VISIBLE in dict(job.env))
    return [
        msgspec.structs.replace(
            wanted,
            num_ranks=None if is_free else job.num_ranks or wanted.num_ranks,
            python=job.python,
            workdir=job.workdir or wanted.workdir,
        )
        for wanted in every
    ]
