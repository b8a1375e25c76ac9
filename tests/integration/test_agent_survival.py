"""Jobs outlive their agent: who comes after it takes them up, and tells truly how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from agent.errors import StateDirError
from agent.jobs.record import JobRecord, read_jobs
from agent.wire.commands import (
    Accepted,
    Claim,
    Commit,
    History,
    InjectFault,
    Kill,
    Prepare,
    PullHistory,
    RefusalReason,
    Refused,
    Shutdown,
    Stop,
    Tier,
)
from agent.wire.jobs import ENDED_STATES, JobSpec, JobState, JobStatus
from agent.wire.reports import ProcessState
from ddpcore.wire import FaultKind
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.ranks import is_alive
from tests.support.subscriber import Subscriber
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent.wire.reports import NodeReport

pytestmark = pytest.mark.ranks

START_S = 100.0
END_S = 30.0
PAUSES_LONG = "import agent.jobs.job\nagent.jobs.job.FIRST_PAUSE_S = 6.0"
"""An agent whose pause between two attempts is seen, and does not end before its test has gone on."""

ROUNDS = """
import os, subprocess, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
subprocess.Popen(["sleep", "600"], start_new_session=True)
rank, attempt = dist.get_rank(), int(os.environ["RANKDECK_ATTEMPT"])
print("attempt", attempt, "rank", rank, flush=True)
signal_file, good_attempt = sys.argv[1], int(sys.argv[2])
while True:
    is_over = torch.tensor(float(os.path.exists(signal_file)))
    dist.all_reduce(is_over)
    if is_over:
        break
    time.sleep(0.01)
if rank == 1 and attempt < good_attempt:
    raise ValueError(f"bad luck in attempt {attempt}")
dist.barrier()
"""

WAITS = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
rank, attempt = int(os.environ["RANK"]), int(os.environ["RANKDECK_ATTEMPT"])
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", rank, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
if rank == 1 and attempt < int(sys.argv[2]):
    raise ValueError(f"bad luck in attempt {attempt}")
"""
"""The same without torch, which takes most of the time: for tests in which nobody looks into the ranks."""


