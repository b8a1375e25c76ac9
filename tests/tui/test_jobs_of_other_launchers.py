"""Jobs that rankdeck did not start: offered, looked at in the views, signalled after a question, and left again."""

from __future__ import annotations

import queue
import re
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest
from textual.widgets import Button

from app.errors import ExitCode, HostUnreachableError
from app.inspect.outside_view import Target
from app.inspect.seen import HostSeen
from app.session import outside as outside_module
from app.session.audit import AuditLog
from app.session.options import SessionOptions
from app.session.outside import InspectSession, OutsideSession
from app.tui.actions import VIEW_NAMES, available
from app.tui.dialogs.signals import whom
from app.view.summary import exit_code
from tests.support.consoles import SimSource, desk, training_source
from tests.support.screens import assert_looks_as_before
from tests.support.seen_ranks import WAITS, at, rank
from tests.support.waiting import until, until_async
from tests.tui.test_starting_programs import idle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.fleet.agent_link import AgentLink
    from app.inspect.seen import SeenRank
    from tests.support.consoles import Desk

WAIT_S = 30.0
SIZES = ((80, 24), (120, 35))
STANDS = [
    *(rank(number, WAITS, seconds=9, asleep_s=9.0, host="gpu1") for number in (0, 1)),
    rank(2, at(14), seconds=9, asleep_s=9.0),
    rank(3, WAITS, seconds=9, asleep_s=9.0),
]
OTHER = [rank(0, at(14), at(15), key="other", pid=7, directory="/home/u/b")]


class Hosts:
    """Two hosts that show what a test has them show; whoever looks at one waits for it."""

    def __init__(self) -> None:
        self.shown: dict[str, queue.SimpleQueue[HostSeen | HostUnreachableError | Looks]] = {
            host: queue.SimpleQueue() for host in ("gpu1", "gpu2")
        }
        self.num_ended = 0

    def show(self, host: str, *ranks: SeenRank) -> None:
        self.shown[host].put(HostSeen(list(ranks), {}, "ada", is_root=False, yama=None))

    def looks(self, link: AgentLink) -> Any:
        return Looks(self, link.host)


class Looks:
    """Looks at a host, in the place of `HostLooks`."""

    def __init__(self, hosts: Hosts, host: str) -> None:
        self._hosts, self._shown = hosts, hosts.shown[host]

    def run(self, take: Callable[[HostSeen], object]) -> None:
        while (seen := self._shown.get()) is not self:
            if isinstance(seen, HostUnreachableError):
                raise seen
            if isinstance(seen, Looks):
                self._shown.put(seen)  # another one is to end
            else:
                take(seen)
        self._hosts.num_ended += 1

    def close(self) -> None:
        self._shown.put(self)


class Stage:
    """A session, and behind a key the jobs of two hosts."""

    def __init__(self, source: SimSource, *, is_read_only: bool = False) -> None:
        self.source, self.hosts = source, Hosts()
        behind = cast("Any", source)
        behind.is_read_only, behind.audit = is_read_only, AuditLog(None)
        links = cast("Any", [SimpleNamespace(host=host) for host in self.hosts.shown])
        self.own_pids: dict[str, set[int]] = {}
        self.outside = OutsideSession(behind, "rankdeck", links, lambda: self.own_pids, self.hosts.looks)
        source.outside = self.outside

    def show_the_job(self) -> None:
        self.hosts.show("gpu1", *STANDS[:2])
        self.hosts.show("gpu2", *STANDS[2:])

    async def turn_to_it(self, console: Desk) -> None:
        await console.press("i")
        self.show_the_job()
        await self.until_it_shows(console, "ranks 0-1, 3 wait in all_reduce")

    async def until_it_shows(self, console: Desk, text: str) -> None:
        def shows() -> bool:
            for _ in range(2):
                console.console.frame()
            return text in " ".join(" ".join(console.lines()).split())

        await until_async(shows, WAIT_S, text)
        await console.settle()


