"""Who is asked by whom: the terminal before there is a screen, then the console, one question at a time, or nobody."""

from __future__ import annotations

import threading

import pytest

from app.cli.options import desk_of
from app.cli.terminal import DESK
from app.session.options import SessionOptions
from app.session.remote_session import RemoteSession
from app.ssh.questions import Question, QuestionDesk
from tests.support.doors import Door
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.waiting import until


class Asker:
    """A thread that asks."""

    def __init__(self, desk: QuestionDesk, text: str) -> None:
        self.answer: str | None = "none yet"
        self._desk = desk
        self._text = text
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self.answer = self._desk.ask(self._text)

    def end(self) -> str | None:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.answer


@pytest.fixture
def desk() -> QuestionDesk:
    return QuestionDesk(LocalUser(["from the terminal"]))


def asked(desk: QuestionDesk, after: int = 0) -> Question:
    def question() -> Question | None:
        found = desk.question
        return found if found is not None and found.number > after else None

    found = until(question, 10, "something is asked")
    assert found is not None
    return found


def test_until_a_console_attends_the_terminal_asks_and_after_it_nobody() -> None:
    local_user = LocalUser(["first", "second"])
    desk = QuestionDesk(local_user)
    desk.show("before")
    assert (desk.can_ask(), desk.ask("Well? ")) == (True, "first")
    desk.attend()
    desk.show("meanwhile")
    assert (desk.can_ask(), desk.ask("Well? ")) == (False, None), "nobody has said that they may be asked"
    desk.leave()
    assert (desk.can_ask(), desk.ask("Well? ")) == (False, None), "a way that was begun with the console is still gone"
    desk.show("after")
    assert local_user.asked == ["Well? "]
    assert local_user.notes == ["before", "after"]


def test_questions_of_several_threads_come_one_after_the_other(desk: QuestionDesk) -> None:
    desk.attend()
    desk.begin("h1")
    askers = [Asker(desk, f"{number}? ") for number in range(3)]
    number = 0
    for _ in askers:
        question = asked(desk, number)
        number = question.number
        assert question.host == "h1"
        desk.answer(number - 1, "too late")
        desk.answer(number, f"answer to {question.lines[0]}")
    assert [asker.end() for asker in askers] == [f"answer to {number}? " for number in range(3)]


def test_what_was_said_comes_with_the_next_question_and_else_at_the_end(desk: QuestionDesk) -> None:
    desk.attend()
    desk.begin("h1")
    desk.show("Lab\nHurry \x1b[2J.")
    asker = Asker(desk, "Code: \x9b2J")
    question = asked(desk)
    assert question.notes == ("Lab", "Hurry \\x1b[2J.")
    assert question.lines == ("Code: \\x9b2J",)
    desk.answer(question.number, "1")
    asker.end()
    desk.show("h1 is added")
    assert desk.drain_notes() == [], "a question may still come"
    assert not desk.end()
    assert desk.drain_notes() == ["h1 is added"]


def test_not_now_holds_until_one_begins_again(desk: QuestionDesk) -> None:
    desk.attend()
    desk.begin("h1")
    asker = Asker(desk, "Code: ")
    desk.answer(asked(desk).number, None)
    assert asker.end() is None
    assert (desk.can_ask(), desk.ask("Code: ")) == (False, None)
    assert desk.end()
    desk.begin("h1")
    assert desk.can_ask()


@pytest.mark.parametrize("how", ["end", "leave"])
def test_a_question_that_is_open_when_all_is_over_is_let_go(desk: QuestionDesk, how: str) -> None:
    desk.attend()
    desk.begin("h1")
    asker = Asker(desk, "Code: ")
    asked(desk)

    getattr(desk, how)()

    assert asker.end() is None
    assert desk.question is None


@pytest.mark.parametrize(
    ("served", "is_read_only", "is_here", "asks"),
    [("", False, False, True), ("web", False, False, False), ("", True, False, False), ("", False, True, False)],
    ids=["a terminal", "a page", "only looking", "this machine"],
)
async def test_only_a_console_on_a_terminal_that_may_act_asks_for_other_machines(
    monkeypatch: pytest.MonkeyPatch, *, served: str, is_read_only: bool, is_here: bool, asks: bool
) -> None:
    monkeypatch.setenv("TEXTUAL_DRIVER", served)
    link = Door("localhost" if is_here else "h1", DESK, ("Code:", "1", False))
    session = RemoteSession(these(link), None, SessionOptions(is_read_only=is_read_only))
    try:
        assert (desk_of(session) is DESK) is asks
    finally:
        await session.close()
