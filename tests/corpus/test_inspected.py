"""`rankdeck inspect` on the reported programs under plain torchrun: nothing of rankdeck is in their ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from app.diagnosis.causes import Severity
from app.fleet.local_link import LocalLink
from app.inspect.comparison import finding_of, standing_of
from app.inspect.inspection_text import sentence
from app.inspect.inspector import look_at_host, own_py_spy
from app.inspect.seen import jobs_of
from tests.corpus.reported.faults import FAULTS, SLOW
from tests.corpus.reported.lives import HEALTHY
from tests.corpus.reported.playing import ROOT
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from app.inspect.comparison import Finding
    from tests.corpus.reported.truth import Program

START_S = 150.0
PATIENCE_S = 20.0
"""For ranks to come to the calls in which they wait."""
IN_CI = {"uneven.rank_0_evaluates", "standing.one_in_open"}


@contextmanager
def running(program: Program, directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program under torchrun until its fault begins; end it and its ranks."""
    fault = directory / "fault"
    environment = {**os.environ, "FAULT_AT": str(fault), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(program.ranks)),
        *(str(program.path), program.mode),
    ]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            argv, env=environment, cwd=program.path.parent, stdout=output, stderr=output, start_new_session=True
        )
    try:
        if program.is_fault:
            until(lambda: fault.exists() or process.poll() is not None, START_S, "the fault")
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()


def parents_of(pid: int) -> set[int]:
    try:
        return {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.NoSuchProcess:
        return set()


def inspected(program: Program, launcher: int, num_looks: int = 3) -> tuple[Finding, str] | None:
    """Return what one inspection finds of the ranks of a launcher, and the sentence on them."""
    jobs = jobs_of([("localhost", look_at_host(LocalLink(), own_py_spy(), num_looks, 0.7))])
    for job in jobs:
        if launcher in parents_of(job.ranks[0].pid):
            finding = finding_of(job, [standing_of(rank) for rank in job.ranks])
            return finding, sentence(job, finding)
    return None


def judged(program: Program, culprits: tuple[int, ...], text: str) -> str:
    """Return `right`, `partly` or `wrong`."""
    if culprits and not program.may_blame(culprits):
        return "wrong"
    has_line = all(pattern.search(text) for pattern in program.patterns() if "culprit" in str(pattern))
    return "right" if culprits in program.culprits and has_line else "partly"


HANGS = [program for program in FAULTS if program not in SLOW and not program.ends_itself]
NOT_FROM_OUTSIDE = {
    "messages.actor_gives_up": "four ranks in four calls",
    "messages.batch_of_other_order": "work.wait() has no frame of its own",
    "starting.same_rank": "two processes of one number are two jobs",
}
"""Programs of which the culprit is not named, and why."""


@pytest.mark.parametrize(
    "program",
    [pytest.param(one, id=one.name, marks=() if one.name in IN_CI else pytest.mark.slow) for one in HANGS],
)
def test_a_hang_is_named_from_outside_and_no_victim(program: Program, tmp_path: Path) -> None:
    with running(program, tmp_path) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        found = inspected(program, process.pid)
        while found is None or (found[0].severity is not Severity.CRITICAL and time.monotonic() < deadline_s):
            found = inspected(program, process.pid, found[0].num_looks or 3 if found else 3)

    finding, text = found
    verdict = judged(program, tuple(one.rank.rank for one in finding.culprits), text)
    assert verdict == "right" or (verdict == "partly" and program.name in NOT_FROM_OUTSIDE), text


@pytest.mark.slow
@pytest.mark.parametrize("program", [pytest.param(one, id=one.name) for one in HEALTHY])
def test_a_healthy_program_is_no_alarm(program: Program, tmp_path: Path) -> None:
    with running(program, tmp_path) as process:
        until(lambda: inspected(program, process.pid) or process.poll() is not None, START_S, "the ranks")
        while process.poll() is None and (found := inspected(program, process.pid)) is not None:
            assert found[0].severity is not Severity.CRITICAL, found[1]