class House:
    """A directory for one agent after another, and a file whose existence ends the job's program."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self._stack = stack
        self._tmp_path = tmp_path
        self.agents: list[RunningAgent] = []
        self.over = tmp_path / "over"
        (tmp_path / "rounds.py").write_text(ROUNDS)
        (tmp_path / "waits.py").write_text(WAITS)

    def agent(self, preamble: str = "") -> RunningAgent:
        """Start another agent in the same directory."""
        directory = self.agents[0].directory if self.agents else None
        self.agents.append(self._stack.enter_context(RunningAgent(directory=directory, preamble=preamble)))
        return self.agents[-1]

    def spec(self, good_attempt: int = 0, program: str = "rounds.py", **changes: Any) -> JobSpec:
        """Return a job of two ranks that goes on until `over` exists, and fails then before the good attempt."""
        command = [program, str(self.over), str(good_attempt)]
        return make_local_spec(self._tmp_path, command=command, **changes)

    def left(self) -> list[psutil.Process]:
        """What is alive of all that was ever seen, the agents apart."""
        agents = {agent.process.pid for agent in self.agents}
        return [process for agent in self.agents for process in agent.processes() if process.pid not in agents]

    def has_left(self, name: str) -> bool:
        """Return whether something of that name is among it; others may be about to end."""
        names = set()
        for process in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.add(process.name())
        return name in names

    def set_off(self, good_attempt: int = 0) -> NodeReport:
        """Start a job whose ranks only wait, and return the first report after both have begun to."""
        agent = self.agents[-1]
        assert isinstance(agent.start_job(self.spec(good_attempt, "waits.py")), Accepted)
        logs = [self.job_dir() / f"rank-{rank}.stdout.log" for rank in (0, 1)]

        def do_both_wait(report: NodeReport) -> bool:
            return are_there(report) and all(log.exists() and log.stat().st_size for log in logs)

        return agent.wait_until(do_both_wait, START_S, "both ranks wait")

    def job_dir(self, attempt: int = 0) -> Path:
        """Return the place of an attempt."""
        return self.agents[0].directory / "jobs" / "train" / str(attempt)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack, tmp_path)


def kill(agent: RunningAgent) -> None:
    agent.processes()
    agent.process.kill()
    agent.process.wait()


def started(agent: RunningAgent, spec: JobSpec) -> NodeReport:
    """Start a job and return the first report in which both ranks train."""
    assert isinstance(agent.start_job(spec), Accepted)
    return agent.wait_until(is_training, START_S, "both ranks report")


def are_there(report: NodeReport) -> bool:
    return [worker.pid > 0 for worker in report.workers] == [True, True]


def is_training(report: NodeReport) -> bool:
    reports = [worker.report for worker in report.workers if worker.report]
    return len(reports) == 2 and all(any(group.enqueued_seq for group in one.groups) for one in reports)


def job(report: NodeReport) -> JobStatus:
    (status,) = report.jobs
    return status


def state_is(*states: JobState) -> Callable[[NodeReport], bool]:
    return lambda report: job(report).state in states


has_ended = state_is(*ENDED_STATES)


@pytest.mark.fault(row=1)
def test_a_killed_agent_leaves_training_untouched_and_the_next_one_takes_it_up(house: House) -> None:
    first = house.agent()
    before = started(first, house.spec())
    kill(first)

    second = house.agent()
    after = second.wait_until(is_training, START_S, "both ranks report to the new agent")

    assert (job(after).state, job(after).detail) == (JobState.RUNNING, "")
    assert job(after).state_s > job(before).state_s
    assert [worker.pid for worker in after.workers] == [worker.pid for worker in before.workers]
    assert after.epoch != before.epoch
    assert isinstance(second.ask(Stop("train")), Accepted)
    assert job(second.wait_until(has_ended, END_S, "it has stopped")).state is JobState.STOPPED
    until(lambda: not house.left(), END_S, "nothing is left")


@pytest.mark.fault(row=6)
@pytest.mark.parametrize(
    ("good_attempt", "state", "code"),
    [pytest.param(0, JobState.SUCCEEDED, 0, marks=pytest.mark.slow), (1, JobState.FAILED, 1)],
)
def test_how_a_job_ended_while_no_agent_ran_is_told_by_the_next_one(
    house: House, good_attempt: int, state: JobState, code: int
) -> None:
    first = house.agent()
    house.set_off(good_attempt)
    kill(first)
    house.over.touch()
    until(lambda: not house.left(), END_S, "the job has ended by itself")

    status = job(house.agent().report())

    assert (status.state, status.exit_code) == (state, code)
    assert ("bad luck in attempt 0" in status.detail) == (code == 1)


@pytest.mark.slow
def test_an_adopted_job_fails_begins_again_and_succeeds(house: House) -> None:
    first = house.agent()
    started(first, house.spec(1, max_restarts=2))
    kill(first)
    second = house.agent(preamble=PAUSES_LONG)
    second.wait_until(is_training, START_S, "both ranks report to the new agent")

    house.over.touch()
    waiting = second.wait_until(state_is(JobState.RESTARTING), END_S, "it fails")
    ended = second.wait_until(has_ended, START_S, "it succeeds")

    assert "bad luck in attempt 0; restarts in" in job(waiting).detail
    status = job(ended)
    assert (status.state, status.attempt, status.num_restarts) == (JobState.SUCCEEDED, 1, 1)
    for attempt in (0, 1):
        assert (house.job_dir(attempt) / "rank-1.stdout.log").read_text() == f"attempt {attempt} rank 1\n"


@pytest.mark.slow
def test_a_budget_of_restarts_ends(house: House) -> None:
    house.over.touch()
    agent = house.agent()
    agent.start_job(house.spec(9, max_restarts=1))

    status = job(agent.wait_until(has_ended, START_S, "it has failed twice"))

    assert (status.state, status.attempt, status.num_restarts) == (JobState.FAILED, 1, 1)
    assert "bad luck in attempt 1" in status.detail
    until(lambda: not house.left(), END_S, "nothing is left")


@pytest.mark.slow
def test_an_agent_that_is_killed_between_two_attempts_has_a_successor_that_begins_the_second(house: House) -> None:
    house.over.touch()
    first = house.agent(preamble=PAUSES_LONG)
    first.start_job(house.spec(1, max_restarts=1))
    first.wait_until(state_is(JobState.RESTARTING), START_S, "the first attempt has failed")
    kill(first)

    status = job(house.agent().wait_until(has_ended, START_S, "the second attempt has ended"))

    assert (status.state, status.attempt, status.num_restarts) == (JobState.SUCCEEDED, 1, 1)


def test_a_job_whose_shim_and_launcher_are_killed_without_an_agent_is_lost_and_nothing_is_left(house: House) -> None:
    first = house.agent()
    house.set_off()
    kill(first)
    record = msgspec.json.decode((house.job_dir() / "run.json").read_bytes())
    pids = [record["shim_pid"], record["launcher_pid"]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(is_alive, pids)), END_S, "both are gone")
    assert house.has_left("sleep"), "what nobody's death ends"

    second = house.agent()

    status = job(second.report())
    assert (status.state, status.exit_code) == (JobState.LOST, None)
    assert status.detail == "nobody knows how it ended: no agent ran when its shim was killed"
    until(lambda: not house.left(), END_S, "nothing is left")


@pytest.mark.fault(row=8)
@pytest.mark.parametrize(
    ("is_recorded", "state", "code", "detail"),
    [
        (False, JobState.LOST, None, "nobody knows how it ended: the node was rebooted"),
        pytest.param(True, JobState.FAILED, -9, "", marks=pytest.mark.slow),
    ],
)
def test_after_a_reboot_a_job_is_lost_unless_its_end_was_recorded(
    house: House, *, is_recorded: bool, state: JobState, code: int | None, detail: str
) -> None:
    first = house.agent()
    house.set_off()
    first.ask(Kill("train"))
    until(lambda: not house.left(), END_S, "nothing runs")
    kill(first)
    path = house.job_dir().parent / "job.json"
    record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    running = msgspec.structs.replace(record.job, state=JobState.RUNNING, exit_code=None, cause="")
    if not is_recorded:
        (house.job_dir() / "exit.json").unlink()
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, boot_id="another", job=running)))

    status = job(house.agent().report())

    assert (status.state, status.exit_code) == (state, code)
    assert status.detail.startswith(detail)


def test_a_prepared_job_is_forgotten_with_its_agent_and_can_be_prepared_again(house: House) -> None:
    first = house.agent()
    assert isinstance(first.ask(Prepare(house.spec())), Accepted)
    kill(first)

    second = house.agent()

    assert second.report().jobs == []
    refused = second.ask(Commit("train"))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.UNKNOWN_JOB
    assert isinstance(second.ask(Prepare(house.spec())), Accepted)


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("shutdown", marks=pytest.mark.slow),
    ],
)
def test_an_agent_that_ends_leaves_its_job_to_the_next_one(house: House, how: signal.Signals | str) -> None:
    first = house.agent()
    before = house.set_off()
    if isinstance(how, str):
        assert isinstance(first.ask(Shutdown()), Accepted)
    else:
        first.process.send_signal(how)
    assert first.process.wait(END_S) == 0

    second = house.agent()
    after = second.wait_until(are_there, START_S, "the new agent has found both ranks")

    assert [worker.pid for worker in after.workers] == [worker.pid for worker in before.workers]


def last_report(subscriber: Subscriber) -> NodeReport:
    """Return the agent's last report, as whoever reads all of them gets it."""
    while not (report := subscriber.report(END_S)).is_last:
        pass
    return report


