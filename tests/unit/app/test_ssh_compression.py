"""What a host packs, and how large it may become."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ssh.compression import MAX_UNPACKED_BYTES, Unpacker


@given(st.lists(st.binary(max_size=2000), max_size=20))
def test_packets_are_unpacked_as_they_were(packets: list[bytes]) -> None:
    stream, unpack = zlib.compressobj(), Unpacker()

    assert [unpack(stream.compress(packet) + stream.flush(zlib.Z_PARTIAL_FLUSH)) for packet in packets] == packets


@pytest.mark.parametrize("num_bytes", [MAX_UNPACKED_BYTES + 1, 200 * MAX_UNPACKED_BYTES])
def test_a_packet_that_would_fill_the_memory_ends_the_connection(num_bytes: int) -> None:
    stream = zlib.compressobj()
    packet = stream.compress(bytes(num_bytes)) + stream.flush(zlib.Z_PARTIAL_FLUSH)

    with pytest.raises(ConnectionAbortedError, match="unpacks to more than"):
        Unpacker()(packet)


def test_a_packet_that_is_not_compressed_ends_the_connection() -> None:
    with pytest.raises(ConnectionAbortedError, match="cannot be unpacked"):
        Unpacker()(b"plain words")
