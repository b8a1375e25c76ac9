"""A recording that is written as a session hears."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.logs import LogLine
from agent.wire.reports import decode_node_report, encode_node_report
from app.diagnosis.causes import Cause
from app.diagnosis.rank_facts import Thresholds
from app.errors import SessionError
from app.recording import recorder as module
from app.recording.bundle import masked
from app.recording.playback import Playback, clock_text
from app.recording.recorder import Recorder
from app.recording.records import LinesRecord, NoticeRecord, ReportRecord, decode_recording
from tests.support.recordings import frozen_recording

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from app.recording.records import Record, Recording

BEGAN_S = 5000.0
"""Of the monotonic clock."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.rankdeck"


def make(path: Path, **how: int) -> Recorder:
    return Recorder(path, frozen_recording().opening.nodes, masked, **how)


def read(path: Path) -> Recording:
    return decode_recording(path.read_bytes())


def feed(recorder: Recorder, count: int = 10**6) -> None:
    for record in frozen_recording().records[:count]:
        moved = type(record)(record.at_s + BEGAN_S, *(getattr(record, name) for name in record.__struct_fields__[1:]))
        recorder.add(moved)


def until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_is_heard_is_what_is_read_again(path: Path) -> None:
    recorder = make(path)
    feed(recorder)
    recorder.close()

    found = read(path)
    assert [type(record) for record in found.records] == [type(record) for record in frozen_recording().records]
    assert not found.is_cut
    assert found.length_s == pytest.approx(frozen_recording().length_s)
    assert path.stat().st_mode & 0o777 == 0o600
    playback = Playback(found, Thresholds())
    while not playback.is_over:
        playback.step(found.length_s)
    assert [verdict.cause for verdict in playback.verdicts] == [Cause.FROZEN]
    assert re.fullmatch(r"\d\d:\d\d:\d\dZ", clock_text(found, 3.0))


def test_what_looks_like_a_secret_is_not_kept(path: Path) -> None:
    recorder = make(path)
    recorder.add(LinesRecord(BEGAN_S, "demo-0", [LogLine(1, 0, "stdout", "token=hf_abcdefghijklmnopqrstuvwxyz1234")]))
    recorder.close()
    (record,) = read(path).records
    assert isinstance(record, LinesRecord)
    assert "hf_abcdefgh" not in record.lines[0].text


def test_a_full_file_gives_way_to_a_new_one_and_both_can_be_read(path: Path) -> None:
    recorder = make(path, max_bytes=60_000)
    feed(recorder)
    recorder.close()
    older, newer = read(path.with_name("run.rankdeck.1")), read(path)
    assert not older.is_cut
    assert not newer.is_cut
    assert newer.records[0].at_s == 0.0
    assert len(older.records) + len(newer.records) <= len(frozen_recording().records)
    last, kept = frozen_recording().records[-1], newer.records[-1]
    assert isinstance(last, ReportRecord)
    assert isinstance(kept, ReportRecord)
    assert kept.frame == last.frame


