"""A real agent without jobs: its directory, its sockets, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from agent.wire.codec import CONTROL_SOCKET, MAX_COMMAND_BYTES, REPORTS_SOCKET
from agent.wire.commands import (
    Abort,
    Accepted,
    Command,
    Commit,
    GetStatus,
    InjectFault,
    Kill,
    Prepare,
    RefusalReason,
    Refused,
    Reply,
    Shutdown,
    Status,
    Stop,
    decode_reply,
    encode_command,
)
from agent.wire.jobs import JobSpec, JobState
from agent.wire.logs import Logs, PullLogs
from ddpcore.wire import Fault, FaultKind
from ddpcore.wire_launch import INBOX_SOCKET
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec
from tests.support.subscriber import Subscriber
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

END_S = 10.0


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture(scope="module")
def asked() -> Iterator[RunningAgent]:
    """An agent of all tests that do nothing but look at it and ask."""
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "train.py").write_text("print('never run')")
    return make_local_spec(tmp_path)


def reason(reply: Reply) -> RefusalReason:
    assert isinstance(reply, Refused), reply
    return reply.reason


def test_its_directory_and_sockets_are_its_users_alone(asked: RunningAgent) -> None:
    assert asked.ready["ready"] is True
    assert asked.ready["node"] == "here"
    for name in (REPORTS_SOCKET, CONTROL_SOCKET, INBOX_SOCKET):
        mode = (asked.directory / name).lstat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600, name


def test_it_listens_on_no_network_port(asked: RunningAgent) -> None:
    assert psutil.Process(asked.process.pid).net_connections("inet") == []


def test_it_reports_five_times_a_second_to_who_asks(agent: RunningAgent) -> None:
    subscriber = Subscriber(agent.directory)
    try:
        subscriber.next()  # what there was before
        began_s = time.monotonic()
        reports = [subscriber.report() for _ in range(6)]
        took_s = time.monotonic() - began_s
    finally:
        subscriber.close()
    assert [report.report_seq - reports[0].report_seq for report in reports] == list(range(6))
    assert took_s > 0.5
    newest = reports[-1]
    assert (newest.node, newest.epoch, newest.agent_pid) == ("here", agent.ready["epoch"], agent.process.pid)
    assert newest.num_cpus == os.cpu_count()
    assert newest.memory_total_bytes > newest.memory_available_bytes > 0
    assert 0 < newest.agent_rss_bytes < 50 * 2**20
    assert 0.0 <= newest.cpu_frac <= 1.0


def test_it_is_light(agent: RunningAgent) -> None:
    assert psutil.Process(agent.process.pid).memory_full_info().pss < 50 * 2**20


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b'{"type":"kill"}\n', b'{"type":"kill","job_id":"../x"}\n', b"\xff\n"]
)
def test_malformed_commands_are_refused_and_the_next_one_is_served(asked: RunningAgent, line: bytes) -> None:
    assert reason(asked.ask_raw(line)) is RefusalReason.MALFORMED
    assert asked.report().node == "here"


def test_an_endless_command_is_refused_and_hung_up_on(asked: RunningAgent) -> None:
    with asked.connect() as road, road.makefile("rb") as replies:
        try:
            road.sendall(b"x" * (2 * MAX_COMMAND_BYTES + 1))
        except ConnectionError:
            return  # it hung up before all was sent
        assert reason(decode_reply(replies.readline())) is RefusalReason.MALFORMED
        assert replies.readline() == b""


def test_several_connections_are_served_at_once(asked: RunningAgent) -> None:
    channels = [asked.connect() for _ in range(8)]
    for road in channels:
        road.sendall(encode_command(GetStatus()) * 2)
    for road in channels:
        with road.makefile("rb") as replies:
            assert all(isinstance(decode_reply(replies.readline()), Status) for _ in range(2))
        road.close()


def test_a_prepared_job_is_shown_and_holds_its_port(agent: RunningAgent, spec: JobSpec) -> None:
    reply = agent.ask(Prepare(spec))
    assert isinstance(reply, Accepted)
    (job,) = agent.report().jobs
    assert (job.job_id, job.state, job.local_world_size) == ("train", JobState.PREPARED, 2)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", reply.master_port))
    assert agent.ask(Abort("train")) == Accepted()
    assert agent.report().jobs == []
    with socket.socket() as other:
        other.bind(("127.0.0.1", reply.master_port))
    assert not (agent.directory / "jobs" / "train").exists()


def test_a_taken_port_is_refused_and_names_its_holder(agent: RunningAgent, spec: JobSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        reply = agent.ask(Prepare(msgspec.structs.replace(spec, master_port=port)))
    assert isinstance(reply, Refused)
    assert reply.reason is RefusalReason.PORT_TAKEN
    assert f"port {port} of 127.0.0.1 is taken by pid {os.getpid()}" in reply.message
    assert agent.report().jobs == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"workdir": "/no/such/dir"}, RefusalReason.NO_WORKDIR),
        ({"python": "/no/such/python"}, RefusalReason.NO_INTERPRETER),
        ({"python": "/etc/passwd"}, RefusalReason.NO_INTERPRETER),
        ({"command": ["missing.py"]}, RefusalReason.NO_SCRIPT),
        ({"master_addr": "192.0.2.1"}, RefusalReason.BAD_ADDRESS),
        ({"master_addr": "no such name"}, RefusalReason.BAD_ADDRESS),
        ({"first_rank": 7}, RefusalReason.MALFORMED),
        ({"allow_faults": False, "faults": [Fault(FaultKind.KILL, 0, 3)]}, RefusalReason.NOT_PERMITTED),
    ],
)
def test_a_job_that_cannot_run_is_refused(
    asked: RunningAgent, spec: JobSpec, changes: dict[str, object], expected: RefusalReason
) -> None:
    assert reason(asked.ask(Prepare(msgspec.structs.replace(spec, **changes)))) is expected
    assert asked.report().jobs == []
    assert isinstance(asked.ask(Prepare(spec)), Accepted)
    assert asked.ask(Abort(spec.job_id)) == Accepted()


def test_a_private_agent_takes_no_directory_that_holds_anything(tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir(mode=0o700)
    (directory / "thesis.tex").touch()

    done = run_agent_verb("serve", "--private", "--dir", str(directory))

    assert done.returncode == 2
    assert "holds thesis.tex: give an empty one" in done.stderr
    assert (directory / "thesis.tex").exists()


def test_a_job_is_shown_without_its_secrets(agent: RunningAgent, spec: JobSpec) -> None:
    secret = msgspec.structs.replace(
        spec, env={"HF_TOKEN": "abc", "LEVEL": "3"}, command=["train.py", "--api-key", "xyz"]
    )
    agent.ask(Prepare(secret))

    done = run_agent_verb("show", "--dir", str(agent.directory), "--job", "train")

    shown = json.loads(done.stdout)
    assert shown["spec"]["env"] == {"HF_TOKEN": "***", "LEVEL": "3"}
    assert shown["spec"]["command"] == ["train.py", "--api-key", "***"]
    assert shown["directory"] == str(agent.directory / "jobs" / "train" / "0")
    unknown = run_agent_verb("show", "--dir", str(agent.directory), "--job", "other")
    assert unknown.returncode == 4
    assert "there is no job other on this node; those here: train" in unknown.stderr


def test_a_job_is_not_prepared_twice(agent: RunningAgent, spec: JobSpec) -> None:
    prepared = agent.ask(Prepare(spec))
    assert isinstance(prepared, Accepted)
    assert agent.ask(Prepare(spec)) == prepared, "whoever lost the reply may ask again"
    other = msgspec.structs.replace(spec, attempt=1)
    assert reason(agent.ask(Prepare(other))) is RefusalReason.JOB_EXISTS
    assert agent.ask(Stop("train")) == Accepted()
    assert agent.report().jobs == [], "it never began"
    assert isinstance(agent.ask(Prepare(other)), Accepted)


@pytest.mark.parametrize(
    "command", [Commit("x"), Abort("x"), Stop("x"), Kill("x"), InjectFault("x", FaultKind.KILL, 0)]
)
def test_unknown_jobs_are_refused(asked: RunningAgent, command: Command) -> None:
    assert reason(asked.ask(command)) is RefusalReason.UNKNOWN_JOB


def test_datagrams_that_are_no_reports_are_counted(agent: RunningAgent) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for datagram in (b"", b"\xc1", b"x" * 70_000):
            sender.sendto(datagram, str(agent.directory / INBOX_SOCKET))
    until(lambda: agent.report().malformed_reports == 3, END_S, "the datagrams are counted")


def test_logs_of_nothing_are_empty(asked: RunningAgent) -> None:
    assert asked.ask(PullLogs(0)) == Logs(epoch=asked.ready["epoch"], first_seq=1, lines=[])


def assert_nothing_is_left(agent: RunningAgent) -> None:
    assert agent.process.wait(END_S) == 0
    assert agent.process.stderr is not None
    assert agent.process.stderr.read() == ""
    assert not agent.directory.exists()


def test_the_end_of_the_console_ends_a_private_agent_and_leaves_nothing(agent: RunningAgent, spec: JobSpec) -> None:
    agent.ask(Prepare(spec))
    agent.close_stdin()
    assert_nothing_is_left(agent)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_a_private_agent_and_leave_nothing(agent: RunningAgent, number: signal.Signals) -> None:
    agent.process.send_signal(number)
    assert_nothing_is_left(agent)


def test_a_shutdown_is_answered_and_leaves_nothing(agent: RunningAgent) -> None:
    assert agent.ask(Shutdown()) == Accepted(num_jobs_left=0, num_jobs_ended=0)
    assert_nothing_is_left(agent)


def test_an_agent_of_its_own_keeps_its_directory_but_no_socket() -> None:
    with RunningAgent() as agent:
        agent.process.terminate()
        assert agent.process.wait(END_S) == 0
        assert sorted(path.name for path in agent.directory.iterdir()) == ["agent.lock", "history"]


def test_a_killed_agents_directory_can_be_served_again() -> None:
    with RunningAgent() as agent:
        agent.process.kill()
        agent.process.wait(END_S)
        done = run_agent_verb("status", "--dir", str(agent.directory))
        assert (done.returncode, done.stdout) == (3, "")
        with RunningAgent(node="again", directory=agent.directory) as second:
            assert second.report().node == "again"


def test_two_agents_never_share_a_directory(agent: RunningAgent) -> None:
    done = run_agent_verb("serve", "--dir", str(agent.directory))
    assert done.returncode == 2
    assert done.stderr == f"agent: another agent serves {agent.directory}: shut it down or use another directory\n"
    assert agent.report().node == "here"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(mode=0o755), "has mode 0755: run chmod 0700"),
        (lambda path: path.write_text(""), "is not a directory"),
        (lambda path: path.symlink_to("/tmp"), "is not a directory"),
    ],
)
def test_a_directory_that_is_not_ours_alone_is_refused(tmp_path: Path, make: object, words: str) -> None:
    path = tmp_path / "state"
    assert callable(make)
    make(path)
    done = run_agent_verb("serve", "--dir", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_directory_whose_name_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    done = run_agent_verb("serve", "--dir", str(tmp_path / ("x" * 100)))
    assert done.returncode == 2
    assert "use a shorter directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_private_agent_wants_a_pipe() -> None:
    with tempfile.TemporaryDirectory(prefix="rd-") as parent, Path("/etc/passwd").open() as no_pipe:
        argv = [sys.executable, "-P", "-m", "agent", "serve", "--dir", f"{parent}/d", "--private"]
        done = subprocess.run(argv, stdin=no_pipe, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "standard input must be a pipe" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_verbs_speak_json(agent: RunningAgent, spec: JobSpec) -> None:
    where = ("--dir", str(agent.directory))
    prepared = run_agent_verb("prepare", *where, stdin=encode_command(Prepare(spec)).decode())
    assert prepared.returncode == 0, prepared.stderr
    assert json.loads(prepared.stdout)["master_port"] > 0
    status = run_agent_verb("status", *where)
    assert json.loads(status.stdout)["report"]["jobs"][0]["job_id"] == "train"
    refused = run_agent_verb("fault", *where, "--job", "train", "--kind", "kill", "--rank", "0")
    assert refused.returncode == 4
    assert json.loads(refused.stdout)["reason"] == "wrong_state"
    assert refused.stderr == "agent: refused (wrong_state): job train is prepared: faults are for running jobs\n"
    assert run_agent_verb("stop", *where, stdin='{"job_id": "train"}').returncode == 0
    assert run_agent_verb("logs", *where).returncode == 0
    assert json.loads(run_agent_verb("logs", *where, "--since-seq", "3").stdout)["lines"] == []
    assert run_agent_verb("abort", *where, "--job", "train").returncode == 4, "it never began, and nothing is left"
    assert run_agent_verb("shutdown", *where).returncode == 0
    assert_nothing_is_left(agent)


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["kill", "--job", "../x"], "", "job_id"),
        (["kill"], "{", "standard input is not a JSON command"),
        (["kill"], '{"type": "stop", "job_id": "x"}', "standard input is not a kill command"),
        (["fault", "--job", "x"], "", "--kind and --rank"),
        (["dance"], "", "No such command"),
        (["commit", "--job"], "", "requires an argument"),
    ],
)
def test_wrong_use_is_said_in_one_line(tmp_path: Path, arguments: list[str], stdin: str, words: str) -> None:
    done = run_agent_verb(*arguments[:1], "--dir", str(tmp_path), *arguments[1:], stdin=stdin)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_agent_is_said_in_one_line(tmp_path: Path) -> None:
    done = run_agent_verb("kill", "--dir", str(tmp_path), "--job", "x")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"agent: no agent answers at {tmp_path}/control.sock: No such file or directory\n"
