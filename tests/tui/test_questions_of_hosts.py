"""What hosts ask before they let a person in again, in the console: when, in which words, and what is left of it."""

from __future__ import annotations

import gc
import math
import queue
import re
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Input

from app.errors import HostKeyError
from app.model.unreachable_reason import UnreachableReason
from app.session.hosts import Connections, HostQuestions
from app.ssh.questions import QuestionDesk
from app.tui.dialogs.questions import QuestionScreen
from tests.support.consoles import SimSource, TalkingSource, desk, never_reached_source
from tests.support.doors import Door, Keys
from tests.support.hostile_text import PAYLOADS, assert_is_harmless
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.screens import assert_looks_as_before
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.consoles import Desk

SIZES = ((80, 24), (120, 35), (200, 50))
SECRET = "correct horse 7"
FIRST_CONTACT = (
    "The authenticity of host h1 (10.83.0.10) can't be established.\n"
    "ED25519 key fingerprint is SHA256:Zr5nGcYk0mA9d8H2Xw1lTq7uVb4eJf6sPz3oCiRtNyE\n"
    "No other host is known by this key.\n"
    "Are you sure you want to continue connecting (yes/no/[fingerprint])?"
)


class House:
    """Hosts that want a person, and a console over them.

    Attributes:
        notices: What the session has said.
    """

    def __init__(self, source: SimSource) -> None:
        self.source = source
        self.desk = QuestionDesk(LocalUser([]))
        self.doors: list[Door] = []
        self.notices: list[str] = []

    def door(self, host: str, wanted: Keys | tuple[str, str, bool]) -> Door:
        door = Door(host, self.desk, wanted)
        self.doors.append(door)
        return door

    def _tell(self, sentence: str) -> None:
        self.notices.append(sentence)
        self.source.notice(re.sub(r"after .*", "after a while", sentence))

    @asynccontextmanager
    async def open(self, size: tuple[int, int] = (120, 35)) -> AsyncIterator[Desk]:
        hosts = these(*self.doors)._replace(away={door.host: door.own_absence() for door in self.doors[1:]})
        connections = Connections(hosts, self._tell)
        self.source.questions = HostQuestions(self.desk, connections, self._tell)
        await connections.open(lambda _node, _frame, _age_s: None, math.inf, lambda _node: False, may_ask=True)
        try:
            async with desk(self.source, size) as console:
                await until(console, lambda: len(self.waiting) == len(self.doors))
                yield console
        finally:
            self.source.questions.close()
            await connections.close()

    @property
    def waiting(self) -> list[str]:
        assert self.source.questions is not None
        return list(self.source.questions.waiting)


async def until(console: Desk, is_so: Callable[[], bool]) -> None:
    """Let frames come until something is so."""

    def look() -> bool:
        console.console.frame()
        return is_so()

    await until_async(look, 60, "it is so")
    await console.frames()


def is_asked(console: Desk) -> bool:
    return isinstance(console.console.screen, QuestionScreen)


@pytest.fixture
def house() -> House:
    return House(never_reached_source())


