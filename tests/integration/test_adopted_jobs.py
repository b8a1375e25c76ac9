"""Jobs that no agent has launched: real torchrun, torch.multiprocessing and bare processes, taken in by an agent."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import pytest

from agent.wire.commands import Accepted, Kill, Prepare, PrepareAgain, RefusalReason, Refused, Stop
from agent.wire.jobs import JobState
from agent.wire.reports import ProcessState
from agent.wire.stacks import GetStacks, Stacks, StackSource
from ddpcore.wire import encode_report
from ddpcore.wire_launch import ENV_AGENT_DIR, ENV_EXEC_PID, INBOX_SOCKET, prepared_env
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.meeting import free_port
from tests.support.node_reports import rank_report
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.wire.jobs import JobStatus
    from agent.wire.reports import NodeReport, WorkerReport

pytestmark = pytest.mark.ranks

PROGRAM = Path(__file__).parents[1] / "support/programs/any_launcher.py"
END_S = 60.0
NAME = "mine"


class Launched:
    """A job of two ranks that its own launcher has started, in an environment that `rankdeck exec` would give it."""

    def __init__(self, directory: Path, agent: RunningAgent, launcher: str) -> None:
        self.directory = directory
        port = str(free_port())
        program = (str(PROGRAM), "spawn" if launcher == "spawn" else "env", str(directory), port)
        mute = f"RANK=1 {sys.executable} -I {' '.join(program)}"
        argv = {
            "torchrun": (
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port),
                *program,
            ),
            "spawn": (sys.executable, *program),
            "mute": ("sh", "-c", f"export {ENV_EXEC_PID}=$$; RANK=0 {_line(program)} & {mute} & wait %1 && wait %2"),
            "shell": ("sh", "-c", f"RANK=0 {_line(program)} & RANK=1 {_line(program)} & wait %1 && wait %2"),
        }[launcher]
        environ = prepared_env({**os.environ, ENV_AGENT_DIR: str(agent.directory)}, NAME)
        if launcher in {"shell", "mute"}:
            environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with (directory / "output").open("wb") as output:
            self.process = subprocess.Popen(argv, env=environ, stdout=output, stderr=output, start_new_session=True)
        self._seen = {psutil.Process(self.process.pid)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def alive(self) -> list[psutil.Process]:
        """Return what runs of all that it has been seen to start."""
        for process in list(self._seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update(process.children(recursive=True))
        return [one for one in self._seen if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]

    def go_on(self, how: str) -> None:
        (self.directory / how).touch()


def _line(program: tuple[str, ...]) -> str:
    return " ".join((sys.executable, *program))


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent() as agent:
        yield agent


def status_of(report: NodeReport) -> JobStatus | None:
    return next((job for job in report.jobs if job.job_id == NAME), None)


def trains(report: NodeReport) -> bool:
    """Return whether both ranks have reported a step."""
    return len(report.workers) == 2 and all(one.report and (one.report.step or 0) > 3 for one in report.workers)


def is_(state: JobState) -> Callable[[NodeReport], bool]:
    return lambda report: (job := status_of(report)) is not None and job.state is state


def worker(report: NodeReport, rank: int) -> WorkerReport:
    return next(one for one in report.workers if one.rank == rank)


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("spawn", marks=pytest.mark.slow), "shell"])
def test_ranks_of_any_launcher_are_taken_in_watched_and_end_as_they_would(
    launcher: str, agent: RunningAgent, tmp_path: Path
) -> None:
    with Launched(tmp_path, agent, launcher) as job:
        report = agent.wait_until(trains, END_S, "both ranks train")
        status = status_of(report)
        assert status is not None
        assert (status.is_adopted, status.ranks, status.world_size) == (True, [0, 1], 2)
        assert [one.rank for one in report.workers] == [0, 1]
        assert [one.report and one.report.anomalies for one in report.workers] == [[], []]
        assert {one.pid for one in report.workers} <= {process.pid for process in job.alive()}

        os.kill(worker(report, 1).pid, signal.SIGSTOP)
        report = agent.wait_until(lambda now: worker(now, 1).process is ProcessState.FROZEN, END_S, "rank 1 is frozen")
        os.kill(worker(report, 1).pid, signal.SIGCONT)

        job.go_on("end")
        report = agent.wait_until(is_(JobState.SUCCEEDED), END_S, "it has succeeded")
        status = status_of(report)
        assert status is not None
        assert status.exit_code == 0  # its parent has not collected it yet
        assert job.process.wait(END_S) == 0
        assert [one.exit and one.exit.code for one in report.workers] == [0, 0]
        output = (tmp_path / "output").read_text()
        assert [output.count(f"rank {rank} is done") for rank in (0, 1)] == [1, 1]


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_the_rank_that_raises_is_the_cause_and_the_launcher_has_its_own_exit_code(
    launcher: str, agent: RunningAgent, tmp_path: Path
) -> None:
    with Launched(tmp_path, agent, launcher) as job:
        agent.wait_until(trains, END_S, "both ranks train")
        job.go_on("boom")

        report = agent.wait_until(is_(JobState.FAILED), END_S, "it has failed")
        assert job.process.wait(END_S) == 1
        status = status_of(report)
        assert status is not None
        assert status.root_cause is not None
        assert (status.root_cause.rank, status.root_cause.exception) == (1, "ValueError: boom")
        assert "rank 1 exited with code 1: ValueError: boom" in status.detail


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_ctrl_c_is_an_interrupt_and_no_failure(launcher: str, agent: RunningAgent, tmp_path: Path) -> None:
    with Launched(tmp_path, agent, launcher) as job:
        agent.wait_until(trains, END_S, "both ranks train")
        job.alive()
        os.killpg(job.process.pid, signal.SIGINT)

        report = agent.wait_until(is_(JobState.STOPPED), END_S, "it is interrupted")
        assert job.process.wait(END_S) in {1, -signal.SIGINT}
        status = status_of(report)
        assert status is not None
        assert (status.detail, status.root_cause) == ("interrupted by SIGINT", None)
        until(lambda: job.alive() == [], END_S, "nothing of it is left")


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("spawn", marks=pytest.mark.slow), "shell"])
@pytest.mark.parametrize("command", [Stop(NAME), pytest.param(Kill(NAME), marks=pytest.mark.slow)])
def test_a_stop_and_a_kill_leave_no_process(
    launcher: str, command: Stop | Kill, agent: RunningAgent, tmp_path: Path
) -> None:
    with Launched(tmp_path, agent, launcher) as job:
        report = agent.wait_until(trains, END_S, "both ranks train")
        job.alive()
        # A frozen rank hears no SIGTERM.
        os.kill(worker(report, 0).pid, signal.SIGSTOP)

        assert isinstance(agent.ask(command), Accepted)
        agent.wait_until(is_(JobState.STOPPED), END_S, "it has stopped")
        assert job.process.wait(END_S) != 0
        until(lambda: job.alive() == [], END_S, "nothing of it is left")


def test_stacks_come_from_its_probes_and_nothing_but_stop_and_kill_is_done_to_it(
    agent: RunningAgent, tmp_path: Path
) -> None:
    with Launched(tmp_path, agent, "shell") as job:
        agent.wait_until(trains, END_S, "both ranks train")

        stacks = agent.ask(GetStacks(NAME))
        assert isinstance(stacks, Stacks)
        assert [(one.rank, one.source) for one in stacks.ranks] == [(0, StackSource.PROBE), (1, StackSource.PROBE)]

        spec = make_local_spec(tmp_path, job_id=NAME)
        refused = agent.ask(Prepare(spec))
        assert isinstance(refused, Refused)
        assert (refused.reason, "give another --name" in refused.message) == (RefusalReason.JOB_EXISTS, True)
        again = agent.ask(PrepareAgain(NAME, 1, 0, 2, 2))
        assert isinstance(again, Refused)
        job.go_on("end")
        job.process.wait(END_S)


def test_a_rank_without_a_probe_is_seen_by_its_process_and_why_is_named(agent: RunningAgent, tmp_path: Path) -> None:
    with Launched(tmp_path, agent, "mute") as job:
        report = agent.wait_until(lambda now: len(now.workers) == 2, END_S, "both ranks are known")
        status = status_of(report)
        assert status is not None
        assert (status.ranks, status.unprobed) == ([0, 1], "python -I")
        assert worker(report, 1).pid in {process.pid for process in job.alive()}
        assert worker(report, 1).report is None

        job.go_on("boom")
        report = agent.wait_until(is_(JobState.FAILED), END_S, "it has failed")
        job.process.wait(END_S)
        how = worker(report, 1).exit
        assert how is not None
        assert how.code in {1, None}  # before Linux 6.15 its parent may have collected it first


@pytest.mark.parametrize("name", ["..", "../..", "/tmp", "a/b", "", "A", "a\n", "x" * 65])
def test_a_report_whose_job_has_no_name_for_a_directory_is_dropped_and_counted(name: str, agent: RunningAgent) -> None:
    before = agent.report().malformed_reports
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        datagram = encode_report(rank_report(0, 1, job_id=name, is_adopted=True))
        sender.sendto(datagram, str(agent.directory / INBOX_SOCKET))

    report = agent.wait_until(lambda now: now.malformed_reports > before, END_S, "it is counted")
    assert (report.jobs, report.workers) == ([], [])


@pytest.mark.slow
def test_after_the_agent_was_killed_training_goes_on_and_the_next_one_takes_its_ranks_in(tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    try:
        with RunningAgent(directory=directory) as first, Launched(tmp_path, first, "torchrun") as job:
            first.wait_until(trains, END_S, "both ranks train")
            first.process.kill()
            first.process.wait()
            with RunningAgent(directory=directory) as second:
                second.wait_until(trains, END_S, "the next agent sees them")
                assert isinstance(second.ask(GetStacks(NAME)), Stacks)
                job.go_on("end")
                assert job.process.wait(END_S) == 0
                second.wait_until(is_(JobState.SUCCEEDED), END_S, "it has succeeded")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow
def test_the_second_run_under_a_name_takes_the_place_of_the_first(agent: RunningAgent, tmp_path: Path) -> None:
    pids: list[set[int]] = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with Launched(tmp_path / str(number), agent, "shell") as job:
            report = agent.wait_until(lambda now: trains(now) and is_(JobState.RUNNING)(now), END_S, "it trains")
            pids.append({one.pid for one in report.workers})
            job.go_on("end")
            job.process.wait(END_S)
            agent.wait_until(is_(JobState.SUCCEEDED), END_S, "it has succeeded")
    assert not pids[0] & pids[1]
    assert [job.job_id for job in agent.report().jobs] == [NAME]
