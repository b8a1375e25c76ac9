"""Streams that share a road: whatever comes in which order, each arrives whole, and none costs more than its window."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.relay.stream import StreamBrokenError, StreamEnd
from agent.wire.relay import (
    MAX_CHUNK_BYTES,
    WINDOW_BYTES,
    Credit,
    Data,
    End,
    Reset,
    decode_from_node,
    encode_relay_message,
)

if TYPE_CHECKING:
    from agent.wire.relay import OfStream

NUM_STREAMS = 3
STEPS = ("say", "carry", "take")
texts = st.lists(st.integers(0, 3 * WINDOW_BYTES), min_size=2 * NUM_STREAMS, max_size=2 * NUM_STREAMS)
moves = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, NUM_STREAMS - 1), st.integers(0, 1), st.integers(1, WINDOW_BYTES)),
    max_size=200,
)


class Road:
    """Both ends of some streams, and one queue each way that they share."""

    def __init__(self, lengths: list[int]) -> None:
        self.ends = [[StreamEnd(number + 1) for number in range(NUM_STREAMS)] for _ in range(2)]
        self.to_say = [[letters(lengths[side * NUM_STREAMS + n]) for n in range(NUM_STREAMS)] for side in range(2)]
        self.wanted = [list(side) for side in self.to_say]
        self.heard = [[bytearray() for _ in range(NUM_STREAMS)] for _ in range(2)]
        self.queues: list[deque[bytes]] = [deque(), deque()]

    def say(self, stream: int, side: int, size: int) -> None:
        end, left = self.ends[side][stream], self.to_say[side][stream]
        chunk = left[: min(size, end.room)]
        self.to_say[side][stream] = left[len(chunk) :]
        end.on_near_bytes(chunk)
        if not self.to_say[side][stream]:
            end.near_ended()
        self.tell(stream, side)

    def carry(self, _stream: int, side: int, _size: int) -> None:
        if self.queues[side]:
            message = decode_from_node(self.queues[side].popleft())
            assert isinstance(message, Data | Credit | End | Reset)
            self.ends[1 - side][message.stream - 1].on_far_message(message)
            self.tell(message.stream - 1, 1 - side)

    def take(self, stream: int, side: int, size: int) -> None:
        end = self.ends[side][stream]
        taken = end.for_near[:size]
        self.heard[side][stream] += taken
        end.near_took(len(taken))
        self.tell(stream, side)

    def tell(self, stream: int, side: int) -> None:
        self.queues[side].extend(encode_relay_message(message) for message in self.ends[side][stream].for_far())
        for other in (0, 1):
            assert len(self.ends[other][stream].for_near) <= WINDOW_BYTES
            assert self.under_way(stream, other) <= WINDOW_BYTES

    def under_way(self, stream: int, side: int) -> int:
        messages = (decode_from_node(frame) for frame in self.queues[side])
        return sum(len(one.chunk) for one in messages if isinstance(one, Data) and one.stream == stream + 1)

    def finish(self) -> None:
        while any(not end.is_over for side in self.ends for end in side):
            for stream in range(NUM_STREAMS):
                for side in (0, 1):
                    for _ in range(8):
                        self.say(stream, side, MAX_CHUNK_BYTES)
                        self.carry(stream, side, 0)
                    self.take(stream, side, WINDOW_BYTES)


def letters(length: int) -> bytes:
    return bytes(number % 251 for number in range(length))


@given(texts, moves)
def test_every_interleaving_arrives_whole_in_order_and_bounded(
    lengths: list[int], steps: list[tuple[str, int, int, int]]
) -> None:
    road = Road(lengths)

    for step, stream, side, size in steps:
        getattr(road, step)(stream, side, size)
    road.finish()

    for side in (0, 1):
        assert [bytes(heard) for heard in road.heard[1 - side]] == road.wanted[side]


def told(end: StreamEnd) -> list[OfStream]:
    return list(end.for_far())


def test_a_far_end_that_sends_more_than_it_may_is_broken_off() -> None:
    end = StreamEnd(1)
    for _ in range(WINDOW_BYTES // MAX_CHUNK_BYTES):
        end.on_far_message(Data(1, b"x" * MAX_CHUNK_BYTES))

    with pytest.raises(StreamBrokenError, match="more bytes than were allowed"):
        end.on_far_message(Data(1, b"x"))


def test_a_far_end_that_gives_credit_for_nothing_is_broken_off() -> None:
    with pytest.raises(StreamBrokenError, match="more credit"):
        StreamEnd(1).on_far_message(Credit(1, 1))


def test_bytes_behind_the_end_are_broken_off_and_so_is_a_reset() -> None:
    end = StreamEnd(1)
    end.on_far_message(End(1))

    with pytest.raises(StreamBrokenError):
        end.on_far_message(Data(1, b"x"))
    with pytest.raises(StreamBrokenError, match="other side"):
        StreamEnd(1).on_far_message(Reset(1))


def test_a_near_end_that_takes_nothing_is_given_no_credit_for_more() -> None:
    end = StreamEnd(1)
    end.on_far_message(Data(1, b"x" * 100))

    assert told(end) == []
    end.near_took(100)
    assert told(end) == [Credit(1, 100)]
