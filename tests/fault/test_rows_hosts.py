"""Hosts that lose power, boot again, or stand still as a whole: rows 7, 8 and 16 of the fault matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.wire.jobs import JobState
from app.errors import HostUnreachableError
from app.fleet.host_link import Access, HostLink
from tests.support.hosts import Network, require_hosts
from tests.support.watch import SSHD, bring_up, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

TOLD_S = 30.0


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", sshd_options=SSHD) as network:
        yield network


@pytest.mark.fault(row=[7, 8])
async def test_a_power_cut_is_told_and_after_a_boot_its_job_is_lost_and_never_running(network: Network) -> None:
    host = network["h2"]
    async with watched(network) as watch:
        watch.lost_ranks = {1}
        with watch.measure(7, "lost"):
            await watch.do(host.cut_power)
            await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
        with watch.measure(7, "connection given up after that"):
            await watch.until(lambda: not watch.links["h2"].is_alive, TOLD_S, "SSH is given up")
        assert "h2" in watch.headline
        assert watch.state("h1") == "up"

        await watch.do(host.boot)
        with HostLink(Access("h2", watch.python, str(network.ssh_config))) as link:
            with watch.measure(8, "agent up"):
                await watch.do(bring_up, link)
            with watch.measure(8, "healed"):
                await watch.until_green()
        (status,) = (await watch.session.fleet.report("h2")).jobs
        assert status.state is JobState.LOST
        assert "the node was rebooted" in status.detail
        assert len(await watch.do(watch.job.processes, [host])) == 0


@pytest.mark.slow
@pytest.mark.fault(row=16)
async def test_a_host_that_stands_still_as_a_whole_is_given_up_and_green_after_it_goes_on(network: Network) -> None:
    host = network["h2"]
    async with watched(network) as watch:
        try:
            with watch.measure(16, "lost"):
                await watch.do(host.freeze)
                await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
            with (
                HostLink(Access("h2", watch.python, str(network.ssh_config))) as link,
                watch.measure(16, "new login given up"),
                pytest.raises(HostUnreachableError),
            ):
                await watch.do(link.connect)
            assert watch.trouble("h2") != ""
        finally:
            await watch.do(host.thaw)
        with watch.measure(16, "healed"):
            await watch.until_green()
