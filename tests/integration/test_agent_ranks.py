"""A real agent with real torchrun ranks: what it sees, what it does to them, and that none outlives it."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import psutil
import pytest

from agent.wire.commands import Accepted, Commit, InjectFault, Kill, Prepare, RefusalReason, Refused, Stop
from agent.wire.ends import DiskLimit, FullDisk, Sender
from agent.wire.jobs import ENDED_STATES, JobSpec, JobState
from agent.wire.logs import Logs, PullLogs
from agent.wire.reports import NodeReport, ProcessState
from ddpcore.checkpoint import Checkpointer
from ddpcore.wire import FaultKind
from tests.support.agents import RunningAgent
from tests.support.filesystems import small_disk
from tests.support.jobs import make_local_spec
from tests.support.ranks import PROGRAMS, is_alive
from tests.support.subscriber import Subscriber
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.ranks

START_S = 100.0
END_S = 15.0

LOOP = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print("hello of", rank, flush=True)
print("\\x1b[2Jnoise", file=sys.stderr, flush=True)
if "fail" in sys.argv and rank == 1:
    raise ValueError("bad luck")
rounds = 5 if "short" in sys.argv else 1_000_000
for _ in range(rounds):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.01)
dist.destroy_process_group()
"""

LAST_CALL = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
dist.all_reduce(torch.ones(4))
store = dist.distributed_c10d._get_default_store()
if rank < 2:
    for _ in range(1000):
        dist.all_reduce(torch.ones(4), group=pair)
    if rank == 1:
        time.sleep(600)
    store.set("calls", "")
    dist.all_reduce(torch.ones(7), group=pair)
store.wait(["calls"])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "loop.py").write_text(LOOP)
    return make_local_spec(tmp_path, command=["loop.py"])


def started(agent: RunningAgent, spec: JobSpec) -> NodeReport:
    """Start a job and return the first report in which all its ranks have reported."""
    agent.start_job(spec)
    return agent.wait_until(lambda report: is_training(report, 2), START_S, "both ranks report")


