"""What is made of the answers of Slurm's commands; `tests.e2e.test_slurm` asks a real one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from app.cli.chosen_hosts import _way_to_relay_of
from app.cli.options import RelayWay
from app.errors import AllocationEndedError, AppError, HostUnreachableError, SessionError, UsageError
from app.slurm.client import SlurmJob, slurm_job, slurm_job_hosts, slurm_job_nodes, why_ending, why_unreachable
from app.slurm.own_step import relay_directory

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ME = f"root|{os.getuid()}"
JOB = SlurmJob("RUNNING", "None", "root", "0", "h[1-2]", name="7", id="7")


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (f"RUNNING|None|{ME}|h[1-2]|7|7\n", None, ""),
        (f"RUNNING|None|{ME}|h[2-3]|7|7\n", HostUnreachableError, "h1: Slurm job 7 runs on h2 now"),
        (f"RUNNING|None|{ME}|gone|7|7\n", None, ""),
        (f"COMPLETING|None|{ME}|h[2-3]|7|7\n", HostUnreachableError, "h1: Slurm job 7 is ending: COMPLETING"),
        (f"PENDING|BeginTime|{ME}||7|7\n", HostUnreachableError, "h1: Slurm job 7 waits: PENDING (BeginTime)"),
        (
            f"CANCELLED|None|{ME}|h[1-2]|7|7\n",
            AllocationEndedError,
            "h1: Slurm job 7 has ended: CANCELLED; it was cancelled",
        ),
        (
            f"PREEMPTED|None|{ME}|h[1-2]|7|7\n",
            AllocationEndedError,
            "has ended: PREEMPTED; a job of higher priority has preempted it",
        ),
        (f"RUNNING|None|ali\x1bce|{os.getuid() + 1}|h1|7|7\n", HostUnreachableError, "h1: Slurm job 7 is a job of ali"),
        (
            f"FAILED|NonZeroExitCode|{ME}|h1|7|7\n",
            AllocationEndedError,
            "h1: Slurm job 7 has ended: FAILED (NonZeroExitCode)",
        ),
        (
            f"TIMEOUT|TimeLimit|{ME}|h[1-2]|7|7\n",
            AllocationEndedError,
            "h1: Slurm job 7 has ended: TIMEOUT (TimeLimit)",
        ),
        (f"NODE\x1b_FAIL|a\x1b[2J|{ME}|h1|7|7\n", AllocationEndedError, ""),
    ],
)
def test_slurm_s_state_of_a_job_is_why_its_relay_is_gone(
    answer: Callable[..., None], text: str, kind: type[AppError] | None, words: str
) -> None:
    answer(text)
    answer("" if "gone" in text else "h2\nh3\n" if "h[2-3]" in text else "h1\nh2\n", "scontrol")

    reason = why_unreachable(JOB, "h1", "h1")

    assert (None if reason is None else type(reason)) is kind
    assert words in str(reason)
    assert "\x1b" not in str(reason)


def test_a_job_that_squeue_does_not_know_has_ended_and_one_is_not_ended_by_a_controller_that_is_away(
    answer: Callable[..., None],
) -> None:
    answer("slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert "has ended: squeue does not know it any more" in str(why_unreachable(JOB, "h1", "h1"))

    answer("squeue: retrying\nsqueue: fatal: Unable to contact slurm controller\n", code=1)
    assert why_unreachable(JOB, "h1", "h1") is None
    with pytest.raises(SessionError, match=r"squeue fails: squeue: fatal: Unable to contact slurm controller$"):
        slurm_job_hosts("7")


ENDING = "JobId=7 JobName=a.sh JobState=COMPLETING Reason={reason} Dependency=(null) PreemptTime={preempted} Nice=0\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ENDING.format(reason="TimeLimit", preempted="None"), "Slurm ends job 7: its time limit is over; ask for more"),
        (ENDING.format(reason="NodeDown", preempted="None"), "Slurm ends job 7: a node has failed; submit it again"),
        (
            ENDING.format(reason="None", preempted="2026-11-26T23:24:25"),
            "Slurm ends job 7: a job of higher priority has preempted it; sbatch --requeue",
        ),
        (
            ENDING.format(reason="TimeLimit", preempted="None").replace("7", "7 ArrayJobId=4 ArrayTaskId=12", 1),
            "Slurm ends job 4_12: its time limit is over",
        ),
        ("JobId=7 JobState=OUT_OF_MEMORY Reason=OutOfMemory\n", "Slurm ends job 7: it used more memory"),
        (ENDING.format(reason="None", preempted="None"), ""),
        ("JobId=7 JobState=RUNNING Reason=None PreemptTime=None\n", ""),
        ("", ""),
    ],
)
def test_why_slurm_ends_a_job_is_said_only_where_slurm_tells(
    answer: Callable[..., None], text: str, sentence: str
) -> None:
    answer(text, "scontrol")

    assert why_ending("7").startswith(sentence)
    assert bool(why_ending("7")) is bool(sentence)


def test_without_slurm_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert why_unreachable(JOB, "h1", "h1") is None
    assert why_ending("7") == ""
    with pytest.raises(SessionError, match="squeue is not installed here"):
        slurm_job_hosts("7")


def test_the_hosts_of_an_array_are_those_of_its_tasks_that_have_not_ended_once(
    answer: Callable[..., None], tmp_path: Path
) -> None:
    ended = f"COMPLETED|None|{ME}|h9|7_6|9\n"
    answer(f"RUNNING|None|{ME}|h1|7_1|8\nRUNNING|None|{ME}|h2|7_2|9\n{ended}PENDING|Resources|{ME}||7_[3-5]|7\n")
    answer("h1\nh2\nh1\n", "scontrol")
    assert slurm_job_hosts("7") == ["h1", "h2"]
    assert (tmp_path / "scontrol.words").read_text() == "show hostnames -- h1,h2"

    answer(ended)
    with pytest.raises(UsageError, match=r"Slurm job 7 is on no node: COMPLETED$"):
        slurm_job_hosts("7")


ARRAY = (
    f"COMPLETED|None|{ME}|h9|7_1|8\nRUNNING|None|{ME}|h1|7_2|9\nRUNNING|None|{ME}|h2|7_3|7\n"
    f"PENDING|Resources|{ME}||7_[4-5]|10\n"
)
HETEROGENEOUS = f"RUNNING|None|{ME}|h2|7+1|8\nRUNNING|None|{ME}|h1|7+0|7\n"


@pytest.mark.parametrize(
    ("text", "typed", "name", "number"),
    [
        (f"RUNNING|None|{ME}|h1|7_2|9\n", "7_2", "7_2", "9"),
        (ARRAY.replace("RUNNING", "FAILED", 1), "7", "7_3", "7"),
        (HETEROGENEOUS, "7", "7+0", "7"),
        (HETEROGENEOUS, "7+1", "7+1", "7"),
        (HETEROGENEOUS.splitlines()[0] + "\n", "8", "7+1", "7"),
        (f"RUNNING|None|{ME}|h1|7|7\n", "7", "7", "7"),
    ],
)
def test_a_job_has_a_number_of_its_own_which_its_step_knows_it_by(
    answer: Callable[..., None], text: str, typed: str, name: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cli.chosen_hosts.named_python", str)
    answer(text)

    job = slurm_job(typed)

    assert (job.name, job.step_id) == (name, number)

    answer("h1\n", "scontrol")
    way, own = _way_to_relay_of(typed, RelayWay("", "", ""))
    assert (way.host, way.directory, own) == ("h1", relay_directory(number), number)


@pytest.mark.parametrize(
    ("text", "typed", "said"),
    [
        (ARRAY.replace("7_2|", "7_12|"), "7", "Slurm job 7 is 2 jobs: 7_3 RUNNING, 7_12 RUNNING$"),
        (ARRAY.replace("RUNNING", "FAILED"), "7", r"Slurm job 7 is on no node: PENDING \(Resources\)$"),
        (ARRAY.splitlines()[-1], "7_5", r"Slurm job 7_5 is on no node: PENDING \(Resources\)$"),
        (
            f"CANCELLED|None|{ME}|h1|7_2|7\nCOMPLETED|None|{ME}|h1|7_1|8\n",
            "7",
            "Slurm job 7 is 2 jobs: 7_1 COMPLETED, 7_2 CANCELLED$",
        ),
        (f"PENDING|None|{ME}||7+0|7\n", "7", "Slurm job 7 is on no node: PENDING$"),
        ("", "7_[3-5%1]", r"7_\[3-5%1\] is not the id of a Slurm job$"),
    ],
)
def test_the_tasks_of_an_array_are_told_where_no_single_one_is_meant(
    answer: Callable[..., None], text: str, typed: str, said: str
) -> None:
    answer(text)

    with pytest.raises(UsageError, match=said):
        slurm_job(typed)


def test_what_slurm_shows_of_an_array_is_of_one_task(answer: Callable[..., None]) -> None:
    third = SlurmJob("RUNNING", "None", "root", "0", "h2", name="7_3", id="7")
    answer(ARRAY.replace("RUNNING", "FAILED", 1))
    answer("h2\n", "scontrol")
    assert why_unreachable(third, "h2", "h2") is None
    assert str(why_unreachable(third._replace(id="9", name="7_2"), "h1", "h1")).startswith(
        "h1: Slurm job 7_2 has ended: FAILED"
    )

    answer("JobId=9 JobState=TIMEOUT Reason=TimeLimit\nJobId=7 JobState=RUNNING Reason=None\n", "scontrol")
    assert why_ending("7") == ""
    assert why_ending("9").startswith("Slurm ends job 9: its time limit is over")

    answer("printed\n", "sinfo")
    assert slurm_job_nodes("7") == {}


@pytest.mark.parametrize("job_id", ["", "7; rm", "--help", "7.0", "x"])
def test_what_is_no_job_id_is_refused_before_slurm_is_asked(job_id: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a Slurm job"):
        slurm_job_hosts(job_id)
