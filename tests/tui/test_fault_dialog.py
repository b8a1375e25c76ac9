"""Whoever asks for a fault gets exactly that one, and whoever only presses Enter gets none."""

from __future__ import annotations

import pytest

from app.errors import AgentRefusedError, UsageError
from ddpcore.wire import FaultKind
from tests.support.consoles import SimSource, desk, frozen_source
from tests.support.sim import SimCluster


@pytest.mark.parametrize(
    ("downs", "injected"),
    [
        (0, (FaultKind.FREEZE, 1.0)),
        (1, (FaultKind.THAW, 1.0)),
        (2, (FaultKind.KILL, 1.0)),
        (3, (FaultKind.SLOW, 8.0)),
        (4, (FaultKind.SLOW, 1.0)),
    ],
)
async def test_kind_and_rank_are_chosen_confirmed_and_injected(downs: int, injected: tuple[FaultKind, float]) -> None:
    source = frozen_source()
    async with desk(source, (80, 24)) as console:
        await console.press("f")
        await console.press("home", *["down"] * downs, "enter")  # the kind
        await console.press("home", "down", "enter")  # rank 1
        assert "rank 1, pid 4001, on demo-0?" in console.text()
        await console.press("right", "enter")  # from `Do nothing` to the other button

        kind, factor = injected
        assert source.injected == [(kind, 1, factor)]
        assert f"rank 1: {kind} is done" in console.text()


async def test_a_button_that_is_clicked_counts_as_pressed() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("f")
        await console.pilot.click("#fault-no")
        assert source.injected == []
        await console.press("f")
        await console.pilot.click("#fault-yes")
        await console.settle()

        assert source.injected == [(FaultKind.THAW, 2, 1.0)]


async def test_a_frozen_rank_is_offered_to_be_thawed() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("f")

        assert "Thaw rank 2, pid 4002, on demo-1?" in console.text()
        await console.press("enter", "enter", "right", "enter")
        assert source.injected == [(FaultKind.THAW, 2, 1.0)]


@pytest.mark.parametrize("keys", [("escape",), ("enter", "enter", "enter"), ("down", "enter", "escape")])
async def test_enter_alone_and_escape_do_nothing(keys: tuple[str, ...]) -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("f")
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
        await console.press("f")
        await console.press("enter", "enter", "right", "enter")

        told = " ".join(console.text().replace("\u2502", " ").split())
        assert "Not done" in told
        for word in words.split():
            assert word in told
        await console.press("3")
        assert console.console.active == "barriers"


async def test_a_session_without_faults_has_neither_the_key_nor_the_footer() -> None:
    sim = SimCluster()
    sim.run_to_step(5)
    source = SimSource(sim.view, can_inject=False)
    async with desk(source) as console:
        assert "Inject" not in console.text()
        await console.press("f")

        assert len(console.console.screen_stack) == 1