def idling(agent: RunningAgent, spec: JobSpec, tmp_path: Path) -> None:
    """Start a job of ranks without torch, which takes most of the time, and wait until both are there."""
    (tmp_path / "idle.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    agent.start_job(msgspec.structs.replace(spec, command=["idle.py"]))

    def are_both_there(report: NodeReport) -> bool:
        return [worker.pid > 0 for worker in report.workers] == [True, True] and report.log_seq >= 2

    agent.wait_until(are_both_there, START_S, "both ranks are there")


def is_training(report: NodeReport, num_ranks: int) -> bool:
    reports = [worker.report for worker in report.workers if worker.report]
    return len(reports) == num_ranks and all(any(group.enqueued_seq for group in one.groups) for one in reports)


def are_measured(report: NodeReport) -> bool:
    return all(
        worker.rss_bytes > 50 * 2**20 and worker.cpu_s > 0.1 and worker.report_age_s < 2.0 for worker in report.workers
    )


def has_ended(report: NodeReport) -> bool:
    return report.jobs[0].state in ENDED_STATES


def job_processes(agent: RunningAgent) -> list[psutil.Process]:
    return [process for process in agent.processes() if process.pid != agent.process.pid]


def process_is(rank: int, state: ProcessState) -> Callable[[NodeReport], bool]:
    return lambda report: report.workers[rank].process is state


def test_ranks_are_found_and_their_reports_and_lines_arrive(agent: RunningAgent, spec: JobSpec) -> None:
    started(agent, spec)
    report = agent.wait_until(are_measured, END_S, "both ranks are measured, and heard again")
    (job,) = report.jobs
    assert (job.state, job.detail) == (JobState.RUNNING, "")
    assert [(worker.rank, worker.local_rank, worker.job_id) for worker in report.workers] == [
        (0, 0, "train"),
        (1, 1, "train"),
    ]
    for worker in report.workers:
        assert worker.report is not None
        assert worker.report.pid == worker.pid
    assert report.malformed_reports == 0
    agent.wait_until(lambda report: report.log_seq >= 4, END_S, "four lines are read")
    reply = agent.ask(PullLogs(0))
    assert isinstance(reply, Logs)
    lines = {(line.rank, line.stream, line.text) for line in reply.lines}
    assert lines >= {(0, "stdout", "hello of 0"), (1, "stdout", "hello of 1"), (1, "stderr", "\x1b[2Jnoise")}


@pytest.mark.slow
def test_the_store_listens_on_loopback_alone(agent: RunningAgent, spec: JobSpec) -> None:
    reply = agent.start_job(spec)
    assert isinstance(reply, Accepted)
    agent.wait_until(lambda report: is_training(report, 2), START_S, "both ranks report")
    listening = {
        connection.laddr
        for process in job_processes(agent)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", reply.master_port) in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}


@pytest.mark.slow
def test_a_rank_is_frozen_thawed_and_slowed(agent: RunningAgent, spec: JobSpec) -> None:
    started(agent, spec)
    assert agent.ask(InjectFault("train", FaultKind.FREEZE, 1)) == Accepted()
    report = agent.wait_until(process_is(1, ProcessState.FROZEN), END_S, "rank 1 is frozen")
    assert report.workers[0].process is ProcessState.RUNNING
    assert agent.ask(InjectFault("train", FaultKind.THAW, 1)) == Accepted()
    agent.wait_until(process_is(1, ProcessState.RUNNING), END_S, "rank 1 is thawed")

    def is_slow(report: NodeReport) -> bool:
        rank_report = report.workers[0].report
        return rank_report is not None and rank_report.slow_factor == 3.0

    assert agent.ask(InjectFault("train", FaultKind.SLOW, 0, factor=3.0)) == Accepted()
    agent.wait_until(is_slow, END_S, "rank 0 is slow")


@pytest.mark.slow
def test_a_hang_that_nobody_watches_is_ended(agent: RunningAgent, spec: JobSpec) -> None:
    abandon_s = 3.0
    console = Subscriber(agent.directory)
    started(agent, msgspec.structs.replace(spec, abandon_s=abandon_s))
    agent.ask(InjectFault("train", FaultKind.FREEZE, 1))
    hung = agent.wait_until(
        lambda report: report.workers[1].report_age_s > 2 * abandon_s, START_S, "rank 1 is silent for long"
    )
    assert (hung.jobs[0].state, hung.jobs[0].detail) == (JobState.RUNNING, "")

    console.close()

    job = agent.wait_until(has_ended, abandon_s + spec.grace_s + END_S, "the job's end").jobs[0]
    assert job.state is JobState.FAILED
    assert job.detail.startswith("no rank of this node got any further for ")
    until(lambda: job_processes(agent) == [], END_S, "nothing is left")


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup that kills what grows beyond 700 MB."""
    path = Path("/sys/fs/cgroup/memory", f"rankdeck-{uuid4().hex[:8]}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text("700000000")
    except OSError:
        pytest.skip("this machine lets nobody make memory cgroups (version 1)")
    yield path
    path.rmdir()


HUNGRY = """
import os, sys
if os.environ["RANK"] == "1":
    open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    while True:
        hoard = globals().setdefault("hoard", [])
        hoard.append(bytearray(os.urandom(1 << 20)) * 8)
dist.barrier()
"""


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_memory_is_told_as_that(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path, memory_cgroup: Path
) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    agent.start_job(msgspec.structs.replace(spec, command=["hungry.py", str(memory_cgroup)]))

    report = agent.wait_until(has_ended, START_S, "the job's end")

    (end,) = [worker.exit for worker in report.workers if worker.exit and worker.exit.signal == signal.SIGKILL]
    assert end.oom_kills == 1
    assert end.facts.memory_limit is not None
    assert 690_000_000 < end.facts.memory_limit.limit_bytes <= 700_000_000
    assert end.facts.cgroup == f"/{memory_cgroup.name}"
    until(lambda: (memory_cgroup / "cgroup.procs").read_text() == "", END_S, "nothing is left in it")


@pytest.mark.slow
def test_a_rank_without_a_probe_cannot_be_slowed(agent: RunningAgent, spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "no_torch.py").write_text("import time; time.sleep(600)")
    agent.start_job(msgspec.structs.replace(spec, command=["no_torch.py"]))
    agent.wait_until(lambda report: len(report.workers) == 2, START_S, "both ranks are found")
    reply = agent.ask(InjectFault("train", FaultKind.SLOW, 0))
    assert isinstance(reply, Refused)
    assert reply.reason is RefusalReason.NO_PROBE


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_signal_and_the_job_fails(agent: RunningAgent, spec: JobSpec) -> None:
    started(agent, msgspec.structs.replace(spec, grace_s=START_S))  # torchrun ends by itself, however slow
    assert agent.ask(InjectFault("train", FaultKind.KILL, 1)) == Accepted()
    report = agent.wait_until(process_is(1, ProcessState.EXITED), END_S, "rank 1 has exited")
    end = report.workers[1].exit
    assert end is not None
    assert (end.code, end.signal, end.facts.sender) == (None, 9, Sender.RANKDECK)
    report = agent.wait_until(has_ended, START_S, "the job has ended")
    (job,) = report.jobs
    assert (job.state, job.exit_code, job.detail) == (JobState.FAILED, 1, "rank 1 was killed by SIGKILL")
    assert all(worker.process is ProcessState.EXITED for worker in report.workers)
    assert job_processes(agent) == []


def test_a_rank_tells_what_it_calls_at_anothers_death_before_torchrun_ends_it(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    (tmp_path / "last_call.py").write_text(LAST_CALL)
    ranks = {"world_size": 3, "local_world_size": 3}
    agent.start_job(msgspec.structs.replace(spec, command=["last_call.py"], **ranks))
    report = agent.wait_until(has_ended, START_S, "the job has ended")
    told = report.workers[0].report
    assert told is not None
    assert 7 in [call.num_elements for group in told.groups for call in group.past]


@pytest.mark.slow
def test_a_frozen_survivor_does_not_keep_a_failed_job_alive(agent: RunningAgent, spec: JobSpec) -> None:
    started(agent, msgspec.structs.replace(spec, grace_s=0.0))
    agent.ask(InjectFault("train", FaultKind.FREEZE, 0))
    agent.ask(InjectFault("train", FaultKind.KILL, 1))
    report = agent.wait_until(has_ended, END_S, "the job has ended, long before torchrun's 30 s")
    assert report.jobs[0].detail == "rank 1 was killed by SIGKILL"
    assert job_processes(agent) == []
    assert list(agent.directory.rglob("rank-*.sock")) == [], "killed ranks cannot remove their sockets"


@pytest.mark.slow
def test_an_exception_of_a_rank_is_in_its_exit_and_in_the_jobs_detail(agent: RunningAgent, spec: JobSpec) -> None:
    agent.start_job(msgspec.structs.replace(spec, command=["loop.py", "fail"]))
    report = agent.wait_until(has_ended, START_S, "the job has ended")
    end = report.workers[1].exit
    assert end is not None
    assert (end.code, end.signal, end.error) == (1, None, "ValueError: bad luck")
    assert report.jobs[0].detail == "rank 1 exited with code 1: ValueError: bad luck"


def test_a_stop_ends_even_a_frozen_rank_and_leaves_no_process(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    idling(agent, spec, tmp_path)
    agent.ask(InjectFault("train", FaultKind.FREEZE, 1))
    assert agent.ask(Stop("train")) == Accepted()
    report = agent.wait_until(has_ended, spec.grace_s + END_S, "it has ended, long before torchrun's 30 s")
    assert report.jobs[0].state is JobState.STOPPED
    assert job_processes(agent) == []
    assert agent.ask(Stop("train")) == Accepted()


@pytest.mark.slow
def test_ranks_of_the_engine_finish_a_step_and_a_checkpoint(agent: RunningAgent, spec: JobSpec, tmp_path: Path) -> None:
    agent.start_job(
        msgspec.structs.replace(
            spec,
            command=[str(PROGRAMS / "paced_engine.py"), "checkpoints"],
            save_s=START_S,  # ranks and torchrun end by themselves, however slow
            grace_s=START_S,
        )
    )
    agent.wait_until(lambda report: are_past_step(report, 3, 2), START_S, "both ranks train")

    assert agent.ask(Stop("train")) == Accepted()
    report = agent.wait_until(has_ended, START_S, "the job has ended")

    assert (report.jobs[0].state, report.jobs[0].exit_code) == (JobState.STOPPED, 0)
    assert [worker.exit and worker.exit.code for worker in report.workers] == [0, 0]
    checkpoint = Checkpointer(tmp_path / "checkpoints").load_latest()
    assert checkpoint is not None
    steps = {worker.report.step for worker in report.workers if worker.report}
    assert steps == {checkpoint.step}
    assert job_processes(agent) == []


def are_past_step(report: NodeReport, step: int, num_ranks: int) -> bool:
    steps = [worker.report.step for worker in report.workers if worker.report and worker.report.can_stop]
    return len(steps) == num_ranks and all(done is not None and done > step for done in steps)


@pytest.mark.slow
def test_a_kill_while_torch_is_still_being_imported_leaves_no_process(agent: RunningAgent, spec: JobSpec) -> None:
    agent.start_job(spec)
    agent.wait_until(lambda report: len(report.workers) > 0, START_S, "a rank is found")
    assert agent.ask(Kill("train")) == Accepted()
    report = agent.wait_until(has_ended, END_S, "the job has ended")
    assert report.jobs[0].state is JobState.STOPPED
    assert job_processes(agent) == []


@pytest.mark.slow
def test_a_killed_agent_takes_its_private_job_along(agent: RunningAgent, spec: JobSpec) -> None:
    started(agent, spec)
    pids = [process.pid for process in job_processes(agent)]
    assert len(pids) >= 4
    agent.process.kill()
    agent.process.wait()
    until(lambda: not any(map(is_alive, pids)), 10.0, "nothing of the job survives")


def test_the_end_of_the_console_leaves_no_process_and_no_file(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    idling(agent, spec, tmp_path)
    agent.ask(InjectFault("train", FaultKind.FREEZE, 0))
    pids = [process.pid for process in job_processes(agent)]
    agent.close_stdin()
    assert agent.process.wait(END_S) == 0
    assert [pid for pid in pids if is_alive(pid)] == []
    assert not agent.directory.exists()


@pytest.mark.slow
def test_a_killed_shim_ends_the_job_and_leaves_no_process(agent: RunningAgent, spec: JobSpec) -> None:
    started(agent, spec)
    (shim,) = psutil.Process(agent.process.pid).children()
    shim.kill()
    report = agent.wait_until(has_ended, END_S, "the job has ended")
    assert (report.jobs[0].state, report.jobs[0].exit_code) == (JobState.FAILED, None)
    until(lambda: not job_processes(agent), END_S, "nothing is left of the job")


@pytest.mark.slow
def test_two_nodes_run_one_job_to_its_end(spec: JobSpec) -> None:
    share = msgspec.structs.replace(
        spec, command=["loop.py", "short"], num_nodes=2, local_world_size=1, job_id="two-nodes"
    )
    with ExitStack() as stack:
        nodes = [stack.enter_context(RunningAgent("--private", node=name)) for name in ("a", "b")]
        prepared = nodes[0].ask(Prepare(share))
        assert isinstance(prepared, Accepted)
        second = msgspec.structs.replace(share, node_rank=1, first_rank=1, master_port=prepared.master_port)
        assert isinstance(nodes[1].ask(Prepare(second)), Accepted)
        assert [node.ask(Commit("two-nodes")) for node in nodes] == [Accepted(), Accepted()]
        for rank, node in enumerate(nodes):
            report = node.wait_until(has_ended, START_S, "the job has ended")
            assert (report.jobs[0].state, report.jobs[0].exit_code) == (JobState.SUCCEEDED, 0)
            assert [worker.rank for worker in report.workers] == [rank]
            end = report.workers[0].exit
            assert end is not None
            assert (end.code, end.signal, end.error) == (0, None, "")


@pytest.mark.slow
def test_a_worker_that_is_not_torch_gets_the_jobs_variables(agent: RunningAgent, spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import os; print(os.environ['ODD'], os.environ['RANKDECK_JOB_ID'])")
    agent.start_job(msgspec.structs.replace(spec, command=["show.py"], env={"ODD": "a 'b' $c"}))
    agent.wait_until(has_ended, START_S, "the job has ended")
    reply = agent.ask(PullLogs(0))
    assert isinstance(reply, Logs)
    assert {(line.rank, line.text) for line in reply.lines if line.stream == "stdout"} == {
        (0, "a 'b' $c train"),
        (1, "a 'b' $c train"),
    }


SAVES = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    torch.save({"weights": torch.zeros(2**20)}, sys.argv[1] + "/a.pt")
dist.barrier()
"""


@pytest.mark.slow
def test_a_checkpoint_on_a_full_disk_names_the_disk(agent: RunningAgent, spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    with small_disk(tmp_path / "disk", 2**20) as disk:
        agent.start_job(msgspec.structs.replace(spec, command=["saves.py", str(disk)]))

        report = agent.wait_until(
            lambda report: has_ended(report) and any(one.exit and one.exit.facts.disk for one in report.workers),
            START_S,
            "the job's end and the full disk",
        )

    (end,) = [worker.exit for worker in report.workers if worker.exit and worker.exit.facts.disk]
    assert "iostream error" in end.error  # torch does not give the reason
    assert end.facts.disk == FullDisk(str(disk), DiskLimit.SPACE, 2**20, 0)
    assert report.workers[1].exit == end
