"""A console that goes through a relay: its nodes are hosts like others, and what it shows is as old as it is."""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.relay import RELAY_VERSION, Hello, Welcome
from agent.wire.reports import WIRE_VERSION
from app.cli.chosen_hosts import HostsWanted, reached
from app.errors import AgentUnreachableError, ExitCode, HostUnreachableError, IncompatibleAgentError, UsageError
from app.fleet.host_link import Access, HostLink
from app.fleet.local_link import LocalLink
from app.fleet.relay_hub import RelayHub
from app.fleet.relayed_link import RelayedLink
from app.inventory.inventory import HostEntry
from app.model.unreachable_reason import UnreachableKind
from app.session.hosts import Hosts
from app.session.remote_session import RemoteSession
from tests.integration.test_relay import Impostor
from tests.support.agents import RunningAgent
from tests.support.commands import run_rankdeck
from tests.support.hosts import Network, require_hosts
from tests.support.relays import RunningRelay
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from app.fleet.agent_link import TakesFrame

ROOT = Path(__file__).parents[2]


@pytest.fixture
def relay() -> Iterator[RunningRelay]:
    with RunningRelay() as running:
        yield running


@pytest.fixture
def agents(relay: RunningRelay) -> Iterator[dict[str, RunningAgent]]:
    with (
        RunningAgent("--relay", str(relay.invitation), node="gpu2") as gpu2,
        RunningAgent("--relay", str(relay.invitation), node="gpu10") as gpu10,
    ):
        relay.wait_for("gpu2", "gpu10")
        yield {"gpu2": gpu2, "gpu10": gpu10}


@pytest.fixture
def hub(relay: RunningRelay) -> Iterator[RelayHub]:
    with RelayHub(LocalLink(), str(relay.directory)) as hub:
        yield hub


@asynccontextmanager
async def session_over(hub: RelayHub, *nodes: str) -> AsyncIterator[RemoteSession]:
    links = tuple(RelayedLink(node, hub, number) for number, node in enumerate(nodes))
    away = {}
    for link in links:
        try:
            link.find()
        except HostUnreachableError as error:
            away[link.host] = error
    session = RemoteSession(Hosts(links, tuple(HostEntry(node) for node in nodes), "--relay x", away))
    session.patience_s = math.inf
    await session.start()
    try:
        yield session
    finally:
        await session.close()


def hub_trouble(session: RemoteSession, node: str) -> str:
    unreachable_reason = session._connections.unreachable_reasons[node]
    return "" if unreachable_reason is None else unreachable_reason.why


def troubles(session: RemoteSession) -> dict[str, str]:
    return {row.node: row.trouble for row in session.view().nodes()}


def ages_into(ages: list[float]) -> TakesFrame:
    """Return what takes reports and notes how old they were."""

    def take(frame: bytes, age_s: float = 0.0) -> None:
        assert frame
        ages.append(age_s)

    return take


def states(session: RemoteSession) -> dict[str, str]:
    return {row.node: row.state for row in session.view().nodes()}


async def test_nodes_are_found_in_order_and_seen_and_spoken_to(hub: RelayHub, agents: dict[str, RunningAgent]) -> None:
    hub.connect()
    assert list(hub.nodes) == ["gpu2", "gpu10"]

    async with session_over(hub, *hub.nodes) as session:
        await until_async(lambda: set(states(session).values()) == {"up"}, 20, "both are up")

        for node, agent in agents.items():
            assert (await session.fleet.report(node)).epoch == agent.ready["epoch"]
        assert session.drain_notices() == []


@pytest.mark.usefixtures("agents")
async def test_what_the_nodes_of_a_relay_remember_is_in_front_of_what_the_console_sees(hub: RelayHub) -> None:
    hub.connect()
    async with session_over(hub, *hub.nodes) as session:
        session.backfill()
        await until_async(lambda: set(states(session).values()) == {"up"}, 20, "both are up")
        seen_s = session.events[0].at_s

        def reached_back() -> bool:
            session.view()
            return any(event.text.startswith("attached") for event in session.events.latest_first())

        await until_async(reached_back, 20, "the past is there")

        *before, attached = list(session.events.latest_first())[::-1]
        assert attached.text.startswith("attached")
        assert sorted(name for event in before for name in ("gpu2", "gpu10") if name in event.text) == ["gpu10", "gpu2"]
        assert all(event.at_s < attached.at_s < seen_s for event in before)


async def test_a_node_that_leaves_is_lost_with_its_reason_and_comes_back_by_itself(
    hub: RelayHub, relay: RunningRelay, agents: dict[str, RunningAgent]
) -> None:
    hub.connect()
    async with session_over(hub, *hub.nodes) as session:
        await until_async(lambda: set(states(session).values()) == {"up"}, 20, "both are up")
        gone = agents["gpu2"]
        gone.process.send_signal(signal.SIGTERM)
        await until_async(lambda: session.away == {"gpu2"}, 20, "one is gone")
        await until_async(
            lambda: troubles(session)["gpu2"].startswith("no agent: it has ended, as it reported to the relay on "),
            20,
            "it says why",
        )
        assert troubles(session)["gpu10"] == ""
        with pytest.raises(AgentUnreachableError):
            await session.fleet.report("gpu2")

        with RunningAgent("--relay", str(relay.invitation), node="gpu2", directory=gone.directory) as again:
            await until_async(lambda: not session.away, 20, "it is there again")
            await until_async(lambda: states(session)["gpu2"] == "up", 20, "it is up again")
            assert (await session.fleet.report("gpu2")).epoch == again.ready["epoch"]
            gone.directory.mkdir(exist_ok=True)


