"""An agent's sockets through standard input and output, as an sshd that forwards nothing still carries them."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agent.service.systemd import ServiceManager
from agent.wire.commands import GetStatus, Status, decode_reply, encode_command
from agent.wire.relay import ASK, decode_merged
from agent.wire.reports import decode_node_report
from tests.support.agents import RunningAgent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


def carrier(verb: str, directory: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "agent", verb, "--dir", str(directory)]
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


def test_telemetry_hands_a_report_out_for_each_question_until_its_input_ends(agent: RunningAgent) -> None:
    with carrier("telemetry", agent.directory) as frames:
        assert frames.stdin
        assert frames.stdout
        reports = []
        for _ in range(3):
            frames.stdin.write(ASK)
            frames.stdin.flush()
            (length,) = struct.unpack(">I", frames.stdout.read(4))
            (report,) = decode_merged(frames.stdout.read(length)).reports
            reports.append(decode_node_report(report.frame))
        frames.stdin.close()

        assert frames.wait(10) == 0
    assert {report.epoch for report in reports} == {agent.ready["epoch"]}
    assert len({report.report_seq for report in reports}) == 3


def test_telemetry_ends_with_its_input_also_where_the_agent_stands_still(agent: RunningAgent) -> None:
    with carrier("telemetry", agent.directory) as frames:
        assert frames.stdin
        assert frames.stdout
        frames.stdin.write(ASK)
        frames.stdin.flush()
        frames.stdout.read(4)
        agent.process.send_signal(signal.SIGSTOP)
        try:
            frames.stdin.close()

            assert frames.wait(20) == 0
        finally:
            agent.process.send_signal(signal.SIGCONT)


def test_jobs_do_not_inherit_the_service_managers_door() -> None:
    environ = {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1", "PATH": "/bin"}

    manager = ServiceManager(environ)

    assert environ == {"PATH": "/bin"}
    assert manager.watchdog_s == 0.0  # the watch is over another process
