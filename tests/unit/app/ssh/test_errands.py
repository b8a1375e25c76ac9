"""Who waits in the place of those who must not."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from app.ssh.worker_pool import SerialQueue, WorkerPool, current_workers, never_wait_here
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0


@pytest.fixture
def errands() -> Iterator[WorkerPool]:
    errands = WorkerPool()
    yield errands
    errands.close()
    until(lambda: not workers(), WAIT_S, "its threads end")


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rankdeck-ssh"]


def test_an_errand_that_blocks_holds_up_no_other(errands: WorkerPool) -> None:
    may_end = threading.Event()
    done = threading.Event()
    for _ in range(3):
        errands.do(lambda: may_end.wait(WAIT_S))
    errands.do(done.set)

    assert done.wait(WAIT_S)
    assert len(workers()) == 4
    may_end.set()


def test_a_thread_that_has_done_one_does_the_next(errands: WorkerPool) -> None:
    seen: list[int] = []
    for number in range(50):
        errands.do(lambda: seen.append(threading.get_ident()))
        until(lambda number=number: len(seen) == number + 1, WAIT_S, "it is done")  # type: ignore[misc]

    assert len(set(seen)) <= 3


def test_in_a_lane_they_go_one_after_the_other_and_lanes_side_by_side(errands: WorkerPool) -> None:
    may_go_on, told = threading.Event(), []
    blocked, other = SerialQueue(errands), SerialQueue(errands)
    blocked.put(lambda: may_go_on.wait(WAIT_S))
    for number in range(100):
        blocked.put(lambda number=number: told.append(number))  # type: ignore[misc]
    is_done = threading.Event()
    other.put(is_done.set)

    assert is_done.wait(WAIT_S)
    assert told == []
    may_go_on.set()
    until(lambda: told == list(range(100)), WAIT_S, "all are done in order")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_one_that_fails_is_told_of_by_its_thread_and_the_next_is_done(errands: WorkerPool) -> None:
    connection, done = SerialQueue(errands), threading.Event()
    connection.put(lambda: 1 // 0)
    connection.put(done.set)

    assert done.wait(WAIT_S)


def test_a_thread_that_must_not_wait_knows_who_does(errands: WorkerPool) -> None:
    found: list[WorkerPool | None] = []

    def look() -> None:
        never_wait_here(errands)
        found.append(current_workers())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(WAIT_S)

    assert found == [errands]
    assert current_workers() is None
