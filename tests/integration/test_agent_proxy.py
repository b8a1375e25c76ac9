"""An agent's sockets through standard input and output, as an sshd that forwards nothing still carries them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from agent.service.systemd import ServiceManager
from agent.wire.commands import GetStatus, Status, decode_reply, encode_command
from tests.support.agents import RunningAgent
from tests.support.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


def carrier(verb: str, directory: Path, *options: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "agent", verb, *options, "--dir", str(directory)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_proxy_carries_commands_and_replies_until_its_input_ends(agent: RunningAgent) -> None:
    with carrier("proxy", agent.directory) as proxy:
        assert proxy.stdin
        assert proxy.stdout
        for _ in range(2):
            proxy.stdin.write(encode_command(GetStatus()))
            proxy.stdin.flush()
            reply = decode_reply(proxy.stdout.readline())
            assert isinstance(reply, Status)
            assert reply.report.epoch == agent.ready["epoch"]
        proxy.stdin.close()

        assert proxy.wait(10) == 0


def test_a_proxy_ends_with_the_agent(agent: RunningAgent) -> None:
    with carrier("proxy", agent.directory) as proxy:
        assert proxy.stdin
        assert proxy.stdout
        proxy.stdin.write(encode_command(GetStatus()))
        proxy.stdin.flush()
        proxy.stdout.readline()
        agent.process.kill()

        assert proxy.wait(10) == 0


def test_a_proxy_to_nobody_says_so(tmp_path: Path) -> None:
    with carrier("proxy", tmp_path) as proxy:
        _, stderr = proxy.communicate(timeout=20)

    assert proxy.returncode == 3
    assert b"no agent answers" in stderr


def test_a_proxy_carries_reports_until_its_input_ends(agent: RunningAgent) -> None:
    with carrier("proxy", agent.directory, "--reports") as proxy, tempfile.TemporaryDirectory() as near:
        path = Path(near, "reports.sock")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            subscriber = Subscriber(Path(near))
            connection, _ = server.accept()
            with connection:
                carrying = threading.Thread(target=carry, args=(connection, proxy))
                carrying.start()
                try:
                    reports = [subscriber.report() for _ in range(3)]
                finally:
                    subscriber.close()
                    carrying.join(20)

        assert proxy.wait(20) == 0
    assert {report.epoch for report in reports} == {agent.ready["epoch"]}
    assert len({report.report_seq for report in reports}) == 3


def carry(connection: socket.socket, proxy: subprocess.Popen[bytes]) -> None:
    """Carry bytes between a connection and a proxy, as sshd would, until the connection ends."""
    assert proxy.stdin
    assert proxy.stdout
    sources: list[socket.socket | IO[bytes]] = [connection, proxy.stdout]
    with proxy.stdin, contextlib.suppress(ConnectionError):
        while True:
            readable, _, _ = select.select(sources, [], [])
            if proxy.stdout in readable:
                connection.sendall(os.read(proxy.stdout.fileno(), 65_536))
            if connection in readable:
                if not (data := connection.recv(65_536)):
                    return
                os.write(proxy.stdin.fileno(), data)


def test_a_proxy_of_reports_ends_with_its_input_also_where_the_agent_stands_still(agent: RunningAgent) -> None:
    with carrier("proxy", agent.directory, "--reports") as proxy:
        assert proxy.stdin
        assert proxy.stdout
        assert proxy.stdout.read(10)[:1] == b"\xff", "the greeting of ZMTP"
        agent.process.send_signal(signal.SIGSTOP)
        try:
            proxy.stdin.close()

            assert proxy.wait(20) == 0
        finally:
            agent.process.send_signal(signal.SIGCONT)


def test_jobs_do_not_inherit_the_service_managers_door() -> None:
    environ = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1", "PATH": "/bin"}

    manager = ServiceManager(environ)

    assert environ == {"PATH": "/bin"}
    assert manager.watchdog_s == 0.0  # the watch is over another process
