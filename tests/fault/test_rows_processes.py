"""Agents, shims and ranks that are killed, stopped or go mad under a console: rows 1 to 6 and 30."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.jobs import JobState
from tests.support.fault_rows import measure
from tests.support.hosts import Network, require_hosts
from tests.support.light_job import PROGRAMS
from tests.support.watch import SSHD, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(300)

TOLD_S = 30.0
WAIT_S = 90.0


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", sshd_options=SSHD) as network:
        yield network


@pytest.mark.fault(row=[1, 6])
async def test_a_killed_agent_is_told_of_its_job_goes_on_to_its_end_and_the_next_one_knows_how_it_ended(
    network: Network,
) -> None:
    async with watched(network) as watch:
        link = watch.links["h2"]
        assert link.place is not None
        with measure(1, "told"):
            await watch.do(network["h2"].exec, "kill", "-9", str(link.place.pid))
            await watch.until(lambda: "no agent" in watch.trouble("h2"), TOLD_S, "it is told")
        assert link.is_alive
        assert watch.state("h1") == "up"
        await watch.do(link.bring_up)
        with measure(1, "healed"):
            await watch.until_green()
        assert watch.session.view().job().state == "running"  # type: ignore[union-attr]

        await watch.do(network["h2"].exec, "kill", "-9", str(link.place.pid))
        watch.lost_ranks = {0, 1}
        watch.job.end_well()
        await watch.until(lambda: "no agent" in watch.trouble("h2"), TOLD_S, "it is told")
        await watch.do(link.bring_up)
        with measure(6, "how it ended"):
            await watch.until(lambda: watch.job_state() == "succeeded", TOLD_S, "how it ended is known")


@pytest.mark.slow
@pytest.mark.fault(row=2)
async def test_a_stopped_agent_is_stale_then_lost_and_back_without_another_login(network: Network) -> None:
    host = network["h2"]
    async with watched(network) as watch:
        link = watch.links["h2"]
        assert link.place is not None
        num_logins = host.num_logins()
        with measure(2, "stale"):
            await watch.do(host.exec, "kill", "-STOP", str(link.place.pid))
            await watch.until(lambda: watch.state("h2") == "stale", TOLD_S, "it is stale")
        await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
        with measure(2, "named as frozen, after it was lost"):
            await watch.until(lambda: "is frozen" in watch.trouble("h2"), TOLD_S, "it is named")
        await watch.do(host.exec, "kill", "-CONT", str(link.place.pid))
        with measure(2, "healed"):
            await watch.until_green()
        assert host.num_logins() == num_logins


@pytest.mark.slow
@pytest.mark.fault(row=3)
async def test_a_killed_shim_is_told_of_training_goes_on_and_stop_ends_it(network: Network) -> None:
    async with watched(network) as watch:
        (shim,) = [
            one.process
            for one in await watch.do(watch.job.processes, [network["h2"]])
            if one.rank is None and any("shim" in word for word in one.process.cmdline())
        ]
        with measure(3, "told"):
            shim.kill()
            await watch.until(lambda: "shim" in watch.job_detail(), TOLD_S, "it is told")
        assert watch.job_state() == "running"
        await watch.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=[4, 5])
async def test_a_frozen_rank_is_named_and_a_killed_one_fails_the_job_with_its_signal(network: Network) -> None:
    async with watched(network) as watch:
        (rank,) = [one.process for one in await watch.do(watch.job.processes, [network["h2"]]) if one.rank == 1]
        with measure(5, "named"):
            rank.send_signal(signal.SIGSTOP)
            await watch.until(lambda: "rank 1 on h2 is frozen" in watch.headline, TOLD_S, "it is named")
        rank.send_signal(signal.SIGCONT)
        with measure(5, "healed"):
            await watch.until(lambda: "frozen" not in watch.headline, TOLD_S, "it is no longer named")
        watch.lost_ranks = {0, 1}
        with measure(4, "told"):
            rank.kill()
            await watch.until(lambda: "SIGKILL" in watch.headline, TOLD_S, "it is told")
        with measure(4, "job ended there"):
            await watch.until(lambda: watch.state_on("h2") is JobState.FAILED, TOLD_S, "its launcher ends it")


@pytest.mark.slow
@pytest.mark.fault(row=30)
async def test_a_host_that_floods_with_nonsense_is_not_believed_and_the_other_one_is_shown_as_before(
    network: Network,
) -> None:
    host = network["h2"]
    async with watched(network) as watch:
        place = watch.links["h2"].place
        assert place is not None
        path = Path(place.dir) / REPORTS_SOCKET
        path.rename(path.with_suffix(".away"))
        flooding = host.start(sys.executable, "-P", str(PROGRAMS / "flooding_agent.py"), str(path))
        try:
            await watch.until(path.exists, TOLD_S, "it listens")
            with measure(30, "told"):
                await watch.do(host.drop_sessions)
                await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
            assert "h2" in watch.headline
            await watch.until(lambda: watch.session.telemetry.num_malformed["h2"] > 1000, WAIT_S, "it floods")
            await watch.until(
                lambda: "what it sends is no report" in watch.trouble("h2"), TOLD_S, "the reason is shown"
            )
            await watch.watch_a_while()
            assert watch.state("h1") == "up"
            await watch.session.fleet.report("h2")
        finally:
            flooding.kill()
            await watch.do(flooding.wait)
        path.with_suffix(".away").rename(path)
        with measure(30, "healed"):
            await watch.do(host.drop_sessions)
            await watch.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=30)
async def test_a_host_whose_reports_are_sound_and_false_is_named_and_the_other_one_is_shown_as_before(
    network: Network,
) -> None:
    async with watched(network) as watch:
        place = watch.links["h2"].place
        assert place is not None
        path = Path(place.dir) / REPORTS_SOCKET
        path.rename(path.with_suffix(".away"))
        command = (sys.executable, "-P", str(PROGRAMS / "lying_agent.py"), str(path), str(path.with_suffix(".away")))
        lying = network["h2"].start(*command)
        try:
            await watch.until(path.exists, TOLD_S, "it listens")
            with measure(30, "told", "sound and false"):
                await watch.do(network["h2"].drop_sessions)
                await watch.until(lambda: "h2 is not believed" in watch.headline, TOLD_S, "it is named")
            await watch.until(lambda: "not believed" in watch.trouble("h2"), TOLD_S, "and its row says why")
            step = watch.job.steps()[0]
            await watch.watch_a_while()
            await watch.until(lambda: watch.job.steps()[0] > step, TOLD_S, "training goes on")
            assert (watch.state("h1"), watch.state("h2")) == ("up", "up")
            (row,) = watch.session.view().ranks([0])
            assert row.node == "h1"
            assert row.step is not None
            assert row.step > step
        finally:
            lying.kill()
            await watch.do(lying.wait)
        path.with_suffix(".away").rename(path)
        with measure(30, "healed", "sound and false"):
            await watch.do(network["h2"].drop_sessions)
            await watch.until_green()