async def test_one_loss_of_the_relay_is_one_loss_and_the_next_relay_is_found(
    hub: RelayHub, relay: RunningRelay, agents: dict[str, RunningAgent]
) -> None:
    hub.connect()
    async with session_over(hub, *hub.nodes) as session:
        await until_async(lambda: set(states(session).values()) == {"up"}, 20, "both are up")
        relay.kill()
        await until_async(lambda: session.away == set(agents), 20, "nobody is heard")
        agents["gpu10"].process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.to_thread(relay.begin_again)
            await until_async(lambda: session.away == {"gpu10"}, 40, "the relay is back, and one agent has found it")
            await until_async(lambda: "does not know it" in hub_trouble(session, "gpu10"), 20, "it says why")
        finally:
            agents["gpu10"].process.send_signal(signal.SIGCONT)
        await until_async(lambda: not session.away, 40, "both have found it")
        await until_async(lambda: set(states(session).values()) == {"up"}, 20, "both are up again")
        for node, agent in agents.items():
            assert (await session.fleet.report(node)).epoch == agent.ready["epoch"]
        told = session.drain_notices()
    assert sum("the connection is lost" in notice for notice in told) == 1
    assert sum("the connection is back" in notice for notice in told) == 1


@pytest.mark.usefixtures("agents")
async def test_nodes_that_come_later_are_told_of_as_long_as_they_are_there(hub: RelayHub, relay: RunningRelay) -> None:
    hub.connect()
    entries = tuple(HostEntry(node) for node in hub.nodes)
    wanted = HostsWanted(entries, "--relay x", False, ("gpu*",), ("gpu4",), "python3", "", "", hub)
    with reached(wanted, lambda link: link.find(), needs_all=True) as hosts:
        session = RemoteSession(hosts)
        session.patience_s = math.inf
        await session.start()
        try:
            await until_async(lambda: set(states(session).values()) == {"up"}, 20, "both are up")
            assert session.view().new_nodes == ""
            with (
                RunningAgent("--relay", str(relay.invitation), node="gpu3"),
                RunningAgent("--relay", str(relay.invitation), node="gpu4"),
                RunningAgent("--relay", str(relay.invitation), node="cpu1"),
            ):
                relay.wait_for("gpu2", "gpu10", "gpu3", "gpu4", "cpu1")
                told: list[str] = []

                def is_told() -> bool:
                    session.view()
                    told.extend(session.drain_notices())
                    return bool(told)

                await until_async(is_told, 20, "it is told of")

                (notice,) = told
                assert notice == (
                    "1 more node has come to the relay on localhost (gpu3): leave and come in again to see them, "
                    "by rankdeck attach --relay x"
                ), "the others are not meant"
                standing = "1 more node has come to the relay: leave and come in again"
                assert session.view().new_nodes == standing
                assert session.view().headline().text == f"2 nodes up, no job yet; {standing}"
                assert set(states(session)) == {"gpu2", "gpu10"}
            await until_async(lambda: session.view().new_nodes == "", 20, "it has gone")
            assert session.drain_notices() == []
        finally:
            await session.close()


async def test_a_report_that_was_kept_on_the_way_does_not_look_fresh(
    hub: RelayHub, relay: RunningRelay, agents: dict[str, RunningAgent]
) -> None:
    hub.connect()
    ages: list[float] = []
    hub.follow("gpu2", ages_into(ages))
    await until_async(lambda: bool(ages) and ages[-1] < 1.0, 20, "a fresh report has come")
    agents["gpu2"].process.send_signal(signal.SIGSTOP)
    try:
        with RelayHub(LocalLink(), str(relay.directory)) as later:
            heard: list[float] = []
            await asyncio.sleep(2.0)  # it is time that is measured
            later.follow("gpu2", ages_into(heard))
            later.connect()
            await until_async(lambda: bool(heard), 10, "what the relay has kept is told to a new console")
    finally:
        agents["gpu2"].process.send_signal(signal.SIGCONT)

    assert heard[0] >= 1.5, "but for what a report was on its way"


def test_an_agent_of_another_version_is_refused_with_what_to_do(hub: RelayHub, relay: RunningRelay) -> None:
    place = b'{"ready":true,"dir":"/d","python":"/p","home":"/h","wire_version":%d}' % (WIRE_VERSION + 1)
    with Impostor(relay) as node:
        node.say(Hello(version=RELAY_VERSION, node="old", instance="1", place=place))
        node.hears_first(Welcome)
        hub.connect()

        with pytest.raises(IncompatibleAgentError, match="speaks wire version") as caught:
            RelayedLink("old", hub, 0).find()

    assert "started again: srun" in caught.value.hint


