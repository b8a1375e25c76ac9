"""Threads find the same lines as one look at each, whichever of them is done first, and are gone afterwards."""

from __future__ import annotations

import gc
import random
import re
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from app.filters.lines import LineWish, LogPiece, lines_of
from app.filters.patterns import TextPattern
from app.filters.terms import Filter, TextTerm
from app.tui.logs import search as log_search
from app.tui.logs import store as log_store
from app.tui.logs.matches import FIRST_PIECE_BYTES, MAX_PIECE_BYTES
from app.tui.logs.search import MAX_COPIED_BYTES, LogSearch, SearchThreads
from app.tui.logs.store import CHUNK_LINES, LogStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S = 60.0
TEXTS = st.lists(st.text("anifANI 7\u00e9", max_size=12), min_size=1, max_size=60)
LABEL = st.sampled_from(["a", "n", "nan", "inf", "i f", "7", "IN", "\u00e9", ".", "[an]", "[^a]", r"\d", r"\w", r"\b"])


def _grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    few = st.lists(parts, min_size=1, max_size=3)
    repeated = st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    return few.map("".join) | few.map(lambda words: f"({'|'.join(words)})") | few.map(".*".join) | repeated


PATTERNS = st.tuples(
    st.sampled_from(["", "(?i)"]), st.sampled_from(["", "^"]), st.recursive(LABEL, _grown), st.sampled_from(["", "$"])
).map("".join)


class AnyOrder(SearchThreads):
    """Does what it is asked to only when a result is waited for, in an order of its own; some waits are in vain."""

    def __init__(self, dice: random.Random, patience: float) -> None:
        super().__init__(0)
        self.asked: list[tuple[Future[Any], partial[Any]]] = []
        self.dice = dice
        self.patience = patience
        self.num_done = 0

    def ask(self, call: Callable[[], Any]) -> Future[Any]:
        assert isinstance(call, partial)
        future = _Asked(self)
        self.asked.append((future, call))
        return future

    def do_one(self) -> None:
        """Do anything that is still to be done."""
        future, call = self.asked.pop(self.dice.randrange(len(self.asked)))
        future.set_result(call())
        self.num_done += 1


class _Asked(Future[Any]):
    def __init__(self, threads: AnyOrder) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            if self._threads.dice.random() >= self._threads.patience:
                raise TimeoutError
            self._threads.do_one()
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


def a_and_b() -> LogStore:
    store = LogStore()
    keep(store, ["a", "b"] * 300)
    return store


def begun(source: str, store: LogStore, threads: Callable[[], SearchThreads]) -> LogSearch:
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
    with small_chunks():
        store = LogStore()
        keep(store, texts)

        assert finish(begun(source, store, lambda: SearchThreads(3))) == as_python_finds(source, texts)


@given(texts=TEXTS, seed=st.integers(), patience=st.floats(0.5, 1.0), is_slow=st.booleans())
def test_the_same_is_found_in_whatever_order_threads_are_done(
    texts: list[str], seed: int, patience: float, is_slow: bool
) -> None:
    threads = AnyOrder(random.Random(seed), patience)
    with small_chunks(), patch.object(log_search, "PIECE_S", 0.0 if is_slow else 1e9):
        store = LogStore()
        keep(store, texts)

        search = begun("a|7", store, lambda: threads)

        assert finish(search) == as_python_finds("a|7", texts)
        assert (search.num_unsearched, threads.is_over.is_set()) == (0, True)


@given(seed=st.integers(), later=st.lists(st.integers(0, 5), max_size=40), max_lines=st.integers(1, 12))
def test_lines_that_come_and_go_meanwhile_are_neither_missed_nor_shown(
    seed: int, later: list[int], max_lines: int
) -> None:
    threads = AnyOrder(random.Random(seed), 1.0)
    texts = [f"line {number}" for number in range(40)]
    with small_chunks():
        store = LogStore(max_lines)
        keep(store, texts)
        search = begun("[02468]$", store, lambda: threads)
        for count in later:
            search.search()
            assert all(store.first <= number < store.end for number in search.numbers)
            more = [f"line {store.end + number}" for number in range(count)]
            keep(store, more)
            texts += more
        found = finish(search)

        assert found == [number for number in as_python_finds("[02468]$", texts) if number >= store.first]


def test_a_pattern_that_becomes_slow_goes_on_in_small_pieces_without_threads() -> None:
    threads = AnyOrder(random.Random(0), 1.0)
    with small_chunks(), patch.object(log_search, "SLOW_PIECE_S", 0.0):
        store = a_and_b()
        search = begun("a", store, lambda: threads)
        assert search.search()
        num_done, num_left = threads.num_done, len(threads.asked)

        assert search.piece_bytes == FIRST_PIECE_BYTES
        assert finish(search) == list(range(0, 600, 2))
    assert num_done > 0
    assert (threads.num_done, len(threads.asked)) == (num_done, num_left)


def test_threads_that_would_wait_for_each_other_take_turns() -> None:
    inside, most = threading.Semaphore(2), list[int]()

    def counting(*of: Any) -> Any:
        with inside:
            most.append(2 - inside._value)
            threading.Event().wait(0.002)  # another one would come in meanwhile
            return lines_of(*of)

    with small_chunks(), patch.object(log_search, "lines_of", counting):
        store = a_and_b()
        threads = SearchThreads(2)
        threads.takes_turns.set()
        search = begun("a", store, lambda: threads)

        assert finish(search) == list(range(0, 600, 2))
        threads.join()
    assert most.count(1) == len(most) > 50


