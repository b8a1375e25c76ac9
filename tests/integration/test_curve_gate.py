"""Nobody comes in over TCP who has another key than the gate's, whatever else fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from agent.transport.relay_sockets import CurveAuthenticator, KeyPair, knock_with, new_key

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_MS = 5_000


class Server:
    """A socket on loopback that says "hello" to whoever it lets in."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client_key = new_key()
        self.gate = CurveAuthenticator(self.context, self.client_key.public)
        self.socket = self.context.socket(zmq.PUB)
        self.gate.guard(self.socket)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def close(self) -> None:
        self.gate.close()
        self.context.destroy(linger=0)


class Client:
    """A subscriber, and what libzmq says of its connection."""

    def __init__(self, server: Server, key: KeyPair | None, *, server_key: str = "") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        if key is not None:
            knock_with(self.socket, key, server_key or server.gate.key.public)
        self._monitor = self.socket.get_monitor_socket()
        self._port = server.port

    def knock(self) -> str:
        """Connect, and return how the first handshake went; `silence` where none was made."""
        self.socket.connect(f"tcp://127.0.0.1:{self._port}")
        while self._monitor.poll(PATIENCE_MS):
            event = recv_monitor_message(self._monitor)
            name = zmq.Event(event["event"]).name or ""
            if name.startswith("HANDSHAKE"):
                return f"{name} {event['value']}"
        return "silence"

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def clients() -> Iterator[list[Client]]:
    clients: list[Client] = []
    yield clients
    for client in clients:
        client.close()


def test_a_known_key_comes_in_and_hears_what_is_said(server: Server, clients: list[Client]) -> None:
    clients.append(client := Client(server, server.client_key))
    assert client.knock().startswith("HANDSHAKE_SUCCEEDED")
    while not client.socket.poll(20):
        server.socket.send(b"hello")
    assert client.socket.recv() == b"hello"


def test_a_stranger_and_a_client_without_a_key_stay_out(server: Server, clients: list[Client]) -> None:
    clients += [Client(server, new_key()), Client(server, None)]
    stranger, keyless = clients
    assert stranger.knock() == "HANDSHAKE_FAILED_AUTH 400"
    assert not keyless.knock().startswith("HANDSHAKE_SUCCEEDED")


def test_a_server_with_another_key_is_not_believed(server: Server, clients: list[Client]) -> None:
    clients.append(client := Client(server, server.client_key, server_key=new_key().public))
    assert not client.knock().startswith("HANDSHAKE_SUCCEEDED")


def test_a_gate_that_has_ended_lets_nobody_in(server: Server, clients: list[Client]) -> None:
    clients.append(client := Client(server, server.client_key))
    server.gate.close()
    assert not client.knock().startswith("HANDSHAKE_SUCCEEDED")


def test_the_secret_half_is_never_printed() -> None:
    key = new_key()
    assert key.secret.decode() not in repr(key)
    assert key.secret.decode() not in f"{key}"
    assert key.public in repr(key)
