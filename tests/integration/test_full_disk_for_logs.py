"""The disk of the logs is full while a job runs: one clear word, and nothing harmed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.jobs import ENDED_STATES, JobState
from agent.wire.logs import ReadLog
from tests.support.agents import RunningAgent
from tests.support.filesystems import small_disk
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.reports import NodeReport

pytestmark = pytest.mark.ranks

START_S = 60.0
DISK_BYTES = 24 * 2**20
"""A little more than an agent wants to be free before it takes a job."""

PROGRAM = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    while not pathlib.Path("fill").exists():
        time.sleep(0.05)
    try:
        while True:
            os.write(1, b"x" * 999 + b"\\n")
    except OSError as error:
        assert error.errno == 28, error
        if "fail" in sys.argv:
            raise
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    # Short, since a socket's path has 108 bytes.
    place = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    with small_disk(place / "d", DISK_BYTES) as disk:
        yield disk / "a"
    shutil.rmtree(place)


@pytest.mark.fault(row=28)
def test_the_agent_says_that_the_disk_is_full_and_all_goes_on(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    spec = make_local_spec(tmp_path, grace_s=2.0)
    with RunningAgent(directory=directory) as agent:
        agent.start_job(spec)
        (tmp_path / "fill").touch()
        report = agent.wait_until(lambda report: "disk full" in report.jobs[0].detail, START_S, "the disk is full")
        assert str(directory) in report.jobs[0].detail
        assert report.jobs[0].state is JobState.RUNNING
        reply = agent.ask(ReadLog("train", 1))
        assert type(reply).__name__ == "LogChunk"

        (tmp_path / "go").touch()

        def has_ended(report: NodeReport) -> bool:
            return report.jobs[0].state in ENDED_STATES

        report = agent.wait_until(has_ended, START_S, "the job has ended")
        assert (report.jobs[0].state, report.jobs[0].exit_code) == (JobState.SUCCEEDED, 0)
        assert "disk full" not in report.jobs[0].detail
        assert agent.process.poll() is None


def are_seen(report: NodeReport) -> bool:
    return [worker.pid > 0 for worker in report.workers] == [True, True]


def test_a_rank_that_ends_of_a_full_disk_is_told_though_it_could_not_write_why(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    spec = make_local_spec(tmp_path, grace_s=20.0)  # torchrun ends by itself, however slow
    with RunningAgent(directory=directory) as agent:
        agent.start_job(msgspec.structs.replace(spec, command=["train.py", "fail"]))
        # The end of a process that nobody has seen is told by the launcher, which has no room for it either.
        agent.wait_until(are_seen, START_S, "the ranks are seen")
        (tmp_path / "fill").touch()
        report = agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, START_S, "the job has ended")
        (job,) = report.jobs
        assert (job.state, job.exit_code) == (JobState.FAILED, 1)
        assert job.detail == "rank 1 exited with code 1: disk full: what it wrote of its end is lost"
        assert job.root_cause is not None
        assert job.root_cause.rank == 1