def test_a_piece_that_takes_its_time_has_threads_take_turns() -> None:
    threads = AnyOrder(random.Random(0), 1.0)
    with small_chunks(), patch.object(log_search, "PIECE_S", 0.0):
        store = a_and_b()
        search = begun("a", store, lambda: threads)
        assert search.search()
        assert not search.has_all_old
        assert (threads.takes_turns.is_set(), threads.is_over.is_set()) == (True, False)
        assert finish(search) == list(range(0, 600, 2))


def test_a_pattern_that_is_slow_from_the_first_asks_for_no_thread() -> None:
    def refuse() -> SearchThreads:
        raise AssertionError("no thread is wanted")

    store = LogStore()
    keep(store, ["a", "b"] * 30)

    assert finish(LogSearch(wish("a"), store, refuse)) == list(range(0, 60, 2))


def test_threads_end_with_the_search_and_with_whoever_lets_go_of_it() -> None:
    with small_chunks(), patch.object(log_search, "SLOW_PIECE_S", 1e9):  # a collection of garbage may take 20 ms
        store = a_and_b()
        search = begun("a", store, lambda: SearchThreads(2))
        search.search()
        assert _num_threads() > 0
        finish(search)
        _until_no_threads()

        search = begun("a", store, lambda: SearchThreads(2))
        search.search()
        assert search.num_unsearched > 0
        del search
        _until_no_threads()


SLOW = r"\d.{200}error"
"""RE2 gives up its automaton of it on random digits."""


def slow_behind_quick() -> LogStore:
    """Return lines whose oldest take 2 s a MiB by `SLOW`, and whose newest take no time."""
    dice = random.Random(1)
    store = LogStore()
    keep(store, ["".join(dice.choices("0123456789abc", k=1023)) for _ in range(CHUNK_LINES)])
    keep(store, ["x" * 1023] * (2 * CHUNK_LINES + 1))
    return store


def in_slow_lines(source: str, store: LogStore) -> LogSearch:
    """Return a search of which a thread has begun to look at slow lines, and does not take them for that."""
    search = begun(source, store, lambda: SearchThreads(2))
    with patch.multiple(log_search, PIECE_S=1e9, SLOW_PIECE_S=1e9):
        search.search()
    assert [task.places.done() for task in search._tasks] == [False]
    return search


def test_threads_in_slow_lines_end_within_a_step_of_the_searches_that_are_dropped() -> None:
    store = slow_behind_quick()
    for number in range(5):
        in_slow_lines(f"{SLOW}{number}", store)
    began_s = time.process_time()
    _until_no_threads()
    # Each of five threads has 9 s of a quiet core's time before it, and 2 up to the end of its piece; a step is 0.15.
    assert time.process_time() - began_s < 5


def test_the_interpreter_ends_soon_and_well_while_threads_are_in_slow_lines() -> None:
    script = """if True:
        import threading
        import time
        from tests.unit.app.tui import test_log_search as tests

        class Last:
            # Takes longer to be freed than threads to come back from RE2, by when they are to have ended.
            def __del__(self, wait=threading.Event().wait):
                wait(1)

        last = Last()
        store = tests.slow_behind_quick()
        kept = tests.in_slow_lines(tests.SLOW, store)
        tests.in_slow_lines(tests.SLOW + "s", store)  # dropped
        print(time.process_time(), flush=True)
    """
    before_s = _children_cpu_s()
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    # Of a core, not of a clock: the threads would take 18 s of it up to the end of what they have begun.
    assert _children_cpu_s() - before_s - float(run.stdout) < 5


def test_asking_copies_a_few_pieces_of_the_newest_chunk_however_long_the_lines_are() -> None:
    asked = AnyOrder(random.Random(0), 0.5)
    store = LogStore()
    keep(store, ["x" * 1023] * (10 * CHUNK_LINES) + ["x" * 2047] * (CHUNK_LINES - 1))
    search = begun("nothing", store, lambda: asked)
    num_copied: list[int] = []
    while search.search():
        pieces = [piece for _, call in asked.asked for piece in call.args[0]]
        num_copied.append(sum(len(piece.packed) for piece in pieces if not isinstance(piece.packed, memoryview)))

    # What has been done by the end of a go is no longer held.
    assert 0 < max(num_copied) <= MAX_COPIED_BYTES
    assert search.num_unsearched == 0


def test_what_has_been_looked_at_is_not_held_while_nobody_asks_for_it() -> None:
    store = LogStore()
    keep(store, ["x" * 100] * (10 * CHUNK_LINES))
    search = begun("nothing", store, lambda: SearchThreads(2))
    search.search()
    assert search._tasks
    while not all(task.places.done() for task in search._tasks):
        threading.Event().wait(0.001)
    end_s = time.monotonic() + DEADLINE_S
    gc.collect()  # of other tests
    while any(type(each) is LogPiece for each in gc.get_objects()):  # none is asked for its class
        assert time.monotonic() < end_s, "pieces are held"
    assert finish(search) == []


def _children_cpu_s() -> float:
    """Return the CPU time of the processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _num_threads() -> int:
    return sum(thread.name == "rankdeck-search" for thread in threading.enumerate())


def _until_no_threads() -> None:
    end_s = time.monotonic() + DEADLINE_S
    while _num_threads():
        assert time.monotonic() < end_s, "threads are left behind"
        threading.Event().wait(0.001)
