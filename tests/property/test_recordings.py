"""A recording that is written is read again; one that was cut is read as far as it goes, and nonsense is refused."""

from __future__ import annotations

import contextlib
import gzip
import io
import zipfile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.logs import LogLine
from agent.wire.reports import WIRE_VERSION
from app.recording.bundle import RECORDING_NAME, recording_of
from app.recording.recorder import Past
from app.recording.records import (
    LinesRecord,
    MalformedRecordingError,
    NoticeRecord,
    Opening,
    Record,
    ReportRecord,
    StacksRecord,
    decode_recording,
    encode_recording,
)
from tests.support.recordings import opening

times = st.floats(0.0, 80_000.0)
names = st.text(max_size=20)
lines = st.builds(
    LogLine, seq=st.integers(0, 2**40), rank=st.integers(-1, 9), stream=st.just("stdout"), text=st.text(max_size=60)
)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(ReportRecord, times, names, st.binary(max_size=200)),
    st.builds(LinesRecord, times, names, st.lists(lines, max_size=4)),
    st.builds(StacksRecord, times, names, st.none(), st.text(max_size=20)),
    st.builds(NoticeRecord, times, st.text(max_size=40)),
)
stories = st.lists(records, max_size=12).map(lambda some: sorted(some, key=lambda record: record.at_s))


@given(stories)
def test_what_is_written_is_read_again(story: list[Record]) -> None:
    found = decode_recording(encode_recording(opening("demo-0"), story))

    assert (found.opening, found.records, found.is_cut) == (opening("demo-0"), story, False)


@given(stories, st.data())
def test_one_that_was_cut_is_read_as_far_as_it_goes(story: list[Record], data: st.DataObject) -> None:
    content = encode_recording(opening("demo-0"), story)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]

    try:
        found = decode_recording(cut)
    except MalformedRecordingError:
        return
    assert found.records == story[: len(found.records)]
    assert found.is_cut or found.records == story


@given(st.binary(max_size=300) | st.binary(max_size=300).map(gzip.compress))
def test_nonsense_is_refused(content: bytes) -> None:
    with pytest.raises(MalformedRecordingError, match=r"not a recording|a zip"):
        decode_recording(recording_of(content))


@given(stories, st.binary(min_size=1, max_size=60))
def test_nonsense_behind_the_records_is_told_and_they_are_read(story: list[Record], nonsense: bytes) -> None:
    whole = gzip.decompress(encode_recording(opening("demo-0"), story))
    found = decode_recording(gzip.compress(whole + b"\xff" + nonsense))

    assert found.records == story
    assert found.is_cut


@given(st.binary(max_size=200))
def test_a_zip_without_a_recording_or_with_a_broken_one_is_refused(content: bytes) -> None:
    for name in (RECORDING_NAME, "other"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as bundle:
            bundle.writestr(f"x/{name}", content)
        packed = file.getvalue()
        with pytest.raises(MalformedRecordingError):
            decode_recording(recording_of(packed))
        for cut in (packed[:-9], packed[: len(packed) // 2] + packed[len(packed) // 2 + 1 :]):
            with pytest.raises(MalformedRecordingError):
                decode_recording(recording_of(cut))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@given(data=st.data())
def test_a_bundle_that_was_packed_again_and_hurt_is_read_or_refused(method: int, data: st.DataObject) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as bundle:
        bundle.writestr(f"x/{RECORDING_NAME}", encode_recording(opening("demo-0"), [NoticeRecord(1.0, "hello " * 50)]))
    content = bytearray(file.getvalue())
    content[data.draw(st.integers(4, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MalformedRecordingError):
        decode_recording(recording_of(bytes(content)))


def test_a_recording_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*story: Record) -> tuple[int, bool]:
        found = decode_recording(encode_recording(opening("demo-0"), story))
        return len(found.records), found.is_cut

    assert read(NoticeRecord(0.0, ""), NoticeRecord(1e10, "")) == (1, True)
    monkeypatch.setattr("app.recording.records.MAX_RECORDS", 3)
    assert read(*[NoticeRecord(0.0, "")] * 3) == (3, False)
    assert read(*[NoticeRecord(0.0, "")] * 4) == (3, True)
    monkeypatch.setattr("app.recording.records.MAX_LINES", 4)
    two = LinesRecord(0.0, "demo-0", [LogLine(1, 0, "stdout", "")] * 2)
    assert read(two, two) == (2, False)
    assert read(two, two, two) == (2, True)


def test_who_made_it_is_no_terminal_escape() -> None:
    hostile = msgspec.structs.replace(opening("demo-0"), format_version=99, rankdeck_version="\x1b[2J")
    with pytest.raises(MalformedRecordingError) as caught:
        decode_recording(encode_recording(hostile, []))
    assert "\x1b" not in str(caught.value)


def test_another_version_is_named() -> None:
    with pytest.raises(MalformedRecordingError, match=r"made by rankdeck 0\.1\.0"):
        decode_recording(encode_recording(of_version(WIRE_VERSION + 1), []))


def of_version(wire_version: int) -> Opening:
    return msgspec.structs.replace(opening("demo-0"), wire_version=wire_version)


def test_recordings_of_the_version_before_are_read() -> None:
    assert decode_recording(encode_recording(of_version(WIRE_VERSION - 1), [])).records == []


def test_a_small_file_that_unpacks_to_much_is_not_unpacked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.recording.records.MAX_RECORDING_BYTES", 4 * 2**20)
    bomb = encode_recording(opening("demo-0"), [NoticeRecord(1.0, "x" * 8000)] * 4000)
    assert len(bomb) < 2**20

    found = decode_recording(bomb)

    assert found.is_cut
    assert 400 < len(found.records) < 1000


@given(stories, st.integers(600, 4000))
def test_the_past_keeps_the_newest_within_its_bounds(story: list[Record], max_bytes: int) -> None:
    past = Past(max_age_s=1000.0, max_bytes=max_bytes)
    for record in story:
        past.add(record)

    kept = past.records()

    assert kept == story[len(story) - len(kept) :]
    assert all(record.at_s >= story[-1].at_s - 1000.0 for record in kept)
    reports = [record for record in kept if isinstance(record, ReportRecord)]
    assert sum(len(record.frame) for record in reports) <= max_bytes
