"""What agents remember is added to what was heard, and nothing of it is a secret; who does not answer is left out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import Command, History, PastReport, PullHistory, Reply, ShowJob, Shown
from agent.wire.jobs import JobState
from agent.wire.logs import LogLine, RootCause
from agent.wire.reports import NodeReport, decode_node_report
from app.errors import AgentUnreachableError
from app.fleet.fleet import Fleet
from app.recording.bundle import encode_bundle
from app.recording.evidence import Answers, ask_agents, put_together
from app.recording.recorder import MAX_AGE_S
from app.recording.records import LinesRecord, Record, ReportRecord
from tests.support.jobs import make_spec
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from agent.wire.commands import PullHistory as Pull

WAIT_S = 30.0
TOKEN = "hf_" + "a1" * 12


class Road:
    """An agent that remembers reports of the last minutes, ten in a reply; one without any does not answer."""

    def __init__(self, report: NodeReport | None, ages_s: list[float], *, hangs: bool = False) -> None:
        self._past = [PastReport(seq, age_s, report) for seq, age_s in enumerate(ages_s, start=1) if report is not None]
        self._hangs = hangs
        self.is_hanging = asyncio.Event()
        self.max_ages_s: list[float | None] = []

    async def request(self, command: Command) -> Reply:
        if not self._past:
            raise AgentUnreachableError("dead", "no route to host")
        match command:
            case ShowJob():
                return Shown(make_spec(job_id="demo"), "/somewhere", 29500)
            case PullHistory():
                return await self._pull(command)
        raise AssertionError(command)

    async def _pull(self, command: Pull) -> Reply:
        self.max_ages_s.append(command.max_age_s)
        if self._hangs and command.since_seq:
            self.is_hanging.set()
            await asyncio.Event().wait()
        return History([past for past in self._past if past.seq > command.since_seq][:10])

    async def close(self) -> None:
        pass


def some_report() -> NodeReport:
    sim = SimCluster()
    sim.run(8)
    return decode_node_report(sim.heard[-1][2])


async def asked(road: Road, heard: list[Record]) -> Answers:
    """Return what is known when all have answered, or when one hangs."""
    answers = Answers()
    fleet = Fleet({"demo-0": road, "dead": Road(None, [])})
    asking = asyncio.create_task(ask_agents(fleet, ["demo-0", "dead"], heard, "demo", answers))
    hanging = asyncio.create_task(road.is_hanging.wait())
    await asyncio.wait({asking, hanging}, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (asking, hanging):
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    return answers


async def test_what_an_agent_remembers_is_taken_up_to_where_this_console_has_heard_it_itself() -> None:
    road = Road(some_report(), [9e9, *(100.0 - age for age in range(100))])
    now_s = time.monotonic()
    heard: list[Record] = [ReportRecord(now_s - 30.0, "demo-0", b"")]

    answers = await asked(road, heard)

    late_s = time.monotonic() - now_s  # a report is as old as it is told to be when it comes
    times = [now_s - record.at_s for record in answers.past]
    assert times == sorted(times, reverse=True)
    assert 69 - late_s <= len(times) <= 71
    assert 29.0 <= min(times) <= 31.5
    assert max(times) < MAX_AGE_S
    assert set(road.max_ages_s) == {MAX_AGE_S}
    assert answers.jobs["demo-0"]["spec"]["job_id"] == "demo"
    assert answers.jobs["dead"] == {"error": "the agent on dead does not answer: no route to host"}


async def test_what_has_come_before_an_agent_hangs_is_kept() -> None:
    answers = await asked(Road(some_report(), [50.0 - age for age in range(40)], hangs=True), [])

    assert len(answers.past) == 10


async def test_an_agent_that_repeats_itself_is_not_asked_for_ever() -> None:
    class Stuck(Road):
        async def _pull(self, command: Pull) -> Reply:  # noqa: ARG002 - that is its fault
            return History(self._past[:3])

    answers = await asked(Stuck(some_report(), [50.0, 49.0, 48.0]), [])

    assert len(answers.past) == 3


async def test_the_last_words_are_kept_however_old_and_the_recording_is_no_longer_by_them() -> None:
    sim = SimCluster()
    sim.run(8)
    reports: list[Record] = [ReportRecord(at_s + 5000.0, node, frame) for at_s, node, frame in sim.heard]
    old = LinesRecord(3.0, "demo-0", [LogLine(1, 0, "stdout", "step 100 loss 2.1")])

    found = await put_together(["demo-0"], sim.view(), [*reports, old], Answers(), ("demo", ""))

    assert any(isinstance(record, LinesRecord) for record in found.records)
    assert found.records[0].at_s == 0.0
    assert found.records[-1].at_s < 10.0


async def test_no_secret_of_a_session_is_in_what_is_put_together() -> None:
    sim = SimCluster()
    sim.run(8)
    arrived_s, node, frame = sim.heard[-1]
    report = decode_node_report(frame)
    cause = RootCause(0, "exited with code 1", f"HTTPError: {TOKEN}", traceback=f"Traceback\n  {TOKEN}")
    job = msgspec.structs.replace(report.jobs[0], state=JobState.FAILED, root_cause=cause, detail=f"see {TOKEN}")
    leaky = msgspec.structs.replace(report, jobs=[job], report_seq=report.report_seq + 1)
    sim.cluster.apply(node, leaky, arrived_s + 1)
    assert TOKEN in str(sim.view().job()), "else this shows nothing"

    found = await put_together(["demo-0"], sim.view(), [], Answers(), ("demo", f"rank 0 said {TOKEN}"))

    assert TOKEN.encode() not in encode_bundle(found)
    assert TOKEN not in str(found)
