"""Links that are cut, lose and throttle, and half of the hosts at once: rows 9 to 15 of the fault matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fault_rows import measure, note
from tests.support.hosts import Network, require_hosts
from tests.support.watch import SSHD, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.hosts import Host

pytestmark = pytest.mark.timeout(300)

TOLD_S = 20.0
"""The design says 3 s until a host is stale, 10 s until its connection is given up."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", sshd_options=SSHD, has_poor_links=True) as network:
        yield network


@pytest.fixture
def four_hosts() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", "h3", "h4", sshd_options=SSHD) as network:
        yield network


@pytest.mark.fault(row=9)
async def test_a_silent_cut_of_two_seconds_is_at_most_a_blink(network: Network) -> None:
    async with watched(network) as watch:
        await watch.do(network["h2"].pull_cable)
        await watch.until(lambda: (watch.rows["h2"].age_s or 0) > 2, TOLD_S, "two seconds")
        await watch.do(network["h2"].plug_in_cable)
        with measure(9, "healed"):
            await watch.until_green()
        assert watch.said_of("connection is lost") == []
        assert watch.links["h2"].is_alive


def mute(host: Host) -> None:
    assert host.link is not None
    host.link.become(is_mute=True)


def deafen(host: Host) -> None:
    assert host.link is not None
    host.link.become(is_deaf=True)


def mend(host: Host) -> None:
    assert host.link is not None
    host.link.become()


CUTS = [
    pytest.param("pull_cable", "plug_in_cable", marks=pytest.mark.fault(row=10), id="silent"),
    pytest.param("take_link_down", "bring_link_up", marks=pytest.mark.fault(row=11), id="carrier"),
    pytest.param(mute, mend, marks=pytest.mark.fault(row=12), id="mute"),
    pytest.param(deafen, mend, marks=pytest.mark.fault(row=12), id="deaf"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "heal"), CUTS)
async def test_a_host_that_is_cut_off_is_lost_with_a_reason_and_comes_back_with_what_it_printed(
    network: Network,
    cut: str | Callable[[Host], None],
    heal: str | Callable[[Host], None],
    request: pytest.FixtureRequest,
) -> None:
    host = network["h2"]
    kind = request.node.callspec.id
    row = {"silent": 10, "carrier": 11}.get(kind, 12)

    def call(what: str | Callable[[Host], None]) -> None:
        getattr(host, what)() if isinstance(what, str) else what(host)

    async with watched(network) as watch:
        with measure(row, "lost", kind):
            await watch.do(call, cut)
            await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
        with measure(row, "connection given up after that", kind):
            await watch.until(lambda: not watch.links["h2"].is_alive, TOLD_S, "SSH is given up")
        await watch.until(lambda: watch.trouble("h2") != "", TOLD_S, "it says why")
        assert "h2" in watch.headline
        assert watch.state("h1") == "up"
        await watch.do(call, heal)
        with measure(row, "healed", kind):
            await watch.until_green()
        num = len(watch.said_of("h2", "the connection is back"))
        assert num == 1, watch.said


@pytest.mark.slow
@pytest.mark.fault(row=13)
async def test_five_percent_of_loss_and_jitter_make_no_host_flap(network: Network) -> None:
    async with watched(network) as watch:
        for host in network.hosts.values():
            assert host.link is not None
            host.link.become(lost_frac=0.05, jitter_s=0.05)
        num_before = len(watch.session.events)
        frames = watch.invariants.num_ages
        await watch.until(lambda: watch.invariants.num_ages > frames + 200, 60, "it is watched for a while")
        changes = [watch.session.events[at].text for at in range(num_before, len(watch.session.events))]
        assert [text for text in changes if "now lost" in text] == []
        assert sum("now stale" in text for text in changes) <= 2, changes
        assert watch.said_of("connection is lost") == []
        for host in network.hosts.values():
            mend(host)
        with measure(13, "healed"):
            await watch.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=14)
async def test_a_link_of_one_megabit_carries_reports_before_the_lines_of_ranks_that_print_much(
    network: Network,
) -> None:
    network.configure("Host h1 h2\n  Compression no")
    async with watched(network, lines_a_step=40) as watch:
        host = network["h2"]
        assert host.link is not None
        host.link.become(bytes_s=125_000)
        num = len(watch.printed)
        ages_s: list[float] = []

        def seen() -> bool:
            ages_s.append(watch.rows["h2"].age_s or 0.0)
            return len(ages_s) > 400

        await watch.until(seen, 60, "it is watched for a while")
        slow_s = sorted(ages_s)[int(0.9 * len(ages_s))]
        note(14, "age of nine in ten reports", slow_s)
        assert slow_s < 3.0, "reports wait behind lines"
        assert len(watch.printed) > num, "no line comes at all"
        mend(host)
        with measure(14, "healed"):
            await watch.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=15)
async def test_half_of_the_hosts_that_are_cut_off_are_one_incident(four_hosts: Network) -> None:
    network = four_hosts
    away = [network["h3"], network["h4"]]
    async with watched(network) as watch:
        for host in away:
            await watch.do(host.pull_cable)
        with measure(15, "told as one"):
            await watch.until(lambda: "h3 and h4" in watch.headline, TOLD_S, "both are in one line")
        await watch.until(
            lambda: not any(watch.links[host.name].is_alive for host in away), TOLD_S, "both are given up"
        )
        assert [watch.state(name) for name in ("h1", "h2")] == ["up", "up"]
        for host in away:
            await watch.do(host.plug_in_cable)
        with measure(15, "healed"):
            await watch.until_green()
        for host in away:
            assert len(watch.said_of(host.name, "the connection is lost")) == 1
