"""Figures in what ranks print: which are found, which patterns are refused, and that none can hold the agent."""

from __future__ import annotations

import math
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import MetricPatternError
from agent.logs.line_metrics import MAX_LOOKED_CHARS, MAX_LOOKED_LINES, LineMetrics

LOSS = r"loss[=:] *([0-9.e+-]+)"


def never() -> bool:
    return False


def found(patterns: list[str], *lines: str, unfinished: str = "") -> dict[str, float]:
    return LineMetrics(patterns).read(lines, unfinished, never)


def test_the_newest_value_counts_and_one_group_without_a_name_is_the_loss() -> None:
    assert found([LOSS], "step 1 loss=2.5", "step 2 loss: 1.5, lr 3", "saved") == {"loss": 1.5}


def test_named_groups_are_metrics_of_their_names() -> None:
    line = "epoch 3 step 120 loss 1.25e-1 lr=3e-4"

    assert found([r"epoch (?P<epoch>\d+) step (?P<step>\d+) loss (?P<loss>\S+)", r"lr=(?P<lr>\S+)"], line) == {
        "epoch": 3.0,
        "step": 120.0,
        "loss": 0.125,
        "lr": 3e-4,
    }


STEP_AND_LOSS = r"step (?P<step>[0-9]+) loss ([0-9.]+)"


@pytest.mark.parametrize(
    ("patterns", "metrics"),
    [
        ([STEP_AND_LOSS], {"step": 20.0, "loss": 0.5}),
        ([r"(?P<nll>\S+) lr", r"loss (\S+) lr (?P<lr>\S+)"], {"nll": 0.5, "loss": 0.5, "lr": 0.25}),
        # Alternatives, decimals of a named figure, and any figure beside a loss of its own are no loss.
        ([r"(step|iter) (?P<step>\d+)"], {"step": 20.0}),
        ([r"lr (?P<lr>\d+(\.\d+)?)"], {"lr": 0.25}),
        ([r"(step (?P<step>\d+))"], {"step": 20.0}),
        ([r"step (\d+) loss (?P<loss>\S+)"], {"loss": 0.5}),
        ([r"loss (\S+)", r"step (\d+) .*lr (?P<lr>\S+)"], {"loss": 0.5, "lr": 0.25}),
        ([r"step (\d+) loss (\S+) lr (?P<lr>\S+)"], {"lr": 0.25}),
    ],
)
def test_the_only_group_without_a_name_beside_named_ones_is_the_loss(
    patterns: list[str], metrics: dict[str, float]
) -> None:
    assert found(patterns, "step 20 loss 0.5 lr 0.25") == metrics


@pytest.mark.parametrize(
    ("patterns", "lines", "step"),
    [
        ([r"step (?P<step>\d+) loss (?P<loss>\S+)"], ["step 20 loss 0.5", "step 30 loss 0.25"], 30.0),
        ([r"step (?P<step>\d+)", r"loss (?P<loss>\S+)"], ["step 20 loss 0.5"], 20.0),
        ([STEP_AND_LOSS], ["step 20 loss 0.5"], 20.0),
        ([r"step (?P<step>\d+)", r"loss (?P<loss>\S+)"], ["step 20 loss 0.5", "step 21", "step 22"], 20.0),
        ([r"loss (?P<loss>\S+)"], ["step 20 loss 0.5"], None),
    ],
)
def test_a_loss_is_of_the_step_in_its_own_line(patterns: list[str], lines: list[str], step: float | None) -> None:
    metrics = LineMetrics(patterns)

    assert metrics.read(lines, "", never)["loss"] in {0.5, 0.25}
    assert metrics.loss_step == step


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 20 loss=0.5", 20.0),
        ("global_step=20, loss=0.5", 20.0),
        ("Epoch 3 [Iter: 20/900] loss=0.5", 20.0),
        ("loss=0.5 steps 20.", 20.0),
        ("step 0.25 s, loss=0.5", None),
        ("24 steps/s, loss=0.5", None),
        ("footstep20x loss=0.5", None),
        ("loss=0.5", None),
    ],
)
def test_what_looks_like_a_step_in_the_line_of_a_loss_is_found_without_a_pattern(line: str, step: float | None) -> None:
    metrics = LineMetrics([LOSS])

    assert metrics.read(["step 1", line, "step 99"], "", never) == {"loss": 0.5}
    assert (metrics.loss_step, metrics.line_step) == (None, step)


def test_what_is_no_number_is_passed_over_for_an_older_one() -> None:
    assert found([r"loss=(\S+)"], "loss=2.5,", "loss=?") == {"loss": 2.5}
    assert math.isnan(found([r"loss=(\S+)"], "loss=nan")["loss"])
    assert found([LOSS], "nothing here") == {}


def test_of_a_progress_bar_only_what_cannot_be_cut_short_is_taken() -> None:
    assert found([LOSS], "loss=9", unfinished="50%|### | loss=2.31]") == {"loss": 2.31}
    assert found([LOSS], "loss=9", unfinished="50%|### | loss=2.3") == {"loss": 9.0}


def test_only_the_newest_lines_and_their_beginnings_are_looked_at() -> None:
    assert found([LOSS], "loss=1", *["x"] * MAX_LOOKED_LINES) == {}
    assert found([LOSS], "x" * MAX_LOOKED_CHARS + "loss=1") == {}
    assert found([LOSS], "loss=9", "x" * (MAX_LOOKED_CHARS - 7) + "loss=1.25") == {"loss": 9.0}
    assert found([LOSS], "x" * (MAX_LOOKED_CHARS - 7) + "loss=12") == {"loss": 12.0}


def test_a_look_that_is_out_of_time_ends() -> None:
    assert LineMetrics([LOSS]).read(["loss=1"], "", lambda: True) == {}


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("loss=(", "missing )"),
        (r"(?=loss)(\d+)", "invalid perl operator"),
        (r"(\d)\1", "invalid escape"),
        ("((a{900}){900}){900}", "invalid repetition size"),
        ("loss", "no groups without names"),
        (r"(\d+) (\d+)", "2 groups without names"),
    ],
)
def test_a_pattern_of_no_use_is_refused_with_the_reason(pattern: str, why: str) -> None:
    with pytest.raises(MetricPatternError) as error:
        LineMetrics([pattern])

    assert why in str(error.value)
    assert repr(pattern) in str(error.value)


def test_a_node_without_re2_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)

    assert LineMetrics([]).read(["loss=1"], "", never) == {}
    with pytest.raises(MetricPatternError, match="google-re2"):
        LineMetrics([LOSS])


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(.*)*x", ".*.*.*.*(=)x", "(a+)+$", "(a?){900}a{90}b"])
def test_a_pattern_that_would_backtrack_for_hours_does_not(pattern: str) -> None:
    began_s = time.thread_time()

    found([pattern], *["a" * 4096] * MAX_LOOKED_LINES)

    assert time.thread_time() - began_s < 5.0, "a backtracking matcher needs longer than the universe is old"


@given(st.lists(st.text(max_size=60)), st.text(max_size=60))
def test_whatever_is_printed_gives_numbers_or_nothing(lines: list[str], unfinished: str) -> None:
    values = LineMetrics([r"(\S+)", r"(?P<any>.*)"]).read(lines, unfinished, never)

    assert all(isinstance(value, float) for value in values.values())
