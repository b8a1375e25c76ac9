"""Lines of several nodes, pulled one node after another: what was printed before is merged by time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.logs import LogLine
from app.session import log_pulls
from app.session.log_pulls import REPEAT_S, AttemptMarks, Begun, LogPulls, Repeats, gap_line, in_time_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.fleet.fleet import Fleet


class Agents:
    """Agents that hold lines of some ages, until they are let answer."""

    def __init__(self, ages_s: dict[str, list[float]]) -> None:
        self.may_answer = {node: asyncio.Event() for node in ages_s}
        self._ages_s = ages_s

    async def pull_logs(self, node: str, _since: int) -> tuple[Sequence[LogLine], int]:
        await self.may_answer[node].wait()
        return [
            LogLine(seq, 0, "stdout", f"{node}: {age_s:g} s ago", age_s=age_s)
            for seq, age_s in enumerate(self._ages_s[node], 1)
        ], 1


async def taken(pulls: LogPulls, within_s: float = 2.0) -> list[str]:
    """Return the next lines."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if lines := pulls.drain_dated():
            return [line.text for _, _, line in lines]
        await asyncio.sleep(0.01)
    return []


async def first_lines(*, answers: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """Return the lines taken when h1 has answered, those taken after `answers`, and whether all were here at first."""
    ages_s = {"h1": [60.0, 20.0, 10.0], "h2": [50.0, 15.0]}
    agents = Agents(ages_s)
    pulls = LogPulls(list(ages_s), lambda: cast("Fleet", agents), lambda _: None)
    following = asyncio.create_task(pulls.follow())
    try:
        pulls.want("h1", "epoch", 3)
        agents.may_answer["h1"].set()
        soon = await taken(pulls, within_s=0.3)
        had_all = pulls.has_all
        for node in answers:
            pulls.want(node, "epoch", len(ages_s[node]))
            agents.may_answer[node].set()
        return soon, await taken(pulls), had_all
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def test_the_first_lines_of_a_node_wait_for_those_of_the_others() -> None:
    soon, lines, had_all = await first_lines(answers=["h2"])

    assert not soon
    assert not had_all
    assert lines == ["h1: 60 s ago", "h2: 50 s ago", "h1: 20 s ago", "h2: 15 s ago", "h1: 10 s ago"]


async def test_they_do_not_wait_for_long_for_a_node_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pulls, "FIRST_LINES_S", 1.0)
    soon, lines, had_all = await first_lines(answers=[])

    assert not soon
    assert not had_all
    assert lines == ["h1: 60 s ago", "h1: 20 s ago", "h1: 10 s ago"]


