"""sshd, its keys and its sessions, and the bastion before it: rows 17 to 22 of the fault matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.errors import AgentUnreachableError, HostUnreachableError
from app.fleet.host_link import Access, HostLink
from tests.support.fault_rows import measure
from tests.support.hosts import Network, require_hosts
from tests.support.watch import SSHD, another_console, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import Host

pytestmark = pytest.mark.timeout(300)

TOLD_S = 30.0


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", "bastion", sshd_options=SSHD) as network:
        yield network


@pytest.mark.fault(row=[17, 18])
async def test_without_a_listener_reports_go_on_and_after_killed_sessions_the_host_is_back_once_it_listens(
    network: Network,
) -> None:
    host = network["h2"]
    async with watched(network, "h1", "h2") as watch:
        await watch.do(host.stop_sshd)
        with (
            HostLink(Access("h2", watch.python, str(network.ssh_config))) as link,
            pytest.raises(HostUnreachableError, match="refuses connections"),
        ):
            await watch.do(link.connect)
        age_frames = watch.invariants.num_ages
        await watch.until(lambda: watch.invariants.num_ages > age_frames + 40, TOLD_S, "it is watched for a while")
        assert watch.state("h2") == "up"
        assert watch.said_of("h2", "the connection") == []

        with measure(18, "told"):
            await watch.do(host.drop_sessions)
            await watch.until(lambda: watch.said_of("h2", "the connection is lost"), TOLD_S, "it is told")
        await watch.until(lambda: "refuses connections" in watch.trouble("h2"), TOLD_S, "it says why")
        await watch.do(host.start_sshd)
        with measure(18, "healed"):
            await watch.until_green()
        assert len(watch.said_of("h2", "the connection is back")) == 1


@pytest.mark.slow
@pytest.mark.fault(row=19)
async def test_a_host_with_another_key_gets_no_command_and_training_goes_on_until_a_console_that_trusts_it_stops_it(
    network: Network,
) -> None:
    host = network["h2"]
    async with watched(network, "h1", "h2") as watch:
        num_before = num_connections(host)
        await watch.do(host.change_host_key)
        with measure(19, "told"):
            await watch.do(host.drop_sessions)
            await watch.until(lambda: "THE HOST KEY OF" in watch.trouble("h2"), TOLD_S, "it is told")
        assert len(watch.said_of("THE HOST KEY OF")) == 1
        await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "what is shown of it is old")
        network.trust_all()  # too late for this console
        await watch.watch_a_while()
        assert num_connections(host) == num_before + 1, "it is not tried again"
        assert host.num_logins() == 1
        with pytest.raises(AgentUnreachableError):
            await watch.session.fleet.report("h2")
        assert watch.state("h1") == "up"

        async with another_console(watch) as other:
            with measure(19, "healed", "from the first frame of another console"):
                await other.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=20)
async def test_a_host_that_revokes_the_key_is_tried_once_grows_old_and_is_back_when_the_user_asks(
    network: Network,
) -> None:
    host = network["h2"]
    keys = host.directory / "authorized_keys"
    text = keys.read_text()
    async with watched(network, "h1", "h2") as watch:
        keys.write_text("")
        with measure(20, "told"):
            await watch.do(host.drop_sessions)
            await watch.until(lambda: "takes none of our keys" in watch.trouble("h2"), TOLD_S, "it is told")
        await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "what is shown of it is old")
        await watch.watch_a_while()
        assert num_refused(host) == 1, "it is not tried again"
        assert watch.state("h1") == "up"

        keys.write_text(text)
        assert watch.session.questions is not None
        with measure(20, "healed"):
            await watch.session.questions.begin()
            await watch.until_green()
        assert num_refused(host) == 1
        assert len(watch.said_of("h2", "the connection is back")) == 1


@pytest.mark.slow
@pytest.mark.fault(row=21)
async def test_a_host_that_forwards_no_more_reports_through_a_proxy_and_takes_commands_so(network: Network) -> None:
    host = network["h2"]
    async with watched(network, "h1", "h2") as watch:

        def is_forwarded() -> bool:
            return watch.links["h2"].is_forwarded

        assert is_forwarded()
        with measure(21, "told"):
            await watch.do(host.forbid_forwarding)
            await watch.until(lambda: watch.said_of("h2", "forwards no sockets"), TOLD_S, "it is told")
        with measure(21, "healed", "through the proxy"):
            await watch.until_green()
        assert not is_forwarded()
        await watch.session.fleet.report("h2")
        await watch.watch_a_while()

        await watch.do(host.allow_forwarding)
        await watch.until(lambda: len(watch.said_of("h2", "the connection is back")) == 2, TOLD_S, "SSH is back")
        with measure(21, "healed", "forwarded again"):
            await watch.until_green()
        assert is_forwarded()
        await watch.do(host.forbid_forwarding)
        await watch.until(lambda: len(watch.said_of("forwards no sockets")) == 2, TOLD_S, "the job is stopped so")
        await watch.until_green()


def num_connections(host: Host) -> int:
    """Return how often somebody has connected to its sshd since it booted."""
    return (host.directory / "sshd.log").read_text().count("Connection from ")


def num_refused(host: Host) -> int:
    return (host.directory / "sshd.log").read_text().count("Failed publickey")


@pytest.mark.slow
@pytest.mark.fault(row=22)
async def test_a_bastion_that_dies_is_one_incident_and_all_behind_it_come_back(network: Network) -> None:
    network.configure("Host h1 h2\n  ProxyJump bastion")
    bastion = network["bastion"]
    async with watched(network, "h1", "h2") as watch:
        assert bastion.num_logins() == 1, "one login for all behind it"
        await watch.do(bastion.cut_power)
        with measure(22, "told as one"):
            await watch.until(lambda: "h1 and h2" in watch.headline, TOLD_S, "both are in one line")
        await watch.until(lambda: not any(link.is_alive for link in watch.links.values()), TOLD_S, "both are given up")
        await watch.do(bastion.boot)
        with measure(22, "healed"):
            await watch.until_green()
        assert len(watch.said_of("the connection is lost")) == 2
        assert bastion.num_logins() <= 3, "each host behind it logs in there by itself"
