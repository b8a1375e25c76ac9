"""Several ranks under NCCL: who holds up the others is named, by the probe and from outside.

NCCL takes several ranks on one GPU from 2.30 on, with NCCL_MULTI_RANK_GPU_ENABLE=1. torch brings an older one:
NCCL_LIBRARY names another libnccl.so.2, which is loaded in its place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.gpu.test_jobs import PATIENCE_S, Job
from tests.support.demo_runs import DemoHouse
from tests.support.gpus import NUM_GPUS, needs_gpu
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

NCCL_LIBRARY = os.environ.get("NCCL_LIBRARY", "")
NUM_RANKS = 4
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    needs_gpu,
    pytest.mark.skipif(
        NUM_GPUS < NUM_RANKS and not NCCL_LIBRARY,
        reason=f"fewer than {NUM_RANKS} GPUs, and NCCL_LIBRARY names no NCCL that takes several ranks on one",
    ),
]
PROGRAM = Path(__file__).parent / "programs" / "several.py"
CALM_STEPS = 100
OLD_S = 61.0
"""Age from which NCCL is asked."""


@pytest.fixture
def job() -> Iterator[SeveralRanks]:
    with DemoHouse() as house:
        yield SeveralRanks(house)


class SeveralRanks(Job):
    """A job of several ranks, on as many GPUs as there are."""

    def begin(self, kind: str) -> None:
        shares = NUM_GPUS < NUM_RANKS
        own = ("--env", f"LD_PRELOAD={NCCL_LIBRARY}", "--env", "NCCL_MULTI_RANK_GPU_ENABLE=1") if shares else ()
        self.start(kind, *own, num_ranks=NUM_RANKS, program=PROGRAM)


@pytest.mark.parametrize("kind", ["sleep", "spin", "kernel"])
def test_a_rank_that_keeps_the_others_waiting_is_named(job: SeveralRanks, kind: str) -> None:
    job.begin(kind)

    status = job.status_with_verdict(culprits=[2], waiting=[0, 1, 3], severity="critical")

    assert status["ranks"][2]["where"].startswith("several.py:")


def test_a_stopped_rank_is_named(job: SeveralRanks) -> None:
    job.begin("stop")

    job.status_with_verdict(cause="frozen", culprits=[2], waiting=[0, 1, 3])


def test_a_rank_that_leaves_out_a_call_of_another_group_is_named(job: SeveralRanks) -> None:
    job.begin("skip")

    job.status_with_verdict(culprits=[2], severity="critical")


def test_a_slow_rank_is_named(job: SeveralRanks) -> None:
    job.begin("slow")

    job.status_with_verdict(cause="straggler", culprits=[2])


def test_a_rank_that_ends_is_the_root_cause(job: SeveralRanks) -> None:
    job.begin("leave")

    (ended,) = job.status_when_failed()["jobs"]

    assert (ended["root_cause"]["rank"], ended["exit_code"]) == (2, 1)


def test_healthy_ranks_raise_no_alarm(job: SeveralRanks) -> None:
    job.begin("train")
    seen: list[dict[str, Any]] = []

    def has_trained(status: dict[str, Any]) -> bool:
        seen.extend(status["verdicts"])
        return (status["jobs"][0]["step"] or 0) > CALM_STEPS

    job.status_when(has_trained, "steps")

    assert seen == []


def test_nccl_tells_from_outside_which_rank_is_behind(job: SeveralRanks) -> None:
    job.begin("sleep")
    pid = job.status_with_verdict(culprits=[2])["ranks"][0]["pid"]

    def has_answered() -> dict[str, Any]:
        (found,) = job.json("inspect", str(pid), "--nccl")["jobs"]
        return found if "launched" in found["nccl"][0] else {}

    found = until(has_answered, PATIENCE_S + OLD_S, "ranks that are old enough, and an answer")

    assert (found["culprits"], found["severity"], found["waiting"]) == ([2], "critical", [[0, 1, 3]])
    (line,) = found["nccl"]
    assert "rank 2 has launched" in line
    assert "AllReduce" in line
