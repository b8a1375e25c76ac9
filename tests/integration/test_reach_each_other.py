"""`agent listen` and `agent reach`, as processes that speak over real sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from agent.doctor.network import parse_target, reach
from app.errors import AgentUnreachableError, HostUnreachableError
from app.fleet.agent_link import MAX_LINE_BYTES, Talk
from app.fleet.local_link import LocalLink
from tests.support.agents import run_agent_verb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

END_S = 20.0


class Listener:
    """`agent listen` in a process of its own."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent", "listen", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.said = self.line()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(END_S)
        self.process.stdout.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener("--address", "127.0.0.1") as listener:
        yield listener


def test_a_listener_is_known_by_its_token_and_ends_with_its_input(listener: Listener) -> None:
    target = f"127.0.0.1:{listener.said['port']}"

    done = run_agent_verb("reach", target, target, "127.0.0.1:1")

    first, second, refused = json.loads(done.stdout)["reached"]
    assert first["token"] == second["token"] == listener.said["token"]
    assert (len(first["token"]), first["interface"]) == (16, "lo")
    assert refused == {"target": "127.0.0.1:1", "error": "Connection refused"}
    assert listener.process.poll() is None
    assert listener.process.stdin
    listener.process.stdin.close()
    assert listener.process.wait(END_S) == 0


def test_a_listener_tells_the_time_for_each_line(listener: Listener) -> None:
    assert listener.process.stdin
    before = time.time()  # noqa: TID251 - clocks are compared
    listener.process.stdin.write("\n\n")

    times = [listener.line()["wall_time_s"], listener.line()["wall_time_s"]]

    assert before <= times[0] <= times[1] <= time.time()  # noqa: TID251 - as above


def test_whoever_comes_cannot_hold_a_listener_up(listener: Listener) -> None:
    address = ("127.0.0.1", listener.said["port"])
    with socket.create_connection(address) as silent, socket.create_connection(address) as rude:
        rude.sendall(b"x" * 100_000)
        assert silent.recv(100).decode() == listener.said["token"]
        found = reach((f"127.0.0.1:{address[1]}",))
    assert found.reached[0].token == listener.said["token"]


def test_a_port_that_is_taken_is_said_with_who_has_it(listener: Listener) -> None:
    with Listener("--address", "127.0.0.1", "--port", str(listener.said["port"])) as second:
        assert (
            f"port {listener.said['port']} of 127.0.0.1 is taken by pid {listener.process.pid}" in second.said["error"]
        )
        assert second.process.wait(END_S) == 0


def test_what_answers_without_a_token_is_not_taken_for_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert reach((target,)).reached[0].token == ""
        thread.join()
        assert reach((target,), connect_s=0.2).reached[0].error == "no answer within 0 s", "it accepts, and is mute"


@pytest.mark.parametrize(
    "target",
    ["h1:22", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1:x", ":80", "[::1:80", "::1:80", "[10.0.0.1]:80"],
)
def test_only_literal_addresses_are_reached_for(target: str) -> None:
    with pytest.raises(ValueError, match="is not ADDRESS:PORT"):
        reach((target,))


def test_an_address_of_ipv6_stands_in_brackets() -> None:
    assert parse_target("[fd00::0001]:80") == ("fd00::1", 80)


def test_a_wrong_target_is_said_in_one_line() -> None:
    done = run_agent_verb("reach", "h1:22")

    assert (done.returncode, done.stderr) == (2, "agent: 'h1:22' is not ADDRESS:PORT\n")


def test_too_many_targets_are_refused() -> None:
    assert run_agent_verb("reach", *["127.0.0.1:1"] * 65).returncode == 2


def test_a_verb_on_this_machine_is_spoken_to_and_let_go() -> None:
    with LocalLink() as link:
        talk = link.begin_verb("listen", "--address", "127.0.0.1")
        assert json.loads(talk.line())["token"]
        talk.send(b"")
        assert json.loads(talk.line())["wall_time_s"]
        talk.close()
        talk.close()
        with pytest.raises(HostUnreachableError):
            talk.send(b"")
        wrong = link.begin_verb("listen", "--port", "none")
        with pytest.raises(AgentUnreachableError, match="`agent listen` ended there"):
            wrong.line()
        wrong.close()
    with LocalLink("/no/such/python") as nowhere, pytest.raises(HostUnreachableError, match="does not run"):
        nowhere.begin_verb("listen")


class Mouth:
    """A channel that says what a test wants."""

    def __init__(self, *pieces: bytes | Exception) -> None:
        self.pieces = list(pieces)

    def recv(self, nbytes: int) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece[:nbytes]

    def sendall(self, s: bytes) -> None:
        raise AssertionError(s)

    def shutdown_write(self) -> None:
        raise AssertionError

    def close(self) -> None:
        raise OSError


def test_lines_come_whole_and_what_a_login_prints_before_is_left_out() -> None:
    talk = Talk("h1", "listen", Mouth(b"Welcome\n\n{", b'"a"', b":1}\n{}\n"))

    assert [talk.line(), talk.line()] == [b'{"a":1}', b"{}"]
    talk.close()


@pytest.mark.parametrize(
    ("piece", "timeout_s", "told"),
    [
        (TimeoutError(), 5.0, "answers nothing"),
        (OSError("Socket is closed"), 5.0, "the connection broke: Socket is closed"),
        (b"x" * (MAX_LINE_BYTES + 1), 5.0, "answers something else"),
        (b"no end", -1.0, "answers nothing"),
    ],
)
def test_a_host_that_does_not_answer_is_not_waited_for(piece: bytes | Exception, timeout_s: float, told: str) -> None:
    pieces = [piece[:MAX_LINE_BYTES], piece[MAX_LINE_BYTES:]] if isinstance(piece, bytes) else [piece]

    with pytest.raises((AgentUnreachableError, HostUnreachableError), match=told):
        Talk("h1", "listen", Mouth(*pieces)).line(timeout_s)
