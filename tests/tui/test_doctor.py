"""The doctor in the console: what it says while it looks and afterwards, and before a job is started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from textual.widgets import Button

from agent.wire.examination import Health, Row
from app.errors import AppError, SessionError
from app.inventory.program import Again, Program
from app.preflight.comparison import compare
from app.preflight.findings import FailureKind, Step
from app.preflight.report_lines import report_lines
from app.settings.loading import load
from app.ssh.questions import Question
from app.tui.actions import ACTIONS
from app.tui.dialogs.doctor import DoctorScreen
from app.tui.dialogs.questions import QuestionScreen
from app.tui.theme import Look
from tests.support.consoles import SimStarter, TalkingSource, desk, frozen_source, training_source
from tests.support.examinations import answers, failed, meshed
from tests.support.hostile_text import PAYLOADS, assert_is_harmless
from tests.support.screens import assert_looks_as_before

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.preflight.findings import Answers, Preflight
    from tests.support.consoles import Desk

SIZES = ((80, 24), (120, 35), (200, 50))
NO_SPACE = Row("disk", Health.BAD, "2 MiB free at /home/ada/project", "make room there, or say another --workdir")
OLD_DRIVER = Row("driver", Health.WARN, "535.104.05 is older than torch was built for", "install a newer one")
LAST = Program(("train.py",), 2)
STEPS = [step for step in Step if step is not Step.REACHING]
"""How far the hosts are, one by one: as many as there are hosts."""


class SimDoctor:
    """Looks at hosts that answer as a test says.

    Attributes:
        asked: For which jobs it has looked.
        may_answer: While it is not set, a look does not end.
        refusal: Raised by every look from now on.
    """

    def __init__(self, *hosts: Answers) -> None:
        self.answers = list(hosts)
        self.asked: list[Program | Again | None] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.refusal: AppError | None = None

    @property
    def hosts(self) -> list[str]:
        return [one.host for one in self.answers]

    async def look(self, tell: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        self.asked.append(job)
        for number, host in enumerate(self.hosts):
            tell(host, STEPS[number % len(STEPS)])
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        return compare(self.answers)


def well() -> SimDoctor:
    return SimDoctor(*meshed(*(answers(f"gpu{number}") for number in range(1, 5))))


def unwell() -> SimDoctor:
    """Return one of six hosts: one is away, one has no room, two have an old driver."""
    fit = meshed(answers("gpu1"), answers("gpu2", OLD_DRIVER), answers("gpu3", NO_SPACE), answers("gpu4", OLD_DRIVER))
    return SimDoctor(*fit, failed("gpu5"), failed("gpu6", FailureKind.HOST_KEY))


def training(doctor: SimDoctor) -> TalkingSource:
    """Return a job that runs over two hosts."""
    source = training_source(12)
    source.doctor = doctor
    return source


def ended(doctor: SimDoctor) -> tuple[TalkingSource, SimStarter]:
    """Return a job that has failed on hosts where another can be started."""
    source = training(doctor)
    source.sim.kill(2)
    source.run(20)
    source.starter = starter = SimStarter(LAST)
    starter.hosts = doctor.hosts
    return source, starter


def is_open(console: Desk) -> bool:
    return isinstance(console.console.screen, DoctorScreen)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_doctor_looks_as_before(size: tuple[int, int]) -> None:
    doctor = unwell()
    doctor.may_answer.clear()
    async with desk(training(doctor), size) as console:
        await console.press("d")
        assert_looks_as_before(f"doctor-asking-{size[0]}x{size[1]}", console.lines())
        doctor.may_answer.set()
        await console.settle()
        assert_looks_as_before(f"doctor-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, id=f"{size[0]}x{size[1]}", marks=() if size == SIZES[0] else pytest.mark.slow)
        for size in SIZES
    ],
)
async def test_the_look_before_a_start_looks_as_before(size: tuple[int, int]) -> None:
    source, _ = ended(unwell())
    async with desk(source, size) as console:
        await console.press("x", "down", "enter")
        assert_looks_as_before(f"program-hosts-{size[0]}x{size[1]}", console.lines())
        await console.press("enter", "right", "enter")
        assert_looks_as_before(f"doctor-before-{size[0]}x{size[1]}", console.lines())
        await console.press("escape")


async def test_it_says_what_the_command_says_in_its_words_and_order() -> None:
    doctor = unwell()
    async with desk(training(doctor), (122, 60)) as console:
        await console.press("d")
        shown = [line.strip() for line in console.lines()]
        lines = report_lines(compare(doctor.answers), 120)
        for line in ("".join(piece.text for piece in line).strip() for line in lines):
            assert line in shown
        first = next(line for line in shown[1:] if line)
        assert first == "gpu5" or "gpu" in first
        assert shown.index(first) < next(n for n, line in enumerate(shown) if line.startswith("warn"))


async def test_while_it_looks_each_host_is_followed_and_keys_work() -> None:
    doctor = unwell()
    doctor.may_answer.clear()
    async with desk(training(doctor)) as console:
        await console.press("d")
        assert "6 hosts to look at, 2 done; it takes some seconds" in console.text()
        assert "gpu1  looks at itself" in console.text()
        assert "gpu3  listens, and answers the time" in console.text()
        assert "Again" not in console.lines()[-1]
        await console.press("escape")
        assert not is_open(console)
        doctor.may_answer.set()
        await console.settle()
        assert console.console.is_running


async def test_asked_again_it_looks_again_and_what_is_well_is_a_key_away() -> None:
    doctor = unwell()
    async with desk(training(doctor), (120, 60)) as console:
        await console.press("d")
        assert "500 MiB free at /" not in console.text()
        await console.press("a")
        assert "500 MiB free at /" in console.text()
        assert "Only what is wrong" in console.lines()[-1]
        doctor.answers = well().answers
        await console.press("a", "r")
        assert "4 hosts: 4 well." in console.lines()[0]
        assert doctor.asked == [None, None]


async def test_it_scrolls_and_copies_the_whole_report() -> None:
    doctor = SimDoctor(*meshed(*(answers(f"gpu{number}", NO_SPACE) for number in range(1, 41))))
    async with desk(training(doctor), (80, 24)) as console:
        await console.press("d")
        assert "40 hosts: 40 not fit" not in console.lines()[-2]
        await console.press("G")
        assert "40 hosts: 40 not fit" in console.text().partition("\n")[2]
        await console.press("g", "pagedown", "pageup", "down", "up", "y")
        assert "Copied the report" in console.text()
        assert "make room there" in console.console.clipboard
        assert console.console.clipboard.splitlines()[-1] == "40 hosts: 40 not fit."


async def test_why_it_could_not_look_is_said() -> None:
    doctor = well()
    doctor.refusal = SessionError("there is no ssh on this machine", "install one")
    async with desk(training(doctor)) as console:
        await console.press("d")
        assert "there is no ssh on this machine (install one)" in console.text()
        await console.press("y")
        assert console.console.clipboard == ""


async def test_a_recording_has_none_and_its_key_says_so() -> None:
    async with desk(frozen_source()) as console:
        await console.press("d")
        assert "There are no hosts to look at: not in a recording" in console.text()
        assert not is_open(console)
        await console.press("question_mark")
        assert "before a job: what is wrong" not in console.text()


async def test_its_key_is_as_the_person_has_set_it() -> None:
    settings = load(ACTIONS, ["keys.doctor=F9"], has_files=False, environ={}).settings().console
    async with desk(training(well()), (200, 50), settings=settings) as console:
        assert "F9 Doctor" in console.lines()[-1]
        await console.press("d")
        assert not is_open(console)
        await console.press("f9")
        assert is_open(console)


async def test_hosts_that_are_fit_are_started_on_without_another_question() -> None:
    doctor = well()
    source, starter = ended(doctor)
    async with desk(source) as console:
        await console.press("x", "down", "enter", "enter", "right", "enter")
        await console.settle()
        assert doctor.asked == [LAST]
        assert starter.started == [LAST]
        assert not is_open(console)


@pytest.mark.parametrize(("keys", "num_started"), [(("enter",), 0), (("escape",), 0), (("right", "enter"), 1)])
async def test_where_something_is_bad_the_person_decides_and_enter_alone_starts_nothing(
    keys: tuple[str, ...], num_started: int
) -> None:
    source, starter = ended(unwell())
    async with desk(source) as console:
        await console.press("x", "down", "enter", "enter", "right", "enter")
        assert is_open(console)
        assert "2 MiB free at /home/ada/project" in console.text()
        assert "Start it all the same" in console.text()
        assert starter.started == []
        await console.press(*keys)
        await console.settle()
        assert len(starter.started) == num_started
        assert not is_open(console)


async def test_what_came_over_the_look_stays_and_nothing_is_started_behind_it() -> None:
    doctor = well()
    doctor.may_answer.clear()
    source, starter = ended(doctor)
    async with desk(source) as console:
        await console.press("x", "down", "enter", "enter", "right", "enter")
        answers_given: list[str | None] = []
        question = Question(1, "gpu2", (), ("Code:",), is_shown=False)
        over = QuestionScreen(console.console.ui.look, question, lambda _number, text: answers_given.append(text))
        await console.console.push_screen(over)
        await console.press("4")
        doctor.may_answer.set()
        await console.settle()
        assert console.console.screen is over
        assert starter.started == []
        await console.press("2", "enter")
        assert answers_given == ["42"]
        assert is_open(console)
        await console.press("right", "enter")
        await console.settle()
        assert starter.started == [LAST]
        assert not is_open(console)


async def test_without_the_tick_nobody_looks() -> None:
    doctor = unwell()
    source, starter = ended(doctor)
    async with desk(source) as console:
        await console.press("x", "down", "enter", *["tab"] * 4)
        assert "[x] look at the hosts first" in console.text()
        await console.press("space")
        assert "[ ] look at the hosts first" in console.text()
        await console.press("enter", "right", "enter")
        assert (doctor.asked, starter.started) == ([], [LAST])


async def test_on_a_single_host_nobody_is_asked_about_it() -> None:
    doctor = SimDoctor(answers("gpu1"))
    source, starter = ended(doctor)
    async with desk(source) as console:
        await console.press("x")
        assert "look at the hosts first" not in console.text()
        await console.press("down", "enter")
        assert "look at the hosts first" not in console.text()
        await console.press("enter", "right", "enter")
        assert (doctor.asked, len(starter.started)) == ([], 1)


async def test_before_a_restart_the_hosts_are_looked_at_while_the_job_still_runs() -> None:
    doctor = unwell()
    source = training(doctor)
    assert source.control is not None
    async with desk(source) as console:
        await console.press("x")
        assert "look at the hosts first" not in console.text(), "a stop needs no look"
        await console.press("down", "down", "down")
        assert "[x] look at the hosts first" in console.text()
        await console.press("enter", "right", "enter")
        assert doctor.asked == [Again("demo")]
        assert "Restart it all the same" in console.text()
        assert source.control.asked == []
        assert console.console.screen.query_one("#doctor-no", Button).has_focus
        await console.press("right", "enter")
        await console.settle()
        assert source.control.asked == ["restart demo None agreed"]


async def test_a_restart_that_is_not_confirmed_leaves_the_job_as_it_is() -> None:
    source = training(unwell())
    assert source.control is not None
    async with desk(source) as console:
        await console.press("x", "down", "down", "down", "enter", "right", "enter", "enter")
        await console.settle()
        assert source.control.asked == []


@pytest.mark.parametrize("look", [Look(), Look(has_colour=False, is_ascii=True)], ids=["colour", "ascii"])
async def test_what_hosts_say_is_text(look: Look) -> None:
    hostile = Row("disk", Health.BAD, "[bold red]x", "do [/b]")
    source, _ = ended(SimDoctor(*meshed(answers("gpu1", hostile), answers("gpu2"))))
    source.starter = starter = SimStarter(Program((f"evil{PAYLOADS[0]}.py",)))
    starter.hosts = ["gpu1", "gpu2"]
    async with desk(source, (100, 30), look) as console:
        await console.press("d")
        assert "[bold red]x" in console.text()
        assert_is_harmless(console)
        await console.press("escape", "x", "down", "enter")
        assert_is_harmless(console)
        if look.is_ascii:
            assert console.text().isascii()
