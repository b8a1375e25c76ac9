"""What real hosts ask when they are gone back to, with a console open: only when the person says so, one at a time."""

from __future__ import annotations

import asyncio
import math
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from app.fleet.host_link import Access, HostLink
from app.session.options import SessionOptions
from app.session.remote_session import RemoteSession
from app.ssh.login import Logins
from app.ssh.questions import QuestionDesk
from tests.support.hosts import PASSWORD, Network, require_hosts
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from app.session.hosts import HostQuestions
    from app.ssh.questions import Question

PASSPHRASE = "open it"
SECOND_FACTOR = (
    "AuthenticationMethods publickey,keyboard-interactive",
    *("UsePAM yes", "KbdInteractiveAuthentication yes", "PermitRootLogin yes"),
)
BACK_S = 30.0


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", sshd_options=getattr(request, "param", ())) as network:
        yield network


class Visit:
    """A session with somebody at its desk."""

    def __init__(self, session: RemoteSession, links: list[HostLink]) -> None:
        self.session = session
        self.links = links
        self.said: list[str] = []

    @property
    def questions(self) -> HostQuestions:
        assert self.session.questions is not None
        return self.session.questions

    def look(self) -> bool:
        """Let a frame come."""
        self.session.view()
        self.said += self.session.drain_notices()
        return True

    async def until_waiting(self, *hosts: str) -> None:
        await until_async(lambda: self.look() and self.questions.waiting == [*hosts], BACK_S, f"{hosts} wait")

    async def until_asked(self, after: int = 0) -> Question:
        def asked() -> Question | None:
            self.look()
            question = self.questions.question
            return question if question is not None and question.number > after else None

        question = await until_async(asked, BACK_S, "something is asked")
        assert question is not None
        return question

    async def until_lost(self, host: str, words: str) -> None:
        """Wait until a host, heard a moment ago, is no longer shown as up, with these words."""

        def trouble() -> str:
            return next(row.trouble for row in self.session.view().nodes() if row.node == host)

        await until_async(lambda: words in trouble(), BACK_S, f"{host}: {words}")

    async def until_told(self, words: str) -> None:
        await until_async(lambda: self.look() and words in "\n".join(self.said), BACK_S, f"{words} is told")


@asynccontextmanager
async def visit(network: Network, *hosts: str, answers: tuple[str, ...] = ()) -> AsyncIterator[Visit]:
    """Open a session over hosts whose agents are brought up; `answers` are given before it begins."""
    desk = QuestionDesk(LocalUser(answers))
    logins = Logins(desk)
    links = [HostLink(Access(host, sys.executable, str(network.ssh_config)), logins) for host in hosts]
    session = None
    try:
        for link in links:
            link.connect()
            link.bring_up()
        session = RemoteSession(these(*links))
        session.patience_s = math.inf
        session.asked_at = desk
        await session.start()
        yield Visit(session, links)
    finally:
        if session is not None:
            await session.close()
        for link in links:
            link.close()


@pytest.mark.parametrize("network", [SECOND_FACTOR], indirect=True)
async def test_a_second_factor_is_asked_for_again_and_the_host_comes_back(network: Network) -> None:
    async with visit(network, "h1", answers=(PASSWORD,)) as at:
        network["h1"].drop_sessions()
        await at.until_waiting("h1")
        await at.until_lost("h1", "wants a new answer at each login")
        assert at.questions.question is None
        assert network["h1"].num_logins() == 1

        going = asyncio.create_task(at.questions.begin())
        wrong = await at.until_asked()
        assert (wrong.host, wrong.lines, wrong.is_shown) == ("h1", ("(root@h1) Password: ",), False)
        at.questions.answer(wrong.number, "guess")
        right = await at.until_asked(wrong.number)
        assert right.notes == ("root@h1 does not take that.",)
        at.questions.answer(right.number, PASSWORD)
        await going

        await at.until_told("h1: the connection is back")
        assert at.questions.waiting == []
        assert network["h1"].num_logins() == 2
        events = [at.session.events[index].text for index in range(len(at.session.events))]
        assert PASSWORD not in "".join([*at.said, *events])


async def test_one_passphrase_brings_all_hosts_with_that_key_back(network: Network) -> None:
    async with visit(network, "h1", "h2") as at:
        network.lock_key(PASSPHRASE)
        for host in ("h1", "h2"):
            network[host].drop_sessions()
        await at.until_waiting("h1", "h2")

        going = asyncio.create_task(at.questions.begin())
        question = await at.until_asked()
        assert f"Passphrase of the key {network.key} (for h1)" in question.lines[0]
        at.questions.answer(question.number, PASSPHRASE)
        await going

        assert all(link.is_alive for link in at.links)
        await at.until_told("h2: the connection is back")
        assert PASSPHRASE not in "".join(at.said)


async def test_a_host_that_nobody_knows_is_asked_about_with_its_fingerprint_as_on_the_terminal(
    network: Network,
) -> None:
    async with visit(network, "h1") as at:
        keys = network.known_hosts.read_text()
        network.known_hosts.write_text("")
        network["h1"].drop_sessions()
        await at.until_waiting("h1")

        for answer in ("no", "maybe", "yes"):
            going = asyncio.create_task(at.questions.begin())
            question = await at.until_asked()
            assert question.is_shown
            assert "ED25519 key fingerprint is SHA256:" in "\n".join(question.lines)
            at.questions.answer(question.number, answer)
            if answer == "maybe":
                again = await at.until_asked(question.number)
                assert again.lines == ("Please type 'yes', 'no' or the fingerprint: ",)
                at.questions.answer(again.number, None)
            await going
            if answer != "yes":
                await at.until_waiting("h1")
                assert network.known_hosts.read_text() == ""

        await at.until_told("h1: the connection is back")
        await at.until_told("is added to")
        assert network.known_hosts.read_text().split()[2] in keys


async def test_of_a_changed_key_nobody_is_asked_and_the_host_is_not_gone_back_to(network: Network) -> None:
    async with visit(network, "h1") as at:
        network["h1"].change_host_key()
        network["h1"].drop_sessions()
        await at.until_told("THE HOST KEY OF")

        assert at.questions.waiting == []
        await at.questions.begin()
        assert at.questions.question is None
        assert not at.links[0].is_alive
        await at.until_lost("h1", "HAS CHANGED")


async def test_whoever_leaves_at_a_question_is_not_held_up(network: Network) -> None:
    async with visit(network, "h1") as at:
        network.lock_key(PASSPHRASE)
        network["h1"].drop_sessions()
        await at.until_waiting("h1")
        going = asyncio.create_task(at.questions.begin())
        await at.until_asked()

        async with asyncio.timeout(10):
            await at.session.close()
            await going
        assert at.questions.question is None


async def test_a_console_that_only_looks_on_asks_nothing(network: Network) -> None:
    with HostLink(Access("h1", sys.executable, str(network.ssh_config))) as link:
        link.connect()
        link.bring_up()
        session = RemoteSession(these(link), None, SessionOptions(is_read_only=True))
        session.asked_at = desk = QuestionDesk(LocalUser(["elsewhere"]))
        session.patience_s = math.inf
        await session.start()
        try:
            assert session.questions is None
            assert desk.ask("Well? ") == "elsewhere", "the desk was not taken over"
        finally:
            await session.close()
