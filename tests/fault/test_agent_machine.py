"""An agent on a machine that is out of order: a full disk, few descriptors, a clock that is set."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.codec import REPORTS_SOCKET
from agent.wire.commands import (
    Accepted,
    Claim,
    Command,
    Commit,
    History,
    Kill,
    Prepare,
    PullHistory,
    RefusalReason,
    Refused,
    Stop,
)
from agent.wire.jobs import ENDED_STATES, JobState
from tests.support.agents import RunningAgent
from tests.support.fault_rows import measure
from tests.support.filesystems import AGENT_DISK_BYTES, SmallDisk, small_disk
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport

pytestmark = pytest.mark.fault

START_S = 100.0
END_S = 30.0


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    # Short, since a socket's path has 108 bytes.
    place = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    with small_disk(place / "d", AGENT_DISK_BYTES) as path:
        yield SmallDisk(path)
    shutil.rmtree(place)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "train.py").write_text("import os, time\nwhile not os.path.exists('over'):\n    time.sleep(0.05)\n")
    return make_local_spec(tmp_path, grace_s=2.0)


def refusal(agent: RunningAgent, command: Command) -> Refused:
    reply = agent.ask(command)
    assert isinstance(reply, Refused), reply
    return reply


def has_ended(report: NodeReport) -> bool:
    return report.jobs[0].state in ENDED_STATES


@pytest.mark.fault(row=28)
def test_an_agent_that_finds_no_room_at_its_start_says_in_one_line_where(disk: SmallDisk) -> None:
    disk.fill()
    argv = [sys.executable, "-P", "-m", "agent", "serve", "--dir", str(disk.directory), "--node", "here"]

    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert str(disk.directory) in line
    assert "No space left on device" in line


@pytest.mark.fault(row=28)
def test_what_a_full_disk_does_not_take_is_refused_until_there_is_room(disk: SmallDisk, spec: JobSpec) -> None:
    with RunningAgent(directory=disk.directory) as agent:
        disk.fill()
        for command in (Claim(3, "ann"), Prepare(spec)):
            assert refusal(agent, command).reason is RefusalReason.NO_SPACE
        disk.empty()
        for command in (Claim(3, "ann"), Prepare(spec)):
            assert isinstance(agent.ask(command), Accepted)

        disk.fill()
        refused = refusal(agent, Commit("train"))
        assert refused.reason is RefusalReason.CANNOT_SPAWN
        assert "No space left on device" in refused.message
        assert agent.report().jobs[0].state is JobState.PREPARED
        agent.wait_until(lambda report: report.report_seq > 15, END_S, "some reports of the past are lost")

        disk.empty()

        def past() -> bool:
            history = agent.ask(PullHistory())
            return isinstance(history, History) and bool(history.reports) and history.reports[-1].age_s < 2.0

        until(past, END_S, "the past is kept again")


@pytest.mark.fault(row=28)
@pytest.mark.ranks
def test_a_job_on_a_full_disk_is_taken_up_by_the_next_agent_which_stops_it(disk: SmallDisk, spec: JobSpec) -> None:
    with RunningAgent(directory=disk.directory) as first:
        first.start_job(spec)
        first.wait_until(lambda report: all(worker.pid for worker in report.workers), START_S, "both ranks are known")
        disk.fill()
        first.processes()
        first.process.kill()
        first.process.wait()
        (disk.directory / "agent.lock").write_text("1234567")  # longer than what the next one writes over it
        disk.fill()

        with RunningAgent(directory=disk.directory) as second:
            report = second.wait_until(lambda report: "disk full" in report.jobs[0].detail, END_S, "it is said")
            assert report.jobs[0].state is JobState.RUNNING
            assert isinstance(second.ask(Stop("train")), Accepted)
            report = second.wait_until(has_ended, END_S, "it has ended")
            assert report.jobs[0].state is JobState.STOPPED
            assert report.jobs[0].exit_code is not None, "there was no room for how it ended"


def look_round(agent: RunningAgent) -> None:
    """Wait for some looks of the agent at its machine."""
    before = agent.report().report_seq
    agent.wait_until(lambda report: report.report_seq > before + 5, END_S, "it looks round")


LIMIT = 256
STEP = 20
"""Connections at a time: fewer than the agent keeps free."""


@pytest.mark.fault(row=34)
def test_an_agent_with_few_descriptors_lets_no_more_consoles_in_and_goes_on() -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {LIMIT}))"
    held: list[socket.socket] = []

    def connect(agent: RunningAgent) -> bool:
        connection = doors.enter_context(socket.socket(socket.AF_UNIX))
        held.append(connection)
        try:
            connection.connect(str(agent.directory / REPORTS_SOCKET))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True

    with contextlib.ExitStack() as doors, RunningAgent(preamble=limit) as agent:
        with contextlib.suppress(ConnectionResetError):  # it may have closed its doors before it answers
            while all(connect(agent) for _ in range(STEP)):
                assert len(held) < LIMIT, "it lets everybody in"
                look_round(agent)
        assert len(held) > 64, "it has raised its own limit"
        assert agent.process.poll() is None
        for connection in held:
            connection.close()

        with measure(34, "healed", "agent"):
            until(lambda: connect(agent), END_S, "consoles are let in again")
        for connection in held:
            connection.close()
        assert agent.process.stderr is not None
        agent.process.terminate()
        agent.process.wait()
        said = [line for line in agent.process.stderr if "descriptors are left" in line]
        assert said == [
            f"agent: few of {LIMIT} descriptors are left: no console is let in until some are free (ulimit -n)\n"
        ]


@pytest.mark.fault(row=34)
@pytest.mark.ranks
def test_a_job_has_the_limit_of_descriptors_that_the_agent_had(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 500))"
    with RunningAgent(preamble=limit) as agent:
        agent.start_job(make_local_spec(tmp_path))
        agent.wait_until(has_ended, START_S, "it has ended")
        assert (agent.directory / "jobs" / "train" / "0" / "rank-0.stdout.log").read_text() == "200\n"


@pytest.mark.fault(row=33)
@pytest.mark.parametrize("step_s", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_duration(tmp_path: Path, spec: JobSpec, step_s: int) -> None:
    step = tmp_path / "step"
    preamble = f"""
