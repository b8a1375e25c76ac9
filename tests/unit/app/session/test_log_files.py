"""Lines that agents no longer keep, read from real files as an agent reads them, beside those of a real ring."""

from __future__ import annotations

import asyncio
import math
import re
from typing import TYPE_CHECKING, cast

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from agent.logs import log_tail
from agent.logs.line_splitter import LineSplitter
from agent.logs.log_tail import LogTail, log_path, read_log
from agent.wire.jobs import JobState
from agent.wire.logs import LogLine, LogStream, ReadLog
from app.errors import AgentUnreachableError
from app.fleet.commands import taken
from app.session import log_files
from app.session.log_files import FilesWish, LogFiles, lines_of, num_older
from app.session.log_pulls import gap_line, is_gap
from tests.support.node_reports import job_status

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.commands import Command, Reply
    from app.fleet.fleet import Fleet
    from app.session.log_pulls import DatedLine

TEXTS = st.lists(st.sampled_from(["", "step", "loss 1", "(3 bytes are not shown here, from offset 7 on; x)"]))


class Disks:
    """The log files of a job on some nodes, read as their agents do."""

    def __init__(self, *roots: Path) -> None:
        self._roots = {f"h{number}": root for number, root in enumerate(roots, 1)}
        self.away: set[str] = set()
        self.asked: list[ReadLog] = []

    async def ask(self, node: str, command: Command) -> Reply:
        if node in self.away:
            raise AgentUnreachableError(node, "no reply in 10 s")
        assert isinstance(command, ReadLog)
        self.asked.append(command)
        return taken(node, read_log(self._roots[node], command))