def past_reports(agent: RunningAgent) -> list[NodeReport]:
    """Return what the agents of a directory have kept, the oldest first."""
    reply = agent.ask(PullHistory(Tier.RECENT, 0))
    assert isinstance(reply, History)
    return [past.report for past in reply.reports]


@pytest.mark.slow
def test_an_agent_that_takes_its_jobs_with_it_reports_last_how_they_ended(house: House) -> None:
    agent = house.agent()
    house.set_off()
    subscriber = Subscriber(agent.directory)
    try:
        subscriber.report()
        assert isinstance(agent.ask(Shutdown(kill_jobs=True)), Accepted)
        report = last_report(subscriber)
    finally:
        subscriber.close()

    assert agent.process.wait(END_S) == 0
    assert house.left() == []
    assert [job.state for job in report.jobs] == [JobState.STOPPED]
    assert [worker.process for worker in report.workers] == [ProcessState.EXITED] * 2


def test_what_is_news_after_the_last_report_of_an_agent_does_not_bring_the_node_back(house: House) -> None:
    agent = house.agent("import agent.transport.subscribers\nagent.transport.subscribers.READING_S = 3.0")
    subscriber = Subscriber(agent.directory)
    try:
        subscriber.report()
        agent.ask(Shutdown())
        last_report(subscriber)
        assert isinstance(agent.ask(Claim(1, "another console")), Accepted)
        report = subscriber.report()
    finally:
        subscriber.close()
    assert report.control is not None
    assert report.is_last


