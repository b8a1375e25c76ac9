"""Patterns are found in lines, one by one and many at once, and no pattern takes long."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.filters import patterns
from app.filters.patterns import PatternError, TextPattern

if TYPE_CHECKING:
    from collections.abc import Iterator


def packed(*lines: str) -> tuple[bytes, np.ndarray]:
    texts = [f"{line}\n".encode() for line in lines]
    return b"".join(texts), np.cumsum([len(text) for text in texts]).astype(np.uint32)


@pytest.mark.parametrize(
    ("source", "text", "is_found"),
    [
        ("error", "an ERROR here", True),
        ("Error", "an ERROR here", False),
        ("ERROR", "an error here", False),
        (r"\Serror", "xERROR", True),
        (r"\pLerror", "xERROR", True),
        (r"(?P<Name>err)or", "ERROR", True),
        ("^step", "a step", False),
        ("step$", "a step", True),
        ("a|b", "xb", True),
        ("stra\u00dfe", "die Stra\u00dfe", True),
    ],
)
def test_small_letters_stand_for_both_cases_and_anchors_for_the_line(source: str, text: str, is_found: bool) -> None:
    assert TextPattern(source).is_in(text) is is_found


def test_lines_are_found_in_many_at_once_and_no_match_goes_over_a_line_end() -> None:
    lines = packed("step 1", "", "loss 2", "step 1 step 2", "\u00e9 step")

    assert TextPattern("step").lines_in(*lines).tolist() == [0, 3, 4]
    assert TextPattern("^step").lines_in(*lines).tolist() == [0, 3]
    assert TextPattern("1$").lines_in(*lines).tolist() == [0]
    assert TextPattern(r"1\s+loss").lines_in(*lines).tolist() == []
    assert TextPattern("^$").lines_in(*lines).tolist() == [1]
    assert TextPattern("x*").lines_in(*lines).tolist() == [0, 1, 2, 3, 4]
    assert TextPattern("").lines_in(*packed()).tolist() == []


@given(
    blocks=st.lists(st.tuples(st.lists(st.text("ab \u00e9", max_size=9), max_size=3), st.integers(1, 12)), max_size=8),
    source=st.sampled_from(["a", "^$", "x*", "b$", "^a", "[^b]", r"\b", ".*a", "a{2}", r"\s", "(?s)a.", "a|b$"]),
    step_bytes=st.one_of(st.integers(1, 40), st.just(patterns.STEP_BYTES)),
)
def test_many_lines_are_looked_at_in_steps_that_end_with_a_line(
    blocks: list[tuple[list[str], int]], source: str, step_bytes: int
) -> None:
    texts = [text for block, num_times in blocks for _ in range(num_times) for text in block]
    text, ends = packed(*texts)
    num_steps = []
    with patch.object(patterns, "STEP_BYTES", step_bytes):
        found = TextPattern(source).lines_in(memoryview(text), ends, lambda: num_steps.append(1))

    assert found.tolist() == [number for number, line in enumerate(texts) if TextPattern(source).is_in(line)]
    longest = max(map(len, text.splitlines(keepends=True)), default=0)
    assert len(num_steps) * (step_bytes + longest) >= len(text)
    assert len(num_steps) <= -(-len(text) // step_bytes)


class Counting:
    """A compiled pattern that counts its matches."""

    def __init__(self, compiled: Any) -> None:
        self.num, self._compiled = 0, compiled

    def finditer(self, *of: Any) -> Iterator[Any]:
        for match in self._compiled.finditer(*of):
            self.num += 1
            yield match


@pytest.mark.parametrize(
    ("source", "num_found", "num_matches"),
    [("step", 990, 16), ("loss", 10, 10), ("[02468]$", 500, 500), ("x*", 1000, 8)],
)
def test_lines_that_follow_each_other_take_one_match(source: str, num_found: int, num_matches: int) -> None:
    lines = packed(*(f"{'loss' if 500 <= number < 510 else 'step'} {number}" for number in range(1000)))
    pattern = TextPattern(source)
    counting = pattern._to_line_end = Counting(pattern._to_line_end)

    assert len(pattern.lines_in(*lines)) == num_found
    assert counting.num <= num_matches + patterns.NUM_IN_TURN


@pytest.mark.parametrize(
    "source",
    [
        "step",
        "(?i)step",
        r"rank \d+",
        r"a\{9\}",
        r"\Q{.*{\E",
        "[{.*]",
        "nan|inf|overflow|diverged|timeout|refused",
        "a.b.c.d.e",
    ],
)
def test_a_small_pattern_is_matched_over_several_lines(source: str) -> None:
    assert TextPattern(source)._run is not None


@pytest.mark.parametrize(
    "source",
    [r"^step|\d.{200}error", r"step|\d{1,3}.{0,40}error", r"\d.{30}", r"\d" + "." * 30, "(a|b)" * 5, r"\pL{446}a"],
)
def test_one_that_grows_where_all_of_its_alternatives_are_kept_is_not(source: str) -> None:
    assert TextPattern(source)._run is None


def test_what_is_raised_after_a_step_ends_the_search() -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        TextPattern("a").lines_in(*packed("a", "b"), stop)


def test_a_span_counts_characters() -> None:
    assert TextPattern("step").span("\u00e9\u4e16 step") == (3, 7)
    assert TextPattern("step").span("none") is None
    assert TextPattern("x*").span("none") is None


@pytest.mark.parametrize("source", ["(", ")", "a)(b", "[z-a]", "(?<=a)b", r"\1", "a{1001}", "x" * 1001])
def test_what_is_no_pattern_is_refused_with_a_reason(source: str) -> None:
    with pytest.raises(PatternError, match=r"."):
        TextPattern(source)


@pytest.mark.parametrize(
    ("source", "unfit"),
    [
        (r"\C", r"\C"),
        (r"\\\C$", r"\C"),
        (r"\Aepoch", r"\A"),
        (r"epoch 2\z", r"\z"),
        (r"\Qa\E\z", r"\z"),
        (r"[\]]\A", r"\A"),
        ("(?-m)^epoch", "(?-m)"),
        ("x(?i-sm:^epoch)", "(?i-sm:"),
    ],
)
def test_what_would_split_a_character_or_not_keep_to_its_line_is_refused(source: str, unfit: str) -> None:
    with pytest.raises(PatternError, match=f"^{re.escape(unfit)} is not taken: "):
        TextPattern(source)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"\\C", r"a\Com"),
        (r"\\\\A", r"a\\A"),
        (r"\Q\C\z(?-m)\E!", r"\C\z(?-m)!"),
        (r"[(?-m:)]+\d", "(?-m:)1"),
        (r"[]\](?-m)]+\d", "](?-m)1"),
        (r"[[:^alpha:](?-m)]+\d", "(?-m)1"),
        (r"(?m)^\pCm|(?-s:m)", "m"),
        (r"\(?-m", "-m"),
    ],
)
def test_what_only_looks_like_it_is_searched_for(source: str, text: str) -> None:
    assert TextPattern(source, is_case_exact=True).span(text) is not None
    assert TextPattern(source).lines_in(*packed("", text)).tolist()[-1:] == [1]


@pytest.mark.parametrize("source", ["(a+)+$", "(a|aa)+$", "(.*)(.*)(.*)(.*)(.*)[^a]$", "(x+x+)+y"])
def test_patterns_that_bring_backtracking_engines_down_are_done_at_once(source: str) -> None:
    pattern, text = TextPattern(source), "a" * 4000 + "x" * 96

    for _ in range(10):
        pattern.is_in(text)


def test_half_of_a_character_is_found_nowhere() -> None:
    assert not TextPattern("\udc80").is_in("?")
