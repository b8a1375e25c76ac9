"""A console on a simulated cluster, held still: frames come and time passes when a test says so."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from agent.wire.logs import LogLine
from app.model.unreachable_reason import UnreachableReason
from app.recording.events import EventLog
from app.recording.history import History
from app.text import nodes_text
from app.tui.actions import VIEW_NAMES
from app.tui.console import DEFAULT_SETTINGS, Console
from app.tui.theme import Look
from app.tui.ui_state import FRAMES_PER_VIEW
from tests.support.screens import screen_lines, screen_strips, until_at_rest
from tests.support.sim import SimCluster, played_once

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection

    from textual.pilot import Pilot
    from textual.strip import Strip

    from app.errors import AppError
    from app.fleet.start_progress import StartProgress
    from app.inventory.program import Program
    from app.recording.events import Event
    from app.settings.schema import ConsoleSettings
    from app.stacks.groups import NodeStacks
    from app.tui.source import ConsoleSource, Doctor, Outside, Questions
    from app.view.view import View
    from ddpcore.wire import Fault

FRAME_S = 0.1
STEPS_PER_LINE = 10
"""A rank of a talking simulation prints a line so often."""


class SimControl:
    """Takes what is asked of the job.

    Attributes:
        asked: It, in words.
        refusal: Raised by everything from now on.
    """

    def __init__(self) -> None:
        self.doing = ""
        self.asked: list[str] = []
        self.refusal: AppError | None = None

    async def stop(self, job_id: str, *, is_agreed: bool) -> str:
        return self._take(f"stop {job_id} {'agreed' if is_agreed else 'now'}")

    async def kill(self, job_id: str) -> str:
        return self._take(f"kill {job_id}")

    async def restart(
        self,
        job_id: str,
        num_ranks: int | None = None,
        *,
        is_immediate: bool = False,
        without: Collection[str] | None = None,
    ) -> str:
        others = "" if without is None else f" without {', '.join(without)}"
        return self._take(f"restart {job_id} {num_ranks} {'now' if is_immediate else 'agreed'}{others}")

    def _take(self, what: str) -> str:
        self.asked.append(what)
        if self.refusal is not None:
            raise self.refusal
        return f"{what}: done"


class SimStarter:
    """Takes programs that are to be started.

    Attributes:
        hosts: Where.
        started: Those that were.
        programs: What was started before, the newest first.
        refusal: Raised by everything from now on.
    """

    def __init__(self, *programs: Program) -> None:
        self.hosts = ["gpu1"]
        self.programs = list(programs)
        self.started: list[Program] = []
        self.refusal: AppError | None = None

    @property
    def where(self) -> str:
        return nodes_text(self.hosts)

    async def past(self) -> list[Program]:
        if self.refusal is not None:
            raise self.refusal
        return self.programs

    async def start(self, program: Program) -> str:
        self.started.append(program)
        if self.refusal is not None:
            raise self.refusal
        return f"{program.text}: started"


class SimSource:
    """A `ConsoleSource`: the rows come from a function, the rest is what a test puts in, or looks at afterwards.

    Attributes:
        failure: Raised by `view` from now on.
        refusal: Raised by `inject` and `stacks` from now on.
        injected: What was asked of `inject`.
        answers: What `stacks` returns.
        stacks_asked: Whether each call of `stacks` wanted native frames.
        stacks_may_come: While it is not set, `stacks` does not return.
        num_closed: How often the console has closed it.
        num_views: How often it was asked for rows.
    """

    title = "rankdeck demo"
    leaving = "the session ends what it started"
    stall_s = 10.0
    player = None
    starter: SimStarter | None = None
    starting: StartProgress | None = None
    questions: Questions | None = None
    doctor: Doctor | None = None
    outside: Outside | None = None
    how_to_begin = ""
    reading = ""
    reads_loss = False

    def __init__(self, make_view: Callable[[], View], *, can_inject: bool = True) -> None:
        self.can_inject = can_inject
        self.control: SimControl | None = SimControl()
        self.failure: AppError | None = None
        self.refusal: AppError | None = None
        self.answers: list[NodeStacks] = []
        self.stacks_asked: list[bool] = []
        self.stacks_may_come = asyncio.Event()
        self.stacks_may_come.set()
        self.injected: list[Fault] = []
        self.num_closed = 0
        self.num_views = 0
        self._make_view = make_view
        self._lines: list[tuple[str, LogLine]] = []
        self._notices: list[str] = []
        self._num_lines = 0
        self.events = EventLog()
        self.history = History()

    def view(self) -> View:
        self.num_views += 1
        if self.failure is not None:
            raise self.failure
        view = self._make_view()
        self.events.observe(view)
        self.history.observe(view)
        return view

    def time_text(self, event: Event) -> str:
        return f"{int(event.at_s) // 60:02}:{int(event.at_s) % 60:02}"

    def print(self, node: str, rank: int, text: str, stream: str = "stdout", job_id: str = "") -> None:
        """Let a rank print a line; -1 is the launcher."""
        self._num_lines += 1
        self._lines.append((node, LogLine(self._num_lines, rank, stream, text, job_id)))

    def notice(self, text: str) -> None:
        self._notices.append(text)

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        lines, self._lines = self._lines, []
        return lines

    def drain_notices(self) -> list[str]:
        notices, self._notices = self._notices, []
        return notices

    async def inject(self, fault: Fault) -> str:
        self.injected.append(fault)
        if self.refusal is not None:
            raise self.refusal
        return f"rank {fault.rank}: {fault.kind} is done"

    async def stacks(self, *, is_native: bool) -> list[NodeStacks]:
        self.stacks_asked.append(is_native)
        await self.stacks_may_come.wait()
        if self.refusal is not None:
            raise self.refusal
        return self.answers

    async def close(self) -> None:
        self.num_closed += 1


class TalkingSource(SimSource):
    """A simulated training whose ranks print their loss."""

    def __init__(self, sim: SimCluster) -> None:
        super().__init__(sim.view)
        self.sim = sim
        sim.each_view = self.history.observe
        self._told = dict.fromkeys(range(sim.world_size), 0)

    def run(self, seconds: float) -> None:
        """Let the simulation run, and its ranks talk."""
        self.sim.run(seconds)
        for row in self.sim.view().ranks():
            while row.step is not None and self._told[row.rank] + STEPS_PER_LINE <= row.step:
                step = self._told[row.rank] = self._told[row.rank] + STEPS_PER_LINE
                loss = 1.5 + 4.0 / (1 + step / 50)
                self.print(row.node, row.rank, f"step {step} epoch {step // 100} loss {loss:.4f}")


class StillConsole(Console):
    """Takes no frame by itself, and looks at the model at every second one, however busy this machine is."""

    NOTIFICATION_TIMEOUT = 3600.0  # what is said stays to be looked at

    def start_frames(self) -> None:
        """Leave frames to the test."""
        self.ui.max_frames_per_view = FRAMES_PER_VIEW


class Desk:
    """A console, the hands at its keys and the eyes on its screen."""

    def __init__(self, console: Console, pilot: Pilot[None]) -> None:
        self.console = console
        self.pilot = pilot

    async def frames(self, count: int = 2) -> None:
        """Let frames come; of two, one has new rows."""
        for _ in range(count):
            self.console.frame()
        await self.settle()

    async def play(self, source: TalkingSource, seconds: float) -> None:
        """Let simulated time pass at the pace of frames."""
        for _ in range(round(seconds / FRAME_S)):
            source.run(FRAME_S)
            self.console.frame()
        await self.settle()

    async def press(self, *keys: str) -> None:
        """Press keys, each when what the one before it has done is on the screen."""
        for key in keys:
            await self.pilot.press(key)
            await self.settle()

    async def show(self, view: str) -> None:
        """Press the key of a view."""
        await self.press(str(VIEW_NAMES.index(view) + 1))

    async def resize(self, width: int, height: int) -> None:
        await self.pilot.resize_terminal(width, height)
        await self.settle()

    async def settle(self) -> None:
        """Wait until what was asked for is painted."""
        await until_at_rest(self.console)

    def lines(self) -> list[str]:
        return screen_lines(self.console)

    def text(self) -> str:
        return "\n".join(self.lines())

    def rendered(self) -> list[Strip]:
        return screen_strips(self.console)


@asynccontextmanager
async def desk(
    source: ConsoleSource,
    size: tuple[int, int] = (120, 35),
    look: Look | None = None,
    settings: ConsoleSettings = DEFAULT_SETTINGS,
) -> AsyncIterator[Desk]:
    """Open a console that is held still, with one frame taken."""
    console = StillConsole(source, look or Look(), settings)
    async with console.run_test(size=size, notifications=True) as pilot:
        opened = Desk(console, pilot)
        await opened.settle()
        await opened.frames(1)
        yield opened


@played_once
def training_source(for_s: float) -> TalkingSource:
    """Return a training of four ranks on two nodes that has run for some seconds."""
    source = TalkingSource(SimCluster())
    source.run(for_s)
    return source


@played_once
def frozen_source() -> TalkingSource:
    """Return a training of four ranks of which rank 2 has been frozen for six seconds."""
    source = TalkingSource(SimCluster())
    source.sim.freeze(2, at_step=45)
    source.run(6)
    source.sim.run_until(lambda: bool(source.sim.verdicts()), 5, "a verdict")
    source.run(6)
    return source


@played_once
def starting_source() -> TalkingSource:
    """Return a training whose ranks are importing torch."""
    source = TalkingSource(SimCluster())
    source.notice("agents demo-0 and demo-1 are up")
    source.notice("torchrun started on 2 nodes; importing torch takes some seconds")
    source.run(2)
    return source


@played_once
def never_reached_source() -> TalkingSource:
    """Return a job over four nodes, of which one could not be reached since the console began."""
    source = TalkingSource(SimCluster(num_nodes=4, ranks_per_node=4))
    source.sim.lose_node(2)
    source.sim.cluster.put_unreachable(
        "demo-2", UnreachableReason("no answer from port 22 within 10 s: Connection timed out")
    )
    return source
