"""How long Python itself holds a program up, with what does it and what does not."""

from __future__ import annotations

import ctypes
import gc
import os
import select
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from ddpcore.probe.process_facts import InterpreterWaits
from ddpcore.wire import WIRE_VERSION, Phase, RankReport, decode_report, encode_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAUSE_S = 0.03
CALL_S = 0.15
NUM_CALLS = 8
REPORT = RankReport(WIRE_VERSION, 0, 0, 1, 1, "job", 0, 1, Phase.FORWARD)


class Waiting:
    """A thread that waits as the probe's does."""

    def __init__(self) -> None:
        self.waits = InterpreterWaits()
        self._end = os.eventfd(0)
        self._wakes = select.poll()
        self._wakes.register(self._end, select.POLLIN)
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._schedstat = ""

    def held_part(self, work: Callable[[], object]) -> float:
        """Return the part of the time of some work for which the lock was held."""
        self._thread.start()
        assert self._has_begun.wait(10.0)
        began_s = time.monotonic()
        work()
        passed_s = time.monotonic() - began_s
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        if self._schedstat == "0 0 0":
            pytest.skip("this kernel does not show for how long a thread had no CPU")
        assert self.waits.gil_held_s is not None
        return self.waits.gil_held_s / passed_s

    def _run(self) -> None:
        self.waits.begin()
        time.sleep(0.001)  # the kernel counts a thread's time once it has let go of its core
        self._has_begun.set()
        self._schedstat = Path("/proc/self/schedstat").read_text().strip()
        while not self.waits.wait(self._wakes, PAUSE_S):
            pass
        self.waits.end()


def test_a_call_in_c_that_keeps_the_lock_holds_it() -> None:
    # PyDLL, unlike CDLL, keeps the lock.
    sleep_us = ctypes.PyDLL(None).usleep

    assert Waiting().held_part(lambda: [sleep_us(int(1e6 * CALL_S)) for _ in range(NUM_CALLS)]) > 0.4


def test_a_call_in_c_that_lets_go_of_the_lock_does_not_hold_it() -> None:
    sleep_us = ctypes.CDLL(None).usleep

    assert Waiting().held_part(lambda: [sleep_us(int(1e6 * CALL_S)) for _ in range(NUM_CALLS)]) < 0.2


def test_a_wake_up_that_was_asked_for_is_not_late() -> None:
    waiting = Waiting()
    assert waiting.held_part(lambda: None) == 0.0


@pytest.fixture
def waits() -> Iterator[InterpreterWaits]:
    waits = InterpreterWaits()
    waits.begin()
    yield waits
    waits.end()


def test_collections_count_and_nothing_does_without_them(waits: InterpreterWaits) -> None:
    gc.disable()
    try:
        before_s = waits.gc_pause_s
        nodes = [[number] for number in range(200_000)]
        assert before_s is not None
        assert waits.gc_pause_s == before_s
        began_s = time.perf_counter()
        gc.collect()
        passed_s = time.perf_counter() - began_s
    finally:
        gc.enable()

    assert len(nodes) == 200_000
    assert 0.2 * passed_s < waits.gc_pause_s - before_s <= passed_s


def test_no_collection_counts_after_the_end_and_no_callback_is_left() -> None:
    before = list(gc.callbacks)
    waits = InterpreterWaits()
    waits.begin()
    waits.end()
    gc.collect()

    assert waits.gc_pause_s == 0.0
    assert gc.callbacks == before
    waits.end()


def test_an_end_of_a_collection_that_was_under_way_at_the_begin_is_no_pause(waits: InterpreterWaits) -> None:
    fresh = InterpreterWaits()
    fresh.gc_pause_s = 0.0
    fresh._on_collection("stop", {})

    assert fresh.gc_pause_s == 0.0


def test_a_report_carries_them_and_is_no_longer_without() -> None:
    waits = InterpreterWaits()
    assert decode_report(encode_report(waits.added_to(REPORT))) == REPORT
    waits.gc_pause_s, waits.gil_held_s = 1.5, 0.5

    assert decode_report(encode_report(waits.added_to(REPORT))) == msgspec.structs.replace(
        REPORT, gc_pause_s=1.5, gil_held_s=0.5
    )
