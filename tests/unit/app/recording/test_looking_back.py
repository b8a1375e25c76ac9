"""What nodes remember goes in front of what a console has seen itself: whole, in order, once."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from agent.wire.codec import MalformedMessageError
from agent.wire.commands import Command, PackedHistory, PullHistory, RefusalReason, Refused, Reply
from agent.wire.digest import decode_frame
from agent.wire.relay import MAX_UNPACKED_BYTES, pack, unpack
from agent.wire.reports import decode_node_report, encode_node_report
from app.cli import hosts
from app.cli.listing import _past_events
from app.diagnosis.causes import Severity
from app.diagnosis.rank_facts import Thresholds
from app.errors import AgentUnreachableError
from app.fleet.fleet import Fleet
from app.recording import backfill
from app.recording.backfill import MAX_REPORTS, MIN_AGE_S, plan, replayed
from app.recording.events import EventKind
from app.recording.playback import ReplayModel
from app.session.session import Session
from app.view.rows import FigureKey
from tests.support.examples import few_and_many
from tests.support.memories import one_long_story, remembered
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.recording.events import Event, EventLog
    from app.recording.history import JobHistory
    from app.session.remote_session import RemoteSession

MARK = "attached; above are the nodes' last"


def seen(sim: SimCluster, begin_s: float, end_s: float) -> ReplayModel:
    """Return what a console sees that looks on between two moments, five times a second."""
    replay = ReplayModel([node.name for node in sim.nodes], Thresholds())
    replay.look(begin_s)
    for at_s, node, frame in sim.heard:
        if begin_s < at_s <= end_s:
            while replay.at_s + 0.2 < at_s:
                replay.look(replay.at_s + 0.2)
            replay.receive(node, decode_frame(frame), at_s)
    replay.look(end_s)
    return replay


class Joined:
    """A console that has looked on since `attached_s`, and reached back at the end."""

    def __init__(self, sim: SimCluster, attached_s: float, seam_s: float = 4.0, period_s: float = 0.5) -> None:
        self.live = seen(sim, attached_s, sim.now_s)
        past = remembered(sim, min(sim.now_s, attached_s + seam_s), period_s)
        self.events: EventLog = self.live.events.reaching_back(past.events, attached_s)
        self.live.history.reach_back(past.history, past.at_s)

    @property
    def job(self) -> JobHistory:
        assert self.live.history.shown is not None
        return self.live.history.shown

    def texts(self) -> list[str]:
        return [event.text for event in self.events.latest_first()][::-1]


def said(events: EventLog) -> list[tuple[EventKind, tuple[int, ...]]]:
    """Return the verdicts that came and went."""
    kinds = {EventKind.VERDICT, EventKind.OVER}
    return [(event.kind, event.ranks) for event in reversed(list(events.latest_first())) if event.kind in kinds]


def test_a_verdict_that_came_and_went_before_the_attach_is_an_event_and_charts_and_waits_reach_back() -> None:
    sim, over_s = one_long_story()
    joined = Joined(sim, over_s + 15)
    begun_s = sim.heard[0][0]

    assert said(joined.events) == [(EventKind.VERDICT, (2,)), (EventKind.OVER, (2,))]
    frozen = next(event for event in joined.events.latest_first() if event.kind is EventKind.VERDICT)
    assert frozen.severity is Severity.CRITICAL
    assert 40 < frozen.at_s - begun_s < 46
    assert joined.job.begun_s is not None
    assert joined.job.begun_s - begun_s < 5
    steps = [x for x, _ in joined.job.loss.points]
    assert steps[0] < 10
    assert steps == sorted(set(steps))
    (wait,) = [wait for wait in joined.job.waits.over if wait.is_missing(2) and wait.row.waited_s > 4]
    assert wait.ranks.tolist() == [0, 1, 3]
    assert sum(MARK in text for text in joined.texts()) == 1


def test_how_things_stood_at_the_attach_is_not_told_again() -> None:
    sim, over_s = one_long_story()
    joined = Joined(sim, over_s + 15)

    texts = [text for text in joined.texts() if MARK not in text]
    assert sum("up" in text and "demo-0" in text for text in texts) == 1
    assert texts.count("job demo: running") == 1
    moments = [event.at_s for event in joined.events.latest_first()][::-1]
    assert moments == sorted(moments)


def test_what_was_seen_of_a_node_that_could_not_be_asked_for_its_past_stays_and_is_of_that_node_alone() -> None:
    sim = SimCluster()
    sim.run(20)
    attached_s = sim.now_s
    sim.run(8)
    live, past = seen(sim, attached_s, sim.now_s), ReplayModel([node.name for node in sim.nodes], Thresholds())
    for at_s, node, frame in sim.heard:
        if node == "demo-0":
            past.receive(node, decode_frame(frame), at_s)
            past.look(at_s)
    assert "nodes demo-0, demo-1: up" in [event.text for event in live.events.latest_first()]

    whole = live.events.reaching_back(past.events, attached_s)

    told = [event for event in whole.latest_first() if event.kind is EventKind.NODE][::-1]
    assert [event.text for event in told] == ["node demo-0: up", "node demo-1: up"]
    assert told[0].at_s < attached_s <= told[1].at_s
    alone = "verdicts of that time are judged, and events dated, by the other nodes alone"
    assert f"{MARK} 20 s, without demo-1: {alone}" in [event.text for event in whole.latest_first()]
    assert not [event for event in past.events.latest_first() if event.kind is EventKind.NOTE]
    assert past.view().notes()["unknown"] == "ranks 2-3: nothing came from demo-1"


@pytest.mark.parametrize("unread", ["demo-0", "demo-1"])
def test_who_lost_a_rank_of_a_node_that_could_not_be_asked_is_not_the_root_cause(unread: str) -> None:
    sim = SimCluster()
    sim.run(20)
    sim.kill(2 if unread == "demo-1" else 1)
    sim.run(20)
    past = ReplayModel([node.name for node in sim.nodes], Thresholds(), is_excerpt=True)
    for at_s, node, frame in sim.heard:
        if node != unread:
            past.receive(node, decode_frame(frame), at_s)
            past.look(at_s)

    bad = [event.text for event in past.events.latest_first() if event.severity is Severity.CRITICAL]
    lost, others = ("0-1", "2-3") if unread == "demo-1" else ("2-3", "0-1")
    why = f"ranks {lost} lost a connection; how ranks {others} ended is not known"
    assert bad == [f"job demo: failed, exit code 1: {why}"]
    job = past.view().job()
    assert job is not None
    assert (job.root_cause, job.detail) == (None, why)


def test_a_verdict_that_stands_at_the_attach_keeps_its_begin_and_ends_once() -> None:
    sim = SimCluster()
    sim.run(20)
    sim.freeze(2)
    sim.run_until(lambda: bool(sim.verdicts()), 20, "a verdict")
    named_s = sim.now_s
    sim.run(20)
    joined = Joined(sim, sim.now_s - 8)

    (frozen,) = [event for event in joined.events.latest_first() if event.kind is EventKind.VERDICT]
    assert abs(frozen.at_s - named_s) < 2
    sim.thaw(2)
    sim.run_until(lambda: not sim.verdicts(), 20, "its end")
    joined.events.observe(sim.view())
    (over,) = [event for event in joined.events.latest_first() if event.kind is EventKind.OVER]
    stood_s = float(over.text.rpartition("after ")[2].removesuffix(" s"))
    assert 20 <= stood_s < 40


@pytest.mark.slow
def test_a_straggler_that_takes_a_while_to_be_seen_again_is_not_told_twice() -> None:
    sim = SimCluster()
    sim.run(20)
    sim.slow(1, 8.0)
    sim.run_until(lambda: bool(sim.verdicts()), 60, "a verdict")
    sim.run(20)
    attached_s = sim.now_s
    sim.run(4.5)
    joined = Joined(sim, attached_s, seam_s=4.0)
    live = ReplayModel([node.name for node in sim.nodes], Thresholds())
    sim.run(40)
    for at_s, node, frame in sim.heard:
        if at_s > attached_s:
            live.receive(node, decode_frame(frame), at_s)
            live.look(at_s)
            if at_s > joined.events.now_s:
                joined.events.observe(live.view())

    assert live.diagnosis.verdicts, "it is seen again"
    assert said(joined.events) == [(EventKind.VERDICT, (1,))]


def test_where_the_last_look_of_the_past_is_the_later_one_past_and_present_are_one() -> None:
    assert_past_and_present_are_one(after_s=55.25, seam_s=20.0, period_s=0.5)


@few_and_many(3, 12, after_s=st.floats(2, 70), seam_s=st.floats(3, 20), period_s=st.sampled_from([0.5, 1.0]))
def test_wherever_a_console_attaches_its_past_and_its_present_are_one(
    after_s: float, seam_s: float, period_s: float
) -> None:
    assert_past_and_present_are_one(after_s, seam_s, period_s)


def assert_past_and_present_are_one(after_s: float, seam_s: float, period_s: float) -> None:
    sim, _ = one_long_story()
    begun_s = sim.heard[0][0]
    whole = seen(sim, begun_s, sim.now_s)
    joined = Joined(sim, begun_s + after_s, seam_s, period_s)

    assert said(joined.events) == said(whole.events)
    marks = [event for event in joined.events.latest_first() if MARK in event.text]
    events: list[Event] = [event for event in joined.events.latest_first() if event not in marks][::-1]
    assert len(marks) == 1
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert len({(event.kind, event.text, event.ranks) for event in events}) == len(events)
    assert len({wait.key for wait in joined.job.waits.over}) == len(joined.job.waits.over)
    assert whole.history.shown is not None
    assert _gaps(joined.job, FigureKey.CPU_CORES, begun_s) <= _gaps(whole.history.shown, FigureKey.CPU_CORES, begun_s)
    steps = [x for x, _ in joined.job.loss.points]
    assert all(before < after for before, after in pairwise(steps))


def _gaps(job: JobHistory, key: str, begin_s: float) -> int:
    """Return for how many seconds a figure is not known between the first and the last at which it is."""
    window = job.window(key, begin_s)
    known = np.flatnonzero(~np.isnan(window.mean))
    assert np.all(np.diff(window.at_s) > 0)
    return int(known[-1] - known[0] + 1 - len(known))


def test_a_node_that_is_left_out_is_no_verdict() -> None:
    sim = SimCluster()
    sim.run(60)

    past = remembered(sim, sim.now_s, nodes=["demo-0"])

    assert said(past.events) == []
    assert past.history.shown is not None


def test_a_job_that_was_over_at_the_attach_has_charts() -> None:
    sim = SimCluster()
    sim.run(30)
    sim.stop()
    sim.run_until(lambda: all(rank.end for rank in sim.ranks), 20, "the end")
    sim.run(15)
    joined = Joined(sim, sim.now_s - 8)

    assert joined.job.is_over
    assert joined.job.figures
    assert joined.job.begun_s is not None
    window = joined.job.window(FigureKey.LOSS, joined.job.begun_s)
    assert np.count_nonzero(~np.isnan(window.mean)) > 15


def test_a_fleet_is_looked_back_at_as_far_as_there_is_room() -> None:
    for num_nodes in (1, 16, 17, 64, 128, 512, 666):
        wanted = plan(num_nodes)
        assert wanted is not None
        assert num_nodes * wanted.max_age_s / wanted.period_s <= MAX_REPORTS
        assert MIN_AGE_S <= wanted.max_age_s <= 600
    assert plan(1) == (0.5, 600)
    assert plan(64) == (1.0, 600)
    assert plan(2048) is None


class Road:
    """An agent that remembers frames with their ages, some in a reply; or it answers otherwise."""

    def __init__(self, ages_s: Sequence[float], frame: Callable[[int], bytes], answer: Reply | None = None) -> None:
        self._past = [(seq, age_s, frame(seq)) for seq, age_s in enumerate(ages_s, start=1)]
        self._answer = answer
        self.asked: list[PullHistory] = []

    async def request(self, command: Command) -> Reply:
        assert isinstance(command, PullHistory)
        self.asked.append(command)
        if self._answer is not None:
            return self._answer
        if not self._past:
            raise AgentUnreachableError("away", "no route to host")
        page = [one for one in self._past if one[0] > command.since_seq][:10]
        frames = [frame for _, _, frame in page]
        seqs, ages_s = [seq for seq, _, _ in page], [age_s for _, age_s, _ in page]
        return PackedHistory(seqs, ages_s, [len(frame) for frame in frames], pack(frames))

    async def close(self) -> None:
        pass


def ages(seconds: int) -> list[float]:
    return [(2 * seconds - number) / 2 for number in range(2 * seconds + 1)]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the nodes to be heard."""
    monkeypatch.setattr(backfill, "SETTLE_S", 0.0)


