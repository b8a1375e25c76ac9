"""What is read of torch's recorder, also of one that we cannot run here, and of none at all."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from ddpcore.probe import flight_recorder
from ddpcore.probe.flight_recorder import FlightRecorder
from ddpcore.probe.gpu import with_batches
from ddpcore.probe.samples import RecorderEntry

# A dump of torch 2.13's gloo recorder, cut to one entry; NCCL's (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp)
# has the same keys.
TRACE = {
    "comm_lib_version": "",
    "entries": [
        {
            "collective_seq_id": 3,
            "input_dtypes": ["Float"],
            "input_sizes": [[3, 2]],
            "is_p2p": False,
            "op_id": 4,
            "p2p_seq_id": 0,
            "pg_id": 1,
            "process_group": ["2", "mesh_dp"],
            "profiling_name": "nccl:all_reduce",
            "record_id": 7,
            "retired": False,
            "state": "scheduled",
            "time_created_ns": 1795235430870045406,
            "timeout_ms": 1800000,
        }
    ],
    "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
    "pg_status": {
        "1": {"last_completed_collective": "3", "last_enqueued_collective": "4", "last_started_collective": "-1"}
    },
    "version": "2.10",
}


def recorder(monkeypatch: pytest.MonkeyPatch, **functions: object) -> FlightRecorder:
    c10d = torch._C._distributed_c10d
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(c10d, name, raising=False)
    for name, function in functions.items():
        monkeypatch.setattr(c10d, name, function, raising=False)
    return FlightRecorder()


def test_the_real_recorder_is_there_and_empty_before_the_first_collective() -> None:
    real = FlightRecorder()

    assert real.is_available
    assert dict(real.counters()) == {}
    assert list(real.dump().entries) == []
    assert real.members() == {}
    assert not real.has_process_group()


def test_a_torch_without_a_recorder_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    none = recorder(monkeypatch)

    assert not none.is_available
    assert (dict(none.counters()), list(none.dump().entries)) == ({}, [])


def test_a_dump_gives_the_entries_and_the_counters_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = recorder(monkeypatch, _dump_nccl_trace_json=lambda *_: json.dumps(TRACE))

    dump = nccl.dump()

    assert list(dump.entries) == [
        RecorderEntry(
            key=("nccl", 1),
            group="2",
            seq=3,
            op="nccl:all_reduce",
            sizes=((3, 2),),
            is_p2p=False,
            is_retired=False,
            called_us=1795235430870045,
            dtypes=("Float",),
        )
    ]
    assert dump.counters == {("nccl", 1): (4, 3)} == nccl.counters()


def test_two_recorders_keep_their_groups_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    both = recorder(
        monkeypatch,
        _dump_fr_trace_json=lambda *_: json.dumps(TRACE).encode(),
        _dump_nccl_trace_json=lambda *_: json.dumps(TRACE),
    )

    assert dict(both.counters()) == {("gloo", 1): (4, 3), ("nccl", 1): (4, 3)}
    assert {entry.key for entry in both.dump().entries} == {("gloo", 1), ("nccl", 1)}


NCCL_DUMPS = json.loads(Path(__file__).with_name("nccl_dumps.json").read_text())
"""Dumps of torch 2.11's NCCL recorder on one H200, without and with TORCH_NCCL_ENABLE_TIMING: the last five calls."""


@pytest.mark.parametrize(
    ("dump", "retired", "begun", "is_lasting_known"),
    [
        # The events show that all is over before the watchdog has retired it.
        ("plain synchronized", [True] * 5, [None] * 5, False),
        ("timed synchronized", [True] * 5, [True] * 5, False),
        ("plain settled", [True] * 5, [None] * 5, False),
        ("timed settled", [True] * 5, [True] * 5, True),
        # Two calls behind a kernel that runs for four seconds.
        ("plain behind_kernel_1s", [True, True, True, False, False], [None] * 5, False),
        ("timed behind_kernel_1s", [True, True, True, False, False], [True, True, True, False, False], True),
    ],
)
def test_what_is_over_and_what_the_gpu_has_begun_is_read_of_nccls_recorder(
    monkeypatch: pytest.MonkeyPatch, dump: str, retired: list[bool], begun: list[bool | None], is_lasting_known: bool
) -> None:
    entries = recorder(monkeypatch, _dump_nccl_trace_json=lambda *_: json.dumps(NCCL_DUMPS[dump])).dump().entries

    assert [entry.is_retired for entry in entries] == retired
    assert [entry.has_begun for entry in entries] == begun
    assert [0 <= entry.on_gpu_us < 1000 for entry in entries if entry.is_retired] == [is_lasting_known] * sum(retired)
    assert {entry.on_gpu_us for entry in entries if not entry.is_retired} <= {-1}


