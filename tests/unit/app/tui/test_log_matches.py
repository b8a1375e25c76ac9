"""Wanted lines are found a piece at a time, and are the same that one look at every line would find."""

from __future__ import annotations

from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS, LineWish
from app.filters.terms import Filter
from app.tui.log_matches import LogMatches
from app.tui.log_store import CHUNK_LINES, LogStore


def wish(text: str) -> LineWish:
    read = read_filter(text, LOG_KEYS)
    assert isinstance(read, Filter)
    return LineWish(read)


def talk(store: LogStore, count: int) -> None:
    for number in range(store.end, store.end + count):
        store.append("gpu1", number % 4, f"line {number}", is_stderr=False)


def numbers(matches: LogMatches) -> list[int]:
    return [matches.number(place) for place in range(len(matches))]


def wanted(store: LogStore) -> list[int]:
    return [number for number in range(store.first, store.end) if "7" in str(number)]


def test_old_lines_are_found_from_the_newest_back_and_new_ones_first() -> None:
    store = LogStore()
    talk(store, 2 * CHUNK_LINES + 100)
    matches = LogMatches(wish("7"), store)
    assert (len(matches), matches.num_unsearched) == (0, store.end)

    assert matches.search()
    assert numbers(matches) == [number for number in wanted(store) if number >= 2 * CHUNK_LINES]
    assert matches.num_unsearched == 2 * CHUNK_LINES

    talk(store, 80)
    assert matches.search()
    assert matches.number(len(matches) - 1) == max(wanted(store))
    while matches.search():
        pass

    assert numbers(matches) == wanted(store)
    assert matches.num_unsearched == 0
    assert not matches.search()


def test_lines_that_are_dropped_are_forgotten_wherever_they_were_found() -> None:
    store = LogStore(max_lines=2 * CHUNK_LINES)
    talk(store, CHUNK_LINES)
    matches = LogMatches(wish("7"), store)
    for _ in range(5):
        talk(store, CHUNK_LINES - 10)
        while matches.search():
            pass

        assert numbers(matches) == wanted(store)


def test_lines_that_are_dropped_before_they_were_looked_at_are_not_missed() -> None:
    store = LogStore(max_lines=CHUNK_LINES)
    talk(store, 10)
    matches = LogMatches(wish("7"), store)
    talk(store, 3 * CHUNK_LINES)
    while matches.search():
        pass

    assert numbers(matches) == wanted(store)


def test_the_place_of_a_line_is_that_of_the_next_wanted_one() -> None:
    store = LogStore()
    talk(store, 100)
    matches = LogMatches(wish("7"), store)
    while matches.search():
        pass
    talk(store, 10)
    while matches.search():
        pass

    assert numbers(matches)[:4] == [7, 17, 27, 37]
    assert [matches.place_of(number) for number in (0, 7, 8, 107, 108)] == [0, 0, 1, len(matches) - 1, len(matches)]


def test_a_store_that_is_held_shows_what_was_there_and_loses_nothing() -> None:
    store = LogStore(max_lines=CHUNK_LINES)
    talk(store, 10)
    store.hold(is_held=True)
    for number in range(10, 15):
        store.append("gpu1", 0, f"line {number}", is_stderr=False)
    matches = LogMatches(wish("line"), store)
    while matches.search():
        pass

    assert (len(store), store.end, len(matches)) == (10, 10, 10)
    for number in range(15, 2 * CHUNK_LINES):
        store.append("gpu1", 0, f"line {number}", is_stderr=False)
    assert (len(store), store.end) == (0, CHUNK_LINES)

    store.hold(is_held=False)
    assert len(store) == CHUNK_LINES
    assert store.line(store.first).text == f"line {CHUNK_LINES}"
