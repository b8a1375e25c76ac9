"""Reports that come straight over TCP: real hosts, their firewalls and broken cables, and who is let in."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.roads.curve import new_key
from agent.wire.direct import ListenForTelemetry, Listening
from app.inventory.inventory import CURVE, HostEntry
from app.sessions import road_choice
from app.sessions.hosts import Hosts
from app.sessions.options import SessionOptions
from app.sessions.remote_session import RemoteSession
from app.ssh import liveness, way
from app.ssh.agent_link import AgentLink
from app.ssh.host_link import Access, HostLink
from app.ssh.link_group import LinkGroup
from tests.support.desk import Desk, read_until
from tests.support.file_contents import contents
from tests.support.hosts import Network, require_hosts
from tests.support.knocks import LET_IN, REFUSED, Visitor
from tests.support.waiting import until, until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.hosts import Host

HOSTS = ("h1", "h2", "h3")
PORT = 47123
THESE_SOURCES = f"SetEnv PYTHONPATH={Path(__file__).parents[2]}"
"""Whatever is installed, the hosts run what is tested."""
IN_CURVE = HostEntry("", telemetry=CURVE, telemetry_interface="eth0")
AT_PORT = msgspec.structs.replace(IN_CURVE, telemetry_ports=(PORT, PORT))
OF_SSHD = {"0.0.0.0:22", "[::]:22"}
SOON_S = 60.0
"""What takes a second or two."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give reports and SSH more time to come before they are given up: all ends of all roads share two cores here."""
    monkeypatch.setattr(road_choice, "TRY_S", 10.0)
    monkeypatch.setattr(liveness, "ANSWER_WITHIN_S", 60.0)
    monkeypatch.setattr(way, "UNACKNOWLEDGED_MS", 60_000)


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network(*HOSTS, sshd_options=(THESE_SOURCES,)) as network:
        yield network


def links_to(network: Network) -> list[HostLink]:
    """Return new ways to all hosts, with an agent on each."""
    links = [HostLink(Access(name, sys.executable, str(network.ssh_config))) for name in HOSTS]
    group = LinkGroup()
    for link in links:
        group.add(link)
    assert [error for _, error in group.connect(AgentLink.bring_up) if error is not None] == []
    return links


@asynccontextmanager
async def looking_on(
    network: Network, *entries: HostEntry, options: SessionOptions | None = None
) -> AsyncIterator[RemoteSession]:
    """Lend a session over all hosts, which are told of by one entry or one each; it lets go of them at the end."""
    links = links_to(network)
    told = entries if len(entries) == len(links) else entries * len(links)
    named = tuple(msgspec.structs.replace(entry, host=link.host) for link, entry in zip(links, told, strict=True))
    session = RemoteSession(Hosts(tuple(links), named, "", {}), None, options or SessionOptions())
    session.patience_s = math.inf
    try:
        await session.start()
        yield session
    finally:
        await session.close()


async def all_up(session: RemoteSession) -> None:
    await until_async(lambda: {row.state for row in session.view().nodes()} == {"up"}, 90, "every node is up")


def fallbacks(session: RemoteSession) -> dict[str, str]:
    """Return why reports come over SSH, by host, where they do."""
    return {row.node: row.fallback for row in session.view().nodes() if row.fallback}


def listeners(host: Host) -> set[str]:
    """Return where something besides sshd listens over TCP on a host."""
    return {line.split()[3] for line in host.exec("ss", "-Hltn").splitlines()} - OF_SSHD


def agent_of(host: Host) -> int:
    """Return the pid of a host's agent."""
    (pid,) = [process.pid for process in host.processes() if "serve" in process.cmdline()]
    return pid


async def listening(session: RemoteSession, host: str, public: str, *, port: int = 0) -> Listening:
    reply = await session.session.fleet.ask(host, ListenForTelemetry(public, "eth0", port, port))
    assert isinstance(reply, Listening)
    return reply


