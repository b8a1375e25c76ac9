"""The logs follow the newest line until one looks back, and stay on the line that is read."""

from __future__ import annotations

import re

import pytest
from textual.events import MouseScrollUp

from agent.wire.jobs import JobState
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.tui.actions import VIEW_NAMES
from app.tui.logs.matches import MAX_LINES
from app.tui.logs.store import CHUNK_LINES, LogStore
from app.tui.views.logs import LogsView
from app.view.summary import is_over
from app.view.view import View
from tests.support.consoles import Desk, SimSource, TalkingSource, desk, training_source
from tests.support.node_reports import job_status, node_report
from tests.support.sim import SimCluster


def talk(source: SimSource, first: int, stop: int) -> None:
    for number in range(first, stop):
        source.print("demo-0", number % 4, f"line {number}.")


def shown(console: Desk) -> list[int]:
    return [int(number) for number in re.findall(r"line (\d+)\.", console.text())]


async def test_new_lines_push_the_old_ones_up() -> None:
    source = SimSource(SimCluster().view)
    talk(source, 0, 100)
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        assert shown(console)[-1] == 99

        talk(source, 100, 130)
        await console.frames(1)

        assert shown(console)[-1] == 129
        assert "130 lines" in console.text()
        assert "following" in console.text()


def restarted() -> TalkingSource:
    """A training whose latest attempt has begun after one that ended with a traceback."""
    source = training_source(12)
    source.drain_logs()
    for text in ("Traceback (most recent call last):", "ValueError: bad data"):
        source.print("demo-1", 2, text, "stderr", "demo")
        source.print("demo-1", -1, text, "stderr", "demo")
    source.print("demo-0", -1, "--- restart 1 began 12:03:04", job_id="demo")
    source.print("demo-0", 0, "step 1 of the next attempt", job_id="demo")
    return source


@pytest.mark.parametrize("is_alone", [True, False])
@pytest.mark.parametrize("is_stopped", [True, False])
async def test_the_last_lines_of_a_restarted_job_are_those_of_its_present_attempt(
    is_alone: bool, is_stopped: bool
) -> None:
    source = restarted()
    if not is_alone:
        source.print("demo-1", 0, "a line of another job", job_id="other")
    if is_stopped:
        source.sim.stop()
        source.sim.run(5)
    async with desk(source) as console:
        assert "step 1 of the next attempt" in console.text()
        assert ("--- restart 1 began 12:03:04" in console.text()) is not is_stopped
        assert "bad data" not in console.text()

        await console.press("2", "home", "down", "down", "enter")
        assert "Ranks >  rank 2 " in console.text()
        assert "rank 2 has printed nothing yet" in console.text()
        assert "bad data" not in console.text()


async def test_the_picture_of_an_earlier_attempt_keeps_its_lines() -> None:
    source = training_source(12)
    source.print("demo-0", 0, "the first attempt", job_id="demo")
    async with desk(source) as console:
        await console.press("f")
        source.print("demo-0", -1, "--- restart 1 began 12:03:04", job_id="demo")
        await console.frames()
        assert "the first attempt" in console.text()
        await console.press("f")
        await console.frames()
        assert "the first attempt" not in console.text()


async def test_the_logs_keep_the_lines_before_a_restart_and_its_mark_stands_out() -> None:
    async with desk(restarted()) as console:
        await console.show("logs")
        assert "ValueError: bad data" in console.text()
        (mark,) = (strip for strip in console.rendered() if "restart 1 began" in strip.text)
        (line,) = (strip for strip in console.rendered() if "of the next attempt" in strip.text)
        styles = [{part.text.strip(): part.style for part in strip} for strip in (mark, line)]
        assert styles[0]["--- restart 1 began 12:03:04"] != styles[1]["step 1 of the next attempt"]


async def test_a_notice_takes_a_line_of_its_own_and_covers_none() -> None:
    source = SimSource(SimCluster().view)
    talk(source, 0, 100)
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        before = shown(console)
        await console.press("e")
        *_, notice, keys = console.lines()

        assert notice.split(maxsplit=1)[1] == "No line at level error yet."
        assert keys.startswith(" 1-8 Views")
        assert shown(console) == before[1:]


