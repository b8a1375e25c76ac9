"""How reports and commands travel is found out at each connection: what sshd forwards may change between two."""

from __future__ import annotations

import math
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.fleet.host_link import Access, HostLink
from app.session.remote_session import RemoteSession
from tests.support.hosts import Network, require_hosts
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.fault

WAIT_S = 60.0


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1") as network:
        yield network


class Console:
    def __init__(self, network: Network, link: HostLink, session: RemoteSession) -> None:
        self.host = network["h1"]
        self.link = link
        self.session = session
        self.said: list[str] = []
        self.config = self.host.directory / "sshd_config"
        self._before = self.config.read_text()

    def row(self) -> tuple[str, str, float]:
        self.said += self.session.drain_notices()
        row = self.session.view().nodes()[0]
        return row.state, row.trouble, row.age_s or 99.0

    async def until_heard(self) -> None:
        await until_async(lambda: self.row()[2] < 1, WAIT_S, "reports come")
        await self.session.fleet.report("h1")
        assert self.row()[:2] == ("up", "")

    async def come_back_with(self, *options: str) -> None:
        """Give sshd other options, and cut the connection."""
        self.config.write_text("\n".join([*options, self._before]))
        self.host.restart_sshd()
        self.row()
        self.said.clear()
        self.host.drop_sessions()
        await until_async(lambda: len(self.row()) and "is back" in "".join(self.said), WAIT_S, "SSH is back")


@asynccontextmanager
async def console(network: Network) -> AsyncIterator[Console]:
    with HostLink(Access("h1", sys.executable, str(network.ssh_config))) as link:
        link.connect()
        link.bring_up()
        session = RemoteSession(these(link))
        session.patience_s = math.inf
        await session.start()
        try:
            at = Console(network, link, session)
            await at.until_heard()
            yield at
        finally:
            await session.close()


@pytest.mark.fault(row=21)
async def test_a_host_that_forwards_no_longer_is_heard_through_a_proxy_after_a_reconnect(network: Network) -> None:
    async with console(network) as at:
        for forwards in (False, True, False):
            await at.come_back_with(*([] if forwards else ["AllowStreamLocalForwarding no"]))
            await at.until_heard()

            assert at.link.is_forwarded is forwards
            assert ("forwards no sockets" in "".join(at.said)) is not forwards


@pytest.mark.fault(row=21)
@pytest.mark.parametrize("forwards", [True, False])
async def test_reports_that_do_not_come_though_the_agent_answers_have_a_reason(
    network: Network, forwards: bool
) -> None:
    async with console(network) as at:
        await at.come_back_with(*([] if forwards else ["AllowStreamLocalForwarding no"]))
        await at.until_heard()
        place = at.link.place
        assert place is not None
        socket = Path(place.dir) / "reports.sock"
        socket.rename(socket.with_suffix(".away"))
        at.host.drop_sessions()

        await until_async(lambda: "no reports: " in at.row()[1], WAIT_S, "the reason is shown")
        await at.session.fleet.report("h1")
        socket.with_suffix(".away").rename(socket)
        await at.until_heard()
