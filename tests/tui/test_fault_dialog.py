"""Whoever asks for a fault gets exactly that one, and whoever only presses Enter gets none."""

from __future__ import annotations

import pytest

from app.errors import AgentRefusedError, UsageError
from ddpcore.wire import Fault, FaultKind
from tests.support.consoles import SimSource, desk, frozen_source
from tests.support.sim import SimCluster


@pytest.mark.parametrize(
    ("downs", "fault"),
    [
        (0, Fault(FaultKind.FREEZE, 1)),
        (1, Fault(FaultKind.THAW, 1)),
        (2, Fault(FaultKind.KILL, 1)),
        (3, Fault(FaultKind.SLOW, 1, factor=8.0)),
        (4, Fault(FaultKind.SLOW, 1, factor=1.0)),
        (5, Fault(FaultKind.GIL, 1, duration_s=30.0)),
        (6, Fault(FaultKind.SKIP_BARRIER, 1)),
        (7, Fault(FaultKind.MISMATCH, 1)),
        (8, Fault(FaultKind.OOM, 1)),
        (9, Fault(FaultKind.LEAVE, 1)),
    ],
)
async def test_kind_and_rank_are_chosen_confirmed_and_injected(downs: int, fault: Fault) -> None:
    source = frozen_source()
    async with desk(source, (80, 24)) as console:
        await console.press("F")
        assert "Enter: to the ranks, Esc closes" in console.text()
        await console.press("home", *["down"] * downs, "enter")  # the kind
        assert "Enter: to the buttons, Esc closes" in console.text()
        await console.press("home", "down", "enter")  # rank 1
        assert "rank 1, pid 4001, on demo-0?" in told(console.text())
        assert "Do nothing" in console.text()
        await console.press("right", "enter")  # from `Do nothing` to the other button

        assert source.injected == [fault]
        assert f"rank 1: {fault.kind} is done" in console.text()


def told(screen: str) -> str:
    """Return what stands in a box, as one line."""
    return " ".join(screen.replace("\u2502", " ").split())


async def test_a_button_that_is_clicked_counts_as_pressed() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("F")
        await console.pilot.click("#fault-no")
        assert source.injected == []
        await console.press("F")
        await console.pilot.click("#fault-yes")
        await console.settle()

        assert source.injected == [Fault(FaultKind.THAW, 2)]


async def test_a_frozen_rank_is_offered_to_be_thawed() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("F")

        assert "Thaw rank 2, pid 4002, on demo-1?" in console.text()
        await console.press("enter", "enter", "right", "enter")
        assert source.injected == [Fault(FaultKind.THAW, 2)]


@pytest.mark.parametrize("before", [(), ("enter",), ("enter", "enter")], ids=["kinds", "ranks", "button"])
async def test_the_right_arrow_goes_to_the_button_at_once_from_either_list(before: tuple[str, ...]) -> None:
    source = frozen_source()
    async with desk(source, (80, 24)) as console:
        await console.press("F", *before)
        assert "right arrow, then Enter: do it" in console.text()
        await console.press("right", "enter")
        assert source.injected == [Fault(FaultKind.THAW, 2)]


@pytest.mark.parametrize("keys", [("escape",), ("enter", "enter", "enter"), ("down", "enter", "escape")])
async def test_enter_alone_and_escape_do_nothing(keys: tuple[str, ...]) -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("F")
        await console.press(*keys)

        assert len(console.console.screen_stack) == 1
        assert source.injected == []


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (AgentRefusedError("demo-0", "unknown_rank", "no rank 0 [/b] here"), "no rank 0 [/b] here"),
        (UsageError("no node has rank 0", "try another"), "no node has rank 0 try another"),
    ],
)
async def test_a_refusal_is_told_and_the_console_lives_on(refusal: Exception, words: str) -> None:
    source = frozen_source()
    source.refusal = refusal  # type: ignore[assignment]
    async with desk(source) as console:
        await console.press("F")
        await console.press("enter", "enter", "right", "enter")

        screen = told(console.text())
        assert "Not done" in screen
        for word in words.split():
            assert word in screen
        await console.press("3")
        assert console.console.active == "barriers"


async def test_an_answer_to_a_question_about_another_attempt_does_nothing() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("F", "home", "down", "down", "enter", "enter")
        assert "Kill rank 2, pid 4002, on demo-1?" in told(console.text())
        source.sim.next_attempt()
        source.run(3.0)
        await console.press("right", "enter")

        assert source.injected == []
        assert "Not done: rank 2 is no longer the process that you were asked about (ask again)" in told(console.text())
        await console.frames()
        await console.press("F", "right", "enter")
        assert source.injected == [Fault(FaultKind.FREEZE, 0)]


async def test_a_job_without_faults_is_not_offered_them_and_the_key_says_how_to_allow_them() -> None:
    sim = SimCluster()
    sim.run_to_step(5)
    source = SimSource(sim.view, can_inject=False)
    async with desk(source) as console:
        assert "Inject" not in console.text()
        await console.press("F")

        assert len(console.console.screen_stack) == 1
        assert "run --allow-faults" in told(console.text())
