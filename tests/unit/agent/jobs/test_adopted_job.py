"""Jobs of other launchers: who is of which run, and how an end is put into a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.jobs.adopted_job import RIVAL_S, AdoptedJob
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

    interrupted = job_of_two()
    for rank in (0, 1):
        interrupted.rank_ended(rank, 0, None, 1.0)
    interrupted.tick(2.0, lives_launcher=False, exit_code=-2)
    assert (interrupted.state, interrupted.cause) == (JobState.FAILED, "the launcher was killed by SIGINT")

    stopped = job_of_two()
    stopped.stop(1.0, is_agreed=False)
    for rank in (0, 1):
        stopped.rank_ended(rank, None, 15, 1.0)
    stopped.tick(2.0, lives_launcher=False, exit_code=None)
    assert (stopped.state, stopped.status(2.0).detail) == (JobState.STOPPED, "")