async def test_reports_come_over_one_port_of_one_interface_and_it_closes_when_the_console_leaves(
    network: Network,
) -> None:
    hosts = network.hosts.values()
    async with looking_on(network, HostEntry("")) as session:
        await all_up(session)
        assert [listeners(host) for host in hosts] == [set()] * 3, "nothing listens unless it is asked for"

    async with looking_on(network, IN_CURVE, options=SessionOptions(is_read_only=True)) as session:
        await all_up(session)
        for host, directory in zip(hosts, session.session._directories.values(), strict=True):
            (ours,) = listeners(host)
            assert ours.rpartition(":")[0] == host.address
            assert not (directory / "telemetry.sock").exists(), "no tunnel carries reports"
        assert (session.drain_notices(), fallbacks(session)) == ([], {})

    for host in hosts:
        until(lambda host=host: not listeners(host), SOON_S, f"nothing of ours listens on {host.name}")  # type: ignore[misc]


@pytest.mark.slow
async def test_only_who_has_asked_over_ssh_is_let_in_and_a_second_console_at_once(network: Network) -> None:
    host = network["h1"]
    async with looking_on(network, AT_PORT) as first:
        await all_up(first)
        mine = new_key()
        at = await listening(first, "h1", mine.public, port=PORT)
        stranger = Visitor(host.address, PORT, new_key(), at.server_key)
        keyless = Visitor(host.address, PORT, None)
        with stranger, keyless, Visitor(host.address, PORT, mine, at.server_key) as guest:
            assert stranger.reception() == REFUSED
            assert keyless.reception() != LET_IN
            assert guest.reception() == LET_IN
            await until_async(guest.hears, SOON_S, "reports come to who has asked")
            assert (stranger.hears(), keyless.hears()) == (None, None)
        async with looking_on(network, AT_PORT) as second:
            await all_up(second)
            assert (first.drain_notices(), second.drain_notices()) == ([], [])
            assert listeners(host) == {f"{host.address}:{PORT}"}
        await until_async(
            lambda: all((row.age_s or 9) < 1 for row in first.view().nodes()), SOON_S, "the first goes on"
        )
        assert (first.drain_notices(), fallbacks(first)) == ([], {})


@pytest.mark.slow
async def test_a_broken_cable_costs_freshness_and_an_agent_that_is_killed_comes_back(network: Network) -> None:
    async with looking_on(network, IN_CURVE) as session:
        await all_up(session)

        network["h1"].pull_cable()
        pulled_s = time.monotonic()
        await until_async(lambda: time.monotonic() - pulled_s > 5, SOON_S, "five seconds pass")
        await until_async(
            lambda: [row.is_old for row in session.view().nodes()] == [True, False, False], SOON_S, "one is missed"
        )
        network["h1"].plug_in_cable()
        await all_up(session)
        assert (session.drain_notices(), fallbacks(session)) == ([], {})

        before = (await session.session.fleet.report("h2")).epoch
        os.kill(agent_of(network["h2"]), signal.SIGKILL)
        await until_async(lambda: session.view().nodes()[1].state != "up", SOON_S, "it is missed")
        for link in links_to(network):  # which bring a new agent up
            link.close()
        await all_up(session)
        report = await session.session.fleet.report("h2")
        assert report.epoch != before
        assert fallbacks(session) == {}
        assert len(listeners(network["h2"])) == 1