@pytest.fixture
def stage() -> Iterator[Stage]:
    source, _ = idle()
    staged = Stage(source)
    yield staged
    staged.outside.leave()


def names(source: Any) -> dict[str, str]:
    return {action.name: action.title for action in available(source)}


async def test_the_start_screen_names_the_key_once_such_jobs_are_known(stage: Stage) -> None:
    async with desk(stage.source) as console:
        assert "i: look at" not in console.text()
        assert names(stage.source)["outside"] == "Inspect"
        stage.outside.offer = "a job of other launchers, 4 ranks on gpu1 and gpu2"
        await console.frames()
        assert "i: look at a job of other launchers, 4 ranks on gpu1 and gpu2" in console.text()


@pytest.mark.parametrize(
    ("ending", "width", "text"),
    [
        ("stop", 120, "i: look at a job of other launchers, 4 ranks on gpu1 and gpu2"),
        ("kill", 120, "i: look at a job of other launchers, 4 ranks on gpu1 and gpu2"),
        ("kill", 80, "i: jobs of other launchers"),
    ],
)
async def test_beside_a_job_that_has_ended_such_jobs_are_named_and_beside_one_that_runs_they_are_not(
    ending: str, width: int, text: str
) -> None:
    source = training_source(12)
    staged = Stage(source)
    staged.outside.offer = "a job of other launchers, 4 ranks on gpu1 and gpu2"
    async with desk(source, (width, 35)) as console:
        assert "other launchers" not in console.text()
        source.sim.stop() if ending == "stop" else source.sim.kill(2)
        source.run(20)
        await console.frames()
        (line,) = (line for line in console.lines() if "other launchers" in line)
        assert text in line
        assert re.match(r" demo  . (stopped|failed)", line)
    staged.outside.leave()


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_such_a_job_looks_as_before_in_its_views(stage: Stage, size: tuple[int, int]) -> None:
    async with desk(stage.source, size) as console:
        await stage.turn_to_it(console)
        for view in ("overview", "ranks"):
            await console.show(view)
            assert_looks_as_before(f"outside-{view}-{size[0]}x{size[1]}", without_ages(console))
        await console.press("s")
        assert_looks_as_before(f"outside-stacks-{size[0]}x{size[1]}", console.lines())
        await console.press("escape", "x")
        assert_looks_as_before(f"outside-signals-{size[0]}x{size[1]}", without_ages(console))


def without_ages(console: Desk) -> list[str]:
    """Return the screen without the ages of looks, which are real time."""
    import re  # noqa: PLC0415

    return [re.sub(r"\d\.\d ?s( old)?", lambda age: "#" * len(age[0]), line) for line in console.lines()]


async def test_what_is_not_known_is_named_as_such_in_every_other_view(stage: Stage) -> None:
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        for view in ("barriers", "stragglers", "memory", "charts"):
            await console.show(view)
            assert "not known: rankdeck did not start this job; 2: ranks; s: stacks" in console.text(), view
        await console.show("logs")
        assert "what its ranks print stays where their launcher puts it" in console.text()
        await console.show("ranks")
        await console.press("enter")
        assert "nothing printed" not in console.text()
        assert "what its ranks print stays where their launcher puts it" in console.text()
        await console.press("f")
        assert "FROZEN PICTURE" in console.text()
        await console.press("i")
        await console.frames()
        assert "FROZEN" not in console.text(), "another source is shown as it is now"
        assert set(VIEW_NAMES) >= {"barriers", "stragglers", "memory", "charts", "logs"}


async def test_new_looks_come_by_themselves_also_into_open_stacks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.tui.dialogs.stacks.REFRESH_S", 0.05)
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        await console.press("s")
        assert "rank 2 (1 rank): at load.py:14 in read" in console.text()
        stage.hosts.show("gpu2", rank(2, WAITS, host="gpu2"), rank(3, WAITS, host="gpu2"))
        await stage.until_it_shows(console, "ranks 0-3 (4 ranks): waiting in all_reduce")


