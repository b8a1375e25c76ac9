"""Tunnels and the pump that serves them, over real connections of SSH whose both ends are here."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import HostUnreachableError
from app.ssh.io_thread import CHUNK_BYTES, JOIN_S
from app.ssh.transport import CHANNEL_ERRORS
from app.ssh.tunnel import MAX_WAITING_BYTES, Tunnel
from tests.support.ssh_pairs import SMALL_WINDOW_BYTES, WAIT_S, SshPair, our_threads
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paramiko import Channel

SOCKET_BYTES = 2_000_000
"""More than the kernel and SSH keep of a connection that nobody reads, windows and all."""


@pytest.fixture(scope="module")
def pair() -> Iterator[SshPair]:
    with SshPair() as pair:
        yield pair


@contextmanager
def tunnel_of(pair: SshPair, path: Path) -> Iterator[Tunnel]:
    tunnel = Tunnel(path, pair.open)
    try:
        yield tunnel
    finally:
        tunnel.close()
        path.unlink()


def connected(path: Path) -> socket.socket:
    near = socket.socket(socket.AF_UNIX)
    near.settimeout(WAIT_S)
    near.connect(str(path))
    return near


def read_all(near: socket.socket) -> bytes:
    chunks = []
    while chunk := near.recv(CHUNK_BYTES):
        chunks.append(chunk)
    return b"".join(chunks)


def pattern(size: int, seed: int) -> bytes:
    """Return bytes of which no two places look alike for long."""
    block = bytes((seed + place * place) % 251 for place in range(997))
    return (block * (size // len(block) + 1))[:size]


Sizes = st.sampled_from([0, 1, 17, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 150_000])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    down=st.lists(Sizes, max_size=5),
    far_acts=st.lists(st.tuples(st.sampled_from(["read", "say"]), Sizes), max_size=8),
    farewell=Sizes,
)
def test_all_that_is_said_arrives_in_its_order_and_a_half_that_is_closed_leaves_the_other_open(
    pair: SshPair, tmp_path: Path, down: list[int], far_acts: list[tuple[str, int]], farewell: int
) -> None:
    sent_down = [pattern(size, seed) for seed, size in enumerate(down)]
    heard_up: list[bytes] = []
    with tunnel_of(pair, tmp_path / "s"), connected(tmp_path / "s") as near:

        def speak() -> None:
            for piece in sent_down:
                near.sendall(piece)
            near.shutdown(socket.SHUT_WR)

        speaker = threading.Thread(target=speak)
        listener = threading.Thread(target=lambda: heard_up.append(read_all(near)))
        speaker.start()
        listener.start()
        far = pair.accept()
        heard_down, sent_up = bytearray(), bytearray()
        for seed, (audited, size) in enumerate(far_acts):
            if audited == "say":
                far.sendall(pattern(size, seed))
                sent_up += pattern(size, seed)
            elif size:
                heard_down += far.recv(size)
        while chunk := far.recv(CHUNK_BYTES):
            heard_down += chunk
        far.sendall(pattern(farewell, 99))  # the near side has said all, and still listens
        sent_up += pattern(farewell, 99)
        far.close()
        speaker.join(WAIT_S)
        listener.join(WAIT_S)

    assert bytes(heard_down) == b"".join(sent_down)
    assert heard_up == [bytes(sent_up)]


def test_who_reads_slowly_gets_all_and_holds_up_nobody(pair: SshPair, tmp_path: Path) -> None:
    said = pattern(SOCKET_BYTES, 1)
    with tunnel_of(pair, tmp_path / "s"), connected(tmp_path / "s") as slow, connected(tmp_path / "s") as quick:
        ends = [pair.accept(), pair.accept()]
        quick.sendall(b"which of them is mine?")
        until(lambda: any(end.recv_ready() for end in ends), WAIT_S, "one of the ends hears the quick one")
        ends.sort(key=lambda end: end.recv_ready())
        ends[0].sendall(said)
        ends[0].close()

        ends[1].sendall(b"this one")
        assert quick.recv(100) == b"this one"
        assert read_all(slow) == said


def flood(near: socket.socket) -> int:
    """Say more than is taken; return how much was, once nothing more is."""
    near.settimeout(0)
    num_taken, quiet_since_s = 0, time.monotonic()
    while time.monotonic() < quiet_since_s + 0.5:
        try:
            num_taken += near.send(bytes(CHUNK_BYTES))
            quiet_since_s = time.monotonic()
        except BlockingIOError:
            threading.Event().wait(0.01)
    return num_taken


def test_of_a_host_that_takes_nothing_little_is_kept_and_other_hosts_are_served(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stuck, other = (stack.enter_context(SshPair(window_bytes=SOCKET_BYTES)) for _ in range(2))
        stack.enter_context(tunnel_of(stuck, tmp_path / "stuck"))
        stack.enter_context(tunnel_of(other, tmp_path / "other"))
        mute = stack.enter_context(connected(tmp_path / "stuck"))
        far_of_mute = stuck.accept()
        loud = stack.enter_context(connected(tmp_path / "stuck"))
        far_of_loud = stuck.accept()
        near = stack.enter_context(connected(tmp_path / "other"))
        far = other.accept()

        stuck.is_taking.clear()  # it goes on to speak, but what we say stays with us
        num_taken = flood(mute)
        far_of_loud.sendall(pattern(SOCKET_BYTES, 3))
        num_heard = 0
        while num_heard < SOCKET_BYTES:  # of which SSH wants to tell the host
            num_heard += len(loud.recv(CHUNK_BYTES))
        began_s = time.monotonic()
        near.sendall(b"ping")
        assert far.recv(10) == b"ping"
        far.sendall(b"pong")
        assert near.recv(10) == b"pong"

        assert time.monotonic() - began_s < WAIT_S / 2
        assert num_taken <= MAX_WAITING_BYTES + SOCKET_BYTES
        stuck.is_taking.set()
        mute.settimeout(WAIT_S)
        mute.shutdown(socket.SHUT_WR)
        num_heard = 0
        while chunk := far_of_mute.recv(CHUNK_BYTES):
            num_heard += len(chunk)
        assert num_heard == num_taken


def test_a_window_that_is_full_holds_up_no_other_connection_of_the_host(pair: SshPair, tmp_path: Path) -> None:
    with tunnel_of(pair, tmp_path / "s"), connected(tmp_path / "s") as full:
        unread = pair.accept()
        assert flood(full) <= MAX_WAITING_BYTES + SMALL_WINDOW_BYTES + SOCKET_BYTES
        with connected(tmp_path / "s") as near:
            far = pair.accept()
            near.sendall(b"ping")
            assert far.recv(10) == b"ping"
        assert not unread.closed


def open_files() -> set[str]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{path.name} {path.readlink()}")
        except FileNotFoundError:
            continue  # the directory itself
    return found


@pytest.mark.parametrize("is_taking", [True, False], ids=["a host that takes all", "a host that takes nothing"])
def test_closing_while_much_is_under_way_is_quick_and_leaves_neither_threads_nor_files(
    tmp_path: Path, *, is_taking: bool
) -> None:
    until(lambda: not our_threads(), WAIT_S, "what came before has ended")
    files = open_files()
    with SshPair() as pair:
        tunnel = Tunnel(tmp_path / "s", pair.open)
        with connected(tmp_path / "s") as busy, connected(tmp_path / "s") as half_closed:
            ends = [pair.accept(), pair.accept()]
            half_closed.shutdown(socket.SHUT_WR)
            for end in ends:
                end.sendall(bytes(SOCKET_BYTES // 2))
            if not is_taking:
                pair.is_taking.clear()
            flood(busy)
            began_s = time.monotonic()

            tunnel.close()
            tunnel.close()

            assert time.monotonic() - began_s < JOIN_S
            assert "rankdeck-pump" not in our_threads()
            read_all(half_closed)
        assert not (tmp_path / "s").is_socket() or not can_connect(tmp_path / "s")
    until(lambda: not our_threads(), WAIT_S, "no thread is left")
    until(lambda: open_files() <= files, WAIT_S, "no file is left")


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as near:
        return near.connect_ex(str(path)) == 0


def test_a_tunnel_that_is_closed_while_its_channel_opens_leaves_nothing_open(pair: SshPair, tmp_path: Path) -> None:
    is_asked, may_open = threading.Event(), threading.Event()
    opened: list[Channel] = []

    def open_late() -> Channel:
        is_asked.set()
        may_open.wait(WAIT_S)
        opened.append(pair.open())
        return opened[0]

    tunnel = Tunnel(tmp_path / "s", open_late)
    with connected(tmp_path / "s") as near:
        assert is_asked.wait(WAIT_S)
        began_s = time.monotonic()
        tunnel.close()
        assert time.monotonic() - began_s < JOIN_S
        may_open.set()
        assert near.recv(1) == b""
    until(lambda: opened and opened[0].closed, WAIT_S, "the channel that came too late is closed")
    pair.accept().close()


def test_one_thread_serves_all_tunnels_and_ends_with_the_last(pair: SshPair, tmp_path: Path) -> None:
    until(lambda: not our_threads(), WAIT_S, "what came before has ended")
    tunnels = [Tunnel(tmp_path / f"{number}", pair.open) for number in range(20)]

    assert our_threads() == ["rankdeck-pump"]
    for tunnel in tunnels[1:]:
        tunnel.close()
    assert our_threads() == ["rankdeck-pump"]
    tunnels[0].close()
    assert our_threads() == []


def test_whoever_connects_where_no_channel_opens_is_hung_up_on_and_may_try_again(pair: SshPair, tmp_path: Path) -> None:
    answers = iter([HostUnreachableError("h", "not now"), None])

    def open_channel() -> Channel:
        if error := next(answers):
            raise error
        return pair.open()

    tunnel = Tunnel(tmp_path / "s", open_channel)
    try:
        with connected(tmp_path / "s") as near:
            assert near.recv(1) == b""
        with connected(tmp_path / "s") as near:
            far = pair.accept()
            far.sendall(b"now")
            assert near.recv(10) == b"now"
    finally:
        tunnel.close()


def test_a_connection_that_breaks_ends_what_went_through_it(tmp_path: Path) -> None:
    with SshPair() as pair, tunnel_of(pair, tmp_path / "s"), connected(tmp_path / "s") as near:
        far = pair.accept()
        near.sendall(b"ping")
        assert far.recv(10) == b"ping"
        pair.client.close()

        assert near.recv(1) == b""
        assert far.recv(1) == b""


def test_keys_are_exchanged_anew_under_way_and_nothing_is_lost(pair: SshPair, tmp_path: Path) -> None:
    said = pattern(SOCKET_BYTES, 5)
    with tunnel_of(pair, tmp_path / "s"), connected(tmp_path / "s") as near:
        far = pair.accept()
        heard: list[bytes] = []
        listener = threading.Thread(target=lambda: heard.append(read_all(near)))
        listener.start()
        for place in range(0, len(said), len(said) // 5):
            far.sendall(said[place : place + len(said) // 5])
            pair.client.renegotiate_keys()
        far.close()
        listener.join(WAIT_S)
    assert heard == [said]


def test_a_host_that_takes_nothing_and_says_nothing_is_dead_while_somebody_waits_to_send(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("QUIET_S", "ANSWER_WITHIN_S"):
        monkeypatch.setattr(f"app.ssh.transport.{name}", 1.0)
    ended: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def send_too_much(channel: Channel) -> None:
        try:
            channel.sendall(bytes(4 * SOCKET_BYTES))
        except CHANNEL_ERRORS as error:
            ended.put(error)

    with SshPair(window_bytes=8 * SOCKET_BYTES) as pair:
        channel = pair.open()
        pair.accept()
        pair.is_taking.clear()
        sender = threading.Thread(target=send_too_much, args=(channel,), daemon=True)
        sender.start()

        until(lambda: not pair.client.is_active(), WAIT_S, "the connection is known to be dead")

        assert isinstance(ended.get(timeout=WAIT_S), CHANNEL_ERRORS)
        sender.join(WAIT_S)


def test_a_host_that_sends_more_than_was_asked_for_is_hung_up_on(pair: SshPair, tmp_path: Path) -> None:
    tunnel = Tunnel(tmp_path / "s", pair.open, 100_000, b"?")
    try:
        with connected(tmp_path / "s") as near:
            far = pair.accept()
            for _ in range(3):  # each reply is within the limit
                near.sendall(b"?")
                assert far.recv(1) == b"?"
                far.sendall(bytes(90_000))
                num_bytes = 0
                while num_bytes < 90_000:
                    num_bytes += len(near.recv(CHUNK_BYTES))
            near.sendall(b"!")  # no request: as libzmq answers a host's PING
            assert far.recv(1) == b"!"
            far.sendall(bytes(20_000))

            assert len(read_all(near)) < 20_000
    finally:
        tunnel.close()


def test_after_hanging_up_whoever_comes_again_gets_a_new_channel(pair: SshPair, tmp_path: Path) -> None:
    with tunnel_of(pair, tmp_path / "s") as tunnel, connected(tmp_path / "s") as first:
        pair.accept().sendall(b"1")
        assert first.recv(1) == b"1", "it is open"
        tunnel.hang_up()
        assert read_all(first) == b""
        with connected(tmp_path / "s") as second:
            pair.accept().sendall(b"of the new one")
            assert second.recv(CHUNK_BYTES) == b"of the new one"