@pytest.mark.parametrize("dump", ["plain p2p", "timed p2p"])
def test_a_batch_of_nccls_is_one_of_transfers_that_ends_with_its_last_entry(
    monkeypatch: pytest.MonkeyPatch, dump: str
) -> None:
    entries = recorder(monkeypatch, _dump_nccl_trace_json=lambda *_: json.dumps(NCCL_DUMPS[dump])).dump().entries

    assert [entry.op for entry in entries[-3:]] == ["nccl:send 0->0", "nccl:recv 0<-0", "nccl:coalesced"]
    assert [(entry.is_p2p, entry.is_retired) for entry in entries[-3:]] == [(True, False), (True, False), (False, True)]
    assert [(entry.is_p2p, entry.is_retired) for entry in with_batches(entries)[-3:]] == [(True, True)] * 3


def test_counters_are_asked_for_without_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dump(*flags: bool) -> bytes:
        asked.append(flags)
        return json.dumps(TRACE).encode()

    gloo = recorder(monkeypatch, _dump_fr_trace_json=dump)
    gloo.counters()
    gloo.dump()

    assert asked == [(False, False), (True, False)]


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[]", b'{"pg_status": {"x": {}}}', b'{"entries": [{"pg_id": 1}]}', b"\xff\xfe"]
)
def test_an_answer_that_makes_no_sense_is_none(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    strange = recorder(monkeypatch, _dump_fr_trace_json=lambda *_: answer)

    assert dict(strange.counters()) == {}
    assert list(strange.dump().entries) == []


def test_an_entry_without_a_group_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"entries": [{"pg_id": 1, "process_group": []}]})

    assert list(recorder(monkeypatch, _dump_fr_trace_json=lambda *_: answer).dump().entries) == []


def test_groups_are_read_from_torch_s_own_map(tmp_path: object) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        real = FlightRecorder()
        assert real.has_process_group()
        assert {name: (group.ranks, group.is_mixed) for name, group in real.members().items()} == {"0": ((0,), False)}
        for rows in (3, 2):
            torch.distributed.all_reduce(torch.ones(rows, 2))
        dump = real.dump()
        assert [(entry.group, entry.seq, entry.op, list(map(list, entry.sizes))) for entry in dump.entries] == [
            ("0", 1, "gloo:all_reduce", [[3, 2]]),
            ("0", 2, "gloo:all_reduce", [[2, 2]]),
        ]
        assert all(entry.called_us > 1e15 and not entry.is_p2p for entry in dump.entries)
        assert dump.counters == real.counters()
    finally:
        torch.distributed.destroy_process_group()


def test_default_groups_are_counted_by_size_however_short_they_last(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "_update_default_pg", c10d._update_default_pg)
    monkeypatch.setattr(flight_recorder, "_num_worlds", Counter())
    recorder = FlightRecorder()
    assert flight_recorder.count_worlds()

    for number in range(2):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/{number}", rank=0, world_size=1)
        torch.distributed.destroy_process_group()

    assert (recorder.num_worlds(1), recorder.num_worlds(2)) == (2, 0)
    monkeypatch.delattr(c10d, "_update_default_pg")
    assert not flight_recorder.count_worlds(), "another torch"


def test_a_map_that_has_changed_is_read_as_far_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", object())

    assert FlightRecorder().members() == {}
    assert not FlightRecorder().has_process_group()
