"""What a host packs, and how large it may become."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ssh.transport import MAX_UNPACKED_BYTES, Unpacker
from tests.support.ssh_pairs import WAIT_S, SshPair
from tests.support.waiting import until


@given(st.lists(st.binary(max_size=2000), max_size=20))
def test_packets_are_unpacked_as_they_were(packets: list[bytes]) -> None:
    stream, unpack = zlib.compressobj(), Unpacker()

    assert [unpack(stream.compress(packet) + stream.flush(zlib.Z_PARTIAL_FLUSH)) for packet in packets] == packets


@pytest.mark.parametrize("num_bytes", [MAX_UNPACKED_BYTES + 1, 200 * MAX_UNPACKED_BYTES])
def test_a_packet_that_would_fill_the_memory_is_refused(num_bytes: int) -> None:
    stream = zlib.compressobj()
    packet = stream.compress(bytes(num_bytes)) + stream.flush(zlib.Z_PARTIAL_FLUSH)

    with pytest.raises(ConnectionAbortedError, match="unpacks to more than"):
        Unpacker()(packet)


def test_a_connection_of_two_that_want_it_is_compressed() -> None:
    with SshPair(is_compressed=True) as pair:
        near, far = pair.open(), pair.accept()
        far.sendall(b"words " * 1000)

        assert near.recv(6) == b"words "
        assert pair.client.remote_compression == "zlib@openssh.com"  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [b"plain words", zlib.compress(bytes(3 * MAX_UNPACKED_BYTES))])
def test_a_host_that_packs_what_cannot_be_unpacked_is_lost_at_once(packed: bytes) -> None:
    with SshPair(is_compressed=True) as pair:
        near = pair.open()
        pair.accept()
        pair.say_packed(packed)

        assert near.recv(1) == b"", "whoever reads hears of the end"
        until(lambda: not pair.client.is_active(), WAIT_S, "the connection has ended")


def test_a_packet_that_is_not_compressed_is_refused() -> None:
    with pytest.raises(ConnectionAbortedError, match="cannot be unpacked"):
        Unpacker()(b"plain words")
