"""Another program from the console: asked, judged and started only where no job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from textual.widgets import Button, Input

from agent.wire.jobs import JobState
from app.diagnosis.diagnoser import Diagnoser
from app.errors import AgentUnreachableError, UsageError
from app.fleet.start_progress import NodeStage, StartProgress
from app.inventory.program import Program, typed
from app.model.cluster import Cluster
from app.settings.loading import load
from app.tui.actions import ACTIONS, VIEW_NAMES
from app.tui.dialogs.program_form import ORDER
from app.view.view import View
from tests.support.consoles import SimSource, SimStarter, TalkingSource, desk, training_source
from tests.support.node_reports import job_status, node_report
from tests.support.screens import assert_looks_as_before
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from tests.support.consoles import Desk

WAIT_S = 30.0
NOW_S = 100.0
SIZES = ((80, 24), (120, 35), (200, 50))
LAST = Program(("train.py", "--epochs", "3"), 4, 2, "/home/ada/project", "/opt/python")
BEFORE = Program(("-m", "pkg.eval"))


def idle() -> tuple[SimSource, SimStarter]:
    """A host whose agent reports, and that has no job."""
    cluster, diagnoser = Cluster(["gpu1"]), Diagnoser()
    cluster.apply("gpu1", node_report(1, workers=[], jobs=[]), NOW_S)
    source = SimSource(lambda: View(cluster, diagnoser.observe(cluster, NOW_S), NOW_S), can_inject=False)
    source.starter = starter = SimStarter()
    source.how_to_begin = "rankdeck run --host gpu1 -- train.py"
    return source, starter


def ended(*past: Program) -> tuple[TalkingSource, SimStarter]:
    """A training that has failed, on a host where another program can be started."""
    source = training_source(12)
    source.sim.kill(2)
    source.run(20)
    source.starter = starter = SimStarter(*past)
    return source, starter


def inside(console: Desk) -> str:
    text = " ".join(console.lines())
    return " ".join(text.replace("│", " ").replace("▌", " ").split())


def field(console: Desk, name: str) -> str:
    return console.console.screen.query_one(f"#program-{name}", Input).value


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_questions_look_as_before(size: tuple[int, int]) -> None:
    source, _ = ended(LAST, BEFORE)
    async with desk(source, size) as console:
        await console.press("x", "down")
        assert "Enter asks which program, Esc closes" in console.text()
        assert_looks_as_before(f"another-{size[0]}x{size[1]}", console.lines())
        await console.press("enter")
        assert_looks_as_before(f"program-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_host_without_a_job_looks_as_before(size: tuple[int, int]) -> None:
    source, _ = idle()
    async with desk(source, size) as console:
        assert_looks_as_before(f"idle-overview-{size[0]}x{size[1]}", console.lines())


def on_its_way(num_nodes: int) -> StartProgress:
    """A start that some nodes have prepared, and one has refused."""
    progress = StartProgress("job gpt", [f"gpu{number}" for number in range(1, num_nodes + 1)])
    for number, node in enumerate(progress.nodes[:-1]):
        progress.move(node, NodeStage.ASKED)
        if number % 3 != 1:
            progress.move(node, NodeStage.PREPARED)
    return progress


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_start_that_is_under_way_looks_as_before(size: tuple[int, int]) -> None:
    source, _ = ended(LAST)
    source.starting = on_its_way(16)
    async with desk(source, size) as console:
        assert_looks_as_before(f"under-way-{size[0]}x{size[1]}", console.lines())


async def test_each_step_of_a_start_is_seen_and_it_leaves_the_screen_when_it_is_over() -> None:
    source, _ = ended(LAST)
    source.starting = progress = on_its_way(3)
    async with desk(source) as console:
        assert "starting job gpt: 1 of 3 prepared, waiting for gpu2" in console.text()
        assert "gpu2 asked   gpu3 not asked   gpu1 prepared" in console.text()
        progress.move("gpu2", NodeStage.REFUSED, "no directory /w")
        await console.frames()
        assert "taking back job gpt: gpu2 refused" in console.text()

        source.starting = None
        await console.frames()
        assert "job gpt" not in console.text()


@pytest.mark.parametrize("name", VIEW_NAMES)
async def test_every_view_of_a_host_without_a_job_says_what_to_do_and_what_there_will_be(name: str) -> None:
    source, _ = idle()
    async with desk(source, (80, 24)) as console:
        await console.show(name)

        assert "1 node up, no job yet" in console.text()
        assert "x starts a program here; or: rankdeck run --host gpu1 -- train.py" in console.text()
        body = [line for line in console.lines()[4:-1] if line.strip()]
        assert body, "the view is not blank"


@pytest.mark.parametrize(
    ("assignments", "told"),
    [
        (["keys.control=F9"], "F9 starts a program here; or: rankdeck run"),
        (["keys.start_program=F8"], "F8 starts a program here; or: rankdeck run"),
        (["keys.control="], "→ rankdeck run"),
    ],
)
async def test_the_key_is_called_as_the_person_has_set_it(assignments: list[str], told: str) -> None:
    settings = load(ACTIONS, assignments, has_files=False, environ={}).settings().console
    source, _ = idle()
    async with desk(source, (80, 24), settings=settings) as console:
        assert told in console.text()


async def test_a_console_that_only_looks_on_names_the_command_alone() -> None:
    source, _ = idle()
    source.starter = None
    async with desk(source, (80, 24)) as console:
        assert "→ rankdeck run --host gpu1 -- train.py" in console.text()


async def test_where_a_job_comes_by_itself_nothing_is_said_of_how_to_begin() -> None:
    source, _ = idle()
    source.how_to_begin = ""
    async with desk(source) as console:
        assert console.lines()[2].strip() == ""


async def test_without_a_job_the_key_leads_to_the_program_and_enter_alone_starts_nothing() -> None:
    source, starter = idle()
    async with desk(source) as console:
        await console.press("x")
        assert "Start a program on gpu1" in console.text()
        assert "type the program and its arguments" in inside(console)
        assert console.console.screen.query_one("#program-yes", Button).disabled
        await console.press("enter", *"a", "enter", "enter")
        assert len(console.console.screen_stack) == 1
        await console.press("x", *"a", "escape")
        assert starter.started == []


async def test_a_program_is_started_with_what_was_typed_and_told() -> None:
    source, starter = idle()
    async with desk(source) as console:
        await console.press("x", *"eval", "tab", "tab", "2", "enter")
        assert "Start eval on gpu1? 2 ranks." in inside(console)
        await console.press("right", "enter")
        await console.frames()

        assert starter.started == [Program(("eval",), 2)]
        assert "eval: started" in console.text()


async def test_the_last_program_is_filled_in_and_up_leads_to_those_before() -> None:
    source, starter = ended(LAST, BEFORE)
    async with desk(source) as console:
        await console.press("x", "down", "enter")
        assert [field(console, name) for name in ("command", "num_ranks", "max_restarts", "workdir", "python")] == [
            "train.py --epochs 3",
            "4",
            "2",
            "/home/ada/project",
            "/opt/python",
        ]
        await console.press("up")
        assert [field(console, name) for name in ORDER] == ["-m pkg.eval", "", "", "", ""]
        assert "Start -m pkg.eval on gpu1? Ranks by the inventory's nproc, else one" in inside(console)
        await console.press("up", "down")
        assert [field(console, name) for name in ORDER] == [typed(LAST)._asdict()[name] for name in ORDER]
        await console.press("enter", "right", "enter")

        assert starter.started == [LAST]


async def test_what_was_changed_is_there_again_after_a_look_at_earlier_programs() -> None:
    source, starter = ended(LAST, BEFORE)
    async with desk(source) as console:
        await console.press("x", "down", "enter", "tab", "end", *"s2", "up")
        assert field(console, "workdir") == ""
        await console.press("down", "enter", "right", "enter")

        assert [program.workdir for program in starter.started] == ["/home/ada/projects2"]


async def test_where_there_is_only_one_program_nothing_is_said_of_earlier_ones() -> None:
    source, _ = ended(LAST)
    async with desk(source) as console:
        await console.press("x", "down", "enter")
        assert "earlier ones" not in console.text()
        assert "tab goes round, Enter leads to the buttons, Esc closes" in console.text()
        await console.press("up")
        assert field(console, "command") == "train.py --epochs 3"


async def test_on_several_hosts_restarts_are_not_asked_for() -> None:
    source, starter = ended(LAST)
    starter.hosts = ["gpu1", "localhost"]
    async with desk(source) as console:
        await console.press("x", "down", "enter", "tab", *["delete"] * 30)
        assert "Start a program on gpu1 and localhost" in console.text()
        assert "restarts" not in console.text()
        assert "the inventory's, else home; on localhost this directory" in console.text()
        await console.press("enter", "right", "enter")

        assert [program.max_restarts for program in starter.started] == [0]


async def test_beside_a_job_that_runs_the_key_is_called_as_the_person_has_set_it() -> None:
    for assignment, told in (("keys.control=F9", "end it first (F9), then"), ("keys.control=", "end it first, then")):
        settings = load(ACTIONS, [assignment], has_files=False, environ={}).settings().console
        source = training_source(12)
        source.starter = SimStarter(LAST)
        async with desk(source, settings=settings) as console:
            await console.console.run_action("start_program")
            await console.settle()
            (said,) = console.console._notifications
            assert told in said.message


async def test_an_earlier_program_that_a_terminal_would_act_on_is_left_out() -> None:
    source, _ = ended(Program(("evil\x1b]0;owned\x07.py",)), Program(("a.py",), workdir="/w\x9b2J"), BEFORE)
    async with desk(source) as console:
        await console.press("x", "down", "enter")

        assert field(console, "command") == "-m pkg.eval"
        await console.press("up", "up")
        assert field(console, "command") == "-m pkg.eval"


async def test_what_was_hidden_as_a_secret_must_be_typed_again() -> None:
    source, starter = ended(Program(("train.py", "--token", "***")))
    async with desk(source) as console:
        await console.press("x", "down", "enter")
        assert "what looked like a secret is hidden as ***: type it again" in inside(console)
        assert console.console.screen.query_one("#program-yes", Button).disabled
        await console.press("escape")
        assert starter.started == []


async def test_beside_a_job_that_runs_nothing_is_started_and_it_is_said_what_to_do() -> None:
    source = training_source(12)
    source.starter = starter = SimStarter(LAST)
    async with desk(source) as console:
        await console.press("x", *["down"] * 5)
        assert "Job demo runs on gpu1: end it first, then start another one here." in inside(console)
        assert console.console.screen.query_one("#control-yes", Button).disabled
        await console.press("enter", "enter")
        await console.console.run_action("start_program")
        await console.settle()
        *_, said = console.console._notifications
        assert said.message == "Job demo runs on gpu1: end it first (x), then start another one."
        assert starter.started == []
        assert len(console.console.screen_stack) == 1


def ended_beside(**jobs: JobState) -> tuple[SimSource, SimStarter]:
    """A job `gpt` that has ended on gpu1, and others there."""
    cluster, diagnoser = Cluster(["gpu1"]), Diagnoser()
    states = {"gpt": JobState.STOPPED} | jobs
    rows = [job_status(job_id=name, state=state, num_nodes=1, world_size=2) for name, state in states.items()]
    cluster.apply("gpu1", node_report(1, rows, []), NOW_S)
    source = SimSource(lambda: View(cluster, diagnoser.observe(cluster, NOW_S), NOW_S, "gpt"))
    source.starter = starter = SimStarter(LAST)
    return source, starter


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_restart_beside_a_job_names_it_and_what_follows_before_it_is_confirmed(size: tuple[int, int]) -> None:
    source, _ = ended_beside(eval=JobState.RUNNING, old=JobState.FAILED)
    async with desk(source, size) as console:
        await console.press("x")
        shared = "Job eval runs on gpu1: the jobs then share CPUs, memory and GPUs there."
        assert f"goes on from its checkpoint if it has one. {shared}" in inside(console)
        assert_looks_as_before(f"restart-beside-{size[0]}x{size[1]}", console.lines())
        await console.press("right", "enter")
        assert source.control is not None
        assert source.control.asked == ["restart gpt None agreed"]


async def test_a_restart_where_no_other_job_runs_names_none() -> None:
    source, _ = ended_beside(old=JobState.FAILED)
    async with desk(source) as console:
        await console.press("x")
        assert "goes on from its checkpoint if it has one. Do nothing" in " ".join(inside(console).split())


async def test_a_program_is_not_asked_for_while_a_job_runs_that_is_not_shown() -> None:
    source, starter = ended_beside(eval=JobState.RUNNING)
    async with desk(source) as console:
        await console.press("x", "down")
        assert "Job eval runs on gpu1: end it first, then start another one here." in inside(console)
        assert console.console.screen.query_one("#control-yes", Button).disabled
        assert "Enter leads to the buttons, Esc closes" in console.text()
        await console.press("enter", "enter")
        await console.console.run_action("start_program")
        await console.settle()
        *_, said = console.console._notifications
        assert said.message == "Job eval runs on gpu1: end it first, then start another one."
        assert len(console.console.screen_stack) == 1
        assert starter.started == []


async def test_where_no_program_can_be_started_it_is_not_offered() -> None:
    source, _ = ended()
    source.starter = None
    async with desk(source) as console:
        await console.press("x")
        assert "Start job demo again?" in console.text()
        assert "another program" not in console.text()
        await console.press("escape")
        await console.console.run_action("start_program")
        await console.settle()
        assert "No program can be started from this console." in console.text()


async def test_a_host_that_does_not_answer_and_one_that_refuses_are_told() -> None:
    source, starter = ended(LAST)
    async with desk(source) as console:
        starter.refusal = AgentUnreachableError("gpu1", "no reply in 10 s")
        await console.press("x", "down", "enter")
        assert "Not done" in console.text()
        assert "no reply in 10 s" in inside(console)
        starter.refusal = None
        await console.press("x", "down", "enter")
        starter.refusal = UsageError("job eval runs on gpu1", "end it first")
        await console.press("enter", "right", "enter")
        assert "job eval runs on gpu1 (end it first" in inside(console)


async def test_the_palette_knows_it_only_where_it_can_be_done() -> None:
    for starter in (SimStarter(), None):
        source, _ = ended()
        source.starter = starter
        async with desk(source) as console:
            await console.press("ctrl+p", *("space" if key == " " else key for key in "a program"))
            found = "Start a program" if starter is not None else "No matches found"
            await until_async(lambda found=found: found in console.text(), WAIT_S, "the palette has looked")  # type: ignore[misc]
            assert ("Start a program" in console.text()) == (starter is not None)