class Printer:
    """An agent that holds 75 lines and sends ten at a time."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def pull_logs(self, _node: str, since: int) -> tuple[Sequence[LogLine], int]:
        self.asked.append(since)
        return [LogLine(seq, 0, "stdout", f"{seq}") for seq in range(since + 1, min(since + 10, 75) + 1)], 1


async def test_many_lines_come_in_small_pieces_some_in_a_row() -> None:
    agent = Printer()
    pulls = LogPulls(["h1"], lambda: cast("Fleet", agent), lambda _: None)
    pulls.want("h1", "epoch", 75)

    await pulls._pull_into_cursor("h1", "epoch", 0)
    assert agent.asked == [0, 10, 20, 30, 40]
    assert not pulls.has_all
    await pulls._pull_into_cursor("h1", "epoch", 50)
    assert agent.asked[5:] == [50, 60, 70]
    assert [line.seq for _, _, line in pulls.drain_dated()] == [*range(1, 76)]


async def test_once_the_agent_is_replaced_no_more_is_asked_for_by_the_old_numbers() -> None:
    agent = Printer()
    pulls = LogPulls(["h1"], lambda: cast("Fleet", agent), lambda _: None)
    pulls.want("h1", "new epoch", 75)

    await pulls._pull_into_cursor("h1", "epoch", 0)
    assert agent.asked == [0]


def test_lines_of_several_nodes_are_merged_by_time_and_those_of_one_keep_their_order() -> None:
    def lines(node: str, *times_s: float) -> list[tuple[float, str, LogLine]]:
        return [(at_s, node, LogLine(1, 0, "stdout", f"{node}{number}")) for number, at_s in enumerate(times_s)]

    merged = in_time_order([*lines("a", 10.0, 50.0, 49.9, 60.0), *lines("b", 20.0, 55.0)])

    assert [line.text for _, _, line in merged] == ["a0", "b0", "a1", "a2", "b1", "a3"]


def test_lines_that_a_node_no_longer_keeps_are_stood_for_by_one() -> None:
    assert gap_line(0, 1, 3.0) is None
    assert gap_line(7, 8, 3.0) is None
    assert gap_line(7, 3, 3.0) is None
    one, many = gap_line(7, 9, 3.0), gap_line(0, 12_346, None)
    assert one is not None
    assert many is not None
    assert (one.seq, one.rank, one.text) == (8, -1, "(1 line is older than what the node keeps: see its files)")
    assert many.text.startswith("(12,345 lines are older")
    assert (one.age_s, many.age_s) == (3.0, None)


def printed(job_id: str, *at_s: float, node: str = "h1") -> list[tuple[float, str, LogLine]]:
    return [(one, node, LogLine(number, 0, "stdout", f"{one:g}", job_id)) for number, one in enumerate(at_s, 1)]


def began(job_id: str, attempt: int, at_s: float, *, is_live: bool = True) -> Begun:
    return Begun(job_id, attempt, "h1", at_s, "12:03:04", is_live)


def test_each_attempt_is_marked_once_before_its_own_lines() -> None:
    marks, lines = AttemptMarks(), in_time_order([*printed("a", 1.0, 5.0, 9.0), *printed("b", 6.0, node="h2")])

    marked = marks.marked(lines, [began("a", 1, 5.5)])

    assert [line.text for _, _, line in marked] == ["1", "5", "6", "--- restart 1 began 12:03:04", "9"]
    assert [(line.rank, line.job_id) for _, _, line in marked if line.text.startswith("---")] == [(-1, "a")]
    assert marks.marked(printed("a", 20.0), [began("a", 1, 5.5)]) == printed("a", 20.0)


def test_a_restart_is_marked_before_it_prints_and_one_that_is_over_and_has_no_line_is_not() -> None:
    old = printed("a", 1.0)
    assert [line.text for _, _, line in AttemptMarks().marked(old, [began("a", 2, 3.0)])][1:] == [
        "--- restart 2 began 12:03:04"
    ]
    assert AttemptMarks().marked(old, [began("a", 2, 3.0, is_live=False)]) == old


def lines_of(rank: int, *texts: str) -> list[LogLine]:
    return [LogLine(number, rank, "stdout", text, "a") for number, text in enumerate(texts, 1)]


def texts_of(lines: Sequence[LogLine]) -> list[str]:
    return [line.text for line in lines]


RANKS = st.lists(st.lists(st.sampled_from(["ready", "loss 1", "loss 2"]), max_size=6), min_size=1, max_size=3)


@given(files=RANKS, later=RANKS, cuts=st.lists(st.integers(0, 20), max_size=4), num_agents=st.integers(1, 3))
def test_what_a_new_agent_reads_again_is_shown_once(
    files: list[list[str]], later: list[list[str]], cuts: list[int], num_agents: int
) -> None:
    repeats, shown = Repeats(), list[LogLine]()
    whole = files
    for number in range(num_agents + 1):
        whole = [[*one, *more] for one, more in zip_longest(files, later, fillvalue=list[str]())] if number else files
        # Each agent reads the files side by side, in an order of its own, and they are pulled in pieces.
        lines = [line for rank, texts in enumerate(whole) for line in lines_of(rank, *texts)]
        if number % 2:
            lines.sort(key=lambda line: line.seq)
        if number:
            repeats.restart(number)
        at = sorted({0, len(lines), *(cut for cut in cuts if cut < len(lines))})
        for first, end in pairwise(at):
            shown += repeats.new_of(lines[first:end], number, has_gap=False)

    for rank, texts in enumerate(whole):
        assert texts_of([line for line in shown if line.rank == rank]) == texts


def test_a_file_that_is_another_one_is_shown_from_its_start() -> None:
    repeats = Repeats()
    repeats.new_of(lines_of(0, "attempt 0", "loss 1", "loss 2"), 0.0, has_gap=False)
    repeats.restart(1.0)

    assert texts_of(repeats.new_of(lines_of(0, "attempt 1", "loss 1"), 1.0, has_gap=False)) == ["attempt 1", "loss 1"]


def test_lines_that_differ_late_or_stay_fewer_are_shown_as_soon_as_that_is_known() -> None:
    repeats = Repeats()
    repeats.new_of([*lines_of(0, "ready", "loss 1", "loss 2"), *lines_of(1, "ready", "loss 1")], 0.0, has_gap=False)
    repeats.restart(1.0)

    assert texts_of(repeats.new_of(lines_of(0, "ready", "loss 1"), 1.0, has_gap=False)) == []
    again = lines_of(0, "ready", "loss 1", "loss 3")[2:]
    assert texts_of(repeats.new_of(again, 1.1, has_gap=False)) == ["ready", "loss 1", "loss 3"]
    assert texts_of(repeats.new_of(lines_of(1, "ready"), 1.2, has_gap=False)) == []
    assert texts_of(repeats.new_of([], 1.1 + REPEAT_S, has_gap=False)) == ["ready"]


@pytest.mark.parametrize("which", ["before", "again"])
def test_where_lines_are_missing_all_are_shown(which: str) -> None:
    repeats = Repeats()
    repeats.new_of(lines_of(0, "ready", "loss 1"), 0.0, has_gap=which == "before")
    repeats.restart(1.0)

    again = repeats.new_of(lines_of(0, "ready", "loss 1"), 1.0, has_gap=which == "again")

    assert texts_of(again) == ["ready", "loss 1"]


def test_an_attempt_has_files_of_its_own_of_which_a_new_agent_reads_the_latest_again() -> None:
    repeats = Repeats()
    repeats.new_of(lines_of(0, "step 1", "step 2", "step 3"), 0.0, has_gap=False)
    second = [msgspec.structs.replace(line, file=7) for line in lines_of(0, "step 1", "step 2")]
    repeats.new_of(second, 1.0, has_gap=False)
    repeats.restart(2.0)
    third = [msgspec.structs.replace(line, file=7) for line in lines_of(0, "step 1", "step 2", "step 3")]

    assert texts_of(repeats.new_of(third, 2.0, has_gap=False)) == ["step 3"]
