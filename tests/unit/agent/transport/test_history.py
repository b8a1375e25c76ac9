from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from agent.transport.history import PastFrames
from agent.wire.commands import Tier
from agent.wire.reports import READABLE_VERSIONS, WIRE_VERSION

if TYPE_CHECKING:
    from pathlib import Path


class Wall:
    """The wall clock, where a test sets it."""

    at_s = 0.0


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    clock = Wall()
    monkeypatch.setattr("agent.transport.history._steady_wall_time", lambda _epoch_s: clock.at_s)
    return clock


def fill(past: PastFrames, seconds: float, start_s: float = 0.0, wall: Wall | None = None) -> float:
    """Append reports at 5 Hz on a virtual clock; return when the last one was made."""
    now_s = start_s
    while now_s < start_s + seconds:
        if wall is not None:
            wall.at_s = now_s
        past.append(f"{now_s:.1f}".encode(), now_s)
        now_s += 0.2
    return now_s


def everything(past: PastFrames, tier: Tier, since_seq: int = 0, max_bytes: int = 10**9) -> list[tuple[int, str]]:
    return [(one.seq, one.frame.decode()) for one in past.since(tier, since_seq, max_bytes)]


def test_the_last_ten_minutes_are_kept_whole_and_a_day_thinly(tmp_path: Path, wall: Wall) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    end_s = fill(past, 3600.0, wall=wall)

    recent = everything(past, Tier.RECENT)
    day = everything(past, Tier.DAY)

    assert recent[-1][1] == f"{end_s - 0.2:.1f}"
    assert 3000 <= len(recent) <= 3350, "ten minutes at 5 Hz, and the minute under way"
    assert [seq for seq, _ in recent] == list(range(recent[0][0], recent[0][0] + len(recent)))
    assert [text for _, text in day][:3] == ["0.0", "10.0", "20.0"]
    assert len(day) in {360, 361}
    past.close()


def test_a_day_is_a_day(tmp_path: Path, wall: Wall) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    for minute in range(3 * 24 * 60):
        wall.at_s = minute * 60.0
        past.append(str(minute).encode(), minute * 60.0)

    day = everything(past, Tier.DAY)

    assert 24 * 60 <= len(day) <= 25 * 60
    assert day[-1][1] == str(3 * 24 * 60 - 1)
    assert len(list((tmp_path / "history").glob("*.reports"))) == 25 + 11
    past.close()


def test_a_cursor_goes_on_where_it_was_and_a_reply_has_a_size(tmp_path: Path) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    fill(past, 200.0)
    whole = everything(past, Tier.RECENT)

    pulled: list[tuple[int, str]] = []
    while piece := everything(past, Tier.RECENT, pulled[-1][0] if pulled else 0, max_bytes=500):
        assert sum(len(text) for _, text in piece) <= 500
        pulled += piece

    assert pulled == whole
    assert len(everything(past, Tier.RECENT, max_bytes=1)) == 1, "one report at least, or a cursor would stand still"
    past.close()


def test_what_is_older_than_asked_for_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    wall_s = 1000.0
    monkeypatch.setattr("agent.transport.history._steady_wall_time", lambda _epoch_s: wall_s)
    for number in range(10):
        past.append(str(number).encode(), float(number))
        wall_s += 10.0

    found = past.since(Tier.RECENT, 3, 10**9, max_age_s=45.0)

    assert [(one.seq, one.frame, one.age_s) for one in found] == [
        (7, b"6", 40.0),
        (8, b"7", 30.0),
        (9, b"8", 20.0),
        (10, b"9", 10.0),
    ]
    past.close()


def test_agents_that_begin_again_and_again_forget_nothing_of_the_last_ten_minutes(
    tmp_path: Path, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a short-lived agent writes is a file too."""
    now_s = 0.0
    for _ in range(40):
        past = PastFrames(tmp_path / "history", "a-boot")
        now_s = fill(past, 20.0, now_s, wall)
        past.close()

    past = PastFrames(tmp_path / "history", "a-boot")
    recent = everything(past, Tier.RECENT)
    assert float(recent[0][1]) <= now_s - 600.0
    assert len(recent) <= 3350
    monkeypatch.setattr("agent.transport.history.MAX_FILES", 40)
    for _ in range(20):
        past = PastFrames(tmp_path / "history", "a-boot")
        past.append(b"short", now_s)
        past.close()
    assert len(list((tmp_path / "history").glob("recent-*"))) == 40


def test_the_last_words_of_an_agent_are_kept_at_once_and_returned_at_any_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall_s = 1000.0
    monkeypatch.setattr("agent.transport.history._steady_wall_time", lambda _epoch_s: wall_s)
    for agent in ("a", "b"):
        past = PastFrames(tmp_path / "history", "a-boot")
        for number in range(9):
            past.append(f"{agent}{number}".encode(), number * 0.2)
            wall_s += 0.2
        past.append(f"{agent} ends".encode(), 1.65, is_last=True)
        past.close()

    past = PastFrames(tmp_path / "history", "a-boot")
    thin = [one.frame.decode() for one in past.since(Tier.RECENT, 0, 10**9, period_s=60.0)]
    assert thin == ["a0", "a ends", "b ends"]
    assert [text for _, text in everything(past, Tier.DAY)] == ["a0", "a ends", "b0", "b ends"]
    past.close()


def test_numbers_go_on_over_restarts_and_a_report_cut_short_is_dropped(tmp_path: Path) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    fill(past, 1.0)
    past.close()
    (path,) = (tmp_path / "history").glob("recent-*")
    path.write_bytes(path.read_bytes()[:-1])
    path.rename(path.with_name(path.name.replace(f"-{WIRE_VERSION}-", f"-{min(READABLE_VERSIONS)}-")))
    unreadable = path.with_name(path.name.replace(f"-{WIRE_VERSION}-", "-1-"))
    unreadable.touch()

    past = PastFrames(tmp_path / "history", "a-boot")
    past.append(b"after", 0.0)

    assert everything(past, Tier.RECENT)[-2:] == [(4, "0.6"), (5, "after")]
    assert not unreadable.exists()
    past.close()


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 40])
def test_a_file_of_nonsense_hurts_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / f"recent-{WIRE_VERSION}-000000000001.reports").write_bytes(content)

    past = PastFrames(tmp_path / "history", "a-boot")
    past.append(b"after", 0.0)

    assert everything(past, Tier.RECENT)[-1][1] == "after"
    past.close()


def test_ages_are_told_not_times(tmp_path: Path) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    past.append(b"now", 5.0)
    assert 0.0 <= past.since(Tier.DAY, 0, 100)[0].age_s < 60.0
    past.close()


@pytest.mark.fault(row=33)
@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_between_two_agents_moves_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    past = PastFrames(tmp_path / "history", "a-boot")
    past.append(b"before", 0.0)
    past.close()
    true_time = time.time  # noqa: TID251 - it is what is set
    monkeypatch.setattr("time.time", lambda: true_time() + step_s)

    past = PastFrames(tmp_path / "history", "a-boot")
    past.append(b"after", 0.0)
    ages_s = [one.age_s for one in past.since(Tier.RECENT, 0, 100, max_age_s=600.0)]
    assert ages_s == sorted(ages_s, reverse=True)
    assert 0 < ages_s[1] < ages_s[0] < 60
    past.close()

    (tmp_path / "history" / "epoch").write_text("another-boot 5.0\n")
    past = PastFrames(tmp_path / "history", "a-boot")
    past.append(b"of now", 0.0)
    assert past.since(Tier.RECENT, 2, 100)[0].age_s < 60, "another boot begins with another clock"
    past.close()
