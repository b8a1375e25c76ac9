"""One thing done to many: in their order, many at once, and whatever one does."""

from __future__ import annotations

import threading

from app.errors import UsageError
from app.threads import MAX_PARALLEL, run_parallel

PATIENCE_S = 10.0


def test_answers_come_in_order_and_one_that_fails_stops_no_other() -> None:
    def third(number: int) -> int:
        if number % 3 == 0:
            raise UsageError(f"not {number}")
        return 10 * number

    answers = [*run_parallel(range(100), third)]

    assert [str(answer) for answer in answers[:4]] == ["not 0", "10", "20", "not 3"]
    assert answers[98] == 980
    assert [*run_parallel([], third)] == []


def test_as_many_as_may_be_run_at_the_same_time() -> None:
    together = threading.Barrier(MAX_PARALLEL)

    assert [*run_parallel(range(MAX_PARALLEL), lambda _: together.wait(PATIENCE_S) >= 0)] == [True] * MAX_PARALLEL


def test_an_answer_is_told_before_the_later_ones_are_known() -> None:
    is_told = threading.Event()

    answers = run_parallel([False, True], lambda waits: not waits or is_told.wait(PATIENCE_S))

    assert next(answers) is True
    is_told.set()
    assert next(answers) is True
