from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from agent.logs import log_tail
from agent.logs.log_tail import LogTail
from agent.wire.codec import MAX_COMMAND_BYTES
from agent.wire.commands import encode_reply
from agent.wire.logs import MAX_PULLED_LINES, LogLoss, Logs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tail(tmp_path: Path) -> LogTail:
    tail = LogTail()
    tail.follow("train", tmp_path, tmp_path, range(2))
    return tail


def texts(tail: LogTail, seq: int = 0, limit: int = 100) -> list[str]:
    return [line.text for line in tail.since(seq, limit)]


def test_lines_are_numbered_over_all_files_of_a_node(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text("zero\n")
    tail.poll()
    (tmp_path / "rank-1.stderr.log").write_text("one\n")
    (tmp_path / "launcher.log").write_text("run\n")
    tail.poll()
    lines = tail.since(0, 100)
    assert [(line.seq, line.rank, line.stream, line.text) for line in lines] == [
        (1, 0, "stdout", "zero"),
        (2, -1, "stderr", "run"),
        (3, 1, "stderr", "one"),
    ]
    assert tail.log_seq == 3
    assert texts(tail, 2) == ["one"]
    assert texts(tail, 3) == texts(tail, 99) == []
    assert texts(tail, 0, limit=2) == ["zero", "run"]
    tail.close()


def test_each_line_says_whose_job_printed_it(tail: LogTail, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tail.follow("evaluate", other, other, range(1))
    (tmp_path / "rank-0.stdout.log").write_text("step 1\n")
    (other / "rank-0.stdout.log").write_text("score 2\n")
    (other / "launcher.log").write_text("run\n")
    tail.poll()
    jobs = {line.text: line.job_id for line in tail.since(0, 100)}
    assert jobs == {"step 1": "train", "score 2": "evaluate", "run": "evaluate"}
    assert len({line.file for line in tail.since(0, 100)}) == 3
    tail.close()


def test_the_unfinished_last_line_comes_when_the_job_has_ended(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text("half")
    tail.poll()
    assert texts(tail) == []
    tail.unfollow("train")
    assert texts(tail) == ["half"]
    tail.unfollow("train")


def test_a_rest_longer_than_one_read_is_read_to_its_end(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_bytes(b"\r" * 200_000 + b"end\n")
    tail.unfollow("train")
    assert texts(tail) == ["end"]


def test_only_the_newest_lines_are_kept(tail: LogTail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_KEPT_LINES", 10)
    (tmp_path / "rank-0.stdout.log").write_text("".join(f"{number}\n" for number in range(25)))
    tail.poll()
    assert texts(tail) == [str(number) for number in range(15, 25)]
    assert (tail.first_seq, tail.log_seq) == (16, 25)
    monkeypatch.setattr(log_tail, "MAX_KEPT_CHARS", 4)
    (tmp_path / "rank-1.stdout.log").write_text("abc\n")
    tail.poll()
    assert texts(tail) == ["abc"]
    tail.close()


def test_a_pull_is_bounded_in_characters(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text(("x" * 4000 + "\n") * 60)
    for _ in range(4):
        tail.poll()
    assert tail.log_seq == 60
    assert len(tail.since(0, 1000)) == log_tail.MAX_PULLED_CHARS // (4000 + log_tail.LINE_CHARS)
    tail.close()


@pytest.mark.parametrize("num_chars", [0, 75, 4096])
def test_the_largest_reply_is_no_longer_than_a_console_takes(tmp_path: Path, num_chars: int) -> None:
    tail = LogTail()
    tail.follow("j" * 64, tmp_path, tmp_path, range(100_000_000, 100_000_001))
    (tmp_path / "rank-100000000.stderr.log").write_text(("\x01" * num_chars + "\n") * MAX_PULLED_LINES)
    tail.log_seq = 10**12
    for _ in range(40):
        tail.poll()
    tail._read_at_s = deque([-1e7] * len(tail._lines))

    taken = tail.since(10**12, MAX_PULLED_LINES)

    reply = encode_reply(Logs(epoch="e" * 256, first_seq=2**63 - 1, lines=taken))
    assert MAX_COMMAND_BYTES * 3 // 50 < len(reply) <= MAX_COMMAND_BYTES // 5
    tail.close()


def test_a_line_says_how_long_ago_it_was_read(tail: LogTail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = 1000.0
    monkeypatch.setattr("agent.logs.log_tail.time.monotonic", lambda: clock_s)
    (tmp_path / "rank-0.stdout.log").write_text("first\n")
    tail.poll()
    clock_s += 60
    with (tmp_path / "rank-0.stdout.log").open("a") as file:
        file.write("second\nthird\n")
    tail.poll()
    clock_s += 5

    assert [(line.text, line.age_s) for line in tail.since(0, 10)] == [("first", 65), ("second", 5), ("third", 5)]
    assert [(line.text, line.age_s) for line in tail.since(1, 1)] == [("second", 5)]
    tail.close()


def test_the_ages_of_dropped_lines_go_with_them(tail: LogTail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_KEPT_LINES", 3)
    (tmp_path / "rank-0.stdout.log").write_text("".join(f"{number}\n" for number in range(9)))
    tail.poll()

    assert len(tail._read_at_s) == len(tail._lines) == 3
    tail.close()


def test_a_burst_is_skipped_says_so_and_is_counted_by_file(tail: LogTail, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stdout.log"
    path.write_text(("x" * 99 + "\n") * 50_000 + "last\n")
    (tmp_path / "rank-1.stdout.log").write_text("quiet\n")
    for _ in range(40):
        tail.poll()
    assert texts(tail, tail.log_seq - 1) == ["last"]
    (note,) = [line.text for line in tail._lines if "bytes are not shown" in line.text]
    assert str(path) in note
    (loss,) = tail.losses
    assert (loss.job_id, loss.rank, loss.stream) == ("train", 0, "stdout")
    num_lines = tail.log_seq - 2  # without the note and the quiet rank's
    assert loss.dropped_bytes + 100 * (num_lines - 1) + 5 == path.stat().st_size
    tail.unfollow("train")
    assert tail.losses == [loss]
    tail.forget("train")
    assert tail.losses == []


def test_a_look_at_all_files_takes_a_bounded_piece_and_starves_none(tail: LogTail, tmp_path: Path) -> None:
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            (tmp_path / f"rank-{rank}.{stream}.log").write_text("busy\n" * 200_000)
    (tmp_path / "launcher.log").write_text("seldom\n")
    before = 0
    for _ in range(5):
        tail.poll()
        assert tail.log_seq - before <= log_tail.POLL_LINES + 4  # and a note for each file
        before = tail.log_seq
    assert {(line.rank, line.stream) for line in tail.since(0, 10**6)} >= {(-1, "stderr")}
    heard = {(line.rank, line.stream) for line in tail._lines}
    assert len(heard) == 5
    tail.close()


def test_memory_does_not_grow_with_what_is_printed(tail: LogTail, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stdout.log"
    for _ in range(30):
        with path.open("ab") as file:
            file.write(b"x" * 5000 + b"\n" + b"y\n" * 500_000)
        tail.poll()
        assert len(tail._lines) <= log_tail.MAX_KEPT_LINES
        assert sum(len(line.text) for line in tail._lines) == tail._num_chars <= log_tail.MAX_KEPT_CHARS
        (file_held,) = [one for one in tail._files["train"] if one.path == path]
        assert len(file_held._splitter._held) <= 4 * 4096
    tail.close()


def test_the_rest_of_an_ended_job_comes_with_later_looks(tail: LogTail, tmp_path: Path) -> None:
    num_lines = 3 * log_tail.POLL_LINES
    (tmp_path / "rank-0.stdout.log").write_text("".join(f"{number}\n" for number in range(num_lines)) + "end")
    tail.unfollow("train")
    assert tail.log_seq < num_lines
    for _ in range(6):
        tail.poll()
    assert texts(tail, tail.log_seq - 2) == [str(num_lines - 1), "end"]
    assert tail.losses == []


def test_a_new_attempt_is_followed_from_its_own_files(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text("first attempt")
    tail.poll()
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "rank-0.stdout.log").write_text("second attempt\n")
    tail.follow("train", tmp_path / "1", tmp_path / "1", range(2))
    tail.poll()
    assert texts(tail) == ["first attempt", "second attempt"]
    assert [loss for loss in tail.losses if loss == LogLoss("train", 0, "stdout", 1)] == []
    tail.close()


def test_a_planted_link_is_not_followed(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").symlink_to("/etc/passwd")
    tail.poll()
    assert tail.log_seq == 0


def test_who_has_printed_is_told_once_with_the_figures_in_it(tmp_path: Path) -> None:
    tail = LogTail()
    tail.follow("train", tmp_path, tmp_path, range(2), [r"loss=([0-9.]+)", r"lr=(?P<lr>[0-9.]+)"])
    (tmp_path / "rank-0.stdout.log").write_text("lr=0.5 loss=2.5\nloss=1.5\n")
    (tmp_path / "rank-0.stderr.log").write_text("\r 10%|# | loss=0.5]")
    (tmp_path / "launcher.log").write_text("loss=9\n")

    tail.poll()

    ((whose, printed),) = tail.take_printed().items()
    assert whose == ("train", 0)
    assert printed.metrics == {"lr": 0.5, "loss": pytest.approx(1.0, abs=0.5)}
    assert printed.num_lines == 2
    assert tail.take_printed() == {}
    tail.poll()
    assert tail.take_printed() == {}
    tail.close()


def test_lines_of_an_earlier_attempt_are_no_news_of_this_one(tmp_path: Path) -> None:
    tail = LogTail()
    for attempt in range(2):
        (tmp_path / str(attempt)).mkdir()
    tail.follow("train", tmp_path / "0", tmp_path / "0", range(1))
    (tmp_path / "0" / "rank-0.stdout.log").write_text("late\n")

    tail.follow("train", tmp_path / "1", tmp_path / "1", range(1))

    assert texts(tail) == ["late"]
    assert tail.take_printed() == {}
    tail.forget("train")
    assert tail._printers == {}
