from __future__ import annotations

import threading

from app.errors import AppError, UsageError
from app.in_parallel import MAX_HOSTS_AT_ONCE, in_parallel


def test_answers_come_in_order_and_a_failure_is_one_of_them() -> None:
    second_is_known = threading.Event()

    def do(number: int) -> int:
        if number == 1:
            assert second_is_known.wait(10)
        if number == 2:
            second_is_known.set()
            raise UsageError("two")
        return 10 * number

    answers = dict(in_parallel([1, 2, 3], do))

    assert list(answers) == [1, 2, 3]
    assert (answers[1], answers[3]) == (10, 30)
    assert isinstance(answers[2], AppError)


def test_no_more_than_so_many_are_at_it_at_once() -> None:
    lock, at_work, most = threading.Lock(), 0, 0
    is_full = threading.Event()

    def do(_: int) -> None:
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
            if at_work == MAX_HOSTS_AT_ONCE:
                is_full.set()
        assert is_full.wait(10)
        with lock:
            at_work -= 1

    assert len(list(in_parallel(range(3 * MAX_HOSTS_AT_ONCE), do))) == 3 * MAX_HOSTS_AT_ONCE
    assert most == MAX_HOSTS_AT_ONCE


def test_nothing_to_do_is_done_at_once() -> None:
    assert list(in_parallel([], str)) == []
