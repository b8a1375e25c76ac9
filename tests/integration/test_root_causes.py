"""Real torchrun ranks that fail in every way: which one was first, of what, and where."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.jobs import ENDED_STATES, JobSpec, JobState
from agent.wire.logs import LAUNCHER_RANK, LogChunk, LogStream, ReadLog, RootCause
from tests.support.agent_console import AgentConsole
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.wire.reports import NodeReport
    from app.view.view import View

pytestmark = pytest.mark.ranks

START_S = 120.0

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

def fail():
    match sys.argv[1]:
        case "raise":
            raise ValueError("bad luck")
        case "chain":
            try:
                open("/no/such/file")
            except OSError as error:
                raise RuntimeError("no data") from error
        case "cleanup":
            try:
                raise KeyError("first")
            finally:
                raise RuntimeError("Connection closed by peer")
        case "record":
            record(lambda: {}["recorded"])()
        case "exit":
            sys.exit(3)
        case "say":
            sys.exit("train.py: no data")
        case "abort":
            os.abort()

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
print("rank", dist.get_rank(), "is here", flush=True)
dist.all_reduce(torch.ones(4))  # no rank is ended before it has said so
if dist.get_rank() == 1:
    fail()
dist.all_reduce(torch.ones(4))
"""

ENDLESS = """
import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
"""

MEETS = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "is here", flush=True)
pathlib.Path("rank" + os.environ["RANK"]).touch()
while not all(pathlib.Path(one).exists() for one in ("rank0", "rank1")):
    time.sleep(0.01)  # no rank is ended before it has said so
sys.exit(3)
"""


EXTRA = """
import ctypes, sys, time
import torch, torch.distributed as dist

def extra():
    if sys.argv[1] == "crash":
        ctypes.string_at(0)
    sys.argv[1] == "exit" and sys.exit(3)
    dist.all_reduce(torch.ones(4))

dist.init_process_group("gloo")
for step in range(1000):
    if step == 30 and dist.get_rank() == 0:
        extra()
    dist.all_reduce(torch.ones(8))
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "train.py").write_text(PROGRAM)
    return make_local_spec(tmp_path)