def test_an_agent_that_comes_back_as_something_else_is_told_and_is_no_end_of_the_console(
    relay: RunningRelay, hub: RelayHub
) -> None:
    with Impostor(relay) as node:
        node.say(Hello(version=RELAY_VERSION, node="x", instance="1", place=b"{}"))
        node.hears_first(Welcome)
        hub.connect()

        unreachable_reason = RelayedLink("x", hub, 0).unreachable_reason
        assert unreachable_reason is not None
        assert (unreachable_reason.unreachable_kind, "its agent answers something else" in unreachable_reason.why) == (
            UnreachableKind.FITTING_AGENT,
            True,
        )


def test_what_is_not_a_relay_is_told(tmp_path: Path) -> None:
    with (
        RelayHub(LocalLink(), str(tmp_path)) as hub,
        pytest.raises(HostUnreachableError, match="no relay serves there in") as caught,
    ):
        hub.connect()

    assert "agent relay --listen" in caught.value.hint


def test_a_node_that_the_relay_does_not_know_and_what_it_cannot_do_are_told(hub: RelayHub) -> None:
    hub.connect()
    link = RelayedLink("gpu9", hub, 0)

    with pytest.raises(HostUnreachableError, match="does not know it"):
        link.find()
    with pytest.raises(UsageError, match="not ended through a relay"):
        link.shut_down(kill_jobs=True)
    with pytest.raises(AgentUnreachableError, match="not within reach of a relay"):
        link.run_python(["-c", "1"], 1.0)


@pytest.mark.parametrize("options", [(), ("AllowStreamLocalForwarding no",)], ids=["sockets", "programs"])
async def test_over_ssh_the_same_is_seen_also_where_sshd_forwards_no_sockets(options: tuple[str, ...]) -> None:
    require_hosts()
    directory = Path(tempfile.mkdtemp(prefix="rdr-", dir="/tmp"))
    with (
        Network("h1", sshd_options=(f"SetEnv PYTHONPATH={ROOT}", *options)) as network,
        RunningRelay(directory=directory) as relay,
        RunningAgent("--relay", str(relay.invitation), node="gpu1") as agent,
    ):
        relay.wait_for("gpu1")
        way = HostLink(Access("h1", sys.executable, str(network.ssh_config)))
        with RelayHub(way, str(directory)) as hub:
            hub.connect()
            async with session_over(hub, "gpu1") as session:
                await until_async(lambda: states(session) == {"gpu1": "up"}, 20, "it is up")
                assert (await session.fleet.report("gpu1")).epoch == agent.ready["epoch"]
                await asyncio.to_thread(network["h1"].drop_sessions)
                await until_async(lambda: session.away == {"gpu1"}, 20, "the connection is lost")
                await until_async(lambda: not session.away, 40, "it is back")
                await until_async(lambda: states(session) == {"gpu1": "up"}, 20, "it is up again")
                assert (await session.fleet.report("gpu1")).epoch == agent.ready["epoch"]


@pytest.mark.slow
def test_commands_say_which_nodes_of_a_relay_they_mean(
    relay: RunningRelay, agents: dict[str, RunningAgent], tmp_path: Path
) -> None:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    at = ("--relay", "localhost", "--relay-dir", str(relay.directory))

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_rankdeck(*arguments, cwd=tmp_path, environ=environ)

    assert run("status", *at)[:2] == (0, "gpu2 and gpu10: up; INFO  2 nodes up, no job yet\n")
    assert run("status", *at, "--host", "gpu1*")[1].startswith("gpu10: up")
    assert run("status", *at, "--exclude", "gpu2")[1].startswith("gpu10: up")
    code, _, stderr = run("status", *at, "--host", "gpu3")
    assert (code, "'gpu3' matches no host of the relay on localhost" in stderr) == (ExitCode.USAGE, True), stderr
    code, _, stderr = run("status", "--relay-dir", "x")
    assert (code, "--relay-dir is of a relay" in stderr) == (ExitCode.USAGE, True), stderr
    (tmp_path / "rankdeck.toml").write_text(f'[cluster]\nrelay = "local"\nrelay_dir = "{relay.directory}"\n')
    assert run("status")[:2] == (0, "gpu2 and gpu10: up; INFO  2 nodes up, no job yet\n")
    for verb in ("up", "down", "install", "doctor"):
        code, _, stderr = run(verb)
        assert (code, f"{verb} does not go through the relay" in stderr) == (ExitCode.USAGE, True), stderr
    code, _, stderr = run("run", "--host", "gpu2", "--detach", "--", "gone.py")
    assert (code, "gone.py is not a file" in stderr) == (ExitCode.REFUSED, True), stderr
    del agents


def test_a_relay_that_no_agent_has_dialled_yet_is_told(relay: RunningRelay, tmp_path: Path) -> None:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}

    code, _, stderr = run_rankdeck(
        "status", "--relay", "localhost", "--relay-dir", str(relay.directory), cwd=tmp_path, environ=environ
    )

    assert (code, "no agent has come to the relay on localhost yet" in stderr, "srun" in stderr) == (2, True, True)
