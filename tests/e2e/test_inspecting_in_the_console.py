"""The console on a job that nothing of rankdeck started: a real torchrun, a real terminal, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.demo_runs import DemoHouse
from tests.support.terminals import Terminal, end_terminals
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 300.0
LOOK_S = 60.0
NUM_RANKS = 3
SHOWN = re.compile(r"job \d+ of \d+|no job yet")
STANDS = """
import sys, time
import torch, torch.distributed as dist
def load():
    open(sys.argv[1], "w").close()
    time.sleep(3600)
dist.init_process_group("gloo")
for step in range(100):
    if dist.get_rank() == 2 and step == 30:
        load()
    dist.all_reduce(torch.ones(4))
"""

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed"),
]


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        yield house
        end_terminals(house.directory)


@contextlib.contextmanager
def training(house: DemoHouse) -> Iterator[subprocess.Popen[bytes]]:
    """Run a plain torchrun until rank 2 stands; give the launcher."""
    script, mark = house.home / "stands_here.py", house.home / "stands"
    script.write_text(STANDS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    launcher = subprocess.Popen(
        [*torchrun, str(script), str(mark)],
        env={**house.environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(mark.exists, START_S, "rank 2 stands")
        yield launcher
    finally:
        launcher.terminate()  # it ends its ranks
        launcher.wait()


def turn_to_ours(terminal: Terminal) -> None:
    """Press the key until our job is shown: others may train on this machine."""

    def is_ours() -> bool:
        text = terminal.text()
        shown = SHOWN.search(text)
        if "stands_here.py" not in text and shown is not None:
            terminal.keys("i")
            terminal.until_it_no_longer_shows(shown[0], LOOK_S)
        return "stands_here.py" in text

    until(is_ours, START_S, "our job is shown")


def test_where_no_agent_serves_inspect_opens_the_console_itself(house: DemoHouse) -> None:
    command = house.argv()[:-1]
    with training(house):
        inspect = [*command, "inspect", "--host", "localhost", "--console"]
        terminal = Terminal(house.directory, house.environment, inspect, 120, 35)
        turn_to_ours(terminal)
        terminal.until_it_shows("rank 2 has not come to the call in which others wait", LOOK_S)
        terminal.keys("q")
        terminal.until_it_shows("exit code 10", LOOK_S)
    refused = subprocess.run(inspect, env=house.environment, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "there is no terminal for a console (leave --console out)" in refused.stderr
    beside = [*inspect, "--json"]
    assert (
        "--console takes no job"
        in subprocess.run(beside, env=house.environment, capture_output=True, text=True, check=False).stderr
    )


def test_a_person_sees_the_rank_of_another_launcher_that_stands_and_ends_the_job(house: DemoHouse) -> None:
    command = house.argv()[:-1]
    with training(house) as launcher:
        subprocess.run([*command, "up", "localhost"], env=house.environment, capture_output=True, check=True)
        terminal = Terminal(house.directory, house.environment, [*command, "attach"], 120, 35)
        terminal.until_it_shows("of other launchers", LOOK_S, "i: look at")
        turn_to_ours(terminal)
        terminal.until_it_shows("rank 2 has not come to the call in which others wait", LOOK_S, "not by rankdeck")
        terminal.keys("2")
        shown = terminal.until_it_shows("stands_here.py:6 in load", LOOK_S, "all_reduce")
        assert shown.count("waiting") == NUM_RANKS - 1
        terminal.keys("s")
        terminal.until_it_shows("ranks 0-1 (2 ranks): waiting in all_reduce, at stands_here.py:11", LOOK_S)
        terminal.keys("Escape")
        terminal.until_it_shows("x Signals", LOOK_S)

        terminal.keys("x")
        terminal.until_it_shows("Send SIGTERM to ranks 0-2 on localhost (pids", LOOK_S)
        terminal.key_that_marks("Enter", "Do nothing", LOOK_S)
        terminal.key_that_marks("Right", "Send SIGTERM", LOOK_S)
        terminal.keys("Enter")
        assert launcher.wait(LOOK_S) != 0
        terminal.until_it_shows("all its ranks have ended; how is not known from outside", LOOK_S)
        terminal.keys("q")
        terminal.until_it_shows("exit code 0", LOOK_S)
    subprocess.run([*command, "down", "localhost"], env=house.environment, capture_output=True, check=True)
    audit = house.home / ".local/state/rankdeck/audit.jsonl"
    (entry,) = (one for line in audit.read_text().splitlines() if (one := json.loads(line))["action"] == "signal")
    assert (entry["hosts"], entry["job_id"], entry["outcome"]) == (["localhost"], "stands_here.py", "done")
    assert entry["sentence"] == "SIGTERM sent to 3 of 3 processes of ranks 0-2 on localhost"
