"""Which log lines are shown: by who printed them, where, at which level, and by their text."""

from __future__ import annotations

import pytest

from app.filters.language import read_filter
from app.filters.lines import ERRORS, LOG_KEYS, LineWish, level_pattern, lines_of
from app.filters.terms import Filter
from app.tui.logs.matches import MAX_PIECE_BYTES
from app.tui.logs.store import LogStore

LINES = (
    ("gpu1", 0, "step 1 loss 2.5", False),
    ("gpu1", -1, "W1122 03:53:25.1 torch/distributed/run.py:792] OMP_NUM_THREADS is not set", True),
    ("gpu2", 2, "Traceback (most recent call last):", True),
    ("gpu2", 2, '  File "train.py", line 31, in <module>', True),
    ("gpu2", 2, "ValueError: the batch is empty", True),
    ("gpu2", 3, "step 1 loss 2.4", False),
    ("gpu1", 1, "a word on stderr", True),
)


def found(text: str, *, is_problems_only: bool = False, culprits: frozenset[int] = frozenset()) -> list[int]:
    read = read_filter(text, LOG_KEYS)
    assert isinstance(read, Filter), read
    store = LogStore()
    for node, rank, line, is_stderr in LINES:
        store.append(node, rank, line, is_stderr=is_stderr)
    return [
        int(place) for place in lines_of(store.piece(0, MAX_PIECE_BYTES), LineWish(read, is_problems_only, culprits))
    ]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", [0, 1, 2, 3, 4, 5, 6]),
        ("node=gpu1", [0, 1, 6]),
        ("rank=2-3", [2, 3, 4, 5]),
        ("rank=launcher", [1]),
        ("stream=stdout", [0, 5]),
        ("!stream=stdout", [1, 2, 3, 4, 6]),
        ("stream=stderr,stdout rank=0", [0]),
        ("level=error", [2, 4]),
        ("level=warning", [1]),
        ("level=error,warning", [1, 2, 4]),
        ("!level=error rank=2", [3]),
        ("loss", [0, 5]),
        ("loss !rank=0", [5]),
        (r"/loss 2\.[0-4]/", [5]),
        ("!loss stream=stdout", []),
        ("nothing loss", []),
    ],
)
def test_a_filter_shows_the_lines_that_it_is_true_of(text: str, places: list[int]) -> None:
    assert found(text) == places


def test_lines_of_other_jobs_are_left_out_where_a_job_is_wanted() -> None:
    store = LogStore()
    for job_id in ("train", "", "evaluate"):
        store.append("gpu1", 0, "step 1", is_stderr=False, job_id=job_id)
        store.append("gpu2", 1, "step 1", is_stderr=False, job_id=job_id)

    piece = store.piece(0, MAX_PIECE_BYTES)
    assert lines_of(piece, LineWish(job_id="train")).tolist() == [0, 1, 2, 3]
    assert lines_of(piece, LineWish(job_id="evaluate")).tolist() == [2, 3, 4, 5]
    assert lines_of(piece, LineWish()).tolist() == [0, 1, 2, 3, 4, 5]


def test_problems_are_errors_and_what_a_culprit_says_on_stderr() -> None:
    assert found("", is_problems_only=True) == [2, 4]
    assert found("", is_problems_only=True, culprits=frozenset({1, 3})) == [2, 4, 6]
    assert found("node=gpu1", is_problems_only=True, culprits=frozenset({1})) == [6]
    assert found("nowhere", is_problems_only=True, culprits=frozenset({1})) == []


def test_a_wish_is_something_when_it_leaves_anything_out() -> None:
    assert not LineWish()
    assert LineWish(is_problems_only=True)
    assert ERRORS


@pytest.mark.parametrize(
    ("level", "lines", "others"),
    [
        (
            "error",
            [
                "2026-11-22 ERROR boom",
                "torch.cuda.OutOfMemoryError: CUDA out of memory",
                "[rank0]: RuntimeError: boom",
                "[rank0]:[E1122 03:53:25.1 ProcessGroupNCCL.cpp:1] timeout",
                "train.py: error: no such file",
                "terminate called without an active exception",
                "Segmentation fault (core dumped)",
                "SomeException",
            ],
            ["mean squared error 0.2", "0 errors", "error rate: 3", "E1122", "Erroneous"],
        ),
        ("warning", ["UserWarning: x", "WARN: x", "[W1122 03:53 x]", "cc: warning: unused"], ["no warnings", "W1122"]),
        ("info", ["2026 INFO ready", "I1122 03:53 x"], ["information"]),
        ("debug", ["DEBUG x", "TRACE x"], ["debugging"]),
    ],
)
def test_levels_are_known_as_programs_write_them(level: str, lines: list[str], others: list[str]) -> None:
    pattern = level_pattern(level)

    assert [line for line in lines if not pattern.is_in(line)] == []
    assert [line for line in others if pattern.is_in(line)] == []
