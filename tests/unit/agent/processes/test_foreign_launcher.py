"""Which process is a rank's launcher, and which ends with one job of a launcher that has several."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.processes.foreign_launcher import launcher_pid_of, lowest_launchers
from ddpcore.wire_launch import prepared_env
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN_ID = "TORCHELASTIC_RUN_ID"


@contextlib.contextmanager
def line(**env: str) -> Iterator[list[int]]:
    """Return the pids of a driver, a launcher and a rank, each started by the one before."""
    argv = ["timeout", "600", "timeout", "600", "sleep", "600"]
    with subprocess.Popen(argv, env={**prepared_env(os.environ, ""), **env}) as process:
        driver = psutil.Process(process.pid)
        until(lambda: [one.name() for one in driver.children(recursive=True)] == ["timeout", "sleep"], 10, "all run")
        below = driver.children(recursive=True)
        try:
            yield [driver.pid, *(one.pid for one in below)]
        finally:
            for one in [driver, *below]:
                one.kill()


@pytest.mark.parametrize("is_torchrun", [True, False])
def test_torchrun_is_the_launcher_of_its_ranks_whoever_has_started_it(is_torchrun: bool) -> None:
    with line(**({RUN_ID: "none"} if is_torchrun else {})) as (driver, launcher, rank):
        assert launcher_pid_of(rank) == (launcher if is_torchrun else driver)


def test_the_lowest_launcher_holds_all_ranks_of_its_job_and_no_other() -> None:
    own = os.getpid()
    with line() as (driver, launcher, rank), line(**{RUN_ID: "none"}) as (_, torchrun, its_rank):
        assert lowest_launchers(driver, [launcher, rank], [its_rank]) == {launcher}
        assert lowest_launchers(own, [its_rank], [rank]) == {torchrun}
        assert lowest_launchers(own, [rank, its_rank], []) == {own}
        assert lowest_launchers(own, [rank, its_rank], [torchrun]) == {rank, its_rank}, "the driver itself has others"
        assert lowest_launchers(own, [launcher, torchrun], [rank]) == {own}, "what a rank has started is its own"
        assert lowest_launchers(driver, [rank, its_rank], []) == {rank, its_rank}, "never above the launcher"
        assert lowest_launchers(driver, [], [rank]) == set()