@pytest.mark.slow
async def test_what_keeps_reports_from_coming_over_tcp_is_said_and_they_come_over_ssh(network: Network) -> None:
    """One host lacks the interface, one has it where this machine has no way to, one has a firewall later on."""
    network["h2"].add_interface("lab0", "10.254.7.2/24")
    absent = msgspec.structs.replace(IN_CURVE, telemetry_interface="ib7")
    unrouted = msgspec.structs.replace(IN_CURVE, telemetry_interface="10.254.7.0/24")
    async with looking_on(network, absent, unrouted, AT_PORT) as session:
        await all_up(session)

        await until_async(lambda: fallbacks(session).keys() == {"h1", "h2"}, SOON_S, "both come over SSH")
        told = fallbacks(session)
        assert told["h1"] == "no address on ib7: name one of this node by telemetry_interface (ip addr)"
        assert told["h2"].startswith("it listens at 10.254.7.2, TCP port ")
        notices = " ".join(session.drain_notices())
        assert notices.count("its reports come over SSH") == 2
        await until_async(lambda: not listeners(network["h2"]), SOON_S, "nothing listens in vain")

        network["h3"].drop_what_comes_from(PORT)
        await until_async(lambda: "h3" in fallbacks(session), 120, "the firewall is noticed")
        await all_up(session)
        assert f"TCP port {PORT}" in fallbacks(session)["h3"]
        assert "firewall" in fallbacks(session)["h3"]


@pytest.mark.slow
async def test_no_secret_is_in_any_file_or_command_line(network: Network, tmp_path: Path) -> None:
    options = SessionOptions(evidence_dir=tmp_path / "evidence", recording=tmp_path / "recording")
    async with looking_on(network, IN_CURVE, options=options) as session:
        await all_up(session)
        assert session._direct is not None
        key = session._direct._key
        shown = repr(session._direct.__dict__) + repr(session.session.telemetry.__dict__)
        argv = [" ".join(process.cmdline()) for host in network.hosts.values() for process in host.processes()]
    written = contents(network.directory, tmp_path)
    audits = [content.decode() for path, content in written.items() if path.name == "audit.jsonl"]

    assert len(written) > 10
    assert all(key.secret not in content for content in written.values())
    assert key.secret.decode() not in shown + "".join(argv)
    assert len(audits) == len(HOSTS)
    for audit in audits:
        commands = [(entry["command"], entry.get("client_key")) for entry in map(json.loads, audit.splitlines())]
        assert commands == [("listen_for_telemetry", key.public), ("stop_listening", key.public)]


@pytest.mark.slow
def test_a_person_says_it_in_the_inventory_and_is_told_where_it_cannot_be(network: Network) -> None:
    desk = Desk(network)
    desk.directory, desk.at = network.directory, ()
    inventory = network.directory / "rankdeck.toml"
    nodes = "".join(f'[[node]]\nhost = "{host}"\n' for host in HOSTS)
    try:
        inventory.write_text(f'[cluster]\ntelemetry = "curve"\n{nodes}')
        code, _, stderr = desk.run("status")
        assert (code, 'rankdeck.toml:2: telemetry = "curve" needs an interface' in stderr) == (2, True), stderr
        inventory.write_text(f'[cluster]\ntelemetry = "curve"\ntelemetry_interface = "eth0"\n{nodes}')
        desk.json("up")

        assert [row["fallback"] for row in desk.json("status")["nodes"]] == [""] * 3

        inventory.write_text(inventory.read_text() + 'telemetry_interface = "ib7"\n')
        found = desk.json("status")["nodes"]
        assert [row["fallback"][:20] for row in found] == ["", "", "no address on ib7: n"]
        code, stdout, _ = desk.run("status")
        assert (code, "h3: its reports come over SSH" in stdout) == (0, True), stdout
        console = desk.start("attach", "--headless")
        assert "h3: its reports come over SSH, not as telemetry" in read_until(console, "over SSH")
        looked = {one["host"]: one["rows"] for one in desk.json("doctor", "--all", codes=(0, 1))["hosts"]}
        told = {host: row["detail"] for host, rows in looked.items() for row in rows if row["name"] == "telemetry"}
        assert told["h1"].startswith(f"its agent listens at eth0, {network['h1'].address}, TCP port "), told
        assert told["h3"] == "it has no interface ib7, but eth0, lo"
        console.send_signal(signal.SIGINT)
        console.communicate(timeout=SOON_S)
        for host in network.hosts.values():
            until(lambda host=host: not listeners(host), SOON_S, f"nothing of ours listens on {host.name}")  # type: ignore[misc]
    finally:
        desk.end()