def test_a_file_that_is_there_is_left_alone(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(SessionError, match="cannot be recorded into: File exists") as caught:
        make(path)
    assert caught.value.hint == "name another, or remove it"
    assert path.read_text() == "mine"
    older = path.with_name("other.1")
    older.write_text("mine")
    with pytest.raises(SessionError, match=r"other\.1 cannot be recorded into: File exists"):
        make(path.with_name("other"))
    assert older.read_text() == "mine"
    assert not path.with_name("other").exists()
    with pytest.raises(SessionError, match="No such file"):
        make(path.parent / "nowhere" / "x")


def test_a_full_disk_ends_the_recording_and_not_the_session(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(path)

    def fail(_self: object, _packed: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module._Part, "_put", fail)
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    feed(recorder, 3)
    until(lambda: not recorder._notices.empty())
    feed(recorder)
    assert recorder.drain_notices() == [f"the recording {path} has ended: No space left on device"]
    recorder.close()
    assert recorder.drain_notices() == []


def test_a_record_that_cannot_be_written_ends_the_recording_with_a_notice(path: Path) -> None:
    recorder = make(path)
    recorder.add(NoticeRecord(BEGAN_S, "heard"))
    recorder.add(NoticeRecord(BEGAN_S + 1, "half a \ud800"))
    until(lambda: not recorder._notices.empty())
    (told,) = recorder.drain_notices()
    assert told.startswith(f"the recording {path} has ended: 'utf-8' codec can't encode character")
    recorder.add(NoticeRecord(BEGAN_S + 2, "more"))
    recorder.close()
    assert not recorder._thread.is_alive()
    assert recorder.drain_notices() == []


@pytest.mark.parametrize(
    "strange",
    [b"\xa1x\xa2\xff\xfe", b"\xa1x\x81\x81\x01\x02\x03", b"\xa1x" + b"\x91" * 700 + b"\xc0"],
    ids=["text that is not UTF-8", "a map as a name", "lists in lists"],
)
def test_a_report_with_a_strange_field_of_another_version_is_kept_without_it_and_masked(
    path: Path, strange: bytes
) -> None:
    report = next(record for record in frozen_recording().records if isinstance(record, ReportRecord))
    secret = msgspec.structs.replace(decode_node_report(report.frame), hostname="hf_abcdefghijklmnopqrstuvwxyz1234")
    frame = encode_node_report(secret)
    assert frame[0] == 0xDE, "a map, its length in two bytes"
    longer = frame[:2] + bytes([frame[2] + 1]) + frame[3:] + strange
    assert decode_node_report(longer) == secret
    recorder = make(path)
    recorder.add(ReportRecord(BEGAN_S, "demo-0", longer))
    recorder.add(NoticeRecord(BEGAN_S, "goes on"))
    recorder.close()
    assert recorder.drain_notices() == []
    kept, notice = read(path).records
    assert isinstance(kept, ReportRecord)
    assert isinstance(notice, NoticeRecord)
    shown = decode_node_report(kept.frame)
    assert shown == msgspec.structs.replace(secret, hostname=shown.hostname)
    assert "hf_abcdefgh" not in shown.hostname


def test_what_waits_for_a_slow_disk_is_bounded_by_its_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 100_000)
    goes_on = threading.Event()

    def slow(record: Record) -> Record:
        assert goes_on.wait(60)
        return record

    recorder = Recorder(path, frozen_recording().opening.nodes, slow)
    for number in range(50):
        recorder.add(ReportRecord(BEGAN_S + number, "demo-0", bytes(30_000)))
    assert 45 <= recorder.num_lost <= 47
    assert recorder.drain_notices() == [f"the disk is too slow for the recording {path}: not all of it is kept"]
    goes_on.set()
    until(lambda: recorder._num_waiting_bytes == 0)
    num_lost = recorder.num_lost
    recorder.add(NoticeRecord(BEGAN_S + 60, "there is room again"))
    recorder.close()
    assert recorder.num_lost == num_lost
    assert len(read(path).records) == 51 - num_lost


def test_the_clock_of_a_recording_begins_with_what_is_heard_first(path: Path) -> None:
    recorder = make(path)
    made_at = datetime.now(UTC).replace(microsecond=0)
    until(lambda: datetime.now(UTC) >= made_at + timedelta(seconds=1))
    heard_at = datetime.now(UTC).replace(microsecond=0)
    recorder.add(NoticeRecord(BEGAN_S, "first"))
    recorder.close()
    seconds = range(1 + int((datetime.now(UTC) - heard_at).total_seconds()))
    assert clock_text(read(path), 0.0) in [f"{heard_at + timedelta(seconds=second):%H:%M:%S}Z" for second in seconds]


def test_a_recording_of_nothing_is_one(path: Path) -> None:
    make(path).close()
    found = read(path)
    assert found.records == []
    assert not found.is_cut


def test_what_the_disk_cannot_take_in_time_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 1)
    recorder = make(path)
    for number in range(2000):
        recorder.add(NoticeRecord(BEGAN_S + number, "x" * 100))
    recorder.close()
    assert len(read(path).records) + recorder.num_lost == 2000
    told = recorder.drain_notices()
    assert told == ([f"the disk is too slow for the recording {path}: not all of it is kept"] * (recorder.num_lost > 0))


def test_after_a_kill_all_but_the_last_second_is_there(path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from app.recording.recorder import Recorder\n"
        "from app.recording.records import NoticeRecord\n"
        "recorder = Recorder(Path(sys.argv[1]), ['n0'], lambda record: record)\n"
        "recorder.add(NoticeRecord(time.monotonic(), 'the last words'))\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)]) as process:
        try:
            until(lambda: path.exists() and path.stat().st_size > 0 and bool(read_if_begun(path)))
        finally:
            process.send_signal(signal.SIGKILL)
    found = read(path)
    assert found.is_cut
    assert [record.text for record in found.records if isinstance(record, NoticeRecord)] == ["the last words"]


def read_if_begun(path: Path) -> list[object]:
    try:
        return list(read(path).records)
    except ValueError:
        return []
