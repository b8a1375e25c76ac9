"""Stopping, killing and starting a job again from the console: asked first, done beside the frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from textual.widgets import Button, Input

from agent.wire.jobs import JobState
from app.errors import AgentRefusedError
from app.model.cluster import Cluster
from tests.support.consoles import TalkingSource, desk, training_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster
from tests.support.sim_node import SimNode

if TYPE_CHECKING:
    from agent.wire.jobs import JobStatus
    from tests.support.consoles import Desk, SimControl

SIZES = ((80, 24), (120, 35))


def training() -> TalkingSource:
    return training_source(12)


def control_of(source: TalkingSource) -> SimControl:
    assert source.control is not None
    return source.control


def inside(console: Desk) -> str:
    """Return what the dialog says: the longest part of each line between its borders."""
    return " ".join(max(line.split("│"), key=len).strip() for line in console.lines())


async def choose(console: Desk, place: int) -> None:
    """Open the dialog and go to one of its choices."""
    await console.press("x", *["down"] * place)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_question_looks_as_before(size: tuple[int, int]) -> None:
    async with desk(training(), size) as console:
        await choose(console, 3)
        assert_looks_as_before(f"control-{size[0]}x{size[1]}", console.lines())


async def test_the_question_names_nodes_ranks_and_processes() -> None:
    async with desk(training()) as console:
        await choose(console, 0)
        text = inside(console)
        assert "Stop job demo? Ranks 0-1 on demo-0 (pids 4000, 4001) and ranks 2-3 on demo-1 (pids 4002, 4003)" in text


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_list_stays_where_it_is_whichever_choice_is_marked(size: tuple[int, int]) -> None:
    async with desk(training(), size) as console:
        await choose(console, 0)
        dialog = console.console.screen.query_one(".dialog")
        regions = {dialog.region}
        for _ in range(4):
            await console.press("down")
            regions.add(dialog.region)
        assert len(regions) == 1
        assert dialog.region.width == (80 if size[0] == 80 else 76), "no parts of words at its sides"
        await console.press("up", "up", "up", "up", "tab")
        assert console.console.screen.focused is not None
        assert console.console.screen.focused.id == "control-no", "a field that is not asked for is not met"


async def test_a_program_without_the_engine_is_asked_about_as_it_ends_by_sigterm() -> None:
    source = training()
    for rank in source.sim.ranks:
        rank.can_stop = False
    source.run(2)
    async with desk(source) as console:
        await choose(console, 0)
        text = inside(console)
        assert "are ended by SIGTERM, and by SIGKILL after a grace period, 10 s unless the job has its own." in text
        assert "checkpoint" not in console.text()
        assert "Stop now" not in console.text(), "it would be the same"
        await console.press("down", "down")
        assert "10 s unless the job has its own; then the job restarts with 4 ranks." in inside(console)
        assert "checkpoint" not in console.text()


async def test_who_only_presses_enter_or_escape_does_nothing() -> None:
    source = training()
    async with desk(source) as console:
        await console.press("x", "escape")
        assert "Nothing was done" not in console.text(), "Esc is meant"
        await console.press("x", "enter", "enter")
        await console.press("x", "down", "down", "enter", "enter")
        await console.press("x", "down", "down", "down", "tab", "enter", "enter")
        await console.press("x", "escape")
        assert control_of(source).asked == []
        assert len(console.console.screen_stack) == 1


async def test_the_last_question_shows_the_keys_that_confirm_and_so_does_the_notice_after_enter() -> None:
    async with desk(training(), (80, 24)) as console:
        await console.press("x")
        assert "right arrow, then Enter: do it; Enter: to the buttons, Esc closes" in console.text()
        await console.press("enter")
        assert "right arrow, then Enter: do it; Enter alone closes" in console.text()
        await console.press("right")
        assert "Enter does it, Esc closes" in console.text()
        await console.press("left", "left")
        assert "right arrow, then Enter: do it; Enter: to the buttons, Esc closes" in console.text()
        await console.press("enter", "enter")
        await console.frames()
        screen = " ".join(console.text().split())
        assert "Nothing was done: the right arrow leads to the button that does it." in screen


async def test_the_right_arrow_goes_to_the_button_at_once_from_the_list() -> None:
    source = training()
    async with desk(source, (80, 24)) as console:
        await console.press("x", "right")
        assert "Enter does it, Esc closes" in console.text()
        await console.press("enter")
        await console.frames()
        assert control_of(source).asked == ["stop demo agreed"]


async def test_keys_that_cannot_do_it_are_not_promised() -> None:
    source = training()
    async with desk(source, (80, 24)) as console:
        await choose(console, 3)
        await console.press("tab", "backspace", "0", "up")
        assert "That many ranks cannot be" in inside(console)
        assert "right arrow" not in console.text()
        await console.press("enter", "enter", "enter")
        assert control_of(source).asked == []


async def test_the_right_arrow_moves_the_cursor_of_a_field_and_the_text_does_not_promise_more() -> None:
    source = training()
    async with desk(source, (80, 24)) as console:
        await choose(console, 3)
        assert "right arrow, then Enter: do it; tab: number of ranks, Esc closes" in console.text()
        await console.press("tab", "right")
        assert console.console.screen.focused is not None
        assert console.console.screen.focused.id == "control-ranks"
        assert "Enter leads to the buttons, Esc closes" in console.text()
        assert "right arrow" not in console.text()


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        (0, "stop demo agreed"),
        (1, "stop demo now"),
        (2, "kill demo"),
        (3, "restart demo None agreed"),
        (4, "restart demo None now"),
    ],
)
async def test_what_is_confirmed_is_asked_for_and_told(place: int, asked: str) -> None:
    source = training()
    async with desk(source) as console:
        await choose(console, place)
        await console.press("enter", "right", "enter")
        await console.frames()
        assert control_of(source).asked == [asked]
        assert f"{asked}: done" in console.text()


STOPPING = "stopping by SIGTERM; what is left in 9 s is killed"


def let_jobs_stop_by_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulated nodes report how their job is stopping, as an agent does."""
    status = SimNode.status

    def detailed(node: SimNode, now_s: float) -> JobStatus:
        found = status(node, now_s)
        return msgspec.structs.replace(found, detail=STOPPING) if found.state is JobState.STOPPING else found

    monkeypatch.setattr(SimNode, "status", detailed)