async def test_every_view_shows_the_lines_of_its_job_alone() -> None:
    sim = SimCluster()
    sim.run(2)
    source = SimSource(sim.view)
    own = sim.view().job_id
    for number in range(30):
        source.print("demo-0", 0, f"own {number}.", job_id=own)
        source.print("demo-0", 0, f"Error: strange {number}.", "stderr", job_id="other")
    source.print("demo-0", -1, "of the node")
    async with desk(source, (120, 35)) as console:
        for keys in (["1"], ["2", "enter"], ["escape", str(VIEW_NAMES.index("logs") + 1)]):
            await console.press(*keys)
            await console.frames()
            assert "own 29." in console.text(), keys
            assert "strange" not in console.text(), keys
        assert "of the node" in console.text()
        assert f"31 of 61 lines, those of job {own} " in console.text()
        assert "errors" not in console.text()


@pytest.mark.parametrize("seconds", [0, 2], ids=["no job is shown yet", "its job is shown"])
async def test_while_the_shown_job_has_no_lines_those_of_the_job_before_are_not_taken_for_its_own(seconds: int) -> None:
    sim = SimCluster()
    sim.run(seconds)
    source = SimSource(sim.view)
    for number in range(30):
        source.print("demo-0", -1, f"raise SignalException {number}", "stderr", job_id="before")
    async with desk(source, (120, 35)) as console:
        await console.frames()
        assert "SignalException" not in console.text()
        if seconds:
            none = f"job {sim.view().job_id} has printed nothing yet"
            assert none in console.text()
            await console.show("logs")
            assert none in console.text()
            assert "0 of 30 lines" in console.text()


async def test_of_a_job_that_is_over_and_has_no_lines_the_command_is_shown_that_reads_its_files() -> None:
    sim = SimCluster()
    sim.run(4)
    sim.stop()
    sim.run_until(lambda: is_over(sim.view()), 60.0, "its end")
    async with desk(SimSource(sim.view), (120, 35)) as console:
        await console.show("logs")
        assert f"no agent keeps its lines: rankdeck logs {sim.view().job_id} reads the files" in console.text()


@pytest.mark.parametrize("has_lines", [True, False])
async def test_the_traceback_of_the_launcher_of_a_stopped_job_is_no_error(has_lines: bool) -> None:
    cluster, diagnoser = Cluster(["localhost"]), Diagnoser()
    states = [JobState.RUNNING]

    def view() -> View:
        now_s = 1000.0 + len(states)
        job = job_status(state=states[-1], num_nodes=1, exit_code=None if states[-1] is JobState.RUNNING else 1)
        cluster.apply("localhost", node_report(len(states), [job], []), now_s)
        return View(cluster, diagnoser.observe(cluster, now_s), now_s)

    source = SimSource(view)
    for number in range(3 * has_lines):
        source.print("localhost", number % 2, f"ValueError: line {number}.", "stderr", job_id="job")
    for text in ("Traceback (most recent call last):", "    raise SignalException(f'Process {os.getpid()}')") * 20:
        source.print("localhost", -1, text, "stderr", job_id="job")
    async with desk(source, (120, 35)) as console:
        await console.show("logs")
        assert f"{40 + 3 * has_lines} errors" in console.text()

        states.append(JobState.STOPPED)
        await console.frames(4)
        assert ("3 errors: e" if has_lines else " lines  ") in console.text()
        assert "40 errors" not in console.text()
        assert "SignalException" in console.text()
        await console.show("overview")
        assert ("SignalException" in console.text()) != has_lines
        assert shown(console) == list(range(3 * has_lines))


async def test_what_the_launcher_prints_while_a_job_is_stopped_is_no_error_of_its_next_attempt_either() -> None:
    source = training_source(12)
    async with desk(source, (120, 35)) as console:
        await console.show("logs")
        source.sim.stop()
        source.run(6)
        await console.frames(4)
        for rank, text in ((-1, "SignalException: Process 7 got signal: 15"), (1, "ValueError: of a rank")):
            source.print("demo-0", rank, text, "stderr", "demo")
        await console.frames(4)
        source.sim.next_attempt()
        source.run(6)
        await console.frames(4)
        assert "1 error: e" in console.text()
        source.print("demo-0", -1, "RendezvousError: of the next attempt", "stderr", "demo")
        await console.frames(4)
        assert "2 errors: e" in console.text()
        await console.press("p")
        assert ("SignalException" in console.text(), "RendezvousError" in console.text()) == (False, True)


