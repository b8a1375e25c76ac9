"""A host that refuses our keys is tried once, and then only when the user asks: many lock whoever fails."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from app.fleet.host_link import Access, HostLink
from app.session.remote_session import RemoteSession
from app.ssh.login import Logins
from app.ssh.questions import QuestionDesk
from tests.support.hosts import Host, Network, require_hosts
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.fault

WAIT_S = 60.0
MANY = 8
"""Attempts on a host that merely does not answer, while the other one is left alone."""


class CountedLink(HostLink):
    num_reconnects = 0

    def reconnect(self, *, asks: bool = False) -> None:
        self.num_reconnects += 1
        super().reconnect(asks=asks)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    require_hosts()
    for pause in ("FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(f"app.session.reconnector.{pause}", 0.1)
    with Network("h1", "h2", "h3", "h4") as network:
        yield network


@asynccontextmanager
async def console(network: Network, *hosts: str) -> AsyncIterator[tuple[RemoteSession, list[CountedLink]]]:
    logins = Logins(desk := QuestionDesk(LocalUser([])))
    with ExitStack() as stack:
        links = [
            stack.enter_context(CountedLink(Access(host, sys.executable, str(network.ssh_config)), logins))
            for host in hosts
        ]
        for link in links:
            link.connect()
            link.bring_up()
        session = RemoteSession(these(*links))
        session.patience_s, session.asked_at = math.inf, desk
        await session.start()
        try:
            yield session, links
        finally:
            await session.close()


def num_refused(host: Host) -> int:
    return (host.directory / "sshd.log").read_text().count("Failed publickey")


def trouble(session: RemoteSession, host: str) -> str:
    return next(row.trouble for row in session.view().nodes() if row.node == host)


@pytest.mark.fault(row=20)
async def test_a_revoked_key_is_tried_once_and_again_when_the_user_asks(network: Network) -> None:
    keys = network["h1"].directory / "authorized_keys"
    text = keys.read_text()
    async with console(network, "h1", "h2") as (session, (revoked, away)):
        keys.write_text("")
        network["h2"].stop_sshd()
        for host in ("h1", "h2"):
            network[host].drop_sessions()
        await until_async(lambda: "takes none of our keys" in trouble(session, "h1"), WAIT_S, "the reason is shown")
        await until_async(lambda: away.num_reconnects >= MANY, WAIT_S, "the other one is tried")

        assert (num_refused(network["h1"]), revoked.num_reconnects) == (1, 1)
        assert session.questions is not None
        assert session.questions.waiting == ["h1"]
        await session.questions.begin()
        assert num_refused(network["h1"]) == 2

        keys.write_text(text)
        tried = away.num_reconnects
        await until_async(lambda: away.num_reconnects >= tried + MANY, WAIT_S, "the other one")
        assert not revoked.is_alive
        await session.questions.begin()
        await until_async(lambda: not trouble(session, "h1"), WAIT_S, "the host is back")
        assert num_refused(network["h1"]) == 2


@pytest.mark.fault(row=20)
async def test_a_jump_host_that_refuses_us_is_tried_once_for_all_behind_it(network: Network) -> None:
    network.configure("Host h2 h3\n  ProxyJump h1")
    keys = network["h1"].directory / "authorized_keys"
    text = keys.read_text()
    async with console(network, "h2", "h3", "h4") as (session, (*links, away)):
        keys.write_text("")
        network["h4"].stop_sshd()
        for host in ("h1", "h4"):
            network[host].drop_sessions()
        for host in ("h2", "h3"):
            await until_async(lambda: "takes none" in trouble(session, host), WAIT_S, "the reason is shown")  # noqa: B023
        await until_async(lambda: away.num_reconnects >= MANY, WAIT_S, "the other one is tried")
        assert num_refused(network["h1"]) == 1

        keys.write_text(text)
        assert session.questions is not None
        await session.questions.begin()
        await until_async(lambda: all(link.is_alive for link in links), WAIT_S, "both are back")
        assert num_refused(network["h1"]) == 1
