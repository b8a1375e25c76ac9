"""Lines that several ranks print alike are one row that keeps its place."""

from __future__ import annotations

from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS, LineWish
from app.filters.terms import Filter
from app.tui.logs.matches import MAX_LINES, NEAR_ROWS, PIECE_LINES, CollapsedLines, LogMatches
from app.tui.logs.store import CHUNK_LINES, LogStore


def told(store: LogStore, *lines: tuple[int, str], is_stderr: bool = False) -> None:
    for rank, text in lines:
        store.append("gpu1", rank, text, is_stderr=is_stderr)


def rows(collapsed: CollapsedLines) -> list[tuple[str, list[int]]]:
    while collapsed.search():
        pass
    places = range(len(collapsed))
    return [(collapsed.logs.line(collapsed.number(at)).text, sorted(collapsed.ranks(at))) for at in places]


def test_lines_of_several_ranks_are_one_row_where_the_first_one_came() -> None:
    store = LogStore()
    told(store, (0, "ready"), (0, "loss 2.1"), (2, "ready"), (1, "ready"), (1, "loss 2.2"))
    collapsed = CollapsedLines(store, None)

    assert rows(collapsed) == [("ready", [0, 1, 2]), ("loss 2.1", [0]), ("loss 2.2", [1])]
    told(store, (3, "ready"), (3, "loss 2.2"))
    assert rows(collapsed) == [("ready", [0, 1, 2, 3]), ("loss 2.1", [0]), ("loss 2.2", [1, 3])]
    assert [collapsed.place_of(number) for number in (0, 1, 2, 5)] == [0, 1, 2, 3]


def test_what_a_rank_prints_again_is_a_row_again() -> None:
    store = LogStore()
    told(store, (0, "ready"), (1, "ready"), (0, "ready"), (1, "ready"))

    assert rows(CollapsedLines(store, None)) == [("ready", [0, 1]), ("ready", [0, 1])]


def test_streams_and_launchers_stay_apart_and_ranks_that_name_themselves_do_not() -> None:
    store = LogStore()
    told(store, (0, "ready"), (-1, "ready"), (-1, "ready"))
    told(store, (1, "ready"), is_stderr=True)
    told(store, (0, "[rank0]: lost"), (1, "[rank1]: lost"), (2, "[default2]:lost"))

    assert rows(CollapsedLines(store, None)) == [
        ("ready", [0]),
        ("ready", [-1]),
        ("ready", [-1]),
        ("ready", [1]),
        ("[rank0]: lost", [0, 1, 2]),
    ]


def test_a_line_joins_no_row_that_is_far_back() -> None:
    store = LogStore()
    told(store, (0, "ready"), *((0, f"step {number}") for number in range(5 * NEAR_ROWS)), (1, "ready"))
    found = rows(CollapsedLines(store, None))

    assert len(found) == 5 * NEAR_ROWS + 2
    assert found[-1] == ("ready", [1])


def test_of_wanted_lines_only_those_are_rows() -> None:
    store = LogStore()
    told(store, (0, "ready"), (0, "other"), (1, "ready"))
    read = read_filter("ready", LOG_KEYS)
    assert isinstance(read, Filter)
    matches = LogMatches(LineWish(read), store)
    had_all_old = matches.has_all_old
    while matches.search():
        pass
    assert (had_all_old, matches.has_all_old) == (False, True)

    assert rows(CollapsedLines(store, matches)) == [("ready", [0, 1])]
    assert rows(CollapsedLines(LogStore(), LogMatches(LineWish(read), LogStore()))) == []


def test_rows_whose_lines_are_dropped_go_and_lines_far_back_are_left_out() -> None:
    store = LogStore(max_lines=CHUNK_LINES)
    told(store, *((number % 2, f"step {number // 2}") for number in range(CHUNK_LINES)))
    collapsed = CollapsedLines(store, None)
    assert len(rows(collapsed)) == CHUNK_LINES // 2
    told(store, *((number % 2, f"step {number // 2}") for number in range(CHUNK_LINES, CHUNK_LINES + 4)))

    assert rows(collapsed) == [(f"step {CHUNK_LINES // 2}", [0, 1]), (f"step {CHUNK_LINES // 2 + 1}", [0, 1])]

    large = LogStore()
    told(large, *((0, f"step {number}") for number in range(MAX_LINES + 10)))
    few = CollapsedLines(large, None)
    assert few.search()
    assert len(few) == PIECE_LINES
    assert few.number(0) == 10
    assert few.num_lines == MAX_LINES
    told(large, (0, "one more"))
    assert few.num_lines == MAX_LINES + 1
    assert collapsed.num_lines == len(store)


def test_of_many_wanted_lines_the_newest_are_rows() -> None:
    store = LogStore()
    told(store, *((0, f"step {number}") for number in range(MAX_LINES + 10)), (1, "other"))
    read = read_filter("step", LOG_KEYS)
    assert isinstance(read, Filter)
    matches = LogMatches(LineWish(read), store)
    while matches.search():
        pass
    collapsed = CollapsedLines(store, matches)

    assert collapsed.num_lines == MAX_LINES + 1
    assert collapsed.search()
    assert collapsed.numbers.tolist() == list(range(10, 10 + PIECE_LINES))
