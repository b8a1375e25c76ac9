"""`rankdeck inspect` on the reported programs over two hosts by SSH, by their user, who is not root."""

from __future__ import annotations

import contextlib
import shutil
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.corpus.reported.playing import ROOT
from tests.corpus.test_inspected import HANGS, NOT_FROM_OUTSIDE, PATIENCE_S, START_S, judged
from tests.integration.test_inspecting_hosts import desk_with_a_user, start_torchrun
from tests.support.desk import Desk, named
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.corpus.reported.truth import Program

HOSTS = ("alice@h1", "alice@h2")
PROGRAMS = "tests/corpus/reported/programs"
ON_TWO_HOSTS = [program for program in HANGS if program.ranks > 1 and program.fault_class != "starting"]
"""Those of starting begin their own launchers, or break their meeting of ranks on one machine."""
STOP_S = 30.0


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with desk_with_a_user() as desk:
        # A user without rights may not enter the directory of this checkout.
        shutil.copytree(ROOT / PROGRAMS, desk.network.directory / "source" / PROGRAMS)
        yield desk


@contextlib.contextmanager
def running(desk: Desk, program: Program) -> Iterator[None]:
    """Run a program on both hosts until its fault begins; end it and its ranks."""
    network = desk.network
    fault = network.directory / "shared" / f"{program.name}.fault"
    source = network.directory / "source"
    variables = (f"FAULT_AT={fault}", f"PYTHONPATH={source}", f"TMPDIR={fault.parent}", "OMP_NUM_THREADS=1")
    argv = (str(source / PROGRAMS / program.path.name), program.mode)
    second = program.ranks // 2
    shares = (program.ranks - second, second)
    launchers = [
        start_torchrun(host, number, network["h1"].address, share, *argv, variables=variables)
        for number, (host, share) in enumerate(zip(network.hosts.values(), shares, strict=True))
    ]
    try:
        until(lambda: fault.exists() or any(one.poll() is not None for one in launchers), START_S, "the fault")
        yield
    finally:
        for launcher in launchers:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(launcher.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            launcher.wait(STOP_S)


def inspected(desk: Desk, num_looks: int) -> dict[str, Any]:
    """Return the job that one inspection shows."""
    (job,) = desk.json("inspect", "--looks", str(num_looks), *named(*HOSTS), codes=(0, 10))["jobs"]
    found: dict[str, Any] = job
    return found


@pytest.mark.slow
@pytest.mark.parametrize("program", [pytest.param(one, id=one.name) for one in ON_TWO_HOSTS])
def test_a_hang_over_two_hosts_is_named_by_their_user(program: Program, desk: Desk) -> None:
    with running(desk, program):
        deadline_s = time.monotonic() + PATIENCE_S
        job = inspected(desk, 3)
        while job["severity"] != "critical" and time.monotonic() < deadline_s:
            job = inspected(desk, 12)

    verdict = judged(program, tuple(job["culprits"]), job["text"])
    assert verdict == "right" or (verdict == "partly" and program.name in NOT_FROM_OUTSIDE), job["text"]
    is_whole = not job["missing"]  # ranks that have ended are not seen
    assert {rank["host"] for rank in job["ranks"]} == set(HOSTS) or not is_whole
