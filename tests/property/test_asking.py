"""A stream that hands out reports for the asking, over a link that is as slow as it likes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.codec import MalformedMessageError, with_length
from agent.wire.relay import ASK, MAX_ASKED, Merged, MergedReport, encode_merged
from app.fleet.credit import LONG_WAY_S, PullCredit

FRAME_BYTES = 7600
REPORTS_HZ = 5


def merged(frame: bytes, held_ms: int = 0) -> bytes:
    return with_length(encode_merged(Merged("r", held_ms, reports=[MergedReport("here", 0, frame)])))


class Link:
    """An agent that makes a report five times a second, at the end of a link of so many bytes a second."""

    def __init__(self, bytes_s: float, latency_s: float) -> None:
        self.bytes_s = bytes_s
        self._latency_s = latency_s
        self._free_s = 0.0
        """When the link has carried all that it was given."""

    def come(self, asked_at_s: float, last_made_s: float) -> tuple[float, float, int]:
        """Return when the answer to a question comes, when its report was made, and how long the agent held it."""
        there_s = asked_at_s + self._latency_s
        made_s = max(there_s, last_made_s + 1 / REPORTS_HZ)
        self._free_s = max(self._free_s, made_s) + FRAME_BYTES / self.bytes_s
        return self._free_s + self._latency_s, made_s, int((made_s - there_s) * 1000)


def ages(link: Link, num_reports: int, later: dict[int, float]) -> list[float]:
    """Return how old reports are when they come, as they go through a link that changes at some of them."""
    asking, now_s, made_s = PullCredit(MAX_ASKED), 100.0, 0.0
    coming: list[tuple[float, float, int]] = []
    found: list[float] = []
    for number in range(num_reports):
        link.bytes_s = later.get(number, link.bytes_s)
        for _ in asking.asks(now_s):
            at_s, made_s, held_ms = link.come(now_s, made_s)
            coming.append((at_s, made_s, held_ms))
        assert 0 < len(coming) <= MAX_ASKED
        at_s, report_made_s, held_ms = coming.pop(0)
        now_s = max(now_s, at_s)
        ((_, way_s),) = asking.feed(merged(b"x", held_ms), now_s)
        assert way_s >= now_s - report_made_s - 1e-6, "none is newer than it is"
        found.append(now_s - report_made_s)
    return found


@given(st.floats(2_000, 10_000_000), st.floats(0.0, 1.0), st.floats(500, 1_000_000))
def test_however_slow_a_link_becomes_reports_are_soon_as_new_as_it_allows(
    bytes_s: float, latency_s: float, later_bytes_s: float
) -> None:
    found = ages(Link(bytes_s, latency_s), 160, {60: later_bytes_s})

    one_s = latency_s + FRAME_BYTES / later_bytes_s
    assert max(found[-80:]) <= max(one_s + 1e-6, LONG_WAY_S)


@pytest.mark.parametrize("report_s", [0.05, 0.19, 0.21, 0.25, 0.35, 0.45, 0.6])
def test_a_link_that_is_always_as_slow_lets_no_reports_queue_up(report_s: float) -> None:
    found = ages(Link(FRAME_BYTES / report_s, 0.02), 200, {})

    assert max(found[1:]) <= max(report_s + 0.02 + 1e-6, LONG_WAY_S)


def test_where_the_way_is_short_a_question_is_for_many() -> None:
    asking = PullCredit(MAX_ASKED)
    assert asking.asks(1.0) == ASK
    list(asking.feed(merged(b"x"), 1.01))

    num_sent = 0
    for turn in range(10 * MAX_ASKED):
        num_sent += bool(asking.asks(1.01 + turn / 10))
        list(asking.feed(merged(b"x", held_ms=100), 1.01 + turn / 10))

    assert num_sent <= 2 * 10 + 1


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8), st.integers(1, 97))
def test_chunks_may_be_cut_anywhere(frames: list[bytes], size: int) -> None:
    asking = PullCredit(MAX_ASKED)
    heard: list[bytes] = []
    for frame in frames:
        asking.asks(0.0)
        said = merged(frame)
        for begin in range(0, len(said), size):
            heard += [one.reports[0].frame for one, _ in asking.feed(said[begin : begin + size], 0.0)]

    assert heard == frames


def test_what_nobody_has_asked_for_is_refused() -> None:
    asking = PullCredit(MAX_ASKED)
    asking.asks(0.0)

    with pytest.raises(MalformedMessageError, match="asked for"):
        list(asking.feed(merged(b"x") * 2, 0.1))
