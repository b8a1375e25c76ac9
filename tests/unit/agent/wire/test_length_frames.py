"""Telemetry over a plain stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.codec import FrameReader, MalformedMessageError, with_length
from agent.wire.reports import MAX_NODE_REPORT_BYTES


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 50), min_size=1))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(with_length(frame) for frame in frames)
    reader = FrameReader(MAX_NODE_REPORT_BYTES)
    taken: list[bytes] = []

    while stream:
        size = cuts[len(taken) % len(cuts)]
        taken += list(reader.feed(stream[:size]))
        stream = stream[size:]

    assert taken == frames


def test_a_frame_longer_than_any_report_is_refused_before_it_is_read() -> None:
    with pytest.raises(MalformedMessageError, match="at most"):
        list(FrameReader(MAX_NODE_REPORT_BYTES).feed((MAX_NODE_REPORT_BYTES + 1).to_bytes(4, "big")))
