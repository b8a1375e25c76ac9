from __future__ import annotations

from typing import Any

import pytest

from agent.node_state.progress import Progress
from ddpcore.wire import WIRE_VERSION, GroupReport, Phase, Place, RankReport


def report(rank: int = 0, **changes: Any) -> RankReport:
    facts: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "rank": rank,
        "local_rank": rank,
        "world_size": 2,
        "pid": 100 + rank,
        "job_id": "train",
        "attempt": 0,
        "report_seq": 1,
        "phase": Phase.BACKWARD,
        "groups": [GroupReport("0", 57, 56, waiting_s=1.0)],
        "place": Place("/train.py", 12, "main"),
    }
    return RankReport(**{**facts, **changes})


def test_nothing_is_known_before_the_first_report() -> None:
    assert Progress().stalled_s(1e6) == 0.0


def test_ranks_that_only_wait_longer_get_no_further() -> None:
    progress = Progress()
    for now_s in (10.0, 20.0, 30.0):
        for rank in (0, 1):
            waited = [GroupReport("0", 57, 56, waiting_s=now_s)]
            progress.note(report(rank, report_seq=int(now_s), phase_s=now_s, groups=waited), now_s)
    assert progress.stalled_s(40.0) == 30.0


@pytest.mark.parametrize(
    "moved",
    [
        {"groups": [GroupReport("0", 57, 57)]},
        {"groups": [GroupReport("0", 58, 56)]},
        {"steps_done": 1},
        {"epoch": 1},
        {"phase": Phase.DATA},
        {"place": Place("/train.py", 13, "main")},
        {"pid": 999},
    ],
)
def test_one_rank_that_moves_is_enough(moved: dict[str, Any]) -> None:
    progress = Progress()
    progress.note(report(0), 0.0)
    progress.note(report(1), 0.0)
    progress.note(report(1, **moved), 50.0)
    assert progress.stalled_s(60.0) == 10.0


def test_ranks_that_fall_silent_get_no_further() -> None:
    progress = Progress()
    progress.note(report(0), 5.0)
    assert progress.stalled_s(65.0) == 60.0
