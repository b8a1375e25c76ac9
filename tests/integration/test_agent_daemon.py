"""An agent in the background: how it comes up, that it outlives who started it, and what a service manager hears."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from agent.wire.commands import Accepted, Shutdown
from agent.wire.examination import decode_examination
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short-named place for an agent; whatever serves there at the end is ended."""
    path = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    yield path
    found = json.loads(run_agent_verb("where", "--dir", str(path)).stdout)
    if found["ready"]:
        run_agent_verb("shutdown", "--kill-jobs", "--dir", str(path))
        until(lambda: not is_alive(found["pid"]), 10, "the daemon is gone")
    shutil.rmtree(path)


def start_daemon(directory: Path) -> dict[str, Any]:
    done = run_agent_verb("serve", "--daemon", "--dir", str(directory), "--node", "here")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_daemon_answers_when_its_starter_returns_and_lives_on(directory: Path) -> None:
    ready = start_daemon(directory)

    assert (ready["ready"], ready["is_new"], ready["node"]) == (True, True, "here")
    process = psutil.Process(ready["pid"])
    assert os.getsid(process.pid) == process.pid
    assert process.terminal() is None
    report = json.loads(run_agent_verb("status", "--dir", str(directory)).stdout)["report"]
    assert report["epoch"] == ready["epoch"]


def test_a_second_start_says_that_it_runs_already(directory: Path) -> None:
    first = start_daemon(directory)

    second = start_daemon(directory)

    # Other tests make and remove network interfaces of this machine meanwhile.
    assert {**second, "addresses": first["addresses"]} == {**first, "is_new": False}


def test_two_starts_at_once_make_one_agent(directory: Path) -> None:
    argv = [sys.executable, "-P", "-m", "agent", "serve", "--daemon", "--dir", str(directory)]
    starters = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)]

    answers = [json.loads(starter.communicate(timeout=60)[0]) for starter in starters]

    assert len({answer["pid"] for answer in answers}) == 1
    assert sum(answer["is_new"] for answer in answers) == 1


def test_a_daemon_outlives_a_hangup(directory: Path) -> None:
    ready = start_daemon(directory)

    os.kill(ready["pid"], signal.SIGHUP)

    assert json.loads(run_agent_verb("where", "--dir", str(directory)).stdout)["epoch"] == ready["epoch"]


def test_a_daemon_that_cannot_start_says_why_with_its_own_code(directory: Path) -> None:
    (directory / "control.sock").mkdir()

    done = run_agent_verb("serve", "--daemon", "--dir", str(directory))

    assert done.returncode == 1
    assert done.stdout == ""
    assert "control.sock" in done.stderr
    assert "agent.log" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_its_log_begins_anew_when_it_is_long(directory: Path) -> None:
    (directory / "agent.log").write_bytes(b"x" * (2 << 20))

    start_daemon(directory)

    assert (directory / "agent.log").stat().st_size == 0
    assert (directory / "agent.log.1").stat().st_size == 2 << 20


def test_a_daemon_whose_log_has_become_long_goes_on_in_a_new_one(directory: Path) -> None:
    log = directory / "agent.log"
    log.write_bytes(b"x" * (2 << 20))
    program = (
        "import sys, pathlib; from agent.service.daemonise import bound_log; bound_log(pathlib.Path(sys.argv[1])); "
        "print('out', flush=True); print('err', file=sys.stderr)"
    )

    with log.open("ab") as output:
        subprocess.run([sys.executable, "-c", program, str(directory)], stdout=output, stderr=output, check=True)

    assert log.read_text() == "out\nerr\n"
    assert (directory / "agent.log.1").stat().st_size == 2 << 20


def test_a_private_agent_is_no_daemon(directory: Path) -> None:
    done = run_agent_verb("serve", "--daemon", "--private", "--dir", str(directory))

    assert (done.returncode, done.stdout) == (2, "")


def test_a_shutdown_says_how_many_jobs_go_on_and_returns_when_the_agent_is_gone(directory: Path) -> None:
    ready = start_daemon(directory)

    done = run_agent_verb("shutdown", "--dir", str(directory))

    assert json.loads(done.stdout) == {"type": "accepted", "num_jobs_left": 0}
    until(lambda: not is_alive(ready["pid"]), 5, "the daemon is gone")
    assert (directory / "agent.log").read_text() == "agent: ended; no job runs\n"


def test_without_an_agent_the_directory_is_still_told(directory: Path) -> None:
    found = json.loads(run_agent_verb("where", "--dir", str(directory)).stdout)

    assert (found["ready"], found["dir"], found["python"]) == (False, str(directory), sys.executable)


@pytest.mark.parametrize("is_abstract", [True, False])
def test_a_service_manager_hears_of_every_stage(directory: Path, is_abstract: bool) -> None:
    address = f"@rankdeck-{os.getpid()}" if is_abstract else str(directory / "notify.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + address[1:] if is_abstract else address)
        manager.settimeout(20)

        def heard(word: str) -> bool:
            return word in manager.recv(4096).decode().split("\n")

        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "600000"}
        with RunningAgent(directory=directory / "agent", environment=environment) as agent:
            until(lambda: heard("READY=1"), 20, "READY=1")
            for _ in range(3):
                until(lambda: heard("WATCHDOG=1"), 20, "WATCHDOG=1")
            assert agent.ask(Shutdown()) == Accepted(num_jobs_left=0)
            until(lambda: heard("STOPPING=1"), 20, "STOPPING=1")


def test_a_service_manager_that_stands_still_does_not_keep_an_agent_from_serving(directory: Path) -> None:
    address = str(directory / "notify.sock")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other,
    ):
        manager.bind(address)
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "600000"}
        with RunningAgent(directory=directory / "agent", environment=environment) as agent:
            other.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    other.sendto(b"more than it takes in", address)

            assert agent.ask(Shutdown()) == Accepted(num_jobs_left=0)
            assert agent.process.wait(20) == 0


def test_the_unit_runs_this_interpreter_and_leaves_jobs_alone() -> None:
    text = run_agent_verb("unit").stdout

    lines = text.splitlines()
    assert f"ExecStart={sys.executable} -P -m agent serve" in lines
    assert {"Type=notify", "KillMode=process", "Restart=on-failure"} <= set(lines)
    assert "@" not in text


def test_the_doctor_has_a_row_for_everything_and_says_what_to_do(directory: Path) -> None:
    done = run_agent_verb("doctor", "--dir", str(directory), "--workdir", str(directory))

    examination = json.loads(done.stdout)
    rows = {row["name"]: row for row in examination["rows"]}
    assert examination["schema"] == 1
    assert {"agent_python", "job_python", "torch", "shared_memory", "disk", "ports", "linger", "open_files"} <= set(
        rows
    )
    assert rows["torch"]["status"] == "ok"
    assert all(row["todo"] for row in rows.values() if row["status"] != "ok")
    assert done.returncode == int(any(row["status"] == "bad" for row in rows.values()))
    facts = decode_examination(done.stdout.encode()).facts
    assert (facts.torch, facts.hostname) == (rows["torch"]["detail"], socket.gethostname())
    assert facts.code is not None


def test_the_doctor_calls_a_missing_interpreter_bad(directory: Path) -> None:
    done = run_agent_verb("doctor", "--dir", str(directory), "--python", "/no/such/python")

    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert done.returncode == 1
    assert rows["job_python"]["status"] == "bad"
