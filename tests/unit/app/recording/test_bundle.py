"""What is kept of an incident: whole, readable without us, safe to show, and without what looks like a secret."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import zipfile
from functools import cache
from pathlib import Path

import msgspec
import pytest

from agent.wire.digest import decode_frame, encode_frame
from agent.wire.logs import LogLine, RootCause
from agent.wire.reports import NodeReport, decode_node_report, encode_node_report
from agent.wire.secret_mask import MASK, masked_text
from agent.wire.stacks import RankStacks, Stacks, StackSource
from app.errors import SessionError
from app.recording.bundle import RECORDING_NAME, Evidence, bundle_name, encode_bundle, file_name, masked, recording_of
from app.recording.evidence import MAX_FILES, check_directory, default_directory, prune, write_evidence
from app.recording.records import (
    LinesRecord,
    NoticeRecord,
    ReportRecord,
    StacksRecord,
    decode_recording,
    encode_recording,
)
from ddpcore.wire_stacks import Frame, RecordedCall, ThreadStack
from tests.support.node_reports import job_status, node_report, rank_report, worker_report
from tests.support.recordings import frozen_recording, opening
from tests.support.sim import SimCluster

FAULT = {"kind": "freeze", "rank": 2, "at_step": 45}
TOKEN = "hf_" + "a1" * 12
URL = "https://me:hunter2@example.org/x"


@cache
def some_frame() -> bytes:
    return next(one.frame for one in reversed(frozen_recording().records) if isinstance(one, ReportRecord))


def evidence(**changes: object) -> Evidence:
    recording = frozen_recording()
    kept = Evidence(
        opening=opening("demo-0", "demo-1", why="rank 2 is frozen"),
        records=recording.records,
        status={"schema": 1},
        summary=["job demo: running", "verdict: rank 2 is frozen"],
        jobs={
            "demo-0": {"spec": {"command": ["train.py"], "faults": [FAULT]}},
            "demo-1": {"error": "it does not answer"},
        },
    )
    return msgspec.structs.replace(kept, **changes)


def files_of(kept: Evidence) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(encode_bundle(kept))) as bundle:
        assert bundle.testzip() is None
        return {name.partition("/")[2]: bundle.read(name) for name in bundle.namelist()}


def test_it_is_read_without_us_and_played_with_us() -> None:
    kept = evidence()
    files = files_of(kept)

    assert set(files) == {
        *("about.txt", "status.json", "stacks.txt", "stacks.json", "logs/demo-0.log"),
        *("jobs/demo-0.json", "jobs/demo-1.json", RECORDING_NAME),
    }
    about = files["about.txt"].decode()
    assert "Why: rank 2 is frozen" in about
    assert "verdict: rank 2 is frozen" in about
    assert "rankdeck was asked to do this harm: freeze rank 2 at step 45\n" in about
    assert re.search(r"^03:12:3\dZ \(1\d s before the end\)  rank 2 on demo-1 is frozen", about, re.MULTILINE)
    assert files["logs/demo-0.log"].decode() == "[rank 0 stdout] step 1 loss 5.3\n[launcher stderr] W torchrun\n"
    assert "rank 2 (1 rank): frozen at train.py:38 in Trainer.step" in files["stacks.txt"].decode()
    assert json.loads(files["stacks.json"])["groups"][0]["ranks"] == [2]
    found = decode_recording(recording_of(encode_bundle(kept)))
    assert (found.records, found.is_cut) == (kept.records, False)
    assert bundle_name(kept.opening) == "demo-20261121-031245.zip"


def test_one_whose_end_is_missing_is_played_as_far_as_it_goes() -> None:
    kept = evidence()
    content = encode_bundle(kept)
    for size in (len(content) - 9, len(content) * 3 // 4):
        found = decode_recording(recording_of(content[:size]))
        assert found.records == kept.records[: len(found.records)]
        assert found.records
    assert decode_recording(recording_of(content[:-9])).records == kept.records, "only texts are missing"
    packed_again = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed_again, "w", zipfile.ZIP_DEFLATED) as new:
        for name in sorted(old.namelist()):
            new.writestr(name, old.read(name))
    assert decode_recording(recording_of(packed_again.getvalue())).records == kept.records


def test_without_stacks_lines_or_a_job_there_is_less_of_it() -> None:
    files = files_of(evidence(records=[], jobs={}, opening=opening()))

    assert set(files) == {"about.txt", "status.json", RECORDING_NAME}


def test_versions_and_the_recorder_of_each_rank_are_in_it() -> None:
    call = RecordedCall("0", 57, "all_reduce", [[4096, 8]], is_over=False, age_s=3.2)
    thread = ThreadStack("MainThread", 1, [Frame("/x/train.py", 3, "main", is_own=True)])
    ranks = [
        RankStacks(rank, StackSource.PROBE, 4000, [thread], recorded=[call], versions={"torch": torch, "nccl": "2.27"})
        for rank, torch in enumerate(("2.13.0", "2.13.0", "2.12.1"))
    ]
    files = files_of(evidence(records=[StacksRecord(1.0, "demo-0", Stacks("demo", 0, 0.1, ranks))]))

    about = files["about.txt"].decode()
    assert "versions on ranks 0-1: torch 2.13.0, nccl 2.27\n" in about
    assert "versions on rank 2: torch 2.12.1, nccl 2.27\n" in about
    assert "all_reduce #57 [4096, 8], not over, called 3.2 s ago" in files["stacks.txt"].decode()


def test_the_stacks_that_show_something_are_the_ones_in_the_texts() -> None:
    gone = StacksRecord(60.0, "demo-1", None, "job demo does not run")
    files = files_of(evidence(records=[*frozen_recording().records, gone]))
    assert "rank 2 (1 rank): frozen" in files["stacks.txt"].decode()


def test_what_ranks_say_is_no_terminal_escape_and_no_path() -> None:
    lines = [LogLine(1, 0, "std\x1b]0;x\x07out", "a\x1b[2Jb"), LogLine(2, 1, "stdout", "../../etc")]
    files = files_of(evidence(records=[LinesRecord(0.0, "../../etc/passwd\x1b", lines)], jobs={"/": {}}))

    assert set(files) >= {"logs/.._.._etc_passwd_.log", "jobs/_.json"}
    assert b"\x1b" not in files["logs/.._.._etc_passwd_.log"]
    assert file_name("") == "node"


def test_the_logs_are_those_of_the_job() -> None:
    job_id = evidence().opening.job_id
    lines = [
        LogLine(1, 0, "stdout", "own", job_id),
        LogLine(2, 0, "stdout", "other", "b"),
        LogLine(3, -1, "stderr", "-"),
    ]
    files = files_of(evidence(records=[LinesRecord(0.0, "demo-0", lines)]))

    assert job_id
    assert files["logs/demo-0.log"].decode().splitlines() == ["[rank 0 stdout] own", "[launcher stderr] -"]


def test_what_looks_like_a_secret_is_in_none_of_it() -> None:
    sim = SimCluster()
    sim.run(8)
    report = decode_node_report(sim.heard[-1][2])
    cause = RootCause(0, exception=f"HTTPError: {URL}", traceback=f"Traceback\n  token={TOKEN}")
    job = msgspec.structs.replace(report.jobs[0], root_cause=cause, detail=f"see {URL}")
    leaky: NodeReport = msgspec.structs.replace(report, jobs=[job])
    thread = ThreadStack(f"upload {TOKEN}", 1)
    told = Stacks("demo", 0, 0.1, [RankStacks(0, StackSource.PROBE, 1, [thread], note=URL)])

    kept = [
        masked(one)
        for one in (
            ReportRecord(0.0, "demo-0", encode_node_report(leaky)),
            LinesRecord(1.0, "demo-0", [LogLine(1, 0, "stdout", f"login with {TOKEN} at {URL}")]),
            StacksRecord(2.0, "demo-0", told),
            NoticeRecord(3.0, f"GET {URL}"),
        )
    ]

    content = b"".join(files_of(evidence(records=kept)).values()) + msgspec.msgpack.encode(kept)
    assert TOKEN.encode() not in content
    assert b"hunter2" not in content
    assert isinstance(kept[0], ReportRecord)
    assert decode_node_report(kept[0].frame).jobs[0].root_cause is not None


@pytest.mark.parametrize("size", range(20, 300, 7))
@pytest.mark.parametrize("secret", [TOKEN, "https://me:voil\u00e0@host/x", "Bearer 0123456789abcdef"])
def test_a_secret_is_found_wherever_it_stands_in_a_frame(secret: str, size: int) -> None:
    report = decode_node_report(some_frame())
    cause = RootCause(0, exception=f"{secret} {'x' * size}"[: size + len(secret)])
    leaky = msgspec.structs.replace(report, jobs=[msgspec.structs.replace(report.jobs[0], root_cause=cause)])

    kept = masked(ReportRecord(0.0, "demo-0", encode_node_report(leaky)))

    assert isinstance(kept, ReportRecord)
    told = decode_node_report(kept.frame).jobs[0].root_cause
    assert told is not None
    assert masked_text(told.exception) == told.exception
    assert MASK in told.exception


def test_a_secret_is_found_in_the_packed_workers_of_a_frame() -> None:
    leaky = worker_report(0, rank_report(0, raised=f"upload failed: {TOKEN}"))
    frame = encode_frame(node_report(1, [job_status()], [leaky]))
    assert TOKEN.encode() in frame

    kept = masked(ReportRecord(0.0, "demo-0", frame))

    assert isinstance(kept, ReportRecord)
    assert TOKEN.encode() not in kept.frame
    assert decode_node_report(kept.frame).workers[0].rank == 0
    assert decode_frame(kept.frame).digest == decode_frame(frame).digest


def test_of_workers_that_cannot_be_read_no_secret_is_kept_while_the_rest_of_the_report_is() -> None:
    found = decode_frame(encode_frame(node_report(1, [job_status()], [worker_report(0)])))
    packed = msgspec.msgpack.encode(msgspec.msgpack.encode([TOKEN]))
    frame = msgspec.msgpack.encode(msgspec.structs.replace(found, packed_workers=msgspec.Raw(packed)))

    kept = masked(ReportRecord(0.0, "demo-0", frame))

    assert isinstance(kept, ReportRecord)
    assert TOKEN.encode() not in kept.frame
    assert decode_frame(kept.frame).jobs[0].job_id == "job"


def test_a_secret_in_a_field_of_another_version_is_not_kept() -> None:
    values = msgspec.msgpack.decode(encode_frame(node_report(1, [job_status()], [worker_report(0)])))
    frame = msgspec.msgpack.encode(values | {"later": TOKEN})

    kept = masked(ReportRecord(0.0, "demo-0", frame))

    assert isinstance(kept, ReportRecord)
    assert TOKEN.encode() not in kept.frame
    assert decode_node_report(kept.frame) == decode_node_report(frame)


def test_of_a_report_that_cannot_be_read_no_secret_is_kept() -> None:
    kept = masked(ReportRecord(0.0, "demo-0", msgspec.msgpack.encode([TOKEN])))

    assert isinstance(kept, ReportRecord)
    assert TOKEN.encode() not in kept.frame


def test_what_is_masked_keeps_within_the_bounds_of_its_field() -> None:
    tail = "://a:b@"
    name = "n" * (256 - len(tail)) + tail
    told = Stacks("demo", 0, 0.1, [RankStacks(0, StackSource.PROBE, 1, [ThreadStack(name, 1)])])
    notice = NoticeRecord(0.0, "n" * (8192 - len(tail)) + tail)

    kept = [masked(StacksRecord(0.0, "demo-0", told)), masked(notice)]

    found = decode_recording(encode_recording(opening("demo-0"), kept))
    assert (found.records, found.is_cut) == (kept, False)


def test_a_job_whose_name_looks_like_a_token_keeps_it() -> None:
    job_id = "sk-resnet50-imagenet-v2"
    assert masked_text(job_id) == MASK
    report = decode_node_report(some_frame())
    job = msgspec.structs.replace(report.jobs[0], job_id=job_id, detail=TOKEN)
    workers = [msgspec.structs.replace(worker, job_id=job_id) for worker in report.workers]
    frame = encode_node_report(msgspec.structs.replace(report, jobs=[job], workers=workers))
    stacks = StacksRecord(0.0, "demo-0", Stacks(job_id, 0, 0.1, [RankStacks(0, StackSource.PROBE, 1, [], note=TOKEN)]))

    kept = masked(ReportRecord(0.0, "demo-0", frame))

    assert isinstance(kept, ReportRecord)
    told = decode_node_report(kept.frame)
    assert {job.job_id for job in told.jobs} == {worker.job_id for worker in told.workers} == {job_id}
    assert told.jobs[0].detail == MASK
    shown = Stacks(job_id, 0, 0.1, [RankStacks(0, StackSource.PROBE, 1, [], note=MASK)])
    assert masked(stacks) == StacksRecord(0.0, "demo-0", shown)


def test_a_record_without_secrets_is_as_it_was() -> None:
    for record in frozen_recording().records:
        assert masked(record) == record


def test_evidence_takes_nobodys_place_and_is_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "train.zip"

    first = write_evidence(path, b"one")
    second = write_evidence(path, b"two")

    assert (first, second) == (path, tmp_path / "kept" / "train-2.zip")
    assert [one.read_bytes() for one in (first, second)] == [b"one", b"two"]
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert sorted(one.name for one in first.parent.iterdir()) == ["train-2.zip", "train.zip"]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SessionError, match=r"evidence cannot be written to .*/x.zip: (File exists|Not a directory)"):
        write_evidence(tmp_path / "file" / "x.zip", b"")


def test_a_place_that_cannot_take_evidence_is_said_before_there_is_any(tmp_path: Path) -> None:
    check_directory(tmp_path / "new" / "deep")
    assert (tmp_path / "new" / "deep").is_dir()
    with pytest.raises(SessionError, match="evidence cannot be kept in /proc/foo: "):
        check_directory(Path("/proc/foo"))


def test_only_the_newest_files_stay_and_nobody_else_s_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers = ["dataset-shard-10.zip", "train-20261121.zip", "notes-20261121-031245.txt"]
    for name in strangers:
        (tmp_path / name).touch()
    for number in range(MAX_FILES + 5):
        path = tmp_path / f"train-20261121-{number:06}.zip"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1_000_000 + number, 1_000_000 + number))

    prune(tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {*strangers, *(f"train-20261121-{number:06}.zip" for number in range(5, MAX_FILES + 5))}

    monkeypatch.setattr("app.recording.evidence.MAX_BYTES", 250)
    prune(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(strangers) + 2


def test_it_goes_where_programs_keep_their_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_directory() == tmp_path / ".local/state/rankdeck/evidence"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/not/allowed")
    assert default_directory() == tmp_path / ".local/state/rankdeck/evidence"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert str(default_directory()) == "/var/state/rankdeck/evidence"