async def test_one_line_shows_how_a_job_is_stopping_and_its_end_replaces_that(monkeypatch: pytest.MonkeyPatch) -> None:
    let_jobs_stop_by_sigterm(monkeypatch)
    source = training()
    async with desk(source, (80, 24)) as console:
        console.console.show_until_ended(f"job demo is {STOPPING}")
        await console.settle()
        assert console.text().count("SIGTERM") == 1, "the notice alone, until a node reports it"
        source.sim.stop()
        await console.play(source, 0.4)
        assert console.text().count("SIGTERM") == 1
        headline = " ".join(" ".join(console.lines()[1:3]).split())
        assert "job demo is stopping by SIGTERM: 4 of 4 ranks are left; what is left in 9 s is killed" in headline
        await console.play(source, 5)
        assert "SIGTERM" not in console.text()


async def test_a_notice_about_the_end_of_a_job_goes_with_that_end() -> None:
    source = training()
    async with desk(source, (80, 24)) as console:
        await choose(console, 2)
        await console.press("enter", "right", "enter")
        assert "kill demo: done" in console.text()
        source.sim.stop()
        await console.play(source, 6)
        assert "kill demo: done" not in console.text()


async def test_a_restart_with_another_number_of_ranks_says_both_numbers() -> None:
    source = training()
    async with desk(source) as console:
        await choose(console, 3)
        await console.press("tab", "backspace", "8")
        assert "with 8 ranks instead of 4" in inside(console)
        await console.press("enter", "right", "enter")
        assert control_of(source).asked == ["restart demo 8 agreed"]


@pytest.mark.parametrize("typed", ["", "0", "1", "8193", "999999"])
async def test_a_number_of_ranks_that_cannot_be_is_said_and_cannot_be_confirmed(typed: str) -> None:
    source = training()
    async with desk(source) as console:
        await choose(console, 3)
        console.console.screen.query_one(Input).value = typed
        await console.settle()
        assert "That many ranks cannot be: at least 2, one on each node, and at most 8,192." in inside(console)
        assert console.console.screen.query_one("#control-yes", Button).disabled


