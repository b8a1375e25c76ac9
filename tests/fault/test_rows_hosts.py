"""Hosts without power, that stand still, with a full disk, with a clock that is set: rows 7, 8, 16, 28 and 33."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.commands import History, PullHistory
from agent.wire.jobs import JobState
from app.errors import AgentRefusedError, HostUnreachableError
from app.fleet.host_link import Access, HostLink
from tests.support.fault_rows import measure
from tests.support.filesystems import AGENT_DISK_BYTES, SmallDisk, small_disk
from tests.support.hosts import Network, require_hosts
from tests.support.light_job import LightJob
from tests.support.watch import ROOT, SSHD, another_console, bring_up, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        with measure(7, "lost"):
            await watch.do(host.cut_power)
            await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
        with measure(7, "connection given up after that"):
            await watch.until(lambda: not watch.links["h2"].is_alive, TOLD_S, "SSH is given up")
        assert "h2" in watch.headline
        assert watch.state("h1") == "up"

        await watch.do(host.boot)
        with HostLink(Access("h2", watch.python, str(network.ssh_config))) as link:
            with measure(8, "agent up"):
                await watch.do(bring_up, link)
            with measure(8, "healed"):
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
            with measure(16, "lost"):
                await watch.do(host.freeze)
                await watch.until(lambda: watch.state("h2") == "lost", TOLD_S, "it is lost")
            with (
                HostLink(Access("h2", watch.python, str(network.ssh_config))) as link,
                measure(16, "new login given up"),
                pytest.raises(HostUnreachableError),
            ):
                await watch.do(link.connect)
            assert watch.trouble("h2") != ""
        finally:
            await watch.do(host.thaw)
        with measure(16, "healed"):
            await watch.until_green()


@pytest.mark.slow
@pytest.mark.fault(row=28)
async def test_a_disk_that_is_full_is_told_of_and_takes_no_job_and_the_one_that_runs_goes_on_and_is_stopped(
    network: Network,
) -> None:
    host = network["h2"]
    host.cut_power()
    with small_disk(host.home / ".local", AGENT_DISK_BYTES) as path:
        disk = SmallDisk(path)
        host.boot()  # a host has the mounts that are there when it boots
        async with watched(network) as watch:
            specs = LightJob(network.directory, "second").specs("h1", "h2", master_addr=network["h1"].address)
            with measure(28, "told"):
                await watch.do(disk.fill)
                await watch.until(lambda: "disk full" in watch.job_detail(), TOLD_S, "it is told")
            with measure(28, "a start refused"), pytest.raises(AgentRefusedError) as refused:
                await watch.session.fleet.start(specs)
            assert (str(refused.value).startswith("h2 refused: "), refused.value.reason) == (True, "no_space")
            await watch.watch_a_while()
            assert watch.job_state() == "running"
            assert [job.job_id for job in (await watch.session.fleet.report("h1")).jobs] == ["train"]
            place = watch.links["h2"].place
            assert place is not None

            await watch.do(disk.empty)
            with measure(28, "healed"):
                await watch.until(lambda: "disk full" not in watch.job_detail(), TOLD_S, "there is room again")
                await watch.until_green()
            assert host.exec("ps", "-o", "args=", "-p", str(place.pid)).count("serve") == 1, "the agent lives"
            await watch.do(disk.fill)  # and so the job is stopped


CLOCK = """
import os, time
def stepped(true, unit):
    def now():
        try:
            with open({path!r} + os.uname().nodename) as file:
                return true() + unit * int(file.read() or 0)
        except OSError:
            return true()
    return now
time.time, time.time_ns = stepped(time.time, 1), stepped(time.time_ns, 10**9)
"""
"""Is run by each Python of a host before all else: its clock is off by as many seconds as a file says."""


@pytest.fixture
def clock() -> Iterator[tuple[Network, Callable[[int], object]]]:
    """Hosts, and a function that sets the clock of h2 to be off by some seconds."""
    require_hosts()
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "sitecustomize.py").write_text(CLOCK.format(path=f"{place}/off-"))
        with Network("h1", "h2", sshd_options=[f"SetEnv PYTHONPATH={place}:{ROOT}"]) as network:
            yield network, lambda off_s: (Path(place) / "off-h2").write_text(str(off_s))


@pytest.mark.slow
@pytest.mark.fault(row=33)
def test_the_doctor_says_which_clock_is_off_by_how_much_and_what_to_do(
    clock: tuple[Network, Callable[[int], object]],
) -> None:
    network, set_clock = clock
    environment = {"HOME": str(network.directory), "RANKDECK_PYTHON": sys.executable, "COLUMNS": "80"}
    environment |= {"RANKDECK_SSH_CONFIG": str(network.ssh_config)}
    for off_s, side in ((3600, "ahead of"), (-3600, "behind")):
        set_clock(off_s)
        argv = [sys.executable, "-P", "-m", "app", "doctor", "h1", "h2"]
        done = subprocess.run(
            argv, cwd=network.directory, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        said = " ".join(done.stdout.split())
        assert said.startswith(f"h2 warn clock 1 h {side} this machine, to within"), said
        assert "-> set it: timedatectl set-ntp true, or chronyc makestep" in said
        assert "2 hosts: 1 well, 1 with warnings." in said


@pytest.mark.slow
@pytest.mark.fault(row=33)
@pytest.mark.parametrize(("first_s", "then_s"), [(3600, 0), (-3600, 3600)])
async def test_a_clock_that_is_off_and_is_set_changes_no_age_and_no_order(
    clock: tuple[Network, Callable[[int], object]], first_s: int, then_s: int
) -> None:
    network, set_clock = clock
    set_clock(first_s)
    began_s = time.monotonic()
    async with watched(network) as watch:

        def events() -> list[str]:
            return [watch.session.events[at].text for at in range(len(watch.session.events))]

        def have_come() -> bool:
            return "job train: running" in events() and any(text.startswith("attached;") for text in events())

        await watch.until(have_come, TOLD_S, "the past and the start are events")
        await watch.watch_a_while()
        set_clock(then_s)
        before = events()
        await watch.watch_a_while()
        link = watch.links["h2"]
        assert link.place is not None
        assert events() == before, "nothing has happened"
        (status,) = (await watch.session.fleet.report("h2")).jobs
        assert 0 < status.state_s < time.monotonic() - began_s

        await watch.do(network["h2"].exec, "kill", "-9", str(link.place.pid))
        await watch.until(lambda: "no agent" in watch.trouble("h2"), TOLD_S, "the agent is gone")
        await watch.do(link.bring_up)
        with measure(33, "healed", "the next agent has another clock"):
            await watch.until_green()
        history = await watch.session.fleet.ask("h2", PullHistory(max_age_s=1e6))
        assert isinstance(history, History)
        ages_s = [past.age_s for past in history.reports]
        assert ages_s == sorted(ages_s, reverse=True)
        assert 5 < ages_s[0] < time.monotonic() - began_s, "reports of the agent before are as old as they are"
        async with another_console(watch) as other:
            await other.until_green()
            await other.watch_a_while()
