"""Wanted lines are found a piece at a time, and are the same that one look at every line would find."""

from __future__ import annotations

from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS, LineWish
from app.filters.terms import Filter
from app.tui.logs.matches import FIRST_PIECE_BYTES, MAX_PIECE_BYTES, PIECE_S, LogMatches
from app.tui.logs.store import CHUNK_LINES, LogStore


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
    matches.piece_bytes = MAX_PIECE_BYTES
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


@given(
    texts=st.lists(st.text(st.sampled_from("a7 é\u4e16"), max_size=30), min_size=1, max_size=60),
    num_before=st.integers(0, 60),
    sizes=st.lists(st.integers(1, 200), min_size=1),
)
def test_the_same_lines_are_found_whatever_the_pieces_are(texts: list[str], num_before: int, sizes: list[int]) -> None:
    store = LogStore()
    for text in texts[:num_before]:
        store.append("gpu1", 0, text, is_stderr=False)
    matches = LogMatches(wish("7"), store)
    for text in texts[num_before:]:
        store.append("gpu1", 0, text, is_stderr=False)
    size = cycle(sizes)
    matches.piece_bytes = next(size)
    while matches.search():
        matches.piece_bytes = next(size)

    assert numbers(matches) == [number for number, text in enumerate(texts) if "7" in text]


def test_pieces_grow_while_they_are_quick_and_shrink_where_the_pattern_is_slow() -> None:
    matches = LogMatches(wish("7"), LogStore())
    matches.pace(PIECE_S / 2)
    assert matches.piece_bytes == 2 * FIRST_PIECE_BYTES
    matches.pace(1.5 * PIECE_S)
    assert matches.piece_bytes == 2 * FIRST_PIECE_BYTES
    for _ in range(40):
        matches.pace(3 * PIECE_S)
    assert matches.piece_bytes == 1
    for _ in range(40):
        matches.pace(0)
    assert matches.piece_bytes == MAX_PIECE_BYTES


def test_a_pattern_that_is_slow_is_searched_a_little_at_a_time() -> None:
    line, slow_s = "x" * 400, 6e-6  # a byte, of RE2 without its automaton
    store = LogStore()
    for _ in range(CHUNK_LINES):
        store.append("gpu1", 0, line, is_stderr=False)
    matches = LogMatches(wish("7"), store)
    spent_s = []
    while (before := matches.num_unsearched) > 0:
        assert matches.search()
        spent_s.append((before - matches.num_unsearched) * (len(line) + 1) * slow_s)
        matches.pace(spent_s[-1])

    assert max(spent_s) <= FIRST_PIECE_BYTES * slow_s
    assert max(spent_s[3:]) <= 2 * PIECE_S + len(line) * slow_s