@pytest.fixture
def time_is_over(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set when the time to answer is over."""
    is_over = threading.Event()

    class Answers(queue.SimpleQueue[str | None]):
        def get(self, block: bool = True, timeout: float | None = None) -> str | None:  # noqa: ARG002 - its name
            while self.empty():
                if is_over.wait(0.01):
                    raise queue.Empty
            return super().get()

    monkeypatch.setattr("app.ssh.questions.queue", SimpleNamespace(SimpleQueue=Answers, Empty=queue.Empty))
    return is_over


def box(console: Desk) -> list[str]:
    """Return the lines of the dialog: what is behind it moves."""
    lines = console.lines()
    first = next(number for number, line in enumerate(lines) if "To reach" in line)
    last = next(number for number, line in enumerate(lines) if "Esc: not now" in line)
    return lines[first : last + 1]


async def test_an_answer_is_what_was_typed_before_enter_however_soon_the_next_key_comes(house: House) -> None:
    door = house.door("demo-2", (FIRST_CONTACT, "yes", True))
    async with house.open() as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        await console.press(*"yes")
        console.console.post_message(Key("enter", None))
        console.console.post_message(Key("8", "8"))
        await until(console, lambda: door.is_alive)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_questions_look_as_before(house: House, size: tuple[int, int]) -> None:
    source = house.source
    assert isinstance(source, TalkingSource)
    source.run(14)
    house.door("demo-2", (FIRST_CONTACT, "yes", True)).told = ""
    code = house.door("demo-3", ("(root@demo-3) Code:", SECRET, False))
    code.told = "(root@demo-3) Lab\n(root@demo-3) The code is on your device."
    source.sim.cluster.put_unreachable("demo-2", UnreachableReason(str(house.doors[0].own_absence())))
    async with house.open(size) as console:
        console.console.ui.tick, console.console.ui.noticed_at_tick = 200, 0
        console.console.paint()
        assert_looks_as_before(f"asks-{size[0]}x{size[1]}", console.lines())
        await console.press("a")
        await until(console, lambda: is_asked(console))
        assert_looks_as_before(f"first-contact-{size[0]}x{size[1]}", box(console))
        await console.press(*"yes", "enter")
        await until(console, lambda: is_asked(console))
        await console.press(*"abc")
        assert_looks_as_before(f"second-factor-{size[0]}x{size[1]}", box(console))
        await console.press("escape")


async def test_a_host_that_wants_an_answer_says_so_and_nobody_is_asked_before_the_key(house: House) -> None:
    door = house.door("h1", ("Code:", SECRET, False))
    async with house.open() as console:
        await console.frames(4)
        assert not is_asked(console)
        assert "a: try h1 again, and answer what is asked" in console.text()
        assert "a Answer" in console.lines()[-1]
        assert door.num_asked == 0
        tries = door.num_tries
        await console.frames(20)
        assert door.num_tries == tries, "time alone does not bring it back"


async def test_the_right_answer_brings_the_host_back_and_what_was_typed_is_nowhere(house: House) -> None:
    house.door("h1", ("Code:", SECRET, False))
    async with house.open() as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        assert console.console.screen.query_one(Input).password
        await console.press(*("space" if key == " " else key for key in SECRET))
        assert SECRET not in console.text()
        assert "•" * len(SECRET) in console.text()
        screen = console.console.screen
        await console.press("enter")
        await until(console, lambda: any("h1: the connection is back" in notice for notice in house.notices))

        assert house.doors[0].is_alive
        assert not is_asked(console)
        assert house.waiting == []
        assert "a Answer" not in console.lines()[-1]
        assert SECRET not in repr(vars(screen)) + "".join(house.notices) + "".join(console.console.ui.notices)
        assert house.desk.question is None
    gc.collect()
    held = [one for one in gc.get_objects() if isinstance(one, Input) and SECRET in one.value]
    assert held == []


async def test_a_passphrase_is_asked_for_once_and_opens_all_hosts_behind_that_key(house: House) -> None:
    keys = Keys(SECRET)
    for number in range(1, 17):
        house.door(f"h{number}", keys)
    async with house.open() as console:
        assert "a: try h1, h2 and 14 more again, and answer what is asked" in console.text()
        await console.press("a")
        await until(console, lambda: is_asked(console))
        assert "Passphrase of the key k (for h1)" in console.text()
        await console.press(*("space" if key == " " else key for key in SECRET), "enter")
        await until(console, lambda: all(door.is_alive for door in house.doors))

        assert sum(door.num_asked for door in house.doors) == 1
        assert not is_asked(console)


async def test_several_hosts_ask_one_after_the_other(house: House) -> None:
    for number in range(1, 4):
        house.door(f"h{number}", (f"Code {number}:", str(number), False))
    async with house.open() as console:
        await console.press("a")
        for number in range(1, 4):
            await until(console, lambda number=number: f"Code {number}:" in console.text())  # type: ignore[misc]
            assert sum(isinstance(screen, QuestionScreen) for screen in console.console.screen_stack) == 1
            await console.press(str(number), "enter")
        await until(console, lambda: all(door.is_alive for door in house.doors))


async def test_not_now_puts_all_of_them_off_and_the_key_asks_again(house: House) -> None:
    for number in range(1, 3):
        house.door(f"h{number}", ("Code:", "1", False))
    async with house.open() as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        await console.press("escape")
        await until(console, lambda: len(house.waiting) == 2)
        assert not is_asked(console)
        assert house.doors[1].num_asked == 0

        await console.press("a")
        await until(console, lambda: is_asked(console))
        await console.press("1", "enter")
        await until(console, lambda: house.doors[0].is_alive)


async def test_a_wrong_answer_leaves_the_host_away_and_the_key_where_it_was(house: House) -> None:
    door = house.door("h1", ("Code:", "1", False))
    async with house.open() as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        await console.press("2", "enter")
        await until(console, lambda: house.waiting == ["h1"])
        assert not door.is_alive


async def test_a_changed_key_is_never_asked_about_nor_tried_again(house: House) -> None:
    house.door("h1", ("Code:", "1", False))
    changed = house.door("h2", ("Code:", "1", False))
    async with house.open() as console:
        changed.refusal = HostKeyError("h2", "THE HOST KEY OF h2 HAS CHANGED")
        await console.press("a")
        await until(console, lambda: is_asked(console))
        await console.press("1", "enter")
        await until(console, lambda: "THE HOST KEY OF h2 HAS CHANGED" in "".join(house.notices))
        assert house.waiting == []
        tries = changed.num_tries
        await console.press("a")
        assert "No host wants an answer" in console.text()
        await console.frames(10)
        assert changed.num_tries == tries


async def test_a_question_that_nobody_answers_in_time_leaves_the_screen(
    time_is_over: threading.Event, house: House
) -> None:
    house.door("h1", ("Code:", "1", False))
    async with house.open() as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        await console.press(*"half")
        time_is_over.set()
        await until(console, lambda: house.waiting == ["h1"])
        assert not is_asked(console)


async def test_a_question_that_is_over_under_another_screen_goes_with_it_and_takes_nothing_away(
    time_is_over: threading.Event, house: House
) -> None:
    house.door("h1", ("Code:", "1", False))
    async with house.open() as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        question = console.console.screen
        await console.press(*"half")
        over: ModalScreen[None] = ModalScreen()
        await console.console.push_screen(over)
        time_is_over.set()
        await until(console, lambda: house.waiting == ["h1"])
        assert console.console.screen is over
        assert question.query_one(Input).value == ""
        await over.dismiss()
        await until(console, lambda: question not in console.console.screen_stack)


async def test_what_a_host_asks_is_text(house: House) -> None:
    house.door("h1", ("".join(PAYLOADS), "1", True)).told = f"[bold red]x {PAYLOADS[3]}"
    async with house.open((100, 30)) as console:
        await console.press("a")
        await until(console, lambda: is_asked(console))
        assert "[bold red]x" in console.text()
        assert_is_harmless(console)
        await console.press("escape")


async def test_where_nobody_may_be_asked_the_key_says_so_and_nothing_is_offered() -> None:
    source: TalkingSource = never_reached_source()
    async with desk(source) as console:
        assert "Answer" not in console.lines()[-1]
        await console.press("a")
        assert "From this console nobody is asked anything" in console.text()
