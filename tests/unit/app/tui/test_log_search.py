"""Threads find the same lines as one look at each, whichever of them is done first, and are gone afterwards."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from app.filters.lines import LineWish
from app.filters.patterns import TextPattern
from app.filters.terms import Filter, TextTerm
from app.tui import log_search, log_store
from app.tui.log_matches import FIRST_PIECE_BYTES, MAX_PIECE_BYTES
from app.tui.log_search import LogSearch
from app.tui.log_store import LogStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S = 10.0
TEXTS = st.lists(st.text("anifANI 7\u00e9", max_size=12), min_size=1, max_size=60)
WORDS = st.sampled_from(["a", "n", "nan", "inf", "i f", "7", "IN", "\u00e9", ".", "[an]", "[^a]", r"\d", r"\w", r"\b"])


def _grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    few = st.lists(parts, min_size=1, max_size=3)
    repeated = st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    return few.map("".join) | few.map(lambda words: f"({'|'.join(words)})") | few.map(".*".join) | repeated


PATTERNS = st.tuples(
    st.sampled_from(["", "(?i)"]), st.sampled_from(["", "^"]), st.recursive(WORDS, _grown), st.sampled_from(["", "$"])
).map("".join)


class AnyOrder(Executor):
    """Does what it is asked to only when a result is waited for, in an order of its own; some waits are in vain."""

    def __init__(self, dice: random.Random, patience: float) -> None:
        self.asked: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.dice = dice
        self.patience = patience
        self.num_done = 0
        self.is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Asked(self)
        self.asked.append((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        self.is_closed = True

    def do_one(self) -> None:
        """Do anything that is still to be done."""
        future, call = self.asked.pop(self.dice.randrange(len(self.asked)))
        if future.set_running_or_notify_cancel():
            future.set_result(call())
            self.num_done += 1


class _Asked(Future[Any]):
    def __init__(self, executor: AnyOrder) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            if self._executor.dice.random() >= self._executor.patience:
                raise TimeoutError
            self._executor.do_one()
        return super().result(timeout)


@contextmanager
def small_chunks() -> Iterator[None]:
    with patch.object(log_store, "CHUNK_LINES", 3):
        yield


def wish(source: str) -> LineWish:
    return LineWish(Filter(source, (TextTerm(TextPattern(source)),)))


def keep(store: LogStore, texts: list[str]) -> None:
    for text in texts:
        store.append("gpu1", 0, text, is_stderr=False)


def begun(source: str, store: LogStore, threads: Callable[[], Executor]) -> LogSearch:
    """Return a search whose pattern has already shown to be quick."""
    search = LogSearch(wish(source), store, threads)
    search.piece_bytes = MAX_PIECE_BYTES
    return search


def finish(search: LogSearch) -> list[int]:
    while search.search():
        pass
    return [search.number(place) for place in range(len(search))]


def as_python_finds(source: str, texts: list[str]) -> list[int]:
    pattern = re.compile(source, re.ASCII | (0 if any(map(str.isupper, source)) else re.IGNORECASE))
    return [number for number, text in enumerate(texts) if pattern.search(text)]


@given(texts=TEXTS, source=PATTERNS)
@example(texts=["", "an INF", "nan", "none", "a in f", "iNf"], source="nan|inf|overflow")
@example(texts=["a", "b a", "", "a b"], source="^(?:a|b)$|b$")
def test_threads_find_what_python_finds_in_each_line(texts: list[str], source: str) -> None:
    with small_chunks(), ThreadPoolExecutor(3) as threads:
        store = LogStore()
        keep(store, texts)

        assert finish(begun(source, store, lambda: threads)) == as_python_finds(source, texts)


@given(texts=TEXTS, seed=st.integers(), patience=st.floats(0.5, 1.0), is_slow=st.booleans())
def test_the_same_is_found_in_whatever_order_threads_are_done(
    texts: list[str], seed: int, patience: float, is_slow: bool
) -> None:
    executor = AnyOrder(random.Random(seed), patience)
    with small_chunks(), patch.object(log_search, "PIECE_S", 0.0 if is_slow else 1e9):
        store = LogStore()
        keep(store, texts)

        search = begun("a|7", store, lambda: executor)

        assert finish(search) == as_python_finds("a|7", texts)
        assert (search.num_unsearched, executor.is_closed) == (0, True)


@given(seed=st.integers(), later=st.lists(st.integers(0, 5), max_size=40), max_lines=st.integers(1, 12))
def test_lines_that_come_and_go_meanwhile_are_neither_missed_nor_shown(
    seed: int, later: list[int], max_lines: int
) -> None:
    executor = AnyOrder(random.Random(seed), 1.0)
    texts = [f"line {number}" for number in range(40)]
    with small_chunks():
        store = LogStore(max_lines)
        keep(store, texts)
        search = begun("[02468]$", store, lambda: executor)
        for count in later:
            search.search()
            assert all(store.first <= number < store.end for number in search.numbers)
            more = [f"line {store.end + number}" for number in range(count)]
            keep(store, more)
            texts += more
        found = finish(search)

        assert found == [number for number in as_python_finds("[02468]$", texts) if number >= store.first]


def test_a_pattern_that_becomes_slow_goes_on_in_small_pieces_without_threads() -> None:
    executor = AnyOrder(random.Random(0), 1.0)
    with small_chunks(), patch.object(log_search, "PIECE_S", 0.0):
        store = LogStore()
        keep(store, ["a", "b"] * 300)
        search = begun("a", store, lambda: executor)
        assert search.search()
        num_done, num_left = executor.num_done, len(executor.asked)

        assert search.piece_bytes == FIRST_PIECE_BYTES
        assert finish(search) == list(range(0, 600, 2))
    assert num_done > 0
    assert (executor.num_done, len(executor.asked)) == (num_done, num_left)


def test_a_pattern_that_is_slow_from_the_first_asks_for_no_thread() -> None:
    def refuse() -> Executor:
        raise AssertionError("no thread is wanted")

    store = LogStore()
    keep(store, ["a", "b"] * 30)

    assert finish(LogSearch(wish("a"), store, refuse)) == list(range(0, 60, 2))


def test_threads_end_with_the_search_and_with_whoever_lets_go_of_it() -> None:
    with small_chunks():
        store = LogStore()
        keep(store, ["a", "b"] * 300)
        search = begun("a", store, lambda: ThreadPoolExecutor(2, "search-under-test"))
        search.search()
        assert _num_threads() > 0
        finish(search)
        _until_no_threads()

        search = begun("a", store, lambda: ThreadPoolExecutor(2, "search-under-test"))
        search.search()
        assert search.num_unsearched > 0
        del search
        _until_no_threads()


def _num_threads() -> int:
    return sum(thread.name.startswith("search-under-test") for thread in threading.enumerate())


def _until_no_threads() -> None:
    end_s = time.monotonic() + DEADLINE_S
    while _num_threads():
        assert time.monotonic() < end_s, "threads are left behind"
        threading.Event().wait(0.001)
