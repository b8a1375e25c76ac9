"""What dumps of torch's flight recorder show, and that nothing in one is ever run."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis.causes import Severity
from app.errors import UsageError
from app.inspect.dump_files import read_dumps
from app.inspect.dumps import Dump, DumpFinding, MalformedDumpError, compared, read_dump

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LIBRARY_FRAME = {"filename": "/venv/lib/python3.11/site-packages/torch/distributed/x.py", "line": 9, "name": "wrapper"}


def entry(seq: int, *, op: str = "all_reduce", is_over: bool = True, **fields: Any) -> dict[str, Any]:
    frames = [LIBRARY_FRAME, {"filename": "/home/u/train.py", "line": 10 + seq, "name": "main"}]
    usual = {"process_group": ("0", "default_pg"), "collective_seq_id": seq, "is_p2p": False, "input_sizes": [[4]]}
    state = "completed" if is_over else "started"
    return {**usual, "profiling_name": f"nccl:{op}", "state": state, "retired": is_over, "frames": frames, **fields}


def dump(*entries: dict[str, Any], **more: Any) -> Dump:
    whole = {"version": "2.10", "pg_status": {"0": {}}, "entries": list(entries), **more}
    return read_dump(pickle.dumps(whole, protocol=2))


def config(ranks: Iterable[int], name: str = "0") -> dict[str, Any]:
    return {name: {"name": name, "desc": "default_pg", "ranks": str(list(ranks))}}


def found(*ranks: list[dict[str, Any]] | None) -> DumpFinding:
    return compared({rank: dump(*entries) for rank, entries in enumerate(ranks) if entries is not None})


WAITS = [entry(5), entry(6, is_over=False)]


TENSOR = ("1", "tensor")


def test_the_rank_that_has_not_come_is_named_with_its_last_line() -> None:
    finding = found(WAITS, [entry(5)], WAITS)

    assert (finding.severity, finding.culprits, finding.waiting) == (Severity.CRITICAL, [1], [0, 2])
    assert finding.text == (
        "rank 1 has not come to all_reduce #6 of default_pg at train.py:16 in main, in which ranks 0, 2 waited; its "
        "last call there was all_reduce #5 of default_pg at train.py:15 in main"
    )


def test_a_rank_that_waits_in_another_group_is_no_culprit() -> None:
    waits_there = entry(3, is_over=False, process_group=TENSOR)
    finding = found(WAITS, [entry(5), waits_there], [entry(5), entry(2, process_group=TENSOR)])

    assert finding.culprits == [2]
    assert "rank 2 has not come to all_reduce #3 of tensor" in finding.text


def test_ranks_that_wait_for_each_other_are_not_said_to_have_come() -> None:
    finding = found([*WAITS, entry(2, process_group=TENSOR)], [entry(5), entry(3, is_over=False, process_group=TENSOR)])

    assert (finding.severity, finding.culprits, finding.waiting) == (Severity.WARNING, [], [0, 1])
    assert "and rank 1, waiting in another call, has not come to it (one of 2 such calls)" in finding.text


def test_other_calls_under_one_number_are_shown_side_by_side() -> None:
    finding = found(WAITS, [entry(5), entry(6, op="broadcast", is_over=False)], WAITS)

    assert (finding.severity, finding.culprits) == (Severity.CRITICAL, [1])
    assert "rank 1 called broadcast #6" in finding.text
    assert "ranks 0, 2 called all_reduce #6" in finding.text


def test_calls_enqueued_ahead_do_not_hide_the_one_that_hangs() -> None:
    ahead = [entry(seq, is_over=False, state="scheduled") for seq in (6, 7)]
    all_reduce, broadcast = (entry(5, op=op, is_over=False) for op in ("all_reduce", "broadcast"))
    finding = found(*[[entry(4), all_reduce, *ahead]] * 3, [entry(4), broadcast, *ahead])

    assert (finding.severity, finding.culprits, finding.waiting) == (Severity.CRITICAL, [3], [0, 1, 2])
    assert "rank 3 called broadcast #5" in finding.text
    assert "all_reduce #5" in found(*[[entry(4), all_reduce, *ahead]] * 2).text
    late = found([entry(4), all_reduce, *ahead], [entry(4)], [entry(4), entry(5), *ahead])
    assert (late.culprits, late.waiting) == ([1], [0, 2])
    assert "rank 1 has not come to all_reduce #5" in late.text
    root_is_through = found([entry(5, op="broadcast"), *ahead], [all_reduce, *ahead], [all_reduce, *ahead])
    assert root_is_through.culprits == [0]
    unrecorded_end = entry(3, is_over=False)
    assert found(*[[unrecorded_end, entry(4)]] * 2).severity is Severity.OK


def test_a_rank_that_lags_hides_no_other() -> None:
    finding = found([entry(5, is_over=False)], *[[entry(5), entry(6, is_over=False)]] * 2, [entry(5)])

    assert (finding.culprits, finding.waiting) == ([3], [0, 1, 2])
    assert "rank 3 has not come to all_reduce #6" in finding.text


def test_sizes_that_may_differ_are_no_mismatch() -> None:
    uneven = [[entry(6, op="all_to_all", is_over=False, input_sizes=[[rows]])] for rows in (3, 5)]

    assert found(*uneven).severity is Severity.WARNING


def test_a_rank_without_a_dump_is_named() -> None:
    finding = found(WAITS, None, WAITS)

    assert (finding.severity, finding.without_dump) == (Severity.CRITICAL, [1])
    assert "rank 1 has left no dump: frozen, killed, or elsewhere" in finding.text


def test_members_of_the_groups_without_a_dump_are_named() -> None:
    one = dump(*WAITS, pg_config=config([0, 1, 2, 7]))
    finding = compared({0: one, 1: one, 2: one})

    assert (finding.severity, finding.without_dump) == (Severity.CRITICAL, [7])
    assert "and all that left a dump have come to it; rank 7 has left no dump" in finding.text
    unknown: list[Any] = [config([]), {"0": "?"}, [], None]
    for one in [dump(*WAITS, pg_config=one) for one in unknown]:
        assert compared({0: one, 1: one}).severity is Severity.WARNING


def test_a_member_that_has_not_called_in_a_group_is_named_unless_its_calls_may_be_overwritten() -> None:
    first = dump(entry(1, is_over=False, record_id=0), pg_config=config([0, 1]))
    finding = compared({0: first, 1: dump()})

    assert (finding.culprits, finding.waiting) == ([1], [0])
    assert "rank 1 has not come to all_reduce #1 of default_pg at train.py:11 in main" in finding.text
    assert "its dump has no call there" in finding.text
    full = dump(entry(9, process_group=TENSOR, record_id=3000))
    assert compared({0: first, 1: full}).culprits == []


def test_groups_of_one_name_are_told_apart_by_their_ranks() -> None:
    pairs = [dump(*WAITS, pg_config=config([0, 1]))] * 2 + [dump(entry(5), pg_config=config([2, 3]))] * 2

    assert compared(dict(enumerate(pairs))).culprits == []


def test_all_in_one_call_is_nobody_s_fault() -> None:
    finding = found(WAITS, WAITS)

    assert (finding.severity, finding.culprits, finding.waiting) == (Severity.WARNING, [], [0, 1])
    assert "and all have come to it" in finding.text
    assert found([entry(5)], [entry(6)]).severity is Severity.OK


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was run",))


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        pickle.dumps({"entries": [Harmful()]}, protocol=2),
        pickle.dumps({"entries": 3}),
        b"\x80\x02r\xff\xff\xff\x7f.",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02" + b"(" * 100_000,
        b"",
    ],
)
def test_what_is_no_dump_is_refused_and_not_run(content: bytes) -> None:
    with pytest.raises(MalformedDumpError):
        read_dump(content)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
ENTRIES = st.lists(
    st.builds(entry, st.integers(0, 9), op=st.sampled_from(["all_reduce", "\x1b[2J"]), is_over=st.booleans())
)


@given(st.binary() | PLAIN.map(lambda value: pickle.dumps({"entries": value}, protocol=2)))
def test_any_bytes_are_a_dump_or_refused(content: bytes) -> None:
    finding = DumpFinding(Severity.OK, [], [], [], "")
    with contextlib.suppress(MalformedDumpError):
        finding = compared({0: read_dump(content)})
    assert finding.culprits == []


@given(st.dictionaries(st.integers(0, 4), ENTRIES, max_size=4))
def test_whatever_dumps_hold_is_told_cleanly_and_no_rank_that_waits_is_behind(dumps: dict[int, Any]) -> None:
    finding = compared({rank: dump(*entries) for rank, entries in dumps.items()})

    assert "\x1b" not in finding.text
    assert not set(finding.culprits) & set(finding.waiting)
    assert (finding.severity is Severity.CRITICAL) == bool(finding.culprits or finding.without_dump)


def test_the_files_of_a_set_are_found_beside_others(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"entries": []}))
    for number in range(9):
        (tmp_path / f"other-{number}").write_text("no dump")

    assert [sorted(one) for one in read_dumps(tmp_path)] == [[0, 1, 2], [], []]
    for rank in range(3):
        (tmp_path / f"nccl_trace_rank_{rank}").write_text("no dump")
    with pytest.raises(UsageError, match="has no readable dump of torch's flight recorder; nccl_trace_rank_0: "):
        read_dumps(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no file whose name ends with a rank"):
        read_dumps(tmp_path / "empty")


def test_a_file_that_cannot_be_read_is_said_and_the_others_are_compared(tmp_path: Path) -> None:
    whole = pickle.dumps({"entries": WAITS}, protocol=2)
    for rank, content in enumerate([whole, b"", whole[:-9], whole, pickle.dumps({"entries": [entry(5)]})]):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    (tmp_path / "nccl_trace_rank_5").mkdir()
    finding = compared(*read_dumps(tmp_path))

    assert (finding.culprits, finding.waiting, finding.without_dump) == ([4], [0, 3], [1, 2, 5])
    for said in ("1 has left no readable dump: it is empty", "2 has left no readable dump: it is cut short", "5 has"):
        assert f"rank {said}" in finding.text


def test_files_of_another_job_are_left_out_and_old_ones_are_named(tmp_path: Path) -> None:
    written = (9_000, 5_000, 10_000, *[4_000] * 5)
    for rank in range(8):
        path = tmp_path / f"comm_lib_trace_rank_{rank}"
        world = config(range(4) if rank < 3 else range(8))
        path.write_bytes(pickle.dumps({"entries": WAITS if rank < 3 else [entry(5)], "pg_config": world}, protocol=2))
        os.utime(path, (0, written[rank]))
    (tmp_path / "comm_lib_trace_rank_7").write_bytes(b"")
    dumps, unread, notes = read_dumps(tmp_path)

    assert (sorted(dumps), unread) == ([0, 1, 2], {})
    assert notes == [
        "left out: the files of ranks 3-7, of another job than the latest file, that of rank 2",
        "more than an hour older than the latest, so perhaps of an earlier job: the file of rank 1",
    ]
    finding = compared(dumps, unread, notes)
    assert (finding.culprits, finding.without_dump) == ([], [3])
    assert finding.text.endswith("; ".join(["", *notes]))


def test_a_call_may_have_a_tensor_for_each_of_many_ranks() -> None:
    many, other = ([[4]] * 72 + [[last]] for last in (4, 5))

    assert found(*[[entry(6, is_over=False, input_sizes=many)]] * 2).severity is Severity.WARNING
    odd = found(*[[entry(6, is_over=False, input_sizes=sizes)] for sizes in (many, many, other)])
    assert odd.culprits == [2]