def failed(agent: RunningAgent, spec: JobSpec, kind: str) -> RootCause:
    """Run a job to its failure and return what the node says of it."""
    job_id = f"fails-by-{kind}"
    agent.start_job(msgspec.structs.replace(spec, job_id=job_id, command=["train.py", kind]))

    def has_ended(report: NodeReport) -> bool:
        return any(job.job_id == job_id and job.state in ENDED_STATES for job in report.jobs)

    report = agent.wait_until(has_ended, START_S, "the job has ended")
    (job,) = [job for job in report.jobs if job.job_id == job_id]
    assert job.state is JobState.FAILED
    assert job.root_cause is not None
    return job.root_cause


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        pytest.param(
            "raise", ("exited with code 1", "ValueError: bad luck", "", "train.py:9 in fail"), marks=pytest.mark.slow
        ),
        (
            "chain",
            (
                "exited with code 1",
                "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'",
                "RuntimeError: no data",
                "train.py:12 in fail",
            ),
        ),
        pytest.param(
            "cleanup",
            (
                "exited with code 1",
                "KeyError: 'first'",
                "RuntimeError: Connection closed by peer",
                "train.py:17 in fail",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "record",
            ("exited with code 1", "KeyError: 'recorded'", "", "train.py:21 in <lambda>"),
            marks=pytest.mark.slow,
        ),
        pytest.param("exit", ("exited with code 3", "", "", ""), marks=pytest.mark.slow),
        pytest.param(
            "say", ("exited with code 1; its last line: train.py: no data", "", "", ""), marks=pytest.mark.slow
        ),
        pytest.param(
            "abort",
            ("was killed by SIGABRT", "Fatal Python error: Aborted", "", "train.py:27 in fail"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_rank_that_failed_by_itself_is_the_cause(
    agent: RunningAgent, spec: JobSpec, kind: str, told: tuple[str, str, str, str]
) -> None:
    cause = failed(agent, spec, kind)
    assert cause.rank == 1
    assert (cause.end, cause.exception, cause.outer, cause.where) == told
    assert cause.exception in cause.traceback
    assert not cause.is_consequence


@pytest.mark.parametrize(
    ("who", "number"),
    [
        ("launcher", 9),
        pytest.param("launcher", 15, marks=pytest.mark.slow),
        pytest.param("shim", 9, marks=pytest.mark.slow),
    ],
)
def test_the_end_of_a_launcher_from_outside_is_the_cause_and_not_its_ranks(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path, who: str, number: int
) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    job_id = f"{who}-gets-{number}"
    agent.start_job(msgspec.structs.replace(spec, job_id=job_id, command=["train.py"]))

    def trains(report: NodeReport) -> bool:
        ranks = [worker.report for worker in report.workers if worker.job_id == job_id]
        return len(ranks) == spec.local_world_size and all(rank is not None and rank.groups for rank in ranks)

    agent.wait_until(trains, START_S, "all ranks train")
    (record,) = agent.directory.glob(f"jobs/{job_id}/*/run.json")
    os.kill(json.loads(record.read_text())[f"{who}_pid"], number)

    def has_ended(report: NodeReport) -> bool:
        return any(job.job_id == job_id and job.state in ENDED_STATES for job in report.jobs)

    report = agent.wait_until(has_ended, START_S, "the job has ended")
    (job,) = [job for job in report.jobs if job.job_id == job_id]
    assert job.state is JobState.FAILED
    assert job.root_cause is not None
    assert (job.root_cause.rank, job.root_cause.is_consequence) == (LAUNCHER_RANK, False)
    assert (who if who == "shim" else "launcher") in job.root_cause.end
    assert "launcher" in job.detail


@pytest.mark.parametrize(
    ("kind", "who", "next_step"),
    [
        (
            "call",
            # The other rank's last report may hold its call, or may not.
            r"rank 0 (with another size or type|ended) at train\.py:9 in extra",
            "lines differ",
        ),
        ("exit", r"exited with code 3.* last seen at train\.py:8 in extra", "see the logs of rank 0"),
        pytest.param("crash", r"last seen at train\.py:7 in extra", "the whole traceback", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_without_an_exception_is_shown_with_the_line_of_that_moment(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path, kind: str, who: str, next_step: str
) -> None:
    (tmp_path / "train.py").write_text(EXTRA)
    agent.start_job(msgspec.structs.replace(spec, job_id=f"extra-{kind}", command=["train.py", kind]))

    def is_shown(view: View) -> bool:
        # The first verdict may come before all ends are known.
        return view.job_id == f"extra-{kind}" and any(re.search(who, verdict.text) for verdict in view.verdicts())

    view = AgentConsole(agent).wait_until(is_shown, START_S, "the line of rank 0 is in a verdict")
    (verdict,) = view.verdicts()
    assert next_step in verdict.hint or "whose call differs is not known" in verdict.text
    (row,) = view.ranks([0])
    line = {"call": 9, "exit": 8, "crash": 7}[kind]
    assert row.where == f"train.py:{line} in extra"


@pytest.mark.slow
def test_a_program_that_is_no_python_is_told_with_its_line(agent: RunningAgent, spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\ndef f(:\n")
    cause = failed(agent, spec, "syntax")
    assert (cause.rank in (0, 1), cause.exception, cause.where) == (True, "SyntaxError: invalid syntax", "train.py:2")


def test_any_piece_of_a_log_can_be_read_by_hand_and_by_a_console(
    agent: RunningAgent, spec: JobSpec, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(MEETS)
    failed(agent, spec, "itself")
    reply = agent.ask(ReadLog("fails-by-itself", 0, LogStream.STDOUT))
    assert isinstance(reply, LogChunk)
    assert reply.text == "rank 0 is here\n"
    road = ("--dir", str(agent.directory))
    where = ("--job", "fails-by-itself", "--rank", "1", "--stream", "stdout", "--offset", "-5")
    by_hand = run_agent_verb("logs", *road, *where)
    assert by_hand.returncode == 0, by_hand.stderr
    assert json.loads(by_hand.stdout)["text"] == "here\n"
    of_launcher = run_agent_verb("logs", *road, "--job", "fails-by-itself", "--rank", "-1")
    assert of_launcher.returncode == 0, of_launcher.stderr
    assert json.loads(of_launcher.stdout)["offset"] == 0
    assert run_agent_verb("logs", *road, "--rank", "1").returncode == 2
    assert run_agent_verb("logs", *road, "--job", "no-such-job", "--rank", "1").returncode == 4