async def test_a_job_that_ends_is_shown_as_ended(stage: Stage) -> None:
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        stage.hosts.show("gpu2", STANDS[3])
        await console.show("ranks")
        await stage.until_it_shows(console, "rank 2 is not there: ended")
        for host in ("gpu1", "gpu2"):
            stage.hosts.show(host)
        await stage.until_it_shows(console, "all its ranks have ended; how is not known from outside")
        await console.press("x")
        assert "No rank of such a job runs." in console.text()


async def test_the_key_goes_from_job_to_job_and_back_to_rankdeck_s_own() -> None:
    stage = Stage(training_source(12))
    async with desk(stage.source) as console:
        await console.press("i")
        await stage.until_it_shows(console, "looking for training that rankdeck did not start on gpu1 and gpu2")
        stage.hosts.show("gpu1", *STANDS[:2], *OTHER, rank(0, WAITS, key="own", pid=99))
        stage.own_pids["gpu1"] = {99}
        stage.hosts.show("gpu2", *STANDS[2:])
        await stage.until_it_shows(console, "job 1 of 2: pid 100 on gpu1")
        await console.press("i")
        await stage.until_it_shows(console, "job 2 of 2: pid 7 on gpu1, in /home/u/b")
        assert "the ranks move, none hangs; whether one is slow" in console.text()
        await console.press("i")
        await console.frames()
        assert " demo " in console.text()
        assert "training, step" in console.text()
        assert names(console.console.ui.source)["control"] == "Stop, restart"
    until(lambda: stage.hosts.num_ended == 2, WAIT_S, "nobody is looked at any more")


async def test_escape_goes_back_to_rankdeck_s_own_job_once_nothing_else_is_left_to_go_back_from() -> None:
    stage = Stage(training_source(12))
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        await console.show("ranks")
        assert " Esc Back " in console.lines()[-1]
        for keys in (("enter", "f"), ("p",), ()):
            await console.press(*keys, "escape")
            await console.frames()
            assert stage.outside.is_shown is bool(keys), keys
        assert "training, step" in console.text()
        assert " Esc Back " not in console.lines()[-1]
    until(lambda: stage.hosts.num_ended == 2, WAIT_S, "nobody is looked at any more")


async def test_the_session_goes_on_behind_such_a_job_and_its_rows_count_at_the_end(stage: Stage) -> None:
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        before = stage.source.num_views
        stage.source.notice("gpu9 is back")
        await console.frames(4)
        assert stage.source.num_views > before
        assert "gpu9 is back" in console.text()
        ui = console.console.ui
        assert ui.view is not None
        assert ui.view.verdicts()
        assert ui.own_view is not None
        assert not ui.own_view.verdicts(), "the exit code is that of the session"
        await console.press("q")
        assert stage.source.num_closed == 1
    until(lambda: stage.hosts.num_ended == 2, WAIT_S, "nobody is looked at any more")


async def test_where_no_such_job_runs_that_is_named_and_the_key_goes_back(stage: Stage) -> None:
    async with desk(stage.source) as console:
        await console.press("i")
        stage.hosts.show("gpu1")
        stage.hosts.shown["gpu2"].put(HostUnreachableError("gpu2", "no py-spy"))
        await stage.until_it_shows(console, "no training that rankdeck did not start is seen on gpu1 and gpu2")
        assert "i: back" in console.text()
        await console.press("i")
        await console.frames()
        assert "no job yet" in console.text()


async def test_why_no_host_can_be_looked_at_is_shown_until_one_can(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_module, "AGAIN_S", 0.05)
    async with desk(stage.source) as console:
        await console.press("i")
        for host, shown in stage.hosts.shown.items():
            shown.put(HostUnreachableError(host, "no py-spy", "pip install py-spy"))
        await stage.until_it_shows(console, "gpu1: no py-spy (pip install py-spy); gpu2: no py-spy")
        stage.show_the_job()
        await stage.until_it_shows(console, "ranks 0-1, 3 wait in all_reduce")


