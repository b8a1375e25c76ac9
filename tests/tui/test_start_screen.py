"""What `rankdeck` alone shows: every choice by a key and Enter, and what the choice is in a shell."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from textual.widgets import Button, OptionList

from app.inventory.inventory import HostEntry, Inventory
from app.inventory.jobs import JobEntry
from app.start import KeptFile, StartFacts
from app.tui.start_app import StartApp
from app.tui.theme import Look
from tests.support.screens import assert_looks_as_before, screen_lines, screen_strips, until_at_rest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from textual.pilot import Pilot

SIZES = ((80, 24), (120, 35), (200, 50))
EVIDENCE = "/home/ada/.local/state/rankdeck/evidence"
FULL = StartFacts(
    home="/home/ada",
    has_torch=True,
    python="/opt/python",
    config_file="~/.ssh/config",
    hosts=("gpu1", "gpu2", "trainer"),
    evidence_dir=EVIDENCE,
    kept=(
        KeptFile(f"{EVIDENCE}/train-3f2a-20261121-031245.zip", 3700.0, 812_345),
        KeptFile(f"{EVIDENCE}/train-{'x' * 70}-20261120-231245.zip", 90_000.0, 4_812_345),
    ),
)
BARE = StartFacts(
    home="/home/ada",
    has_torch=False,
    python="/opt/python",
    config_file="~/.ssh/config",
    hosts=None,
    evidence_dir=EVIDENCE,
)
LAB = msgspec.structs.replace(
    FULL,
    hosts=("gpu1", "workstation"),
    inventory=Inventory(
        "lab",
        tuple(HostEntry(f"gpu{number}") for number in range(1, 5)),
        (
            JobEntry("gpt", ("train.py", "--config", "gpt.toml", "--out", f"runs/{'x' * 120}"), ("gpu[1-3]",)),
            JobEntry("evaluation", ("-m", "pkg.evaluate", "--all")),
        ),
    ),
    inventory_file="~/lab/rankdeck.toml",
)
WRONG = msgspec.structs.replace(
    BARE, inventory_trouble="/home/ada/lab/rankdeck.toml:7: hots: no such key of node, did you mean host? (and 2 more)"
)


class Start:
    """The start screen and the hands at its keys."""

    def __init__(self, app: StartApp, pilot: Pilot[tuple[str, ...]]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.settle()

    async def type(self, text: str) -> None:
        keys = {" ": "space", ".": "full_stop", "-": "minus", "/": "slash"}
        await self.press(*(keys.get(character, character) for character in text))

    async def settle(self) -> None:
        await until_at_rest(self.app)
        asking = [worker for worker in self.app.workers if worker.name == "_ask_here"]
        if asking:
            await self.app.workers.wait_for_complete(asking)
            await until_at_rest(self.app)

    def lines(self) -> list[str]:
        return screen_lines(self.app)

    def text(self) -> str:
        return " ".join(" ".join(self.lines()).replace("│", " ").split())


@asynccontextmanager
async def start(facts: StartFacts, size: tuple[int, int] = (80, 24), look: Look | None = None) -> AsyncIterator[Start]:
    app = StartApp(facts, lambda: "this machine; its agent serves", look or Look())
    async with app.run_test(size=size, notifications=True) as pilot:
        opened = Start(app, pilot)
        await opened.settle()
        yield opened


def named(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


@pytest.mark.parametrize("size", SIZES, ids=named)
async def test_the_screens_look_as_before(size: tuple[int, int]) -> None:
    async with start(FULL, size) as screen:
        assert_looks_as_before(f"start-{named(size)}", screen.lines())
        await screen.press("3", "enter")
        assert_looks_as_before(f"start-hosts-{named(size)}", screen.lines())
        await screen.press("down", "enter")
        await screen.type("train.py --epochs 3")
        assert_looks_as_before(f"start-program-{named(size)}", screen.lines())
        await screen.press("escape", "escape", "4", "enter")
        assert_looks_as_before(f"start-files-{named(size)}", screen.lines())


@pytest.mark.parametrize("size", SIZES, ids=named)
async def test_the_screens_of_a_cluster_look_as_before(size: tuple[int, int]) -> None:
    async with start(LAB, size) as screen:
        assert_looks_as_before(f"start-lab-{named(size)}", screen.lines())
        await screen.press("2", "enter")
        assert_looks_as_before(f"start-lab-jobs-{named(size)}", screen.lines())
        await screen.press("escape", "3", "enter")
        await screen.type("train.py --epochs 3")
        assert_looks_as_before(f"start-lab-program-{named(size)}", screen.lines())
        await screen.press("escape", "5", "enter")
        assert_looks_as_before(f"start-lab-hosts-{named(size)}", screen.lines())


async def test_an_inventory_that_is_wrong_is_told_on_the_screen_which_works_all_the_same() -> None:
    async with start(WRONG) as screen:
        assert_looks_as_before("start-wrong-80x24", screen.lines())
        assert "rankdeck.toml:7: hots: no such key of node, did you mean host? (and 2 more)" in screen.text()
        await screen.press("2", "enter", "enter")

    assert screen.app.return_value == ("attach", "--host", "localhost")


@pytest.mark.parametrize(
    ("keys", "argv"),
    [
        (("enter",), ("attach",)),
        (("2", "enter", "enter"), ("start", "gpt")),
        (("2", "enter", "down", "enter"), ("start", "evaluation")),
        (("2", "enter", *"eval", "enter"), ("start", "evaluation")),
        (("3", "enter", *"a", "tab", *"8", "enter", "enter"), ("run", "--workdir", "8", "--", "a")),
        (("4", "enter"), ("doctor",)),
        (("5", "enter", "enter"), ("attach", "--host", "gpu1")),
        (("5", "enter", *"work", "enter"), ("attach", "--host", "workstation")),
        (("6", "enter", "enter", *"a", "enter", "enter"), ("run", "--host", "gpu1", "--", "a")),
        (("7", "enter"), ("demo",)),
        (("9", "enter"), ("--help",)),
    ],
)
async def test_keys_lead_to_the_commands_of_a_cluster(keys: tuple[str, ...], argv: tuple[str, ...]) -> None:
    async with start(LAB) as screen:
        await screen.press(*keys)

    assert screen.app.return_value == argv


async def test_a_job_that_is_not_there_cannot_be_started_and_escape_goes_back() -> None:
    async with start(LAB) as screen:
        await screen.press("2", "enter", *"nothing", "enter")
        assert "'nothing' is in no job of ~/lab/rankdeck.toml" in screen.text()
        await screen.press("escape", "3", "enter", "escape")
        assert "Watch cluster lab: 4 hosts" in screen.text()
        assert screen.app.return_value is None


async def test_a_program_for_several_hosts_is_not_asked_for_restarts() -> None:
    async with start(LAB) as screen:
        await screen.press("3", "enter", *"a")
        assert "Which program, on all 4 hosts?" in screen.text()
        assert "restarts" not in screen.text()
        assert "In a shell: rankdeck run -- a" in screen.text()
        await screen.press("escape", "6", "enter", "enter")
        assert "restarts" in screen.text()


async def test_a_number_without_a_choice_marks_nothing() -> None:
    async with start(FULL) as screen:
        await screen.press("9", "enter")

    assert screen.app.return_value == ("demo",)


async def test_settings_that_were_typed_stand_in_the_command() -> None:
    async with start(msgspec.structs.replace(FULL, settings=("--no-config",), has_no_files=True)) as screen:
        assert "In a shell: rankdeck demo --no-config" in screen.text()
        await screen.press("3", "enter", "enter", *"a")
        assert "In a shell: rankdeck run --no-config --host localhost -- a" in screen.text()
        await screen.press("enter", "enter")

    assert screen.app.return_value == ("run", "--no-config", "--host", "localhost", "--", "a")


async def test_where_there_is_nothing_yet_it_looks_as_before() -> None:
    async with start(BARE, (80, 24), Look(has_colour=False, is_ascii=True)) as screen:
        await screen.press("1")
        assert_looks_as_before("start-bare-80x24", screen.lines())
        assert "\n".join(screen.lines()).isascii()


@pytest.mark.parametrize(
    ("keys", "argv"),
    [
        (("enter",), ("demo",)),
        (("1", "enter"), ("demo",)),
        (("5", "enter"), ("--help",)),
        (("2", "enter", "enter"), ("attach", "--host", "localhost")),
        (("2", "enter", "down", "down", "enter"), ("attach", "--host", "gpu2")),
        (("2", "enter", *"train", "enter"), ("attach", "--host", "trainer")),
        (("2", "enter", *"new", "enter"), ("attach", "--host", "new")),
        (("down", "down", "down", "enter", "enter"), ("replay", f"{EVIDENCE}/train-3f2a-20261121-031245.zip")),
        (("4", "enter", "slash", "x", "enter"), ("replay", "/x")),
        (("4", "enter", "pagedown", "pageup", "enter"), ("replay", f"{EVIDENCE}/train-3f2a-20261121-031245.zip")),
    ],
)
async def test_keys_lead_to_a_command(keys: tuple[str, ...], argv: tuple[str, ...]) -> None:
    async with start(FULL) as screen:
        await screen.press(*keys)

    assert screen.app.return_value == argv


async def test_a_program_is_typed_judged_and_started_by_its_command() -> None:
    async with start(FULL) as screen:
        await screen.press("3", "enter", "down", "enter", "enter")
        assert "type the program and its arguments" in screen.text()
        assert screen.app.screen.query_one("#program-yes", Button).disabled
        await screen.type("train.py")
        await screen.press("tab", "tab", "2")
        assert "In a shell: rankdeck run --host gpu1 --nproc-per-node 2 -- train.py" in screen.text()
        await screen.press("enter", "enter")

    assert screen.app.return_value == ("run", "--host", "gpu1", "--nproc-per-node", "2", "--", "train.py")


async def test_escape_goes_back_page_by_page_and_leaves_with_nothing() -> None:
    async with start(FULL) as screen:
        await screen.press("3", "enter", "enter")
        assert "Which program, on localhost?" in screen.text()
        await screen.press("escape")
        assert "Which host?" in screen.text()
        await screen.press("escape")
        assert "Watch a demo" in screen.text()
        await screen.press("escape")

    assert screen.app.return_value is None


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_keys_that_leave(key: str) -> None:
    async with start(FULL) as screen:
        await screen.press(key)

    assert screen.app.return_value is None


async def test_ctrl_c_leaves_from_any_page() -> None:
    async with start(FULL) as screen:
        await screen.press("2", "enter", "ctrl+c")

    assert screen.app.return_value is None


async def test_without_torch_a_demo_is_not_begun_and_it_is_said_what_to_install() -> None:
    async with start(BARE) as screen:
        await screen.press("1", "enter")
        assert "has no PyTorch" in screen.text()
        assert screen.app.return_value is None
        assert screen.app.is_running


async def test_the_command_stands_below_what_is_marked() -> None:
    async with start(FULL) as screen:
        assert "In a shell: rankdeck demo" in screen.text()
        await screen.press("4")
        assert "In a shell: rankdeck replay FILE" in screen.text()
        await screen.press("2", "enter")
        assert "its agent serves" in screen.text()
        await screen.press("down")
        assert "In a shell: rankdeck attach --host gpu1" in screen.text()


@pytest.mark.parametrize("has_colour", [True, False])
async def test_what_is_marked_can_be_seen_also_without_colour(*, has_colour: bool) -> None:
    async with start(FULL, look=Look(has_colour=has_colour)) as screen:
        await screen.press("2", "enter", "down")
        rows = [strip for strip in screen_strips(screen.app) if strip.text.strip("│ ") in {"gpu1", "gpu2"}]
        marked, other = ([segment.style for segment in row if "gpu" in segment.text] for row in rows)

        assert marked != other


async def test_what_is_no_host_is_said_and_cannot_be_taken() -> None:
    async with start(FULL) as screen:
        await screen.press("2", "enter")
        await screen.press("percent_sign", "enter")
        assert "'%' is no host: name an alias of ssh" in screen.text()
        assert screen.app.is_running
        await screen.press("backspace", "enter")

    assert screen.app.return_value == ("attach", "--host", "localhost")


async def test_the_mouse_works_too() -> None:
    async with start(FULL) as screen:
        await screen.pilot.click(OptionList, offset=(5, 1))
        await screen.settle()
        await screen.pilot.click("#list-choices", offset=(5, 1))
        await screen.settle()

    assert screen.app.return_value == ("attach", "--host", "gpu1")


async def test_a_small_terminal_can_still_be_used() -> None:
    async with start(FULL, (60, 15)) as screen:
        assert "5 See all commands" in screen.text()
        await screen.press("2", "enter", "enter")
    assert screen.app.return_value == ("attach", "--host", "localhost")

    async with start(LAB, (60, 15)) as screen:
        assert "In a shell: rankdeck attach" in screen.text()
        await screen.press("9")
        assert "9 See all commands" in screen.text()
        await screen.press("5", "enter", *"localhost", "enter")

    assert screen.app.return_value == ("attach", "--host", "localhost")


async def test_an_impatient_enter_opens_no_second_page() -> None:
    async with start(FULL) as screen:
        ways = screen.app.screen.query_one("#start-ways", OptionList)
        ways.highlighted = 1
        ways.action_select()
        ways.action_select()
        await screen.settle()
        await screen.press("escape")
        assert "Watch a demo" in screen.text()
        assert len(screen.app.screen_stack) == 1
        await screen.press("enter", "enter")

    assert screen.app.return_value == ("attach", "--host", "localhost")
