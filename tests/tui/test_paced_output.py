"""Paints end in a question that the terminal answers: on a real terminal, through Textual's own driver."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.screen_link import LocalUser
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

ARGV = [sys.executable, "-m", "tests.support.sim_console"]
TERMINAL = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(Path(__file__).parents[2])}
QUESTION = "\x1b[6n"
WAIT_S = 60.0


@contextmanager
def opened(*, answers: bool = True, **more: str) -> Iterator[LocalUser]:
    local_user = LocalUser(ARGV, {**TERMINAL, **more})
    if not answers:
        local_user.stop_answering()
    try:
        local_user.until_painted("Overview", WAIT_S)
        yield local_user
    finally:
        local_user.close()


def asks_nothing(local_user: LocalUser, for_s: float = 1) -> bool:
    try:
        local_user.until_painted(QUESTION, for_s)
    except TimeoutError:
        return True
    return False


def test_every_paint_ends_in_a_question_and_answers_are_no_keys() -> None:
    with opened() as local_user:
        for _ in range(5):
            local_user.until_painted(QUESTION, WAIT_S)
        local_user.key(b"2", "WAIT SHARE", WAIT_S)

        assert local_user.process.poll() is None


def test_without_pacing_no_question_is_asked() -> None:
    with opened(RANKDECK_PACING="0") as local_user:
        local_user.key(b"2", "WAIT SHARE", WAIT_S)
        assert asks_nothing(local_user)


def test_a_terminal_that_answers_nothing_is_painted_and_its_keys_count() -> None:
    with opened(answers=False) as local_user:
        local_user.key(b"2", "WAIT SHARE", WAIT_S)
        until(lambda: asks_nothing(local_user), 60, "it asks no more")
        painted = local_user.num_bytes
        local_user.wait_until(lambda: local_user.num_bytes > painted + 20_000, WAIT_S, "it paints on")


def test_no_answer_is_left_for_the_shell() -> None:
    with opened(SIM_LAST_ANSWER_S=str(WAIT_S)) as local_user:
        local_user.stop_answering()
        local_user.until_painted(QUESTION, WAIT_S)
        local_user.type(b"q")
        local_user.wait(0.3)  # the way back of the answer
        local_user.answer()
        local_user.wait_until(lambda: local_user.process.poll() is not None, WAIT_S, "the console has gone")

        assert local_user.unread() == b""
