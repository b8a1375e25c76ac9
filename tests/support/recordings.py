"""Recordings of simulated clusters."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from agent.wire.logs import LogLine
from agent.wire.reports import WIRE_VERSION
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.verdicts import Verdict
from app.recording.records import (
    FORMAT_VERSION,
    LinesRecord,
    NoticeRecord,
    Opening,
    Recording,
    ReportRecord,
    StacksRecord,
)
from tests.support.sim import SimCluster, played_once
from tests.support.stacks import one_frozen

if TYPE_CHECKING:
    from app.recording.records import Record

MADE_AT = "2026-11-21T03:12:45Z"


class Watch:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def opening(*nodes: str, why: str = "") -> Opening:
    return Opening(FORMAT_VERSION, WIRE_VERSION, "0.1.0", MADE_AT, list(nodes), "demo", why)


def verdict(cause: Cause = Cause.FROZEN, severity: Severity = Severity.CRITICAL, **changes: Any) -> Verdict:
    """Return what is said of rank 2."""
    facts = {"culprits": (2,), "nodes": ("demo-1",), "job": "demo", "attempt": 0, **changes}
    return Verdict(cause=cause, severity=severity, **facts)


def recording_of(sim: SimCluster, *others: Record) -> Recording:
    """Return what a console has heard of a simulation, with other records among it."""
    begin_s = sim.heard[0][0]
    reports: list[Record] = [ReportRecord(at_s - begin_s, node, frame) for at_s, node, frame in sim.heard]
    records = sorted((*reports, *others), key=lambda record: record.at_s)
    return Recording(opening(*(node.name for node in sim.nodes)), records, is_cut=False)


@cache
@played_once
def frozen_recording() -> Recording:
    """Return a training of four ranks of which rank 2 is frozen some seconds before the end, with its stacks."""
    sim = SimCluster()
    sim.freeze(2, at_step=45)
    sim.run_until(lambda: bool(sim.verdicts()), 30, "a verdict")
    begin_s, named_s = sim.heard[0][0], sim.now_s
    sim.run(12)
    stacks: list[Record] = [
        StacksRecord(named_s - begin_s + 1.0, answer.node, answer.stacks, answer.trouble) for answer in one_frozen()
    ]
    printed = [LogLine(1, 0, "stdout", "step 1 loss 5.3"), LogLine(2, -1, "stderr", "W torchrun")]
    others = (LinesRecord(4.0, "demo-0", printed), NoticeRecord(1.0, "agents demo-0 and demo-1 are up"))
    return recording_of(sim, *others, *stacks)