async def test_page_up_stops_following_and_end_follows_again() -> None:
    source = SimSource(SimCluster().view)
    talk(source, 0, 100)
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        await console.press("pageup")
        before = shown(console)
        assert before[-1] < 99

        talk(source, 100, 130)
        await console.frames()
        assert shown(console) == before
        assert "30 new below, End follows" in console.text()

        await console.press("home")
        assert shown(console)[0] == 0
        await console.press("end")
        assert shown(console)[-1] == 129
        talk(source, 130, 131)
        await console.frames(1)
        assert shown(console)[-1] == 130


async def test_scrolling_down_to_the_last_line_follows_again() -> None:
    source = SimSource(SimCluster().view)
    talk(source, 0, 100)
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        await console.press("up", "up")
        assert not console.console.query_one(LogsView).is_following
        await console.press("down", "down")

        assert console.console.query_one(LogsView).is_following


async def test_the_line_that_is_read_stays_when_old_lines_are_dropped() -> None:
    source = SimSource(SimCluster().view)
    async with desk(source, (80, 24)) as console:
        console.console.ui.logs = LogStore(max_lines=2 * CHUNK_LINES)
        talk(source, 0, 2 * CHUNK_LINES)
        await console.frames(1)
        await console.show("logs")
        await console.press("pageup")
        before = shown(console)

        talk(source, 2 * CHUNK_LINES, 2 * CHUNK_LINES + 10)
        await console.frames()

        assert shown(console) == before
        assert f"{CHUNK_LINES:,} older dropped" in console.text()


async def test_long_lines_are_read_by_moving_to_the_side_and_no_further_than_they_are_long() -> None:
    source = SimSource(SimCluster().view)
    source.print("demo-0", 0, "0123456789" * 10 + "THE END")
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        assert "THE END" not in console.text()
        assert "  right: long lines " in console.text()
        await console.press("left")
        await console.press(*["right"] * 10)
        assert "THE END" in console.text()
        assert "from column" in console.text()
        assert "long lines" not in console.text()

        await console.press(*["left"] * 10)
        assert " 0123456789" in console.text()
        for number in range(30):
            source.print("demo-0", 0, f"line {number}")
        await console.frames()
        assert "long lines" not in console.text(), "none in the window is"


async def test_wide_characters_move_to_the_side_by_cells() -> None:
    source = SimSource(SimCluster().view)
    source.print("demo-0", 0, "a" + "\u4e16" * 60 + "END")
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        await console.press(*["right"] * 10)

        assert "END" in console.text()
        assert len(console.lines()) == 24


async def test_the_wheel_scrolls() -> None:
    source = SimSource(SimCluster().view)
    talk(source, 0, 100)
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        logs = console.console.query_one(LogsView)
        top = logs.top
        await console.pilot._post_mouse_events([MouseScrollUp], widget=logs)
        await console.settle()

        assert logs.top == top - 3
        assert not logs.is_following


async def test_lines_that_ranks_print_alike_are_one_row_until_each_is_wanted_again() -> None:
    source = SimSource(SimCluster().view)
    for number in range(50):
        for rank in range(4):
            source.print("demo-0", rank, f"line {number}.")
    async with desk(source, (80, 24)) as console:
        await console.press("c")
        assert console.console.active == "logs"
        assert "LOGS  50 of 200 lines" in console.text()
        assert " ranks 0-3   line 49." in console.text()
        source.print("demo-1", 1, "line 50.")
        await console.frames(1)
        assert " demo-1:r1   line 50." in console.text()
        await console.press("slash", *"rank", "equals_sign", "1", "minus", "3", "enter")
        assert " ranks 1-3   line 49." in console.text()
        await console.press("escape", "pageup")
        before = shown(console)
        source.print("demo-0", 2, "line 50.")
        await console.frames()
        assert shown(console) == before

        await console.press("end", "c")
        assert "ranks" not in "\n".join(console.lines()[4:])
        assert "201 lines" not in console.text()
        assert "202 lines" in console.text()


async def test_of_more_lines_than_are_collapsed_it_says_of_how_many() -> None:
    source = SimSource(SimCluster().view)
    async with desk(source, (100, 24)) as console:
        ui = console.console.ui
        for number in range(MAX_LINES + 15):
            ui.logs.append("demo-0", number % 4, f"line {number // 4}.", is_stderr=False)
        await console.press("c")
        await until_frames(console, "LOGS  12,5")

        assert "LOGS  12,501 of the latest 50,000 lines" in console.text()


async def until_frames(console: Desk, words: str) -> None:
    """Let frames come until words are there."""
    for _ in range(1000):
        if words in console.text():
            return
        await console.frames(1)
    raise AssertionError(console.text())
