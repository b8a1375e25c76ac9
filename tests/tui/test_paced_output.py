"""Paints end in a question that the terminal answers: on a real terminal, through Textual's own driver."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.screen_link import Person
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ARGV = [sys.executable, "-m", "tests.support.sim_console"]
TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(Path(__file__).parents[2])}
QUESTION = "\x1b[6n"
WAIT_S = 60.0


@contextmanager
def opened(*, answers: bool = True, **more: str) -> Iterator[Person]:
    person = Person(ARGV, {**TERMINAL, **more})
    if not answers:
        person.stop_answering()
    try:
        person.until_painted("Overview", WAIT_S)
        yield person
    finally:
        person.close()


def asks_nothing(person: Person, for_s: float = 1) -> bool:
    try:
        person.until_painted(QUESTION, for_s)
    except TimeoutError:
        return True
    return False


def test_every_paint_ends_in_a_question_and_answers_are_no_keys() -> None:
    with opened() as person:
        for _ in range(5):
            person.until_painted(QUESTION, WAIT_S)
        person.key(b"2", "WAIT SHARE", WAIT_S)

        assert person.process.poll() is None


def test_without_pacing_no_question_is_asked() -> None:
    with opened(RANKDECK_PACING="0") as person:
        person.key(b"2", "WAIT SHARE", WAIT_S)
        assert asks_nothing(person)


def test_a_terminal_that_answers_nothing_is_painted_and_its_keys_count() -> None:
    with opened(answers=False) as person:
        person.key(b"2", "WAIT SHARE", WAIT_S)
        until(lambda: asks_nothing(person), 60, "it asks no more")
        painted = person.num_bytes
        person.wait_until(lambda: person.num_bytes > painted + 20_000, WAIT_S, "it paints on")


def test_no_answer_is_left_for_the_shell() -> None:
    with opened(SIM_LAST_ANSWER_S=str(WAIT_S)) as person:
        person.stop_answering()
        person.until_painted(QUESTION, WAIT_S)
        person.type(b"q")
        person.wait(0.3)  # the way back of the answer
        person.answer()
        person.wait_until(lambda: person.process.poll() is not None, WAIT_S, "the console has gone")

        assert person.unread() == b""
