"""Which events are shown."""

from __future__ import annotations

import pytest

from app.diagnosis.causes import Severity
from app.filters.language import read_filter
from app.filters.lines import EVENT_KEYS, is_event_shown
from app.filters.terms import Filter
from app.recording.events import Event, EventKind

EVENTS = (
    Event(1.0, EventKind.NODE, Severity.OK, "node gpu1: up"),
    Event(2.0, EventKind.VERDICT, Severity.CRITICAL, "rank 2 on gpu1 is frozen", (2,)),
    Event(3.0, EventKind.OVER, Severity.OK, "rank 2: no longer frozen, after 4.2 s", (2,)),
    Event(4.0, EventKind.VERDICT, Severity.WARNING, "ranks 3-4 on gpu1 are slow", (3, 4)),
)


@pytest.mark.parametrize(
    ("text", "is_problems_only", "places"),
    [
        ("", False, [0, 1, 2, 3]),
        ("", True, [1, 3]),
        ("kind=verdict,over", False, [1, 2, 3]),
        ("!severity=ok", False, [1, 3]),
        ("rank=2", False, [1, 2]),
        ("rank=4", False, [3]),
        ("rank=5", False, []),
        ("!rank=2", False, [0, 3]),
        ("FROZEN", False, []),
        ("frozen !/no longer/", False, [1]),
    ],
)
def test_a_filter_shows_the_events_that_it_is_true_of(text: str, is_problems_only: bool, places: list[int]) -> None:
    read = read_filter(text, EVENT_KEYS)
    assert isinstance(read, Filter)

    shown = [is_event_shown(event, read, is_problems_only=is_problems_only) for event in EVENTS]

    assert [place for place, is_shown in enumerate(shown) if is_shown] == places
