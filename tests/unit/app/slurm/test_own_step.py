"""When the console of a Slurm step asks why Slurm ends its job; `tests.e2e.test_slurm` runs such steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from app.slurm import own_step
from app.slurm.own_step import _notify_why
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NOT_NOTED = "JobId=7 JobState=RUNNING Reason=None PreemptTime=None\n"
NOTED = "JobId=7 JobState=COMPLETING Reason=TimeLimit PreemptTime=None\n"
WHY = "Slurm ends job 7: its time limit is over"


@pytest.mark.parametrize("pause_s", [0.05, 60.0])
def test_why_slurm_ends_a_job_is_shown_once_it_is_noted_or_at_the_end(
    answer: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pause_s: float
) -> None:
    monkeypatch.setattr(own_step, "WHY_PAUSE_S", pause_s)
    answer(NOT_NOTED, "scontrol")
    is_over, shown = threading.Event(), list[str]()
    asking = threading.Thread(target=_notify_why, args=("7", is_over, shown.append))
    asking.start()
    until(lambda: (tmp_path / "scontrol.calls").stat().st_size > 0, 10.0, "Slurm is asked")
    answer(NOTED, "scontrol")
    if pause_s > 10.0:
        is_over.set()
    asking.join(10.0)

    assert len(shown) == 1
    assert shown[0].startswith(WHY)


def test_where_slurm_does_not_show_why_nothing_is_shown(answer: Callable[..., None]) -> None:
    answer(NOT_NOTED, "scontrol")
    is_over, shown = threading.Event(), list[str]()
    is_over.set()
    _notify_why("7", is_over, shown.append)

    assert shown == []
