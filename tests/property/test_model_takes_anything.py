"""Whatever nodes say, in whatever order, the console's model, diagnosis, view and JSON never raise."""

from __future__ import annotations

import json

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
    OutsideLook,
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
    Anomaly,
    ChildWait,
    ExitWait,
    GroupReport,
    PastCall,
    PeerCall,
    PeerWait,
    Phase,
    Place,
    RankReport,
    StepCalls,
    TrainingReport,
)
from tests.support.examples import few_and_many

NODES = ["a", "b", "c"]

counts = st.one_of(st.integers(0, 6), st.sampled_from([0, 2**31, 2**63 - 1]))
ranks = st.one_of(st.integers(0, 5), st.sampled_from([77, 2**31 - 1]))
seconds = st.one_of(st.floats(0, 30), st.sampled_from([0.0, 1e10]))
texts = st.one_of(st.sampled_from(["", "all_reduce", "barrier", "\x1b]52;c\x07", "\u202e"]), st.text(max_size=8))
losses = st.one_of(st.none(), st.floats())
sizes = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=3)

groups = st.builds(
    GroupReport,
    group=st.sampled_from(["0", "1", BARRIER_GROUP, "\x1b"]),
    enqueued_seq=counts,
    completed_seq=counts,
    op=texts,
    label=texts,
    sizes=sizes,
    waiting_s=seconds,
    is_waiting=st.booleans(),
    is_queued=st.booleans(),
    is_behind_work=st.booleans(),
    ranks=st.lists(ranks, max_size=4),
    dtypes=st.lists(texts, max_size=2),
    root=st.none() | ranks,
    reduce_op=texts,
    past=st.lists(st.builds(PastCall, counts, texts, st.integers(-1, 2**62), texts), max_size=9),
    steps=st.lists(st.builds(StepCalls, counts, counts), max_size=3),
)
peer_calls = st.builds(
    PeerCall,
    op=st.sampled_from(["send", "recv", "\x1b"]),
    peer=st.none() | ranks,
    group=st.sampled_from(["0", "1"]),
    tag=counts,
    number=counts,
)
places = st.none() | st.builds(Place, file=texts, line=counts, function=texts)
reports = st.builds(
    RankReport,
    wire_version=st.just(1),
    rank=ranks,
    local_rank=ranks,
    world_size=counts,
    pid=counts,
    job_id=st.sampled_from(["j", "k"]),
    attempt=st.integers(0, 1),
    report_seq=counts,
    phase=st.sampled_from(Phase),
    phase_s=seconds,
    place=places,
    step=st.none() | counts,
    epoch=st.none() | counts,
    loss=losses,
    loss_first=losses,
    steps_done=counts,
    groups=st.lists(groups, max_size=4),
    observed_s=seconds,
    waited_s=seconds,
    slow_factor=st.sampled_from([1.0, 8.0]),
    recorder_missing=st.booleans(),
    is_step_counted=st.booleans(),
    anomalies=st.lists(st.sampled_from(Anomaly), max_size=4),
    stood_s=seconds,
    step_age_s=seconds,
    step_limit_s=seconds,
    peer_calls=st.lists(peer_calls, max_size=4),
    peer_wait=st.none()
    | st.builds(PeerWait, calls=st.lists(peer_calls, max_size=4), waiting_s=seconds, is_on_gpu=st.booleans()),
    child_wait=st.none() | st.builds(ChildWait, pid=counts, what=texts, waiting_s=seconds),
    exit_wait=st.none() | st.builds(ExitWait, what=texts, name=texts, place=places, pid=counts, waiting_s=seconds),
    can_stop=st.booleans(),
    training=st.none()
    | st.builds(
        TrainingReport,
        last_step=st.none() | counts,
        goodput_frac=st.none() | st.floats(0, 1),
        checkpoint_step=st.none() | counts,
        checkpoint_age_s=st.none() | seconds,
    ),
)
ends = st.none() | st.builds(
    ExitReport,
    code=st.none() | st.integers(-3, 3),
    signal=st.none() | st.sampled_from([6, 9, 15, 250]),
    age_s=seconds,
    error=st.sampled_from(["", "Connection closed by peer", "ValueError: \x1b"]),
)
workers = st.builds(
    WorkerReport,
    job_id=st.sampled_from(["j", "k"]),
    attempt=st.integers(0, 1),
    rank=ranks,
    local_rank=ranks,
    outside=st.none() | st.builds(OutsideLook, pid=counts, place=places, age_s=seconds),
    pid=counts,
    process=st.sampled_from(ProcessState),
    process_s=seconds,
    rss_bytes=counts,
    exit=ends,
    report=st.none() | reports,
    report_age_s=seconds,
    seen_s=seconds,
    quiet_s=seconds,
    cpu_cores=st.floats(),
    metrics=st.dictionaries(st.sampled_from(["loss", "step", "epoch", "\x1b[2J"]), st.none() | st.floats(), max_size=4),
)
jobs = st.builds(
    JobStatus,
    job_id=st.sampled_from(["j", "k"]),
    attempt=st.integers(0, 1),
    state=st.sampled_from(JobState),
    state_s=seconds,
    world_size=st.one_of(st.integers(0, 6), st.just(2**62)),
    num_nodes=st.integers(0, 3),
    node_rank=ranks,
    first_rank=st.one_of(st.integers(0, 5), st.just(2**31 - 1)),
    local_world_size=st.one_of(st.integers(0, 6), st.just(2**63 - 1)),
    exit_code=st.none() | st.integers(-9, 9),
    detail=texts,
    unprobed=texts,
)
node_reports = st.builds(
    NodeReport,
    wire_version=st.just(WIRE_VERSION),
    node=texts,
    epoch=st.sampled_from(["x", "y"]),
    report_seq=st.integers(0, 20),
    hostname=texts,
    agent_pid=counts,
    num_cpus=counts,
    cpu_frac=st.floats(),
    memory_total_bytes=counts,
    memory_available_bytes=counts,
    jobs=st.lists(jobs, max_size=3),
    workers=st.lists(workers, max_size=6),
)
events = st.tuples(st.sampled_from([*NODES, "stranger"]), node_reports, st.floats(0, 12))