@pytest.mark.parametrize("how", ["command", pytest.param("signal", marks=pytest.mark.slow)])
def test_an_agent_that_is_asked_to_end_reports_that_it_does_and_so_does_its_history(house: House, how: str) -> None:
    first = house.agent()
    house.set_off()
    subscriber = Subscriber(first.directory)
    try:
        subscriber.report()
        if how == "command":
            first.ask(Shutdown())
        else:
            first.process.terminate()
        report = last_report(subscriber)
    finally:
        subscriber.close()
    assert first.process.wait(END_S) == 0
    assert [job.state for job in report.jobs] == [JobState.RUNNING]

    second = house.agent()
    kept = second.wait_until(lambda report: len(report.workers) == 2, START_S, "the new agent has both ranks")
    farewells = [past.is_last for past in past_reports(second) if past.epoch != kept.epoch]
    assert farewells == [False] * (len(farewells) - 1) + [True]
    assert not kept.is_last


@pytest.mark.slow
def test_two_jobs_on_one_node_end_apart(house: House) -> None:
    agent = house.agent()
    started(agent, house.spec())
    agent.start_job(house.spec(job_id="other"))
    agent.wait_until(lambda report: len([w for w in report.workers if w.report]) == 4, START_S, "four ranks report")

    agent.ask(Kill("train"))
    report = agent.wait_until(lambda report: report.jobs[0].state is JobState.STOPPED, END_S, "one is killed")

    assert [status.state for status in report.jobs] == [JobState.STOPPED, JobState.RUNNING]
    assert [worker.process for worker in report.workers if worker.job_id == "other"] == ["running", "running"]
    assert isinstance(agent.ask(InjectFault("other", FaultKind.KILL, 1)), Accepted)
    agent.wait_until(lambda report: report.jobs[1].state is JobState.FAILED, END_S, "the other one has failed")


