"""sshd, its sessions and the bastion before it: rows 17, 18 and 22 of the fault matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.errors import HostUnreachableError
from app.fleet.host_link import Access, HostLink
from tests.support.hosts import Network, require_hosts
from tests.support.watch import SSHD, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

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

        with watch.measure(18, "told"):
            await watch.do(host.drop_sessions)
            await watch.until(lambda: watch.said_of("h2", "the connection is lost"), TOLD_S, "it is told")
        await watch.until(lambda: "refuses connections" in watch.trouble("h2"), TOLD_S, "it says why")
        await watch.do(host.start_sshd)
        with watch.measure(18, "healed"):
            await watch.until_green()
        assert len(watch.said_of("h2", "the connection is back")) == 1


@pytest.mark.slow
@pytest.mark.fault(row=22)
async def test_a_bastion_that_dies_is_one_incident_and_all_behind_it_come_back(network: Network) -> None:
    network.configure("Host h1 h2\n  ProxyJump bastion")
    bastion = network["bastion"]
    async with watched(network, "h1", "h2") as watch:
        assert bastion.num_logins() == 1, "one login for all behind it"
        await watch.do(bastion.cut_power)
        with watch.measure(22, "told as one"):
            await watch.until(lambda: "h1 and h2" in watch.headline, TOLD_S, "both are in one line")
        await watch.until(lambda: not any(link.is_alive for link in watch.links.values()), TOLD_S, "both are given up")
        await watch.do(bastion.boot)
        with watch.measure(22, "healed"):
            await watch.until_green()
        assert len(watch.said_of("the connection is lost")) == 2
        assert bastion.num_logins() <= 3, "each host behind it logs in there by itself"
