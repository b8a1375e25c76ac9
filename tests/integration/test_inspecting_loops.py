"""`rankdeck inspect` on real ranks, one of which is in a loop without an end beside a thread of Python."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from app.diagnosis.causes import Severity
from app.fleet.local_link import LocalLink
from app.inspect.comparison import SURE_LOOP_S, finding_of, standing_of
from app.inspect.inspection_text import sentence
from app.inspect.inspector import look_at_host, own_py_spy
from app.inspect.seen import jobs_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from app.inspect.comparison import Finding

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(400)]

START_S = 150.0
NUM_LOOKS = 12
BEGIN = """
import pathlib, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def look_again_and_again():
    while True:
        time.sleep(0.02)

def endless():
    n = 0
    while True:
        n += 1

def works():
    for i in range(10**8):
        n = sum(range(10**6))

dist.init_process_group("gloo")
for _ in range(4):
    threading.Thread(target=look_again_and_again, daemon=True).start()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
"""
IN_A_FUNCTION = """
def main():
    for step in range(100):
        if step == 3 and dist.get_rank() == 1:
            pathlib.Path(sys.argv[1]).touch()
            {}()
        model(torch.ones(2, 8)).sum().backward()
main()
"""
IN_THE_SCRIPT = """
for step in range(100):
    if step == 3 and dist.get_rank() == 1:
        pathlib.Path(sys.argv[1]).touch()
        while True:
            pass
    model(torch.ones(2, 8)).sum().backward()
"""


@contextlib.contextmanager
def training(directory: Path, program: str) -> Iterator[int]:
    """Run a program on two ranks until rank 1 is in its loop; give the launcher's pid."""
    script, mark = directory / "loop.py", directory / "in_loop"
    script.write_text(BEGIN + program)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    with (directory / "output").open("wb") as output:
        launcher = subprocess.Popen(
            [*argv, str(mark)], stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        until(lambda: mark.exists() or launcher.poll() is not None, START_S, "rank 1 in its loop")
        yield launcher.pid
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        launcher.kill()
        launcher.wait()


def inspected(launcher: int) -> tuple[Finding, str]:
    """Return what the looks of `--looks 12` find of the ranks of a launcher, and the sentence on them."""
    pids = {child.pid for child in psutil.Process(launcher).children(recursive=True)}
    jobs = jobs_of([("localhost", look_at_host(LocalLink(), own_py_spy(), NUM_LOOKS, 1.0))])
    job = next(job for job in jobs if job.ranks[0].pid in pids)
    finding = finding_of(job, [standing_of(rank) for rank in job.ranks])
    return finding, sentence(job, finding)


@pytest.mark.parametrize(
    ("program", "where"),
    [(IN_A_FUNCTION.format("endless"), "in endless (runs, "), (IN_THE_SCRIPT, "in <module> (runs, ")],
    ids=["function", "script"],
)
def test_a_loop_without_an_end_is_an_alarm_beside_other_threads_of_python(
    program: str, where: str, tmp_path: Path
) -> None:
    with training(tmp_path, program) as launcher:
        time.sleep(SURE_LOOP_S)
        finding, text = inspected(launcher)

    assert (finding.severity, [one.rank.rank for one in finding.culprits]) == (Severity.CRITICAL, [1]), text
    assert where in text


def test_a_loop_whose_number_rises_is_no_alarm(tmp_path: Path) -> None:
    with training(tmp_path, IN_A_FUNCTION.format("works")) as launcher:
        time.sleep(SURE_LOOP_S)
        finding, text = inspected(launcher)

    assert finding.severity is Severity.WARNING, text
    assert "rank 1 has not come to it, no alarm while it moves" in text
