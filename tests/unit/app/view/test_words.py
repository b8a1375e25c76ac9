"""Units, ranges and places read the same everywhere, and cells keep their width."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import text as words
from app.diagnosis.causes import Severity
from app.view.rows import Headline
from ddpcore.wire import Place


@pytest.mark.parametrize(
    ("num_bytes", "text", "cell"),
    [
        (0, "0 B", "0B"),
        (999, "999 B", "999B"),
        (1000, "1.0 KiB", "1.0K"),
        (1536, "1.5 KiB", "1.5K"),
        (412 * 2**20, "412 MiB", "412M"),
        (1023 * 2**20, "1.0 GiB", "1.0G"),
        (9.96 * 2**30, "10 GiB", "10G"),
        (2**100, "9999 EiB", "9999E"),
        (None, "-", "-"),
        (math.nan, "-", "-"),
    ],
)
def test_bytes_read_with_two_or_three_digits(num_bytes: float | None, text: str, cell: str) -> None:
    assert words.bytes_text(num_bytes) == text
    assert words.bytes_cell(num_bytes) == cell


@pytest.mark.parametrize(
    ("seconds", "text", "cell"),
    [
        (0.04, "0.0 s", "0.0s"),
        (1.72, "1.7 s", "1.7s"),
        (9.96, "10 s", "10s"),
        (59.4, "59 s", "59s"),
        (59.6, "1 min", "1m00s"),
        (200, "3 min 20 s", "3m20s"),
        (7500, "2 h 5 min", "2h05m"),
        (7200, "2 h", "2h00m"),
        (86400 * 5, "120 h", "5d"),
        (-1, "0.0 s", "0.0s"),
        (None, "-", "-"),
        (math.inf, "-", "-"),
    ],
)
def test_seconds_read_in_the_units_of_their_size(seconds: float | None, text: str, cell: str) -> None:
    assert words.seconds_text(seconds) == text
    assert words.seconds_cell(seconds) == cell


@given(st.floats())
def test_cells_never_grow_wider_than_they_say(value: float) -> None:
    assert len(words.seconds_cell(value)) <= 6
    assert len(words.bytes_cell(value)) <= 5


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([2], "rank 2"),
        ([3, 0, 1, 2, 7], "ranks 0-3, 7"),
        ([1, 1, 1], "ranks 1"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 more"),
    ],
)
def test_ranks_read_as_ranges(ranks: list[int], text: str) -> None:
    assert words.ranks_text(ranks) == text


@given(st.lists(st.integers(0, 200)))
def test_ranges_hold_exactly_the_numbers(numbers: list[int]) -> None:
    told = [number for first, last in words.number_ranges(numbers) for number in range(first, last + 1)]

    assert told == sorted(set(numbers))


def test_nodes_beyond_two_are_counted() -> None:
    assert words.nodes_text(["a"]) == "a"
    assert words.nodes_text(["a", "b"]) == "a and b"
    assert words.nodes_text(["a", "b", "c", "d"]) == "a, b and 2 more"


def test_a_place_is_file_line_and_function_without_the_directory() -> None:
    assert words.place_text(Place("/home/u/train.py", 142, "train_step")) == "train.py:142 in train_step"
    assert words.place_text(Place("train\x1b.py", 1, "f\n")) == r"train\x1b.py:1 in f\x0a"
    assert words.place_text(None) == ""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("0", 57, "all_reduce", ""), "all_reduce #57"),
        (("rankdeck.barrier", 3, "barrier", "epoch"), 'barrier "epoch" #3'),
        (("4", 57, "all_reduce", ""), "all_reduce #57 of group 4"),
        (("0", None, "", ""), "collective"),
    ],
)
def test_a_call_reads_as_operation_label_seq_and_group(call: tuple[str, int | None, str, str], text: str) -> None:
    assert words.call_text(*call) == text


def test_numbers_that_are_not_known_are_a_dash() -> None:
    assert words.percent_text(None) == words.rate_text(math.nan) == words.loss_text(None) == "-"
    assert words.percent_text(0.424) == "42 %"
    assert words.percent_text(-0.004) == "0 %"
    assert words.rate_text(3.24) == "3.2"
    assert words.rate_text(24.4) == "24"


@pytest.mark.parametrize(
    ("loss", "text"),
    [(2.306, "2.31"), (0.0123, "0.0123"), (12345.0, "1.23e+04"), (math.nan, "NaN"), (-math.inf, "-inf")],
)
def test_a_loss_keeps_three_digits_and_may_be_no_number(loss: float, text: str) -> None:
    assert words.loss_text(loss) == text


def test_a_loss_of_an_earlier_step_names_it_as_a_step() -> None:
    assert words.loss_step_text(1200, 1203) == " at step 1,200"
    assert words.loss_step_text(1203, 1203) == words.loss_step_text(None, 1203) == ""


def test_signals_and_sizes_have_names() -> None:
    assert words.signal_text(9) == "SIGKILL"
    assert words.signal_text(250) == "signal 250"
    assert words.sizes_text(1) == "1 element"
    assert words.sizes_text(2_001_000) == "2,001,000 elements"


def test_json_values_are_built_in_rounded_and_never_nan() -> None:
    row = Headline(Severity.OK, "fine")

    assert words.json_value([row]) == [{"severity": "ok", "text": "fine"}]
    assert words.json_value({"a": [math.nan, math.inf, 1.23456789, 123456.789, 7, True, None]}) == {
        "a": [None, None, 1.23457, 123456.8, 7, True, None]
    }


def test_finite_lets_only_numbers_through() -> None:
    assert words.finite(1.5) == 1.5
    assert words.finite(math.nan) is None
    assert words.finite(None) is None
