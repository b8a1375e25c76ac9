"""Two ranks of a real job under a real agent: the one that is held up says by what, the other one does not."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from agent.wire.commands import Commit, Kill, Prepare
from agent.wire.signals import RATES, Signal
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.reports import NodeReport, WorkerReport

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

START_S = 100.0
USUAL_S = 20.0
PATIENCE_S = 60.0
PROGRAM = """
import gc, os, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
usual_s, folder = float(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
begun_s = time.monotonic()
kept = [[number] for number in range(200_000)]
gc.disable()  # none of its own accord
open(f"{folder}/usual", "w").close()
while True:
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
    if dist.get_rank() == 1 and time.monotonic() - begun_s > usual_s:
        if not os.path.exists(f"{folder}/held_up"):
            open(f"{folder}/held_up", "w").close()
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        gc.collect()
        for number in range(50):
            print("line", number)
        sys.stdout.flush()
"""
HELD_UP = {Signal.GC_PAUSE, Signal.LOG_LINES, Signal.CPUS_ALLOWED}


def signals_of(report: NodeReport, rank: int) -> set[str]:
    return set(next(worker.signals for worker in report.workers if worker.rank == rank))


def changed(worker: WorkerReport) -> set[str]:
    """Return what has changed since the ranks found each other."""
    return {name for name, reading in worker.signals.items() if reading.since_s is not None}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a rank cannot be bound to fewer CPUs than one")
def test_a_rank_that_is_held_up_after_a_while_reports_by_what_and_since_when(tmp_path: Path) -> None:
    usual, held_up = tmp_path / "usual", tmp_path / "held_up"
    (tmp_path / "program.py").write_text(PROGRAM)
    with RunningAgent() as agent:
        spec = make_local_spec(tmp_path, 2, command=["program.py", str(USUAL_S), str(tmp_path)])
        agent.ask(Prepare(spec))
        agent.ask(Commit(spec.job_id))
        agent.wait_until(lambda _: usual.exists(), START_S, "the first step")
        agent.wait_until(
            lambda report: not HELD_UP & (signals_of(report, 0) | signals_of(report, 1)), USUAL_S, "usual steps"
        )
        assert not held_up.exists()

        agent.wait_until(lambda _: held_up.exists(), START_S, "the change")
        changed_s = time.monotonic()
        report = agent.wait_until(
            lambda report: any(worker.rank == 1 and changed(worker) >= HELD_UP for worker in report.workers),
            PATIENCE_S,
            "all that holds it up",
        )
        age_s = time.monotonic() - changed_s
        agent.ask(Kill(spec.job_id))

    first, second = report.workers
    assert not HELD_UP & set(first.signals)
    assert second.signals[Signal.CPUS_ALLOWED].value == pytest.approx(1.0, abs=0.1)
    for name in HELD_UP:
        reading = second.signals[name]
        assert reading.before is not None
        assert reading.since_s == pytest.approx(age_s, abs=5.0)
        if name in RATES:
            assert reading.value > 2 * reading.before
    assert report.signals is not None