async def test_a_job_that_has_ended_can_only_be_started_again() -> None:
    source = training()
    source.sim.kill(2)
    source.run(20)
    async with desk(source) as console:
        await console.press("x")
        assert "Start job demo again?" in console.text()
        assert "Kill" not in console.text()
        await console.press("enter", "right", "enter")
        assert control_of(source).asked == ["restart demo None agreed"]


async def test_a_job_that_has_lost_a_node_can_go_on_without_it() -> None:
    source = training()
    source.sim.lose_node(1)
    source.run(20)
    async with desk(source) as console:
        await choose(console, 5)
        text = inside(console)
        assert "Restart job demo without lost nodes? It is killed where it runs, and restarts without demo-1" in text
        assert "What may still run on demo-1 cannot be ended from here." in text
        assert not console.console.screen.query_one("#control-size").visible
        await console.press("enter", "right", "enter")
        assert control_of(source).asked == ["restart demo None now without demo-1"]


async def test_a_job_whose_nodes_are_all_there_is_not_offered_to_go_on_without_any() -> None:
    async with desk(training()) as console:
        await console.press("x")
        assert "Restart without" not in console.text()


async def test_a_frozen_picture_is_asked_about_as_it_is_now() -> None:
    source = training()
    async with desk(source) as console:
        await console.press("f")
        source.sim.kill(2)
        await console.play(source, 25)
        assert "running" in console.lines()[2]
        await console.press("x")
        assert "Start job demo again?" in console.text()
        await console.press("escape", "F")
        assert "rank 2, pid" not in inside(console)


async def test_a_refusal_is_told_and_the_console_goes_on() -> None:
    source = training()
    control_of(source).refusal = AgentRefusedError("demo-0", "wrong_state", "job demo [b]has[/b] ended \x1b[2J")
    async with desk(source) as console:
        await choose(console, 0)
        await console.press("enter", "right", "enter")
        assert "Not done" in console.text()
        assert "job demo [b]has[/b] ended" in console.text()
        assert "\x1b" not in console.text()


async def test_what_is_under_way_stands_in_the_masthead() -> None:
    source = training()
    control_of(source).doing = "restart: waiting for the job to end"
    async with desk(source, (160, 40)) as console:
        assert "restart: waiting for the job to end" in console.lines()[2]


async def test_before_there_is_a_job_there_is_nothing_to_ask() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source) as console:
        await console.press("x")
        assert "There is no job yet to act on." in console.text()


async def test_who_only_looks_on_has_no_key_for_it() -> None:
    source = training()
    source.control = None
    async with desk(source) as console:
        assert "Stop, restart" not in console.lines()[-1]
        await console.press("question_mark")
        assert "Stop, restart" not in console.text()
        await console.press("escape", "x")
        assert "This console only watches" in console.text()


def let_another_launcher_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let simulated jobs be of another launcher."""
    status = SimNode.status

    def adopted(node: SimNode, now_s: float) -> JobStatus:
        return msgspec.structs.replace(status(node, now_s), ranks=[rank.rank for rank in node.ranks], num_nodes=1)

    monkeypatch.setattr(SimNode, "status", adopted)


async def test_ranks_of_another_launcher_on_a_host_that_is_not_watched_are_not_called_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_another_launcher_start(monkeypatch)
    sim = SimCluster()
    sim.cluster = Cluster(["demo-0"])
    source = TalkingSource(sim)
    source.run(12)
    async with desk(source) as console:
        text = " ".join(console.lines())
        assert "2 of 4 ranks training" in text
        assert (text.count("unprobed"), text.count("not reported here"), text.count("starting")) == (2, 2, 0)
        assert console.console.ui.no_lines_text == "what its ranks print stays where their launcher puts it"


async def test_a_job_of_another_launcher_can_be_stopped_and_killed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_another_launcher_start(monkeypatch)
    source = TalkingSource(SimCluster())
    source.run(12)
    async with desk(source) as console:
        await console.press("x")
        text = " ".join(console.lines())
        assert [word in text for word in ("Stop now", "Kill", "Restart")] == [True, True, False]
        await console.press("escape")

        source.sim.stop()
        await console.play(source, 12)
        await console.press("x")
        assert "It is started again the way it was started." in " ".join(console.lines())