@few_and_many(20, 150, st.lists(events, max_size=12))
def test_arbitrary_reports_become_state_or_are_counted(heard: list[tuple[str, NodeReport, float]]) -> None:
    cluster, diagnoser, now_s = Cluster(NODES), Diagnoser(), 1000.0
    for node, report, pause_s in heard:
        now_s += pause_s
        frame = encode_node_report(report)
        cluster.apply(node, decode_node_report(frame), now_s)
        cluster.validate()
        diagnosis = diagnoser.observe(cluster, now_s)
        diagnosis.validate()
        view = View(cluster, diagnosis, now_s)
        text = json.dumps(status_object(view), allow_nan=False, ensure_ascii=False) + view.headline().text
        view.memory()
        view.memory_summary()
        view.progress()
        assert not set(text) & set("\x1b\x07\u202e")


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
group_calls = st.builds(
    GroupCall, group=st.sampled_from(["0", "1"]), op=texts, label=texts, ranks=st.lists(ranks, max_size=4)
)
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


@few_and_many(20, 150, st.lists(st.tuples(events, digests), max_size=8))
def test_a_digest_that_has_nothing_to_do_with_the_workers_becomes_state_or_is_counted(
    heard: list[tuple[tuple[str, NodeReport, float], Digest]],
) -> None:
    cluster, diagnoser, now_s = Cluster(NODES), Diagnoser(), 1000.0
    for (node, report, pause_s), digest in heard:
        now_s += pause_s
        cluster.apply(node, msgspec.structs.replace(frame_of(report), digest=digest), now_s)
        cluster.validate()
        diagnosis = diagnoser.observe(cluster, now_s)
        diagnosis.validate()
        view = View(cluster, diagnosis, now_s)
        json.dumps(status_object(view), allow_nan=False)
        view.headline()
        view.memory()
        view.memory_summary()
        view.progress()


@few_and_many(20, 50, st.lists(node_reports, min_size=2, max_size=3))
def test_reports_that_are_taken_together_tell_what_they_tell_one_by_one(reports: list[NodeReport]) -> None:
    together, in_turn = Cluster(NODES), Cluster(NODES)
    heard = [(node, frame_of(report), 1000.0) for node, report in zip(NODES, reports, strict=False)]

    together.apply_all(heard)
    for node, frame, now_s in heard:
        in_turn.apply(node, frame, now_s)

    shown = [View(cluster, Diagnoser().observe(cluster, 1000.0), 1000.0) for cluster in (together, in_turn)]
    assert status_object(shown[0]) == status_object(shown[1])


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


claims = st.tuples(st.sampled_from(ProcessState), st.lists(plausible_groups, max_size=2), ends)
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