@pytest.mark.parametrize(
    ("place", "number", "pids"),
    [(0, signal.SIGTERM, [100, 101, 102, 103]), (1, signal.SIGKILL, [100, 101, 102, 103]), (2, signal.SIGCONT, [103])],
)
async def test_a_signal_is_sent_only_after_the_question_to_those_that_it_names(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, place: int, number: int, pids: list[int]
) -> None:
    sent: list[tuple[list[int], int]] = []

    def send(_links: object, targets: Sequence[Target], asked: int) -> str:
        sent.append(([target.pid for target in targets], asked))
        return "it was sent"

    monkeypatch.setattr(outside_module, "send_signal", send)
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        frozen = msgspec.structs.replace(STANDS[3].looks[-1], state="T")
        stage.hosts.show("gpu2", STANDS[2], msgspec.structs.replace(STANDS[3], looks=[frozen]))
        await stage.until_it_shows(console, "rank 3 is frozen")
        await console.press("x", "enter", "enter")
        await console.press("x", "escape")
        assert not sent, "pressing only Enter, or Esc, does nothing"
        await console.press("x", *["down"] * place)
        text = " ".join(console.text().replace("│", " ").split())
        asked = "rank 3 on gpu2 (pid 103)" if len(pids) == 1 else "ranks 0-1 on gpu1 (pids 100, 101)"
        assert f"Send {signal.Signals(number).name} to {asked}" in text
        await console.press("enter", "right", "enter")
        await until_async(lambda: sent, WAIT_S, "it is sent")
        await stage.until_it_shows(console, "it was sent")
        assert sent == [(pids, number)]
        assert any("on request: it was sent" in event.text for event in console.console.ui.events.latest_first())


def test_the_question_has_room_for_many_hosts() -> None:
    targets = [Target(f"gpu{number // 9}", number, 1, 0, number, is_stopped=False) for number in range(50)]
    text = whom(targets)
    assert text.startswith("ranks 0-8 on gpu0 (pids 0, 1, 2, 3, 4, 5, 6, 7, ...), ranks 9-17 on gpu1 (pids 9, ")
    assert text.endswith(" and 14 more on 2 more hosts")


async def test_a_console_that_only_watches_has_no_signals() -> None:
    source, _ = idle()
    stage = Stage(source, is_read_only=True)
    async with desk(stage.source) as console:
        await stage.turn_to_it(console)
        assert "control" not in names(stage.outside)
        await console.press("x")
        assert "This console only watches" in console.text()
        assert not console.console.screen.query(Button)
        await console.press("i")


async def test_without_a_session_behind_the_first_job_follows_the_last_and_counts_for_the_exit_code() -> None:
    hosts = Hosts()
    links = cast("Any", [SimpleNamespace(host="gpu1", is_alive=True)])
    session = InspectSession(links, "rankdeck on gpu1", SessionOptions(), hosts.looks)
    await session.start()
    stage = cast("Any", SimpleNamespace())
    async with desk(session) as console:
        hosts.show("gpu1", *OTHER)
        await Stage.until_it_shows(stage, console, "the ranks move, none hangs; whether one is slow")
        await console.press("i")
        await until_async(lambda: hosts.num_ended == 1, WAIT_S, "the first looks have ended")
        hosts.show("gpu1", *STANDS[:2], msgspec.structs.replace(STANDS[2], host="gpu1"), STANDS[3])
        await Stage.until_it_shows(stage, console, "ranks 0-1, 3 wait in all_reduce")
        ui = console.console.ui
        assert ui.own_view is not None
        assert exit_code(ui.own_view) is ExitCode.VERDICT_STANDS
        await console.press("q")
    until(lambda: hosts.num_ended == 2, WAIT_S, "nobody is looked at any more")


async def test_where_no_host_can_be_looked_at_the_key_says_so() -> None:
    source, _ = idle()
    async with desk(source) as console:
        await console.press("i")
        assert "From this console no host can be looked at from outside." in console.text()
        assert "outside" not in names(source)
