"""The digest says of a node's ranks what the workers say, and a frame with it is read by whoever knows of none."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from agent.jobs.job import Job
from agent.jobs.record import JobRecord
from agent.wire.codec import IncompatibleWireError, MalformedMessageError
from agent.wire.digest import (
    HAS_LOSS,
    HAS_REPORT,
    HAS_WORKED,
    NO_AGE_MS,
    NO_JOB,
    PHASES,
    PROCESSES,
    RANK_RECORD,
    STANDING_RECORD,
    NodeFrame,
    decode_frame,
    digest_of,
    encode_frame,
    frame_of,
)
from agent.wire.relay import RosterEntry
from agent.wire.reports import (
    MAX_NODE_REPORT_BYTES,
    NodeReport,
    ProcessState,
    WorkerReport,
    decode_node_report,
    encode_node_report,
)
from app.model.rank_batch import COUNT, RANKS, SECOND, STANDINGS, RankBatch
from ddpcore.wire import Phase, RankReport
from tests.support.node_reports import (
    PLACE,
    dead_worker,
    group_report,
    job_status,
    node_report,
    rank_report,
    worker_report,
)


def two_ranks() -> NodeReport:
    worked = [0.5 * place for place in range(len(PHASES))]
    first = rank_report(
        0,
        step=7,
        loss=2.5,
        observed_s=9.0,
        waited_s=3.0,
        worked_s=worked,
        groups=[group_report(5, 1.5, sizes=[[3, 4]])],
    )
    workers = [worker_report(0, first, process_s=4.0, pss_bytes=99), dead_worker(1, signal=9)]
    return node_report(1, [job_status()], workers)


def records(report: NodeReport) -> np.ndarray:
    digest = digest_of(report)
    return np.frombuffer(digest.ranks, RANKS)


def test_a_frame_is_read_as_a_report_and_as_a_digest_with_the_workers_beside() -> None:
    report = two_ranks()
    frame = encode_frame(report)

    assert decode_node_report(frame) == report
    decoded = decode_frame(frame)
    assert list(decoded.workers) == report.workers
    assert decoded.worker("job", 0, 1) == report.workers[1]
    assert decoded.worker("job", 1, 1) is None
    assert decoded.jobs == report.jobs


def test_the_workers_of_a_frame_of_version_5_are_a_list() -> None:
    report = msgspec.structs.replace(two_ranks(), wire_version=5)
    frame = msgspec.structs.replace(
        frame_of(report), packed_workers=msgspec.Raw(msgspec.msgpack.encode(report.workers))
    )
    encoded = msgspec.msgpack.encode(frame)

    assert decode_node_report(encoded) == report
    assert decode_frame(encoded).workers == report.workers


def test_a_frame_without_a_digest_gets_one_on_arrival() -> None:
    report = two_ranks()

    assert decode_frame(encode_node_report(report)) == decode_frame(encode_frame(report))


def test_a_record_holds_the_figures_of_a_worker() -> None:
    living, dead = records(two_ranks())

    assert living["rank"] == 0
    assert living["seconds"][SECOND["process_s"]] == 4.0
    assert living["seconds"][SECOND["waited_s"]] == 3.0
    assert living["seconds"][len(SECOND) :].tolist() == [0.5 * place for place in range(len(PHASES))]
    assert [living["counts"][COUNT[name]] for name in ("step", "pss_bytes", "num_last")] == [7, 99, -1]
    assert living["loss"] == 2.5
    assert living["flags"] == HAS_REPORT | HAS_LOSS | HAS_WORKED
    assert PHASES[living["phase"]] is Phase.FORWARD
    assert living["place"] != 0
    assert (dead["flags"], dead["place"], dead["rank"]) == (0, 0, 1)
    assert PROCESSES[dead["process"] - 1] is ProcessState.EXITED
    assert math.isnan(dead["loss"])


def test_the_latest_steps_and_the_step_of_the_loss_have_a_record_where_they_are_known() -> None:
    reported = rank_report(0, step=40, step_ages_ms=[20, 2**40], step_stride=10, loss=2.5, loss_step=30)
    counted = rank_report(1, step=5, is_step_counted=True, step_ages_ms=[7], loss=1.0)
    workers = [
        worker_report(0, reported),
        worker_report(1, counted),
        # A printed step says nothing of when it ended, and counts for nothing beside a counted one.
        worker_report(2, rank_report(2), metrics={"step": 20.0}),
        worker_report(3, rank_report(3, step=5), metrics={"step": 22.0, "loss": 0.5}, loss_step=20),
        worker_report(4, counted, metrics={"step": 20.0}),
        worker_report(5, rank_report(5, step=5)),
        dead_worker(6, signal=9),
    ]

    found, rows = RankBatch([(0, frame_of(node_report(1, [job_status()], workers)), 0.0)]).progress()

    assert rows.tolist() == [0, 1, 3, 4]
    assert found["loss_step"].tolist() == [30, -1, 20, -1]
    assert found["stride"].tolist() == [10, 1, 1, 1]
    known = [[age for age in ages if age != NO_AGE_MS] for ages in found["ages_ms"].tolist()]
    assert known == [[20, NO_AGE_MS - 1], [7], [], [7]]


def test_places_are_told_apart() -> None:
    elsewhere = msgspec.structs.replace(PLACE, line=PLACE.line + 1)
    workers = [worker_report(0, rank_report(0)), worker_report(1, rank_report(1, place=elsewhere))]
    workers.append(worker_report(2, rank_report(2)))

    first, second, third = records(node_report(1, [job_status()], workers))["place"]

    assert first == third != second


def test_calls_that_ranks_have_in_common_are_told_once() -> None:
    same = group_report(5, ranks=[0, 1])
    workers = [worker_report(rank, rank_report(rank, groups=[same, group_report(rank)])) for rank in (0, 1)]

    digest = digest_of(node_report(1, [job_status()], workers))

    assert [call.ranks for call in digest.calls] == [[0, 1], []]
    standings = np.frombuffer(digest.standings, STANDINGS)
    assert standings[["row", "call"]].tolist() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert standings["counts"][:, 0].tolist() == [5, 0, 5, 1]


def test_a_worker_of_a_job_that_is_not_listed_has_none() -> None:
    assert records(node_report(1, [], [worker_report(0)]))["job"].tolist() == [NO_JOB]


def test_bytes_that_are_no_frame_are_refused() -> None:
    with pytest.raises(MalformedMessageError, match="at most"):
        decode_frame(b"x" * (MAX_NODE_REPORT_BYTES + 1))
    with pytest.raises(MalformedMessageError, match="not a node report"):
        decode_frame(b"\xc1")
    with pytest.raises(IncompatibleWireError, match="wire version 99"):
        decode_frame(encode_frame(msgspec.structs.replace(two_ranks(), wire_version=99)))


def test_workers_that_are_none_are_none_when_somebody_looks() -> None:
    frame = decode_frame(encode_frame(two_ranks()))
    nonsense = msgspec.msgpack.encode([{"rank": "x"}])
    for packed in (nonsense, msgspec.msgpack.encode(nonsense), msgspec.msgpack.encode(b"")):
        broken = msgspec.structs.replace(frame, packed_workers=msgspec.Raw(packed))

        assert broken.worker("job", 0, 0) is None
        with pytest.raises(MalformedMessageError, match="not a node report"):
            decode_node_report(msgspec.msgpack.encode(broken))


def heard(frame: NodeFrame) -> RankBatch:
    return RankBatch([(0, frame, 10.0)])


def broken(frame: NodeFrame, **parts: bytes) -> NodeFrame:
    assert frame.digest is not None
    return msgspec.structs.replace(frame, digest=msgspec.structs.replace(frame.digest, **parts))


def test_records_that_make_no_sense_are_left_out() -> None:
    frame = decode_frame(encode_frame(two_ranks()))
    assert frame.digest is not None
    told = np.frombuffer(frame.digest.ranks, RANKS).copy()
    told["seconds"][0, 0] = math.nan
    told["process"][1] = 77

    assert heard(frame).is_sound.tolist() == [True, True]
    assert heard(broken(frame, ranks=told.tobytes())).is_sound.tolist() == [False, False]
    assert len(heard(broken(frame, ranks=frame.digest.ranks[:-1])).records) == 1


def test_standings_that_point_nowhere_are_left_out() -> None:
    frame = decode_frame(encode_frame(two_ranks()))
    assert frame.digest is not None
    assert len(heard(frame).standings()[0]) == 1
    for row, call, waiting_s in ((2, 0, 0.0), (0, 1, 0.0), (0, 0, math.inf)):
        standing = STANDING_RECORD.pack(5, 4, -1, waiting_s, row, call, False, False, False)
        assert len(heard(broken(frame, standings=standing)).standings()[0]) == 0


def test_records_are_of_one_size_on_both_sides() -> None:
    assert (RANKS.itemsize, STANDINGS.itemsize) == (RANK_RECORD.size, STANDING_RECORD.size)
    assert RANK_RECORD.size % 8 == STANDING_RECORD.size % 8 == 0


@pytest.mark.parametrize(
    ("kind", "field", "sent"),
    [
        (Job, "restart_at_s", "begin_again_at_s"),
        (JobRecord, "job", "memory"),
        (RosterEntry, "silent_ms", "heard_ms"),
        (WorkerReport, "store_port_owner", "store_listener"),
        (RankReport, "anomalies", "oddities"),
        (RankReport, "tick", "beat"),
    ],
)
def test_fields_are_sent_and_stored_by_the_names_that_other_versions_know(
    kind: type[msgspec.Struct], field: str, sent: str
) -> None:
    assert kind.__struct_encode_fields__[kind.__struct_fields__.index(field)] == sent