class Node:
    """A node's files of job `gpt`, and the ring of the agent that follows them."""

    def __init__(self, root: Path, first_rank: int = 0) -> None:
        self.root = root
        self.status = job_status(
            job_id="gpt", first_rank=first_rank, local_world_size=2, world_size=4, state=JobState.SUCCEEDED
        )
        self._tail = LogTail()

    def write(self, rank: int, text: str, attempt: int = 0, stream: LogStream = LogStream.STDOUT) -> None:
        path = log_path(self.root / str(attempt), rank, stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def follow(self, attempt: int = 0) -> None:
        directory = self.root / str(attempt)
        self._tail.follow("gpt", directory, directory, range(self.status.first_rank, self.status.first_rank + 2))
        self._tail.poll()

    def end(self) -> None:
        self._tail.unfollow("gpt")

    def change(self, **fields: object) -> None:
        self.status = msgspec.structs.replace(self.status, **fields)

    def kept(self, node: str = "h1") -> list[DatedLine]:
        """Return what a console pulls, with the line in place of what is dropped."""
        lines = self._tail.since(0, 100_000)
        gap = gap_line(0, self._tail.first_seq, lines[0].age_s if lines else None)
        return [(0.0, node, line) for line in [*filter(None, [gap]), *lines]]


def take(disks: Disks, nodes: dict[str, Node], there: list[DatedLine], wish: FilesWish | None = None) -> LogFiles:
    files = LogFiles(cast("Fleet", disks), "gpt", wish or FilesWish(lambda _rank: True))
    asyncio.run(files.read([{name: node.status for name, node in nodes.items()}], there))
    return files


def printed(lines: list[DatedLine]) -> list[str]:
    return [f"{node}:{line.rank} {line.text}" for _, node, line in lines]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    node = Node(tmp_path / "gpt")
    node.write(0, "0a\n0b\n")
    node.write(0, "0e\n", stream=LogStream.STDERR)
    node.write(1, "1a\n1b")
    node.write(-1, "launched\n")
    return node


def test_the_lines_of_a_job_that_ended_before_its_agent_began_are_all_read_rank_after_rank(
    node: Node, tmp_path: Path
) -> None:
    other = Node(tmp_path / "other", first_rank=2)
    other.write(3, "3a\n")
    for one in (node, other):
        one.change(is_past=True)
    files = take(Disks(node.root, other.root), {"h1": node, "h2": other}, [])

    dated = files.dated(marks_attempts=True)
    assert printed(dated) == ["h1:0 0a", "h1:0 0b", "h1:0 0e", "h1:1 1a", "h1:1 1b", "h2:3 3a", "h1:-1 launched"]
    assert {(at_s, line.age_s, line.job_id) for at_s, _, line in dated} == {(-math.inf, None, "gpt")}
    assert [line.stream for _, _, line in dated][1:3] == ["stdout", "stderr"]
    (notice,) = files.notices()
    assert "from the log files on h1 and h2: rank after rank, since files have no times" in notice


def test_a_choice_of_ranks_texts_and_last_lines_holds_for_files_too(node: Node) -> None:
    node.change(is_past=True)

    def found(**wish: object) -> list[str]:
        wanted = FilesWish(**({"takes": lambda _rank: True} | wish))  # type: ignore[arg-type]
        return printed(take(Disks(node.root), {"h1": node}, [], wanted).dated(marks_attempts=True))

    assert found(takes=lambda rank: rank == 1) == ["h1:1 1a", "h1:1 1b"]
    assert found(pattern=re.compile("a$")) == ["h1:0 0a", "h1:1 1a"]
    assert found(num_last=1) == ["h1:0 0b", "h1:0 0e", "h1:1 1b", "h1:-1 launched"]
    assert found(pattern=re.compile("a"), num_last=1) == ["h1:0 0a", "h1:1 1a", "h1:-1 launched"]


def test_by_age_the_lines_of_a_past_job_are_wanted_where_it_ended_within_that_time(node: Node) -> None:
    node.change(is_past=True, state_s=90.0)
    recent = take(Disks(node.root), {"h1": node}, [], FilesWish(lambda _rank: True, max_age_s=100.0))
    earlier = take(disks := Disks(node.root), {"h1": node}, [], FilesWish(lambda _rank: True, max_age_s=80.0))

    assert len(recent.dated(marks_attempts=True)) == 6
    assert "--since leaves out none of them" in recent.notices()[0]
    assert (earlier.dated(marks_attempts=True), disks.asked) == ([], [])
    assert earlier.notices() == ["job gpt ended 1 min 30 s ago: no line of it is younger"]


def test_what_a_ring_has_dropped_comes_before_what_it_keeps_each_line_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "MAX_KEPT_LINES", 3)
    node.change(state=JobState.RUNNING)
    node.follow()
    for number in range(3):
        node.write(1, f"\n1c{number}")
        node.follow()
    there = node.kept()
    files = take(Disks(node.root), {"h1": node}, there)

    assert is_gap(there[0][2])
    assert printed(files.beside(there)) == ["h1:1 1b", "h1:1 1c0", "h1:1 1c1"]
    assert printed(files.dated(marks_attempts=True)) == ["h1:0 0a", "h1:0 0b", "h1:0 0e", "h1:1 1a", "h1:-1 launched"]


def test_by_age_lines_that_a_ring_has_dropped_are_not_read_and_that_is_a_notice(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "MAX_KEPT_LINES", 3)
    node.follow()
    wish = FilesWish(lambda _rank: True, max_age_s=600.0)
    files = take(disks := Disks(node.root), {"h1": node}, node.kept(), wish)

    assert disks.asked == []
    (notice,) = files.notices()
    assert notice.startswith("h1 kept only the lines of the last ")
    assert "leave out --since for them" in notice


def test_a_ring_that_has_dropped_nothing_needs_no_file(node: Node) -> None:
    node.follow()
    files = take(disks := Disks(node.root), {"h1": node}, node.kept())

    assert (disks.asked, files.notices(), files.beside(node.kept())[0][2].text) == ([], [], node.kept()[0][2].text)


def test_attempts_that_an_agent_has_not_followed_are_read_and_marked(node: Node) -> None:
    for attempt in (1, 2):
        node.write(0, f"again {attempt}\n", attempt)
    node.change(attempt=2, num_restarts=2, state=JobState.RUNNING)
    node.follow(attempt=2)
    files = take(Disks(node.root), {"h1": node}, node.kept())

    assert files.attempts == [0, 1]
    dated = files.dated(marks_attempts=True)
    assert printed(dated)[-3:] == ["h1:-1 launched", "h1:-1 --- restart 1", "h1:0 again 1"]
    assert not any("restart" in text for text in printed(files.dated(marks_attempts=False)))


