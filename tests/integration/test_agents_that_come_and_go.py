"""Agents that are not there when a console opens, or that are killed under it: it says so, and finds the next ones."""

from __future__ import annotations

import math
import re
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from app.cli.hosts import look
from app.errors import AgentRefusedError, AgentUnreachableError, AppError, ExitCode, FrozenAgentError
from app.fleet.host_link import Access, HostLink
from app.inventory.inventory import HostEntry
from app.inventory.program import Program
from app.session.hosts import Hosts
from app.session.remote_session import RemoteSession
from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.view.view import View

COME_S = 30.0
AT_ONCE_S = 12.0
"""A login and a start of Python on a busy machine: 1 s on a quiet one; until now the refusal took 31 s."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2") as network:
        yield network


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def link_to(network: Network, stack: ExitStack, name: str) -> HostLink:
    link = stack.enter_context(HostLink(Access(name, sys.executable, str(network.ssh_config))))
    link.connect()
    return link


def both(*links: HostLink, away: dict[str, AppError]) -> Hosts:
    return Hosts(links, tuple(HostEntry(link.host, num_ranks=1) for link in links), "", away)


def session_over(hosts: Hosts) -> RemoteSession:
    """Return a session as that of the screen, which never gives up."""
    session = RemoteSession(hosts)
    session.patience_s = math.inf
    return session


async def test_a_program_is_started_once_the_first_host_is_there(network: Network, stack: ExitStack) -> None:
    first, second, other = (link_to(network, stack, name) for name in ("h1", "h2", "h1"))
    second.bring_up()
    with pytest.raises(AgentUnreachableError) as unreachable_reason:
        first.find()
    session = session_over(both(first, second, away={"h1": unreachable_reason.value}))
    await session.start()
    try:
        assert session.away == {"h1"}
        assert session.starter is not None
        with pytest.raises(AppError):
            await session.starter.start(Program(("missing.py",)))

        place = other.bring_up()
        await until_async(lambda: not session.away, COME_S, "it is found")

        assert await session.starter.past() == []
        with pytest.raises(AgentRefusedError, match="is not a file"):  # both were asked, and looked for the program
            await session.starter.start(Program(("missing.py",)))
        assert first.place is not None
        assert first.place.epoch == place.epoch
    finally:
        await session.close()


@pytest.mark.fault(row=1)
async def test_an_agent_that_is_killed_under_a_console_is_told_of_and_the_next_one_is_found(
    network: Network, stack: ExitStack
) -> None:
    links = [link_to(network, stack, name) for name in ("h1", "h2")]
    pids = [link.bring_up().pid for link in links]
    session = session_over(both(*links, away={}))
    await session.start()
    try:
        await until_async(lambda: [row.state for row in session.view().nodes()] == ["up", "up"], COME_S, "both report")

        network["h2"].exec("kill", "-9", str(pids[1]))

        await until_async(lambda: session.away == {"h2"}, COME_S, "it is missed")
        await until_async(
            lambda: "nothing is known of jobs there (rankdeck up h2)" in session.view().nodes()[1].trouble,
            COME_S,
            "it is said",
        )
        assert links[1].is_alive, "it is not the connection"
        await until_async(lambda: session.view().nodes()[1].state == "lost", COME_S, "it is not waited for any more")
        text = session.view().headline().text
        assert re.fullmatch(r"no agent on h2 for [\d.]+ s: nothing is known of jobs there \(rankdeck up h2\)", text), (
            text
        )
        link_to(network, stack, "h2").bring_up()
        await until_async(lambda: [row.state for row in session.view().nodes()] == ["up", "up"], COME_S, "both report")
        told: list[str] = []

        def is_told_back() -> bool:
            told.extend(session.drain_notices())
            return "h2: the agent is back" in told

        await until_async(is_told_back, COME_S, "it is told that it is back")
        assert any("nothing is known of jobs there" in notice for notice in told)
        assert not any("the connection" in notice for notice in told)
        assert (await session.fleet.report("h2")).agent_pid != pids[1]
    finally:
        await session.close()


@pytest.mark.fault(row=2)
async def test_an_agent_whose_process_is_stopped_is_told_as_that_and_is_back_once_it_goes_on(
    network: Network, stack: ExitStack
) -> None:
    links = [link_to(network, stack, name) for name in ("h1", "h2")]
    pids = [link.bring_up().pid for link in links]
    session = session_over(both(*links, away={}))
    await session.start()
    try:
        await until_async(lambda: [row.state for row in session.view().nodes()] == ["up", "up"], COME_S, "both report")

        network["h2"].exec("kill", "-STOP", str(pids[1]))
        began_s = time.monotonic()
        with pytest.raises(FrozenAgentError) as caught:
            link_to(network, stack, "h2").bring_up()
        assert time.monotonic() - began_s < AT_ONCE_S
        assert str(caught.value) == f"the agent on h2 (pid {pids[1]}) is frozen"

        await until_async(lambda: session.away == {"h2"}, COME_S, "it is missed")
        (_, row) = session.view().nodes()
        assert f"its process (pid {pids[1]}) is frozen (on h2: kill -CONT {pids[1]})" in row.trouble
        assert "rankdeck up" not in session.view().headline().text

        network["h2"].exec("kill", "-CONT", str(pids[1]))
        await until_async(lambda: [row.state for row in session.view().nodes()] == ["up", "up"], COME_S, "both report")
    finally:
        network["h2"].exec("kill", "-CONT", str(pids[1]))
        await session.close()


async def test_a_look_at_two_hosts_of_which_one_has_no_agent_shows_the_other(
    network: Network, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.session.session.UNHEARD_S", 0.0)  # a loaded machine takes that long for the first report
    first, second = (link_to(network, stack, name) for name in ("h1", "h2"))
    first.bring_up()
    with pytest.raises(AgentUnreachableError) as unreachable_reason:
        second.find()
    views: list[View] = []

    code = await look(
        RemoteSession(both(first, second, away={"h2": unreachable_reason.value})), views.append, is_watching=False
    )

    assert (code, [row.state for row in views[-1].nodes()]) == (ExitCode.WELL, ["up", "lost"])
    assert "nothing is known of jobs there" in views[-1].nodes()[1].trouble