def frames_of(sim: SimCluster, node: str, age_s: int) -> Callable[[int], bytes]:
    """Return which frame a node remembers at each place: the last seconds, twice a second."""
    report = [told for at_s, told in _reports(sim, node) if at_s > sim.now_s - age_s]

    def frame(seq: int) -> bytes:
        place = min(len(report) - 1, (seq - 1) * len(report) // (2 * age_s))
        return encode_node_report(decode_node_report(report[place]))

    return frame


def _reports(sim: SimCluster, node: str) -> list[tuple[float, bytes]]:
    return [(at_s, frame) for at_s, name, frame in sim.heard if name == node]


@pytest.mark.usefixtures("at_once")
async def test_nodes_are_asked_page_by_page_and_who_cannot_be_asked_is_left_out() -> None:
    sim = SimCluster()
    sim.run(40)
    channels = {
        "demo-0": Road(ages(20), frames_of(sim, "demo-0", 20)),
        "demo-1": Road([], lambda _: b""),
        "old": Road([], lambda _: b"", Refused(RefusalReason.MALFORMED, "not a command")),
        "tired": Road([60.0, 50.0], frames_of(sim, "demo-1", 20)),
    }
    began_s = time.monotonic()

    read: list[str] = []

    past = await replayed(Fleet(channels), list(channels), Thresholds(), on_read=read.append)

    assert past is not None
    assert sorted(read) == sorted(channels), "each is read, or cannot be"
    assert began_s - 5 < past.at_s <= time.monotonic()
    assert [command.since_seq for command in channels["demo-0"].asked] == [0, 10, 20, 30, 40]
    assert {command.is_packed for command in channels["demo-0"].asked} == {True}
    job = past.view().job()
    assert job is not None
    assert job.job_id == "demo"
    states = {row.node: row.state for row in past.view().nodes()}
    assert states == {"demo-0": "up", "demo-1": "connecting", "old": "connecting", "tired": "connecting"}


class Attached(Session):
    """A session on a simulated cluster whose nodes remember the last 20 s, and have reported once since."""

    away, title = frozenset[str](), "demo"

    def __init__(self, sim: SimCluster) -> None:
        self._roads = {node.name: Road(ages(20), frames_of(sim, node.name, 20)) for node in sim.nodes}
        self._latest = {node.name: _reports(sim, node.name)[-1][1] for node in sim.nodes}
        super().__init__({node: Path() for node in self._roads})

    async def connect(self) -> None:
        self._fleet, self._listening_since_s = Fleet(self._roads), time.monotonic()
        for node, frame in self._latest.items():
            self.take_frame(node, frame)

    async def check_job(self) -> None:
        """Any job will do."""


@pytest.mark.parametrize(
    ("age_s", "came_up", "how"),
    [
        pytest.param(40, [], "started", id="agents older than what is remembered"),
        pytest.param(15, ["node demo-0: up", "node demo-1: up"], "running", id="agents that began in it"),
    ],
)
async def test_events_are_printed_once_the_nodes_remember_what_the_command_has_seen(
    age_s: int, came_up: list[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "SETTLE_S", 3600.0)
    monkeypatch.setattr(hosts, "STATUS_REPORTS_S", 0.0)
    sim = SimCluster()
    sim.run(age_s)

    session = Attached(sim)

    async with asyncio.timeout(60):
        found = await _past_events(cast("RemoteSession", session))
    await session.close()

    assert [event.text for event in found if event.kind is EventKind.NODE] == came_up
    assert [event.text for event in found if event.kind is EventKind.JOB][-1] == f"job demo: {how}"
    assert len({event.text for event in found}) == len(found), "each once"
    assert [event.at_s for event in found] == sorted(event.at_s for event in found)
    assert not [event for event in found if MARK in event.text], "it is no event of the job"
    assert session.events.seam is not None
    assert MARK in session.events.seam.text


@pytest.mark.usefixtures("at_once")
async def test_where_nobody_remembers_anything_nothing_changes() -> None:
    assert await replayed(Fleet({"away": Road([], lambda _: b"")}), ["away"], Thresholds()) is None


@pytest.mark.usefixtures("at_once")
async def test_a_page_of_nonsense_ends_what_its_node_tells_and_raises_nothing() -> None:
    broken = Road([], lambda _: b"", PackedHistory([1], [0.1], [4], b"no zlib"))
    past = await replayed(Fleet({"demo-0": broken}), ["demo-0"], Thresholds())
    assert past is not None
    assert past.view().job() is None


@pytest.mark.usefixtures("at_once")
async def test_the_loop_has_its_turn_while_the_past_is_looked_at() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=8)
    sim.run(40)
    channels = {node: Road(ages(20), frames_of(sim, node, 20)) for node in ("demo-0", "demo-1")}
    looking = asyncio.create_task(replayed(Fleet(channels), list(channels), Thresholds()))
    num_turns = 0
    while not looking.done():
        num_turns += 1
        await asyncio.sleep(0)

    past = looking.result()
    assert past is not None
    assert num_turns > 10
    assert past.history.shown is not None


def test_packed_reports_come_back_and_what_is_none_is_refused() -> None:
    frames = [b"one", b"", b"three" * 100]
    packed, sizes = pack(frames), [len(frame) for frame in frames]

    assert list(unpack(packed, sizes)) == frames
    assert list(unpack(pack([]), [])) == []
    bomb = pack([b"\0" * 10 * MAX_UNPACKED_BYTES])
    for wrong, its_sizes in ((packed[:9], sizes), (packed, [*sizes, 1]), (b"x", sizes), (bomb, [10**7])):
        with pytest.raises(MalformedMessageError):
            list(unpack(wrong, its_sizes))
    assert list(unpack(bomb, [9])) == [b"\0" * 9], "no more is unpacked than is said to be there"


def test_the_command_is_what_it_was_unless_more_is_wanted() -> None:
    assert msgspec.json.encode(PullHistory()) == b'{"type":"history"}'