@pytest.mark.fault(row=26)
def test_an_older_generation_is_refused_also_by_the_next_agent(house: House) -> None:
    first = house.agent()
    assert isinstance(first.ask(Claim(4, "ann@laptop")), Accepted)
    assert isinstance(first.ask(Claim(5, "bob@desk")), Accepted)
    kill(first)

    second = house.agent()

    held = second.report().control
    assert held is not None
    assert (held.generation, held.holder) == (5, "bob@desk")
    refused = second.ask(Prepare(house.spec(), generation=4))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.OLD_GENERATION
    assert isinstance(second.ask(Prepare(house.spec(), generation=5)), Accepted)


def test_a_shim_that_has_not_said_yet_who_it_is_is_waited_for_and_not_killed(house: House) -> None:
    first = house.agent()
    before = house.set_off()
    kill(first)
    record = house.job_dir() / "run.json"
    hidden = record.rename(record.with_suffix(".hidden"))

    second = house.agent()
    second.wait_until(lambda report: report.report_seq > 5, END_S, "some looks")
    assert job(second.report()).state is JobState.RUNNING
    hidden.rename(record)

    after = second.wait_until(are_there, START_S, "the new agent has found both ranks")
    assert [worker.pid for worker in after.workers] == [worker.pid for worker in before.workers]


@pytest.mark.fault(row=29)
@pytest.mark.slow
def test_a_job_whose_record_is_damaged_runs_on(house: House) -> None:
    first = house.agent()
    before = started(first, house.spec())
    first.start_job(house.spec(job_id="other"))
    kill(first)
    (house.job_dir().parent / "job.json").write_text("{")

    second = house.agent()
    second.wait_until(lambda report: report.report_seq > 5, END_S, "some looks and a sweep")

    assert [status.job_id for status in second.report().jobs] == ["other"]
    assert all(is_alive(worker.pid) for worker in before.workers)


@pytest.mark.slow
def test_a_job_between_two_attempts_begins_again_also_after_a_reboot(house: House) -> None:
    house.over.touch()
    first = house.agent(preamble=PAUSES_LONG)
    first.start_job(house.spec(1, max_restarts=1))
    first.wait_until(state_is(JobState.RESTARTING), START_S, "the first attempt has failed")
    kill(first)
    path = house.job_dir().parent / "job.json"
    record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
    late = msgspec.structs.replace(record.job, since_s=1e9, restart_at_s=1e9)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, boot_id="another", job=late)))

    status = job(house.agent().wait_until(has_ended, START_S, "the second attempt has ended"))

    assert (status.state, status.attempt) == (JobState.SUCCEEDED, 1)


def test_the_secrets_of_an_ended_job_are_not_kept(house: House) -> None:
    agent = house.agent()
    agent.start_job(house.spec(program="waits.py", env={"HF_TOKEN": "abc"}))
    path = house.job_dir().parent / "job.json"
    assert b'"HF_TOKEN":"abc"' in path.read_bytes()
    house.over.touch()
    agent.wait_until(has_ended, START_S, "it ends")
    assert b'"HF_TOKEN":"***"' in path.read_bytes()


def test_records_of_a_newer_agent_are_refused_and_left_alone(house: House) -> None:
    first = house.agent()
    first.ask(Prepare(house.spec()))
    kill(first)
    path = house.job_dir().parent / "job.json"
    path.write_text('{"record_version": 99}')

    done = subprocess.run(
        [*first.argv],
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )

    assert done.returncode == 2
    assert done.stderr.startswith(f"agent: {path} is of version 99, this agent knows 1: start the newer agent again")
    assert path.read_text() == '{"record_version": 99}'


@pytest.mark.fault(row=29)
def test_a_damaged_record_is_set_aside_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train" / "job.json"
    path.parent.mkdir()
    path.write_text('{"record_version": 1, "boot_id":')

    assert read_jobs(tmp_path) == []

    assert not path.exists()
    assert path.with_suffix(".damaged").exists()
    assert "cannot be read, it is now job.damaged" in capsys.readouterr().err
    path.write_text('{"record_version": 2}')
    with pytest.raises(StateDirError, match="is of version 2"):
        read_jobs(tmp_path)
