"""Whatever the probe sees, and whatever a peer sends: the fold keeps its invariants, the wire keeps its word."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpcore.probe.rank_state import RankIdentity, RankState
from ddpcore.probe.samples import BarrierMark, GroupMembers, RecorderDump, RecorderEntry, Sample, StepMark
from ddpcore.probe.stack import CodeRoots, StackReader
from ddpcore.wire import (
    MAX_REPORT_BYTES,
    WIRE_VERSION,
    Fault,
    FaultKind,
    GroupReport,
    MalformedReportError,
    Phase,
    Place,
    RankReport,
    SlowDown,
    decode_faults,
    decode_report,
    decode_request,
    encode_faults,
    encode_report,
    encode_request,
)
from tests.support.examples import few_and_many

any_int = st.integers(min_value=-(2**70), max_value=2**70)
any_text = st.text(st.characters(codec=None), max_size=400)
keys = st.sampled_from([("gloo", 0), ("gloo", 1), ("nccl", 0)])
counters = st.dictionaries(keys, st.tuples(st.integers(-1, 5), st.integers(-1, 5)))
entries = st.builds(
    RecorderEntry,
    key=keys,
    group=st.sampled_from(["0", "1", "", "\udcff" * 300]),
    seq=st.integers(-2, 6) | any_int,
    op=any_text,
    sizes=st.lists(st.lists(st.integers(0, 9), max_size=10).map(tuple), max_size=10).map(tuple),
    is_p2p=st.booleans(),
    is_retired=st.booleans(),
)
members = st.dictionaries(
    st.sampled_from(["0", "1", "\udcff" * 300]),
    st.builds(
        GroupMembers,
        ranks=st.sets(st.integers(0, 3), max_size=4).map(lambda ranks: tuple(sorted(ranks))),
        is_mixed=st.booleans(),
    ),
)
stacks = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "/torch/optim/a.py",
                "/torch/distributed/distributed_c10d.py",
                "/ddpcore/barriers/named_barriers.py",
                "<x>",
            ]
        )
        | any_text,
        st.integers(0, 10**6),
        any_text,
    ),
    max_size=5,
)
step_marks = st.builds(
    StepMark,
    step=any_int,
    loss=st.none() | st.floats(),
    epoch=st.none() | any_int,
    loss_first=st.none() | st.floats(),
    steps_done=st.integers(0, 100),
)
ticks = st.tuples(
    st.floats(0.0, 5.0), counters, stacks, st.none() | step_marks, st.lists(st.sampled_from(Phase), max_size=2)
)
barriers = st.none() | st.tuples(any_text, st.booleans(), st.booleans())
dumps = st.none() | st.tuples(st.lists(entries, max_size=6), counters, members)


@few_and_many(40, 100, st.lists(st.tuples(ticks, barriers, dumps), max_size=12))
def test_any_sequence_of_samples_keeps_the_invariants_and_fits_the_wire(
    history: list[tuple[tuple[Any, ...], tuple[Any, ...] | None, tuple[Any, ...] | None]],
) -> None:
    state = RankState(RankIdentity(rank=1, local_rank=1, world_size=4, pid=9, job_id="job", attempt=1))
    reader = StackReader(CodeRoots(torch=("/torch/",), ddpcore=("/ddpcore/",), libraries=("/lib/",)))
    now_s, num_calls = 50.0, 0
    previous: RankReport | None = None
    for (gap_s, seen, stack, step, phases), barrier, dump in history:
        now_s += gap_s
        mark = None
        if barrier is not None:
            label, is_new, is_over = barrier
            num_calls += is_new or num_calls == 0
            mark = BarrierMark(label, num_calls, now_s - gap_s, is_over)
        state.observe(Sample(now_s, seen, reader.read(stack), bool(seen), step, tuple(phases), mark))
        state.validate()
        if dump is not None or state.wants_dump(now_s):
            found, dumped, groups = dump or ([], seen, {})
            state.learn(RecorderDump(found, dumped), groups)
            state.validate()

        report = state.report()
        assert msgspec.msgpack.encode(decode_report(encode_report(report))) == encode_report(report)
        if previous is not None:
            assert report.report_seq == previous.report_seq + 1
            assert 0.0 <= report.waited_s - previous.waited_s <= report.observed_s - previous.observed_s + 1e-9
        previous = report


places = st.builds(Place, file=st.text(max_size=50), line=st.integers(0, 2**63 - 1), function=st.text(max_size=50))
group_reports = st.builds(
    GroupReport,
    group=st.text(max_size=50),
    enqueued_seq=st.integers(0, 2**63 - 1),
    completed_seq=st.integers(0, 2**63 - 1),
    op=st.text(max_size=64),
    label=st.text(max_size=256),
    sizes=st.lists(st.lists(st.integers(0, 2**40), max_size=4), max_size=3),
    waiting_s=st.floats(0, 1e10),
    is_waiting=st.booleans(),
    ranks=st.lists(st.integers(0, 2**31 - 1), max_size=5),
)
rank_reports = st.builds(
    RankReport,
    wire_version=st.just(WIRE_VERSION),
    rank=st.integers(0, 2**31 - 1),
    local_rank=st.integers(0, 2**31 - 1),
    world_size=st.integers(0, 2**31),
    pid=st.integers(0, 2**31),
    job_id=st.text(max_size=64),
    attempt=st.integers(0, 2**31),
    report_seq=st.integers(0, 2**63 - 1),
    phase=st.sampled_from(Phase),
    place=st.none() | places,
    step=st.none() | st.integers(0, 2**63 - 1),
    loss=st.none() | st.floats(allow_nan=False),
    groups=st.lists(group_reports, max_size=3),
    slow_factor=st.floats(1.0, 1e6),
)


@given(rank_reports)
def test_a_report_comes_back_as_it_went(report: RankReport) -> None:
    assert decode_report(encode_report(report)) == report


@given(
    rank_reports,
    st.dictionaries(st.text(min_size=1, max_size=8).map("new_".__add__), st.integers() | st.text(), max_size=3),
)
def test_a_report_of_a_younger_rank_with_more_fields_is_understood(
    report: RankReport, more: dict[str, int | str]
) -> None:
    more = {name: value for name, value in more.items() if not isinstance(value, int) or abs(value) < 2**63}
    fields = msgspec.msgpack.decode(encode_report(report)) | more

    assert decode_report(msgspec.msgpack.encode(fields)) == report


@given(rank_reports)
def test_a_report_of_another_wire_version_is_refused(report: RankReport) -> None:
    with pytest.raises(MalformedReportError, match="wire version 2"):
        decode_report(encode_report(msgspec.structs.replace(report, wire_version=2)))


@given(st.binary(max_size=300) | st.binary(min_size=1, max_size=8).map(lambda chunk: chunk * 2000))
@example(b"\x91" * 60_000)
@example(b"x" * (MAX_REPORT_BYTES + 1))
@example(b"\xa4\xff\xff\xff\xff")
def test_hostile_bytes_raise_nothing_but_malformed(datagram: bytes) -> None:
    for decode in (decode_report, decode_request, lambda text: decode_faults(text.decode("utf-8", "surrogateescape"))):
        try:
            decode(datagram)
        except MalformedReportError:
            continue


@given(rank_reports, st.data())
def test_a_damaged_report_is_understood_or_malformed(report: RankReport, data: st.DataObject) -> None:
    datagram = bytearray(encode_report(report))
    for _ in range(data.draw(st.integers(1, 3))):
        datagram[data.draw(st.integers(0, len(datagram) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_report(bytes(datagram[: data.draw(st.integers(0, len(datagram)))]))
    except MalformedReportError:
        return


@given(st.builds(SlowDown, request_id=st.integers(0, 2**63 - 1), factor=st.floats(1.0, 1000.0)))
def test_a_request_comes_back_as_it_went(request: SlowDown) -> None:
    assert decode_request(encode_request(request)) == request


@given(
    st.lists(
        st.builds(
            Fault,
            kind=st.sampled_from(FaultKind),
            rank=st.integers(0, 2**31 - 1),
            at_step=st.none() | st.integers(0, 2**63 - 1),
            factor=st.floats(1.0, 1000.0),
        ),
        max_size=4,
    )
)
def test_faults_come_back_as_they_went(faults: list[Fault]) -> None:
    assert decode_faults(encode_faults(faults)) == faults
