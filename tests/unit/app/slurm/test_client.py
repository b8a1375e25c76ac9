"""What is made of the answers of Slurm's commands; `tests.e2e.test_slurm` asks a real one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from app.errors import AllocationEndedError, AppError, HostUnreachableError, SessionError, UsageError
from app.slurm.client import slurm_job_hosts, why_unreachable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has a command print some text from then on."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answers(text: str, name: str = "squeue", code: int = 0) -> None:
        (tmp_path / f"{name}.txt").write_text(text)
        stream = " >&2" if code else ""
        (tmp_path / name).write_text(f"#!/bin/sh\ncat {tmp_path}/{name}.txt{stream}; exit {code}\n")
        (tmp_path / name).chmod(0o755)

    return answers


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("RUNNING|None|h[1-2]\n", None, ""),
        ("PENDING|BeginTime|\n", HostUnreachableError, "h1: Slurm job 7 waits: PENDING (BeginTime)"),
        ("CANCELLED|None|h[1-2]\n", AllocationEndedError, "h1: Slurm job 7 has ended: CANCELLED"),
        ("TIMEOUT|TimeLimit|h[1-2]\n", AllocationEndedError, "h1: Slurm job 7 has ended: TIMEOUT (TimeLimit)"),
        ("NODE\x1b_FAIL|a\x1b[2J|h1\n", AllocationEndedError, ""),
    ],
)
def test_slurm_s_state_of_a_job_is_why_its_relay_is_gone(
    answer: Callable[..., None], text: str, kind: type[AppError] | None, words: str
) -> None:
    answer(text)

    reason = why_unreachable("7", "h1")

    assert (None if reason is None else type(reason)) is kind
    assert words in str(reason)
    assert "\x1b" not in str(reason)


def test_a_job_that_squeue_does_not_know_has_ended_and_one_is_not_ended_by_a_controller_that_is_away(
    answer: Callable[..., None],
) -> None:
    answer("slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert "has ended: squeue does not know it any more" in str(why_unreachable("7", "h1"))

    answer("squeue: retrying\nsqueue: fatal: Unable to contact slurm controller\n", code=1)
    assert why_unreachable("7", "h1") is None
    with pytest.raises(SessionError, match=r"squeue fails: squeue: fatal: Unable to contact slurm controller$"):
        slurm_job_hosts("7")


def test_without_slurm_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert why_unreachable("7", "h1") is None
    with pytest.raises(SessionError, match="squeue is not installed here"):
        slurm_job_hosts("7")


def test_the_hosts_of_an_array_are_those_of_all_its_tasks_once(answer: Callable[..., None]) -> None:
    answer("RUNNING|None|h1\nRUNNING|None|h2\nPENDING|Resources|\n")
    answer("h1\nh2\nh1\n", "scontrol")

    assert slurm_job_hosts("7") == ["h1", "h2"]


@pytest.mark.parametrize("job_id", ["", "7; rm", "--help", "7.0", "x"])
def test_what_is_no_job_id_is_refused_before_slurm_is_asked(job_id: str) -> None:
    with pytest.raises(UsageError, match="is not the id of a Slurm job"):
        slurm_job_hosts(job_id)
