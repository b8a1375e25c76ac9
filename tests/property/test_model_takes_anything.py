"""Whatever nodes say, in whatever order, the console's model, diagnosis, view and JSON never raise."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from hypothesis import strategies as st

from agent.wire.digest import (
    HISTORY_RECORD,
    LATENESS,
    NUM_PAST,
    PHASES,
    RANK_RECORD,
    SECONDS,
    STANDING_RECORD,
    Digest,
    GroupCall,
    frame_of,
)
from agent.wire.jobs import JobState, JobStatus
from agent.wire.reports import (
    WIRE_VERSION,
    ExitReport,
    NodeReport,
    ProcessState,
    WorkerReport,
    decode_node_report,
    encode_node_report,
)
from app.diagnosis.causes import Cause
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.view.summary import status_object
from app.view.view import View
from ddpcore.wire import (
    BARRIER_GROUP,
    GroupReport,
    Phase,
    RankReport,
)
from tests.support.any_message import lies, messages
from tests.support.examples import few_and_many
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = ["a", "b", "c"]

node_reports = messages(NodeReport, wire_version=WIRE_VERSION)
events = st.tuples(st.sampled_from([*NODES, "stranger"]), node_reports, st.floats(0, 12))


def shown(cluster: Cluster, diagnoser: Diagnoser, now_s: float) -> View:
    """Let a diagnosis be made, and ask for everything that a screen or a command shows."""
    cluster.validate()
    diagnosis = diagnoser.observe(cluster, now_s)
    diagnosis.validate()
    view = View(cluster, diagnosis, now_s)
    json.dumps(status_object(view), allow_nan=False)
    memory, gpus = view.memory(), view.gpus()
    asked = [view.headline(), view.nodes(), view.first_nodes(2, odd_first=True), view.barriers(), view.verdicts()]
    asked += [memory, view.memory_findings(memory), view.memory_summary(), gpus, view.gpu_findings(gpus)]
    asked += [
        view.oddest_gpus(2),
        view.other_jobs(),
        view.company_texts,
        view.remarks(),
        view.beside(),
        view.broken_gpus(),
        view.job(),
    ]
    asked += [view.job(), ranks := view.ranks(), [view.usual_place(row.rank) for row in ranks], status_object(view)]
    view.progress()
    view.figures()
    assert not set("".join(texts_of(msgspec.to_builtins(asked)))) & set("\x1b\x07\u202e")
    return view


def texts_of(value: object) -> Iterator[str]:
    """Yield every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_of(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_of(item)


@few_and_many(10, 150, st.lists(events, max_size=8))
def test_arbitrary_reports_become_state_or_are_counted(heard: list[tuple[str, NodeReport, float]]) -> None:
    cluster, diagnoser, now_s = Cluster(NODES), Diagnoser(), 1000.0
    for node, report, pause_s in heard:
        now_s += pause_s
        cluster.apply(node, decode_node_report(encode_node_report(report)), now_s)
        shown(cluster, diagnoser, now_s)


numbers = st.one_of(st.integers(0, 6), st.just(2**32 - 1))
times = st.one_of(st.floats(0, 30), st.floats())
NUM_TIMES = len(SECONDS) + len(PHASES) + len(LATENESS)
rank_records = st.builds(
    lambda seconds, floats, counts, rank, flags, codes, place: RANK_RECORD.pack(
        *seconds, *floats, *counts, rank, flags, *codes, place
    ),
    st.lists(times, min_size=NUM_TIMES, max_size=NUM_TIMES),
    st.tuples(st.floats(), st.floats()),
    st.lists(st.one_of(st.integers(-1, 6), st.sampled_from([-(2**63), 2**63 - 1])), min_size=7, max_size=7),
    numbers,
    st.integers(0, 511),
    st.tuples(*[st.one_of(st.integers(0, 5), st.just(255))] * 4),
    numbers,
)
standing_records = st.builds(
    STANDING_RECORD.pack,
    *[st.one_of(st.integers(-1, 6), st.sampled_from([-(2**63), 2**63 - 1]))] * 3,
    times,
    numbers,
    numbers,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
history_records = st.builds(
    HISTORY_RECORD.pack,
    *[st.one_of(st.integers(-1, 6), st.sampled_from([-(2**63), 2**63 - 1]))] * 2,
    numbers,
    numbers,
    *[numbers] * (1 + 3 * NUM_PAST),
)
group_calls = messages(GroupCall)
odd_bytes = st.sampled_from([b"", b"", b"x"])
digests = st.builds(
    lambda told, calls, standings, histories, rest: Digest(
        b"".join(told) + rest, calls, b"".join(standings) + rest, b"".join(histories) + rest
    ),
    st.lists(rank_records, max_size=4),
    st.lists(group_calls, max_size=3),
    st.lists(standing_records, max_size=4),
    st.lists(history_records, max_size=4),
    odd_bytes,
)


@few_and_many(8, 150, st.lists(st.tuples(events, digests), max_size=6))
def test_a_digest_that_has_nothing_to_do_with_the_workers_becomes_state_or_is_counted(
    heard: list[tuple[tuple[str, NodeReport, float], Digest]],
) -> None:
    cluster, diagnoser, now_s = Cluster(NODES), Diagnoser(), 1000.0
    for (node, report, pause_s), digest in heard:
        now_s += pause_s
        cluster.apply(node, msgspec.structs.replace(frame_of(report), digest=digest), now_s)
        shown(cluster, diagnoser, now_s)


@few_and_many(5, 50, st.lists(node_reports, min_size=2, max_size=3))
def test_reports_that_are_taken_together_tell_what_they_tell_one_by_one(reports: list[NodeReport]) -> None:
    together, in_turn = Cluster(NODES), Cluster(NODES)
    heard = [(node, frame_of(report), 1000.0) for node, report in zip(NODES, reports, strict=False)]

    together.apply_all(heard)
    for node, frame, now_s in heard:
        in_turn.apply(node, frame, now_s)

    views = [View(cluster, Diagnoser().observe(cluster, 1000.0), 1000.0) for cluster in (together, in_turn)]
    assert status_object(views[0]) == status_object(views[1])


plausible_groups = st.builds(
    GroupReport,
    group=st.sampled_from(["0", BARRIER_GROUP]),
    enqueued_seq=st.integers(1, 4),
    completed_seq=st.integers(0, 3),
    op=st.sampled_from(["all_reduce", "broadcast"]),
    label=st.sampled_from(["", "x"]),
    sizes=st.sampled_from([[], [[3]], [[4]]]),
    waiting_s=st.floats(0, 20),
    is_waiting=st.booleans(),
    is_queued=st.booleans(),
    is_behind_work=st.booleans(),
)


claims = st.tuples(
    st.sampled_from(ProcessState), st.lists(plausible_groups, max_size=2), st.none() | messages(ExitReport)
)
four_claims = st.lists(claims, min_size=4, max_size=4)
Claim = tuple[ProcessState, list[GroupReport], ExitReport | None]


@few_and_many(40, 150, st.lists(four_claims, min_size=1, max_size=6), st.sampled_from([0.2, 3.0]))
def test_a_verdict_is_about_ranks_in_the_state_that_it_tells(beats: list[list[Claim]], beat_s: float) -> None:
    """Whatever four ranks claim: the frozen are frozen, the dead are dead, and a straggler does not wait."""
    cluster, watching, now_s = Cluster(["a"]), Diagnoser(), 1000.0
    for tick, claimed in enumerate(beats, 1):
        now_s += beat_s
        cluster.apply("a", _node(tick, [_worker(rank, tick, *claim) for rank, claim in enumerate(claimed)]), now_s)
        cluster.validate()
        watching.observe(cluster, now_s).validate()

        diagnosis = Diagnoser().observe(cluster, now_s)
        diagnosis.validate()
        facts = diagnosis.jobs["j"].facts
        waiting = {rank for wait in diagnosis.waits for rank in wait.waiting.tolist()}
        for verdict in diagnosis.verdicts:
            blamed = list(verdict.culprits)
            if verdict.cause is Cause.FROZEN:
                assert facts.is_frozen[blamed].all()
            elif verdict.cause in (Cause.EXITED, Cause.FEWER_CALLS):
                assert facts.is_dead[blamed].all()
            elif verdict.cause in (Cause.STRAGGLER, Cause.SILENT):
                assert not waiting & set(blamed)


def _node(tick: int, told: list[WorkerReport]) -> NodeReport:
    status = JobStatus(
        job_id="j", attempt=0, state=JobState.RUNNING, state_s=1.0, world_size=4, num_nodes=1,
        node_rank=0, first_rank=0, local_world_size=4,
    )  # fmt: skip
    return NodeReport(
        wire_version=WIRE_VERSION, node="a", epoch="e", report_seq=tick, hostname="h", agent_pid=1, num_cpus=1,
        jobs=[status], workers=told,
    )  # fmt: skip


def _worker(
    rank: int, tick: int, process: ProcessState, groups: list[GroupReport], end: ExitReport | None
) -> WorkerReport:
    report = RankReport(
        wire_version=1, rank=rank, local_rank=rank, world_size=4, pid=10 + rank, job_id="j", attempt=0,
        report_seq=tick, phase=Phase.FORWARD, groups=groups, observed_s=float(tick),
    )  # fmt: skip
    is_dead = process is ProcessState.EXITED
    return WorkerReport(
        job_id="j", attempt=0, rank=rank, local_rank=rank, pid=10 + rank, process=process, process_s=0.1,
        exit=(end or ExitReport(code=0)) if is_dead else None, report=report,
    )  # fmt: skip


@cache
def true_reports() -> list[tuple[float, str, NodeReport]]:
    """Return when the reports of two nodes with two ranks each come, at some point of a training."""
    sim = SimCluster()
    sim.run(8)
    return [(at_s, node, decode_node_report(frame)) for at_s, node, frame in sim.heard]


@few_and_many(5, 150, st.data())
def test_a_node_that_lies_does_not_change_what_is_known_of_the_ranks_of_another(data: st.DataObject) -> None:
    """But for a new attempt or a restart by another launcher, which each node is believed."""
    cluster, honest, diagnoser = Cluster(["demo-0", "demo-1"]), Cluster(["demo-0", "demo-1"]), Diagnoser()
    heard = true_reports()
    first = data.draw(st.integers(len(heard) // 4, len(heard) - 12))
    for place, (now_s, node, report) in enumerate(heard[: first + 12]):
        honest.apply(node, report, now_s)
        told = data.draw(lies(report)) if node == "demo-1" and place >= first else report
        if told is not report:
            jobs = [msgspec.structs.replace(job, attempt=0, ranks=[]) for job in told.jobs]
            told = msgspec.structs.replace(told, jobs=jobs)
        cluster.apply(node, decode_node_report(encode_node_report(told)), now_s)
        if place >= first:
            shown(cluster, diagnoser, now_s)
    (true,) = honest.jobs.values()
    for rank in (0, 1):
        assert cluster.jobs[true.job_id].worker(rank) == true.worker(rank)