def test_of_an_earlier_start_of_the_name_no_line_is_read(node: Node) -> None:
    node.write(0, "of today\n", attempt=1)
    node.change(attempt=1, is_past=True)
    files = take(Disks(node.root), {"h1": node}, [])

    assert printed(files.dated(marks_attempts=True)) == ["h1:-1 --- restart 1", "h1:0 of today"]
    (notice,) = [notice for notice in files.notices() if "from before" in notice]
    assert notice.startswith("no line from before restart 1 is read; files that are left are read in pieces, ")
    assert re.search(r"on h1: python -P -m agent logs --job \S+ --attempt 0 --rank 0$", notice)


def test_of_a_large_file_the_last_part_is_read_from_a_whole_line_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "MAX_NODE_BYTES", 0)
    monkeypatch.setattr(log_files, "MIN_FILE_BYTES", 100_000)
    node.write(1, "\n" + "".join(f"line {number:06}\n" for number in range(20_000)))
    node.change(is_past=True)
    files = take(Disks(node.root), {"h1": node}, [], FilesWish(lambda rank: rank == 1))

    dated = printed(files.dated(marks_attempts=True))
    assert dated == [f"h1:1 line {number:06}" for number in range(20_000 - len(dated), 20_000)]
    assert 90_000 < 12 * len(dated) < 100_000 + 12
    assert "only the last 98 KiB are read: on the host python -P -m agent logs reads the rest" in files.notices()[1]


def test_a_node_out_of_reach_and_a_job_of_another_launcher_take_no_line_away(node: Node, tmp_path: Path) -> None:
    node.change(is_past=True)
    other, adopted = Node(tmp_path / "b", first_rank=2), Node(tmp_path / "c", first_rank=2)
    other.change(is_past=True)
    adopted.change(is_past=True, ranks=[2])
    disks = Disks(node.root, other.root, adopted.root)
    disks.away = {"h2"}
    files = take(disks, {"h1": node, "h2": other, "h3": adopted}, [])

    assert len(files.dated(marks_attempts=True)) == 6
    assert list(files.failures) == ["h2"]
    assert files.notices()[-1] == "log files on h2 are not read: no reply in 10 s"


def test_a_file_that_was_replaced_keeps_the_line_in_place_of_what_is_dropped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tail, "MAX_KEPT_LINES", 2)
    node.follow()
    there = node.kept()
    for path in node.root.rglob("rank-*.log"):
        path.write_text("another\n")
    files = take(Disks(node.root), {"h1": node}, there)

    assert is_gap(files.beside(there)[0][2])


@given(st.text("ab\r\n\0x", max_size=60) | st.text(max_size=30))
def test_lines_are_those_that_an_agent_makes(text: str) -> None:
    data = text.replace("\0", "").encode(errors="replace")
    splitter = LineSplitter()
    lines = splitter.feed(data)
    lines += [] if splitter.is_empty else [splitter.flush()]

    assert lines_of(data.decode()) == lines


@given(st.lists(st.text("ab", max_size=2)), st.integers(0), st.integers(0, 5))
def test_lines_of_a_file_and_those_that_are_kept_are_the_file(lines: list[str], first: int, num_new: int) -> None:
    seen = len(lines) - min(num_new, len(lines))
    kept = lines[min(first, seen) : seen]
    num = num_older(lines, kept)

    assert (num is None) == (not kept)
    if num is not None and seen == len(lines):
        assert lines[:num] + kept == lines


@given(TEXTS, TEXTS)
def test_any_lines_are_compared_without_harm(lines: list[str], kept: list[str]) -> None:
    num = num_older(lines, kept)
    assert num is None or 0 <= num < len(lines)


def test_lines_dropped_while_they_were_pulled_end_what_is_compared() -> None:
    lines = [f"line {number}" for number in range(20)]
    kept = [LogLine(number, 0, "stdout", lines[number], "gpt") for number in (5, 6, 9, 10)]
    gap = gap_line(7, 10, None)
    assert gap is not None
    remembered = log_files._by_file([gap, *kept[:2], gap, *kept[2:]])

    assert remembered == {(0, "stdout"): [["line 5", "line 6"]]}
    assert num_older(lines, remembered[0, "stdout"][0]) == 5
