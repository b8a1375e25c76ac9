"""Starts: by a console that is killed, refused by one host, by a second console: rows 23, 24 and 26."""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.commands import Accepted, Claim, Commit, Prepare
from agent.wire.jobs import JobState
from app.errors import AgentRefusedError, UsageError
from tests.support.desk import Desk, named
from tests.support.fault_rows import measure
from tests.support.hosts import Network, require_hosts
from tests.support.light_job import LightJob
from tests.support.waiting import until
from tests.support.watch import SSHD, another_console, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(400)

WAIT_S = 90.0
HOSTS = ("h1", "h2")
NUM_KILLS = 6
LONGEST_S = 4.0
"""From the start of the command to its kill: half of them come before its first word to an agent."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network(*HOSTS, sshd_options=SSHD) as network:
        yield network


@pytest.mark.fault(row=23)
async def test_what_a_console_has_prepared_begins_nowhere_and_what_it_has_half_begun_is_shown_and_stopped(
    network: Network,
) -> None:
    async with watched(network) as watch:
        job = LightJob(network.directory, "half")
        fleet, specs = watch.session.fleet, job.specs(*HOSTS, master_addr=network["h1"].address)

        def state_of_half(host: str) -> JobState | None:
            statuses = [assignment[host] for assignment in watch.session.assignments() if host in assignment]
            return next((status.state for status in statuses if status.job_id == "half"), None)

        prepared = await fleet.ask("h1", Prepare(specs["h1"]))
        assert isinstance(prepared, Accepted)
        other = msgspec.structs.replace(specs["h2"], master_port=prepared.master_port)
        assert isinstance(await fleet.ask("h2", Prepare(other)), Accepted)
        await watch.until(lambda: state_of_half("h2") is JobState.PREPARED, WAIT_S, "it is shown as prepared")
        assert await watch.do(job.processes, network.hosts.values()) == [], "nothing runs before its commit"

        await fleet.ask("h1", Commit("half"))
        with measure(23, "half of a start shown"):
            await watch.until(lambda: state_of_half("h1") is JobState.RUNNING, WAIT_S, "what runs is shown")
        assert state_of_half("h2") is JobState.PREPARED
        assert {one.host for one in await watch.do(job.processes, network.hosts.values())} == {"h1"}
        await watch.session.job_control.stop("half", is_agreed=False)
        await watch.until(lambda: state_of_half("h1") is JobState.STOPPED, WAIT_S, "it is stopped")
        assert await watch.do(job.processes, network.hosts.values()) == []
        assert watch.state_on("h1") is JobState.RUNNING, "another job was stopped too"


@pytest.mark.slow
@pytest.mark.fault(row=23)
async def test_a_console_that_is_killed_at_any_moment_of_a_start_leaves_what_the_next_one_ends(
    network: Network,
) -> None:
    dice = random.Random(23)
    desk = Desk(network)
    try:
        async with watched(network) as watch:

            def kill_one(number: int) -> str:
                job = LightJob(network.directory, f"killed{number}")
                how = ("--no-doctor", "--beside", "--detach", "--name", job.job_id, "--nproc-per-node", "1")
                where = ("--job-python", str(job.python), "--workdir", str(job.directory))
                console = desk.start("run", *named(*HOSTS), *how, *where, "train.py")
                time.sleep(dice.uniform(0.5, LONGEST_S))  # it is a moment that is wanted, whatever happens in it
                console.send_signal(signal.SIGKILL)
                console.communicate()
                code, _, stderr = desk.run("kill", job.job_id, *named(*HOSTS))
                assert code in {0, 2, 4}, stderr
                until(lambda: job.processes(network.hosts.values()) == [], WAIT_S, "nothing of it runs")
                return f"{code} {stderr}"

            for number in range(NUM_KILLS):
                await watch.do(kill_one, number)
            await watch.until_green()
    finally:
        desk.end()


@pytest.mark.slow
@pytest.mark.fault(row=24)
async def test_a_job_that_one_host_refuses_leaves_nothing_anywhere_and_the_one_that_runs_alone(
    network: Network,
) -> None:
    async with watched(network) as watch:
        job = LightJob(network.directory, "refused")
        network["h2"].lose_road_to(network["h1"])
        with measure(24, "told"), pytest.raises(AgentRefusedError, match="h2 refused: no way from here to"):
            await watch.session.fleet.start(job.specs(*HOSTS, master_addr=network["h1"].address))
        assert await watch.do(job.processes, network.hosts.values()) == []
        for host in HOSTS:
            assert [status.job_id for status in (await watch.session.fleet.report(host)).jobs] == ["train"]
        await watch.watch_a_while()
        await watch.do(watch.invariants.look_at_jobs, watch.hosts, watch.job, job)

        await watch.do(network["h2"].exec, "ip", "route", "del", "unreachable", network["h1"].address)
        with measure(24, "healed", "the same job starts"):
            await watch.session.fleet.start(job.specs(*HOSTS, master_addr=network["h1"].address))
            await watch.until(lambda: len(job.steps()) == len(HOSTS), WAIT_S, "every rank of it makes steps")
        await watch.session.job_control.stop(job.job_id, is_agreed=False)

        def is_stopped() -> bool:
            statuses = [status for assignment in watch.session.assignments() for status in assignment.values()]
            return [status.state for status in statuses if status.job_id == job.job_id] == [JobState.STOPPED] * 2

        await watch.until(is_stopped, WAIT_S, "it is stopped")
        assert await watch.do(job.processes, network.hosts.values()) == []
        await watch.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=26)
async def test_two_consoles_look_on_the_second_starts_nothing_and_an_older_claim_is_refused(network: Network) -> None:
    async with watched(network) as watch:
        job = LightJob(network.directory, "second")
        async with another_console(watch) as other:
            await other.until_green()
            await other.until(lambda: other.job_state() == "running", WAIT_S, "it shows the job")
            with measure(26, "told"), pytest.raises(UsageError, match="job train runs on"):
                await other.session.start_another(job.request)
            assert isinstance(await other.session.fleet.ask("h1", Claim(5, "bob@desk")), Accepted)
            spec = job.specs("h1", master_addr=network["h1"].address)["h1"]
            with pytest.raises(AgentRefusedError, match="bob@desk"):
                await watch.session.fleet.ask("h1", Prepare(spec, generation=4))
            await watch.watch_a_while()
            await watch.do(watch.invariants.look_at_jobs, watch.hosts, watch.job, job)
            assert await watch.do(job.processes, network.hosts.values()) == []
        await watch.until(lambda: watch.job_state() == "stopped", WAIT_S, "the first one shows what the second did")