import os, time
true_time = time.time
time.time = lambda: true_time() + ({step_s} if os.path.exists({str(step)!r}) else 0)
"""
    with RunningAgent(preamble=preamble) as agent:
        assert isinstance(agent.ask(Prepare(spec)), Accepted)
        before = agent.wait_until(lambda report: report.report_seq > 5, END_S, "some reports are kept")
        step.touch()
        after = agent.wait_until(lambda report: report.report_seq > before.report_seq + 5, END_S, "some more are kept")

        assert 0 < after.jobs[0].state_s - before.jobs[0].state_s < 60
        history = agent.ask(PullHistory(max_age_s=600))
        assert isinstance(history, History)
        ages_s = [past.age_s for past in history.reports]
        assert [past.seq for past in history.reports] == list(range(1, len(ages_s) + 1))
        assert ages_s == sorted(ages_s, reverse=True)
        assert 0 < ages_s[0] < 600
        assert isinstance(agent.ask(Commit("train", within_s=600)), Accepted)
        agent.ask(Stop("train"))


# Fails one call of an agent that writes below its directory, the NUMBERth, as a full disk does.
FAILS_ONE_WRITE = """
import errno, io, os
MARKS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
seen = 0
def fail_one(module, name, is_write):
    true = getattr(module, name)
    def call(target, *rest, **named):
        global seen
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        except (OSError, TypeError):
            path = ""
        if str(path).startswith(DIRECTORY) and is_write(*rest):
            seen += 1
            if seen == NUMBER:
                with true_open(STRUCK, "a") as file:
                    file.write(f"{name} {path}\\n")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return true(target, *rest, **named)
    setattr(module, name, call)
true_open = io.open
fail_one(io, "open", lambda mode="r", *_: set(mode) & set("wax+"))
fail_one(os, "open", lambda flags, *_: flags & MARKS)
for name in ("write", "pwrite", "ftruncate", "fsync", "mkdir", "replace", "rename"):
    fail_one(os, name, lambda *_: True)
"""


@pytest.mark.fault(row=28)
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_each_single_write_of_an_agent_may_fail(tmp_path: Path, spec: JobSpec) -> None:
    struck, number = tmp_path / "struck", 0
    while number == 0 or struck.exists():
        struck.unlink(missing_ok=True)
        number += 1
        directory = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
        names = f"DIRECTORY, STRUCK, NUMBER = {str(directory)!r}, {str(struck)!r}, {number}"
        agent = RunningAgent(directory=directory, preamble=names + FAILS_ONE_WRITE)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(agent)
            except AssertionError as error:
                refused = str(error)
            else:
                refused = ""
                live_through(agent, spec)
        shutil.rmtree(directory, ignore_errors=True)
        assert not refused or ("No space left on device" in refused and "Traceback" not in refused), number
    assert number > 20, "hardly a write was seen"


def live_through(agent: RunningAgent, spec: JobSpec) -> None:
    """Have an agent do what it writes for, and see that it says in its words what it could not do."""
    for command in (Claim(3, "ann"), Prepare(spec), Commit("train")):
        reply = agent.ask(command)
        if isinstance(reply, Refused):
            assert reply.reason is not RefusalReason.INTERNAL, reply
            assert "No space left on device" in reply.message or reply.reason is RefusalReason.UNKNOWN_JOB
            assert isinstance(agent.ask(command), Accepted | Refused), "it answers no more"
    look_round(agent)
    agent.ask(Kill("train"))
    agent.wait_until(lambda report: all(job.state in ENDED_STATES for job in report.jobs), END_S, "it has ended")
    assert agent.process.stderr is not None
    agent.process.terminate()
    assert agent.process.wait(END_S) == 0
    assert "Traceback" not in agent.process.stderr.read()
