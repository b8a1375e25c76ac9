"""The stacks of all ranks: one key, no waiting for anybody, and what they say."""

from __future__ import annotations

import pytest

from app.errors import AgentUnreachableError, UsageError
from app.stacks.groups import NodeStacks
from app.tui.dialogs.stacks import StacksScreen
from app.tui.theme import Look
from ddpcore.wire_stacks import Frame
from tests.support.consoles import SimSource, desk, frozen_source
from tests.support.hostile_text import PAYLOADS, assert_is_harmless
from tests.support.screens import assert_looks_as_before
from tests.support.stacks import answer, in_step, one_frozen, standing


def stuck_source() -> SimSource:
    source = frozen_source()
    source.answers = one_frozen()
    return source


@pytest.mark.parametrize("size", [(80, 24), (120, 35)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_stacks_of_a_frozen_rank_look_as_before(size: tuple[int, int]) -> None:
    async with desk(stuck_source(), size) as console:
        await console.press("s")
        assert_looks_as_before(f"frozen-stacks-{size[0]}x{size[1]}", console.lines())


async def test_one_key_shows_the_odd_rank_above_those_who_wait() -> None:
    source = stuck_source()
    async with desk(source) as console:
        await console.press("s")

        text = console.text()
        assert "job train: 4 ranks in 2 groups" in text
        odd = text.index("rank 2 (1 rank): frozen at train.py:38 in Trainer.step")
        assert odd < text.index("ranks 0-1, 3 (3 ranks): waiting in all_reduce #57, at train.py:41 in Trainer.step")
        assert source.stacks_asked == [False]


async def test_keys_work_while_ranks_are_asked() -> None:
    source = stuck_source()
    source.stacks_may_come.clear()
    async with desk(source) as console:
        await console.press("s")
        assert "asking every rank" in console.text()
        await console.frames(2)
        await console.press("escape")
        assert not isinstance(console.console.screen, StacksScreen)
        await console.press("2")
        assert console.console.active == "ranks"

        source.stacks_may_come.set()
        await console.settle()
        assert console.console.is_running


async def test_asked_again_it_shows_what_is_new_and_native_frames_on_wish() -> None:
    source = stuck_source()
    async with desk(source) as console:
        await console.press("s")
        source.answers = [answer("demo-0", standing(0, in_step(99)))]
        await console.press("s")
        assert "rank 0 (1 rank): at train.py:99 in Trainer.step" in console.text()
        assert "frozen" not in console.text()
        await console.press("n")

        assert source.stacks_asked == [False, False, True]


async def test_all_frames_are_one_key_away_and_scroll() -> None:
    async with desk(stuck_source(), (80, 24)) as console:
        await console.press("s")
        assert "2 frames of runpy" in console.text()
        assert "Fewer frames" not in console.text()

        await console.press("a")
        assert "Fewer frames" in console.text()
        assert "/home/me/project/train.py:38 in Trainer.step" in console.text()
        await console.press("G")
        assert "thread rankdeck-heart of rank 0" in console.text()
        await console.press("g")
        assert "rank 2 (1 rank)" in console.text()
        await console.press("pagedown", "pageup", "down", "up")
        assert "rank 2 (1 rank)" in console.text()
        await console.press("right")
        assert "rank 2 (1 rank)" in console.text()
        assert "me/project/train.py:38 in Trainer.step" in console.text()
        assert "/home/me/project/train.py:38" not in console.text()
        await console.press("left")
        assert "/home/me/project/train.py:38" in console.text()


async def test_short_lines_are_in_sight_when_the_long_ones_have_gone() -> None:
    async with desk(stuck_source(), (80, 24)) as console:
        await console.press("s")
        assert " right Long lines" not in console.text()
        await console.press("a")
        assert " right Long lines" in console.lines()[-1]
        await console.press(*["right"] * 12)
        assert "> train.py:38 in Trainer.step" not in console.text()

        await console.press("a")

        assert "train.py:38 in Trainer.step" in console.text().partition("rank 2 (1 rank)")[2].partition("\n")[2]


@pytest.mark.parametrize(
    "refusal", [UsageError("there is no job yet"), AgentUnreachableError("demo-1", "no reply in 10 s")]
)
async def test_why_there_are_none_is_said(refusal: UsageError) -> None:
    source = stuck_source()
    source.refusal = refusal
    async with desk(source) as console:
        await console.press("s")

        assert str(refusal) in console.text()


async def test_a_node_that_does_not_answer_is_named_beside_the_others() -> None:
    source = stuck_source()
    source.answers = [source.answers[0], NodeStacks("demo-1", None, "no reply in 10 s")]
    async with desk(source) as console:
        await console.press("s")

        assert "demo-1: no reply in 10 s" in console.text()
        assert "ranks 0-1 (2 ranks): waiting in all_reduce #57" in console.text()


@pytest.mark.parametrize("look", [Look(), Look(has_colour=False, is_ascii=True)], ids=["colour", "ascii"])
async def test_hostile_stacks_are_text(look: Look) -> None:
    source = stuck_source()
    frames = [Frame(f"/x/{payload}/t{payload}.py", 3, f"f{payload}", is_own=True) for payload in PAYLOADS]
    source.answers = [
        answer(f"n{PAYLOADS[3]}", standing(0, frames, note="".join(PAYLOADS))),
        NodeStacks("b[/b]", None, "[bold red]x"),
    ]
    async with desk(source, (100, 30), look) as console:
        await console.press("s")
        assert_is_harmless(console)
        assert "[bold red]x" in console.text()
        await console.press("a")
        assert_is_harmless(console)
        if look.is_ascii:
            assert console.text().isascii()
