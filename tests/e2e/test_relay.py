"""Nodes that no console reaches: their agents dial a relay, as Slurm starts them, and a job runs over all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from app.manual import markdown
from tests.support.desk import IMPORT_S, Desk, read_until
from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import Host

ROOT = Path(__file__).parents[2]
HOSTS = ("h1", "h2", "h3")
SOON_S = 90.0
"""What takes some seconds."""
PROGRAM = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(4)
while True:
    dist.all_reduce(ones)
    time.sleep(0.05)
"""
SRUN = """#!/bin/bash
# As srun: runs a command once on each node, hands SIGTERM on, and ends when they have.
while [[ $1 == --* ]]; do shift; done
number=0
for init in $STAND_IN_NODES; do
  SLURM_NODEID=$number nsenter -t "$init" -n -u -i -- "$@" &
  pids+=" $!"
  number=$((number + 1))
done
trap 'kill -TERM $pids' TERM
while ! wait; do :; done
"""


class Allocation:
    """What sbatch does: runs the script of `rankdeck help slurm` on the first node; all nodes share a home."""

    def __init__(self, network: Network) -> None:
        self.home = network.directory / "home"
        self.home.mkdir(mode=0o700)
        self.relay_dir = self.home / ".local/state/rankdeck/relay-4711"
        tools = network.directory / "bin"
        tools.mkdir()
        (tools / "srun").write_text(SRUN)
        (tools / "srun").chmod(0o755)
        (tools / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        (tools / "python").chmod(0o755)
        self.said = network.directory / "batch.log"
        script = network.directory / "batch.sh"
        script.write_text(batch_script())
        self._inits = [init_of(host) for host in network.hosts.values()]
        self._environ = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.home),
            "STAND_IN_NODES": " ".join(self._inits),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": str(len(self._inits)),
        }
        with self.said.open("wb") as log:
            self._started = [self._on_first_node(log, "bash", str(script))]

    def relay_again(self) -> None:
        """Start another relay on the first node, as a person does whose relay was killed."""
        relay = ("python", "-P", "-m", "agent", "relay", "--listen", "eth0", "--dir", str(self.relay_dir))
        with self.said.open("ab") as log:
            self._started.append(self._on_first_node(log, *relay))

    def _on_first_node(self, log: IO[bytes], *argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["nsenter", "-t", self._inits[0], "-n", "-u", "-i", "--", *argv],
            env=self._environ,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def cancel(self) -> None:
        """Do what scancel does to a step: SIGTERM for srun; returns when the script has ended."""
        for pid in self.pids("bin/srun"):
            os.kill(pid, signal.SIGTERM)
        self._started[0].wait(SOON_S)

    def pids(self, words: str) -> list[int]:
        """Return the processes of this job whose command line has these words."""
        sessions = ",".join(str(process.pid) for process in self._started)
        listing = ["ps", "-s", sessions, "-o", "pid=,args="]
        lines = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.splitlines()
        return [int(pid) for pid, command in (line.split(None, 1) for line in lines) if words in command]

    def end(self) -> None:
        for pid in self.pids(""):
            os.kill(pid, signal.SIGKILL)
        for process in self._started:
            process.wait(SOON_S)


def batch_script() -> str:
    """Return the script of the manual, taken from there so that the two cannot differ."""
    block = re.search(r"<!-- sbatch -->\n```\n(.*?)```", markdown("slurm"), re.DOTALL)
    assert block
    return block[1]


def init_of(host: Host) -> str:
    assert host._init
    return str(host._init.pid)


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    # The verbs that SSH runs on the relay's host are those of this checkout, as the agents are.
    with Network(*HOSTS, sshd_options=(f"SetEnv PYTHONPATH={ROOT}",)) as network:
        yield network


@pytest.fixture
def allocation(network: Network) -> Iterator[Allocation]:
    allocation = Allocation(network)
    yield allocation
    allocation.end()


def node_states(desk: Desk, *at: str) -> dict[str, str]:
    status = desk.json("status", *at, codes=(0, 1, 10))
    return {row["node"]: row["state"] for row in status["nodes"]}


def all_are_up(desk: Desk) -> bool:
    """Say whether every node is up; while none has come to the relay, that is said with another exit code."""
    code, stdout, _ = desk.run("status", "--json")
    if code not in {0, 1, 10}:
        return False
    return {row["node"]: row["state"] for row in json.loads(stdout)["nodes"]} == dict.fromkeys(HOSTS, "up")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_job_in_an_allocation_is_started_watched_and_ended_through_its_relay(
    desk: Desk, network: Network, allocation: Allocation
) -> None:
    (allocation.home / "train.py").write_text(PROGRAM)
    until((allocation.relay_dir / "reports.sock").exists, SOON_S, "the relay serves")
    (network.directory / "rankdeck.toml").write_text(
        f'[cluster]\nrelay = "h1"\nrelay_dir = "{allocation.relay_dir}"\nworkdir = "{allocation.home}"\n'
    )
    until(lambda: all_are_up(desk), SOON_S, "all agents have come")

    console = desk.start("run", "--name", "gpt", "--nproc-per-node", "1", "--json", "--", "train.py")
    assert "job gpt started on h1, h2 and h3 with 3 ranks" in read_until(console, "started")
    until(lambda: desk.json("status", codes=(0, 10))["jobs"][0]["state"] == "running", IMPORT_S, "it runs")
    until(lambda: "train.py" in desk.run("stacks", "gpt")[1], IMPORT_S, "its ranks are seen through the relay")
    assert set(node_states(desk, "--host", "h2*")) == {"h2"}

    for pid in allocation.pids("agent relay"):
        os.kill(pid, signal.SIGKILL)
    assert "h1: " in read_until(console, "is lost")
    allocation.relay_again()
    assert "the connection is back" in read_until(console, "is back")
    until(lambda: all_are_up(desk), SOON_S, "the agents have found the next relay")

    stopped = desk.json("stop", "gpt")
    assert (stopped["state"], [row["host"] for row in stopped["hosts"]]) == ("stopped", list(HOSTS))
    code, _, stderr = desk.run("up")
    assert (code, "up does not go through the relay on h1" in stderr, "srun" in stderr) == (2, True, True)
    allocation.cancel()
    until(lambda: allocation.pids("agent serve") == [], SOON_S, "the agents have ended with their step")
    code, _, stderr = desk.run("status")
    assert (code, "it has ended, as it reported to the relay on h1" in stderr) == (3, True), stderr
