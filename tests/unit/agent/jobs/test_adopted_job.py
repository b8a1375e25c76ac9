"""Jobs of other launchers: who is of which run, and how an end is put into a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.jobs.adopted_job import LAUNCHER_END_S, RESTART_S, RIVAL_S, AdoptedJob
from agent.jobs.root_cause import TOGETHER_S
from agent.wire.jobs import JobState
from tests.support.node_reports import rank_report

if TYPE_CHECKING:
    from ddpcore.wire import RankReport


def report(rank: int, pid: int, world_size: int = 2, attempt: int = 0) -> RankReport:
    return rank_report(rank, world_size, pid=pid, attempt=attempt, is_adopted=True)


def job_of_two() -> AdoptedJob:
    job = AdoptedJob(report(0, 10), 0.0)
    assert job.take(report(1, 11), 11, 0.0)
    return job


def test_a_rank_that_torch_numbers_otherwise_begins_another_run_which_the_others_join() -> None:
    job = job_of_two()
    assert job.is_succeeded_by(report(1, 10))

    later = AdoptedJob(report(1, 10), 1.0)
    assert not later.is_succeeded_by(report(1, 11))
    assert not later.take(report(1, 11), 11, 1.0)  # it has not been numbered yet
    assert later.take(report(0, 11), 11, 2.0)
    assert [(rank, member.pid) for rank, member in sorted(later.members.items())] == [(0, 11), (1, 10)]


def test_a_second_process_of_a_rank_is_shown_while_it_reports() -> None:
    job = job_of_two()
    assert not job.take(report(1, 99), 99, 5.0)

    assert "two processes report as rank 1: 11, and 99" in job.status(5.0).detail
    assert job.status(5.0 + RIVAL_S).detail == ""


def test_ranks_without_a_probe_have_each_its_reason() -> None:
    job = AdoptedJob(report(0, 10, world_size=4), 0.0, "python -I")
    assert job.add_mute(2, 12, "python -I")
    assert job.status(1.0).unprobed == "python -I"

    assert job.add_mute(1, 11, "torch not imported")
    assert job.status(1.0).unprobed == "ranks 0, 2: python -I; rank 1: torch not imported"

    assert not job.add_mute(1, 99, "python -I")  # it runs
    assert not job.add_mute(4, 99, "python -I")  # a rank of another world
    assert job.take(report(1, 13, world_size=4), 13, 2.0)  # below a process that only looked like it
    assert not job.add_mute(1, 99, "python -I")
    assert job.status(1.0).unprobed == "python -I"
    job.rank_ended(2, 0, None, 2.0)
    assert job.add_mute(2, 22, "python -E")  # its launcher has started it again


def test_ranks_without_a_probe_give_way_to_a_report_that_knows_the_world_otherwise() -> None:
    job = AdoptedJob(report(0, 10), 0.0, "python -I")
    assert job.add_mute(1, 11, "python -I")
    assert not job.is_succeeded_by(report(0, 20))
    assert job.is_succeeded_by(report(0, 20, world_size=4))
    assert job.take(report(1, 11), 11, 1.0)
    assert not job.is_succeeded_by(report(0, 20, world_size=4))


def test_an_end_is_said_as_far_as_it_is_known() -> None:
    unknown = job_of_two()
    unknown.rank_ended(0, None, None, 1.0)
    assert unknown.cause == "rank 0 ended, and its exit code is not known"

    stopped = job_of_two()
    stopped.stop(1.0, is_agreed=False)
    for rank in (0, 1):
        stopped.rank_ended(rank, None, 15, 1.0)
    stopped.tick(2.0, lives_launcher=False, exit_code=None)
    assert (stopped.state, stopped.status(2.0).detail) == (JobState.STOPPED, "")


Ends = list[tuple[int, float, int | None, int | None, str]]
"""When each rank ends, its exit code, signal, and the exception that its probe has reported before."""


def ended(ends: Ends, launcher_code: int | None, idle_s: float = 0.5) -> AdoptedJob:
    """Return a job whose two ranks end, and then its launcher."""
    job = job_of_two()
    for rank, at_s, code, number, raised in ends:
        if raised:
            last = rank_report(rank, 2, pid=10 + rank, is_adopted=True, is_ending=True, raised=raised)
            assert job.take(last, 10 + rank, at_s)
        job.rank_ended(rank, code, number, at_s)
    over_s = ends[-1][1]
    job.tick(over_s + idle_s, lives_launcher=False, exit_code=launcher_code)
    job.tick(over_s + idle_s + 0.2, lives_launcher=False, exit_code=launcher_code)
    job.validate()
    return job


INTERRUPT, LOST = "KeyboardInterrupt", "RuntimeError: Connection closed by peer [127.0.0.1]:4711"


@pytest.mark.parametrize(
    ("ends", "launcher_code"),
    [
        # torchrun passes SIGINT on, and ends with code 1; it kills what does not end.
        ([(0, 9.0, None, 2, INTERRUPT), (1, 9.1, None, 2, "")], 1),
        ([(1, 9.0, None, 2, INTERRUPT), (0, 39.0, None, 9, "")], 1),
        ([(1, 9.0, None, 9, INTERRUPT), (0, 9.0, None, 9, "")], -9),
        # mp.spawn's ranks end with code 0, its parent by the signal; those of mpirun by SIGTERM.
        ([(0, 9.0, 0, None, ""), (1, 9.0, 0, None, "")], -2),
        ([(0, 9.0, None, 15, ""), (1, 9.2, None, 15, "")], 130),
        # A rank may lose the other before it notices the signal itself.
        ([(1, 8.9, 1, None, LOST), (0, 9.0, 130, None, "")], 1),
        # How a rank has ended may be unknown.
        ([(0, 9.0, None, 2, ""), (1, 9.1, None, None, "")], None),
    ],
)
def test_an_interrupt_is_no_failure(ends: Ends, launcher_code: int | None) -> None:
    job = ended(ends, launcher_code)
    status = job.status(99.0)
    assert (status.state, status.root_cause) == (JobState.STOPPED, None)
    assert status.detail.startswith("interrupted by SIGINT")


@pytest.mark.parametrize(
    ("ends", "launcher_code"),
    [
        # A rank has failed by itself, before or after.
        ([(1, 9.0, 1, None, "ValueError: boom"), (0, 9.1, None, 2, INTERRUPT)], -2),
        ([(0, 9.0, None, 2, INTERRUPT), (1, 9.1, None, 11, "")], 1),
        ([(0, 9.0, None, 2, INTERRUPT), (1, 9.1, 3, None, "")], 130),
        # The kernel has killed one, or somebody has ended it, and the user ends the rest later.
        ([(1, 5.0, None, 9, ""), (0, 9.0, None, 2, INTERRUPT)], 1),
        ([(1, 5.0, None, 15, ""), (0, 9.0, None, 2, INTERRUPT)], 1),
        ([(1, 5.0, 1, None, LOST), (0, 9.0, None, 2, INTERRUPT)], 1),
        ([(1, 5.0, None, None, ""), (0, 9.0, None, 2, INTERRUPT)], 1),
        ([(1, 5.0, None, 9, ""), (0, 9.0, None, 15, "")], 130),
        # The launcher was killed, which sends SIGINT to what mp.spawn has started.
        ([(0, 9.0, None, 2, INTERRUPT), (1, 9.1, 0, None, "")], -9),
        # Nothing shows SIGINT.
        ([(0, 9.0, None, 15, ""), (1, 9.1, None, 15, "")], 1),
        ([(0, 9.0, 0, None, ""), (1, 9.1, 0, None, "")], 1),
    ],
)
def test_no_interrupt_hides_a_failure(ends: Ends, launcher_code: int | None) -> None:
    job = ended(ends, launcher_code)
    assert (job.state, job.is_interrupted) == (JobState.FAILED, False)
    assert job.cause


def test_an_interrupt_is_shown_from_its_beginning_with_the_ranks_that_have_it_and_ends_the_run() -> None:
    job = job_of_two()
    job.rank_ended(1, None, 2, 8.0)
    assert job.state is JobState.RUNNING  # the other rank may wait for it for ever
    job.rank_ended(0, None, 15, 8.5)
    job.tick(8.6, lives_launcher=True, exit_code=None)
    status = job.status(10.0)
    assert (status.state, status.state_s, status.detail) == (
        JobState.STOPPING,
        2.0 + TOGETHER_S,
        "interrupted by SIGINT: rank 1",
    )
    assert job.is_succeeded_by(report(0, 20))
    assert not job.is_succeeded_by(report(0, 10))


@pytest.mark.parametrize(("is_stopped", "patience_s"), [(False, RESTART_S), (True, LAUNCHER_END_S)])
def test_a_job_ends_before_a_launcher_that_has_begun_another_one(is_stopped: bool, patience_s: float) -> None:
    job = job_of_two()
    if is_stopped:
        job.stop(0.0, is_agreed=True)
    for rank in (0, 1):
        job.rank_ended(rank, 0, None, 1.0)
    for now_s, is_shared in ((1.0, True), (0.9 + patience_s, True), (1.0 + patience_s, False)):
        job.tick(now_s, lives_launcher=True, exit_code=None, is_shared=is_shared)
        assert not job.has_ended
    job.tick(1.0 + patience_s, lives_launcher=True, exit_code=None, is_shared=True)
    assert job.state is (JobState.STOPPED if is_stopped else JobState.SUCCEEDED)
