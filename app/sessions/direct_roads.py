"""Has the reports of hosts come straight over TCP: asks their agents over SSH, and again whenever one falls silent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, assert_never

from agent.wire.direct import ListenForTelemetry, Listening, StopListening
from agent.wire.replies import RefusalReason
from app.daemon_thread import in_daemon_thread
from app.errors import AgentRefusedError, AppError
from app.roads.direct_source import DirectSource, new_client_key
from app.safe_text import LINE_LIMIT, clean
from app.sessions.road_choice import Ask, Effect, FallBack, HearAt, RoadChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from app.sessions.hosts import Hosts
    from app.sessions.session import Session
    from app.ssh.agent_link import AgentLink

LOOK_S = 0.25
ASKED_AT_ONCE = 32
FAREWELL_S = 2.0
"""For all agents to hear that this console leaves; one that does not lets it in until its lease is over."""


class DirectRoads:
    """The hosts of a session whose reports come over TCP, in its loop. The key is made here and leaves with us."""

    def __init__(self, hosts: Hosts, session: Session, tell: Callable[[str], None]) -> None:
        """Before the session is connected.

        Args:
            hosts: All hosts; those that are to be heard so are `Hosts.direct`.
            session: Hears them.
            tell: Takes a sentence about each whose reports come over SSH all the same.
        """
        self._session = session
        self._tell = tell
        self._key = new_client_key()
        self._hosts = {link.host: (link, entry) for link, entry in hosts.direct}
        self._choices = {host: RoadChoice(_address_of_ssh(link)) for host, (link, _) in self._hosts.items()}
        self._let_in: set[str] = set()
        """Hosts whose agents may know our key."""
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        for host in self._hosts:
            session.telemetry.hear(host, None)

    def start(self) -> None:
        """Begin; the session is connected."""
        self._start(self._look_on())

    async def close(self) -> None:
        """Tell the agents that we leave, as far as they can be told."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*(self._leave(host) for host in self._let_in))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="rankdeck-direct-road")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look_on(self) -> None:
        while True:
            now_s, heard_s = time.monotonic(), self._session.telemetry.heard_s
            for host, choice in self._choices.items():
                self._do(host, choice.look(now_s, heard_s.get(host)))
            await asyncio.sleep(LOOK_S)

    def _do(self, host: str, effect: Effect | None) -> None:
        match effect:
            case None:
                return
            case Ask():
                self._start(self._ask(host))
            case HearAt(address=address, port=port, server_key=server_key):
                self._session.telemetry.hear(host, DirectSource(address, port, server_key, self._key))
            case FallBack(words=words):
                self._start(self._fall_back(host, clean(words, LINE_LIMIT)))
            case _:
                assert_never(effect)

    async def _ask(self, host: str) -> None:
        choice, (_, entry) = self._choices[host], self._hosts[host]
        first, last = entry.telemetry_ports
        question = ListenForTelemetry(self._key.public, entry.telemetry_interface, first, last)
        self._let_in.add(host)
        try:
            async with self._asking:
                reply = await self._session.fleet.ask(host, question)
        except AgentRefusedError as error:
            # For a moment its ports may be held by a doctor who looks whether we reach them.
            may_pass = error.reason == RefusalReason.PORT_TAKEN
            self._do(host, choice.refused(_refusal_words(error), time.monotonic(), may_pass=may_pass))
        except AppError:
            choice.unanswered(time.monotonic())
        else:
            if isinstance(reply, Listening):
                self._do(host, choice.answered(reply, time.monotonic()))
            else:
                self._do(host, choice.refused(f"it answered with {type(reply).__name__}", time.monotonic()))

    async def _fall_back(self, host: str, words: str) -> None:
        link, _ = self._hosts[host]
        self._session.put_fallback(host, words)
        self._tell(f'{host}: its reports come over SSH, not as telemetry = "curve" wants: {words}')
        self._session.telemetry.hear(host, None)
        try:
            await in_daemon_thread(link.bring_telemetry)
        except AppError as error:
            self._tell(str(error))
        await self._leave(host)
        self._let_in.discard(host)

    async def _leave(self, host: str) -> None:
        with contextlib.suppress(AppError):
            await self._session.fleet.ask(host, StopListening(self._key.public))


def _refusal_words(error: AgentRefusedError) -> str:
    if error.reason == RefusalReason.MALFORMED:
        return "its agent does not know how: bring this console's there, rankdeck install --restart-agent"
    return error.message


def _address_of_ssh(link: AgentLink) -> str:
    """Return the address under which SSH has come to the host, as it says itself."""
    return "" if link.place is None or not link.place.addresses else link.place.addresses[0].partition("/")[0]
