"""What earlier runs have left is found, told apart, and cleaned on request only."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import psutil
import pytest

from agent.processes.leftovers import chosen
from agent.wire.commands import CleanLeftovers, FindLeftovers, Leftover, Leftovers, RefusalReason, Refused
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A parent that dies at once leaves its child to init.
LEAVE = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.DEVNULL).pid)
"""
LISTEN = """
import socket, time
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
time.sleep(600)
"""


OTHER_SHIM = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture
def leave() -> Iterator[Callable[..., int]]:
    """Return a function that leaves an orphan with the given environment, and returns its pid."""
    pids = []

    def leave(program: str = LISTEN, **env: str) -> int:
        kept = {name: value for name, value in os.environ.items() if name != "RANK"}
        argv = [sys.executable, "-c", LEAVE, program]
        pids.append(int(subprocess.check_output(argv, env={**kept, **env}, stderr=subprocess.DEVNULL)))
        return pids[-1]

    yield leave
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def found(agent: RunningAgent) -> dict[str, Leftover]:
    reply = agent.ask(FindLeftovers())
    assert isinstance(reply, Leftovers)
    return {item.name: item for item in reply.items}


def of_pid(agent: RunningAgent, pid: int) -> Leftover | None:
    return next((item for name, item in found(agent).items() if name.startswith(f"process:{pid}:")), None)


def test_an_orphan_of_a_dead_shim_is_ours_and_cleaned_without_more_ado(
    agent: RunningAgent, leave: Callable[..., int]
) -> None:
    pid = leave(RANKDECK_JOB_ID="train", RANKDECK_INBOX="/gone/inbox.sock", RANK="3")
    until(lambda: (item := of_pid(agent, pid)) is not None and bool(item.ports), 10, "it is found and listens")
    item = of_pid(agent, pid)
    assert item is not None
    assert item.name in {one.name for one in chosen(list(found(agent).values()), [])}
    assert (item.is_ours, item.job_id, item.rank, len(item.ports)) == (True, "train", 3, 1)
    assert 0 <= item.age_s < 60
    assert item.size_bytes > 2**20
    assert f"pid {pid}: " in item.text

    reply = agent.ask(CleanLeftovers([item.name]))

    assert isinstance(reply, Leftovers)
    assert [one.name for one in reply.items] == [item.name]
    until(lambda: not is_alive(pid), 10, "it is gone")
    assert of_pid(agent, pid) is None


@pytest.mark.parametrize("package", ["agent", "agent/processes"])
def test_what_a_shim_of_another_installation_watches_over_is_no_leftover(
    agent: RunningAgent, tmp_path: Path, package: str
) -> None:
    (tmp_path / package).mkdir(parents=True)
    shim = tmp_path / package / "shim.py"
    shim.write_text(OTHER_SHIM)
    env = {**os.environ, "RANKDECK_JOB_ID": "train", "RANKDECK_INBOX": "/gone/inbox.sock", "RANK": "0"}
    with subprocess.Popen([sys.executable, "-I", "-S", str(shim)], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child_pid = int(process.stdout.readline())
        try:
            assert of_pid(agent, child_pid) is None
            assert of_pid(agent, process.pid) is None
        finally:
            os.kill(child_pid, signal.SIGKILL)


def test_an_orphan_of_another_launcher_is_cleaned_only_by_name_and_confirmation(
    agent: RunningAgent, leave: Callable[..., int]
) -> None:
    pid = leave(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    item = until(lambda: of_pid(agent, pid), 10, "it is found")
    assert item is not None
    assert not item.is_ours

    assert item.name not in {one.name for one in chosen(list(found(agent).values()), [])}
    refused = agent.ask(CleanLeftovers([item.name]))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.NOT_PERMITTED
    assert is_alive(pid)
    assert agent.ask(CleanLeftovers(["process:1:1"], is_confirmed=True)) == Leftovers([])

    cleaned = agent.ask(CleanLeftovers([item.name], is_confirmed=True))

    assert isinstance(cleaned, Leftovers)
    until(lambda: not is_alive(pid), 10, "it is gone")


def test_shared_memory_that_nothing_uses_is_found_by_its_name(agent: RunningAgent) -> None:
    path = Path(f"/dev/shm/torch_999999_{uuid4().hex[:8]}_0")
    path.write_bytes(b"x" * 4096)
    try:
        with path.open("rb"):
            assert f"shm:{path.name}" not in found(agent), "this process holds it open"
        item = found(agent)[f"shm:{path.name}"]
        assert (item.is_ours, item.size_bytes, item.text) == (False, 4096, str(path))

        agent.ask(CleanLeftovers([item.name], is_confirmed=True))

        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_the_verb_lists_and_cleans(agent: RunningAgent, leave: Callable[..., int]) -> None:
    pid = leave(RANKDECK_JOB_ID="train", RANKDECK_INBOX="/gone/inbox.sock")
    until(lambda: of_pid(agent, pid), 10, "it is found")
    directory = ("--dir", str(agent.directory))

    listed = run_agent_verb("leftovers", *directory)
    name = next(item["name"] for item in json.loads(listed.stdout)["items"] if f":{pid}:" in item["name"])
    cleaned = run_agent_verb("leftovers", *directory, "--clean", "--name", name)
    misused = run_agent_verb("leftovers", *directory, "--foreign")

    assert cleaned.returncode == 0
    until(lambda: not is_alive(pid), 10, "it is gone")
    assert misused.returncode == 2
    assert "--name and --foreign go with --clean" in misused.stderr
