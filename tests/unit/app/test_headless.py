"""What the demo prints for scripts and for people."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from app.errors import ExitCode
from app.headless import Headless, exit_code, summary_lines, summary_object
from tests.support.sim import SimCluster
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from app.view import View


class SlowStart:
    """What is followed shows a job that has ended, as one of the same name did before, until it has begun."""

    watched_job = "demo"
    started_at_s = 0.0

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.num_looks = 0
        self._sim = SimCluster(num_nodes=1, ranks_per_node=2)
        self._sim.run_to_step(3)
        self._sim.stop()
        self._sim.run_until(lambda: (job := self._sim.view().job()) is not None and job.state == "stopped", 60)

    async def start(self) -> None:
        await self.begun.wait()

    def view(self) -> View:
        self.num_looks += 1
        return self._sim.view()

    def drain_notices(self) -> list[str]:
        return []


async def test_a_job_that_has_not_begun_yet_has_not_ended_whatever_became_of_the_one_before_it() -> None:
    followed = SlowStart()
    following = asyncio.create_task(Headless(followed).run())
    await until_async(lambda: followed.num_looks > 3, 10, "it looks")
    assert not following.done()

    followed.begun.set()
    view, is_unnamed = await asyncio.wait_for(following, 10)

    assert (view.job() is not None, is_unnamed) == (True, False)


def test_a_healthy_job_is_exit_code_0_and_a_short_summary() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run_to_step(50)
    sim.run(2)

    summary = summary_object(sim.view())

    assert exit_code(sim.view()) is ExitCode.WELL
    assert list(summary) == [
        "schema", "job", "steps", "loss_first", "loss_last", "nodes", "gpus", "ranks", "barriers", "verdicts",
    ]  # fmt: skip
    assert summary["schema"] == 1
    assert summary["steps"] >= 50
    assert summary["loss_first"] > summary["loss_last"]
    assert summary["verdicts"] == []
    assert msgspec.json.decode(msgspec.json.encode(summary)) == summary


def test_a_standing_verdict_is_exit_code_10_and_told_with_what_to_do() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.freeze(2, at_step=10)
    sim.run_until(lambda: bool(sim.verdicts()), within_s=60)
    sim.run(2)

    lines = summary_lines(summary_object(sim.view()))

    assert exit_code(sim.view()) is ExitCode.VERDICT_STANDS
    verdict = next(line for line in lines if line.startswith("verdict: "))
    assert "rank 2" in verdict
    assert "frozen" in verdict
    assert lines[lines.index(verdict) + 1].startswith("  thaw it")


def test_a_fault_that_was_not_named_is_a_failure_whatever_else_stands() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run(5)

    assert exit_code(sim.view(), is_fault_unnamed=True) is ExitCode.JOB_FAILED


def test_before_anything_is_known_the_summary_says_that_the_job_did_not_start() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)

    summary = summary_object(sim.view())

    assert summary["job"] is None
    assert summary_lines(summary) == ["the job did not start"]
    assert exit_code(sim.view()) is ExitCode.WELL
