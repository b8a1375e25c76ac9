"""The commands of README's own program, and those that print rows, typed as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.demo_runs import DemoHouse
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
TRAIN = """
import argparse, pathlib, time
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
epochs = parser.parse_args().epochs
dist.init_process_group("gloo")
for epoch in range(epochs):
    dist.all_reduce(torch.ones(3))
    print(f"epoch {epoch} loss 1.5", flush=True)
while pathlib.Path("hold").exists():
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""
VERDICT_STANDS = 10


def fenced(page: str, heading: str) -> list[str]:
    """Return what is typed in the first block behind a heading, without what is written beside it."""
    _, _, rest = (ROOT / page).read_text().partition(heading)
    block = rest.split("```")[1]
    return [re.split(r" {2,}", line)[0] for line in block.strip().splitlines()]


class Shell:
    """Types commands in a directory in which `rankdeck` is found."""

    def __init__(self, house: DemoHouse, directory: Path) -> None:
        self.directory = directory
        found = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = {**house.environment, "PATH": found}

    def start(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            shlex.split(line),
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, line: str, within_s: float = 120.0, codes: tuple[int, ...] = (0, VERDICT_STANDS)) -> str:
        process = self.start(line)
        printed, _ = process.communicate(timeout=within_s)
        assert process.returncode in codes, f"{line}: {printed}"
        return printed


@pytest.mark.ranks
def test_the_commands_for_ones_own_program_do_what_readme_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with DemoHouse() as house:
        shell = Shell(house, tmp_path)
        run, *others, down = fenced("README.md", "## Your own program, on this machine")
        assert [line.split()[1] for line in (run, *others, down)] == [
            "run",
            "status",
            "logs",
            "attach",
            "exec",
            "run",
            "inspect",
            "down",
        ]

        assert "succeeded" in shell.type(run)
        assert "succeeded" in shell.type(others[0])
        printed = shell.type(others[1])
        assert re.search(r"^localhost:r0 +epoch 2 loss 1.5$", printed, re.MULTILINE), printed
        assert "succeeded" in shell.type(others[2])
        assert "epoch 0 loss 1.5" in shell.type(others[3])
        assert "succeeded" in shell.type(others[4])
        assert "rank" in shell.type(others[5])
        assert "is down" in shell.type(down)
        assert house.processes() == []


@pytest.mark.ranks
def test_the_commands_that_print_rows_are_as_the_manual_has_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    hold = tmp_path / "hold"
    hold.touch()
    with DemoHouse() as house:
        shell = Shell(house, tmp_path)
        shell.type("rankdeck run --detach --name gpt --nproc-per-node 3 train.py")
        until(lambda: "loss 1.5" in shell.type("rankdeck logs"), 60, "the ranks print")
        lines = fenced("app/help/exit-codes.md", "Each view has a verb")
        lasting = [line for line in lines if re.search(r" -f | --watch| record ", line)]
        assert len(lasting) == 3
        started = [(line, shell.start(line)) for line in lasting]

        for line in lines:
            if line not in lasting:
                assert shell.type(line).strip(), line
        hold.unlink()

        for line, process in started:
            printed, _ = process.communicate(timeout=120)
            assert process.returncode in (0, VERDICT_STANDS), f"{line}: {printed}"
            assert printed.strip(), line
        assert (tmp_path / "night.rdk").stat().st_size
        shell.type("rankdeck down localhost --kill-jobs")


@pytest.mark.ranks
def test_what_runs_need_not_be_named_and_what_was_ended_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hold").touch()
    with DemoHouse() as house:
        shell = Shell(house, tmp_path)
        for name in ("a", "b", "c"):
            shell.type(f"rankdeck run --detach --beside --name {name} --nproc-per-node 1 train.py")

        assert "several jobs run on localhost: a, b, c (name one: JOB)" in shell.type("rankdeck stop", codes=(2,))
        assert "job c on localhost: stopped" in shell.type("rankdeck kill c")
        assert shell.type("rankdeck down localhost --kill-jobs").endswith("is down; 2 jobs were ended\n")
        assert shell.type("rankdeck down", codes=(0,)) == "no agent runs on localhost\n"

        shell.type("rankdeck run --detach --name d --nproc-per-node 1 train.py")
        assert "rankdeck: job d, the only one under way" in shell.type("rankdeck stacks")
        assert "job d on localhost: stopped" in shell.type("rankdeck stop")
        assert "no job runs on localhost" in shell.type("rankdeck stop", codes=(2,))
        shell.type("rankdeck run --detach --name e --nproc-per-node 1 train.py")
        assert shell.type("rankdeck down localhost").endswith(
            "is down; one job goes on: rankdeck up localhost takes it up again\n"
        )
        assert shell.type("rankdeck down localhost --kill-jobs") == "no agent runs on localhost; 1 job was ended\n"
        assert house.processes() == []


LAUNCHED = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
print("here", flush=True)
time.sleep(600)
"""


def test_attach_points_to_training_of_other_launchers(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(LAUNCHED)
    with DemoHouse() as house:
        shell = Shell(house, tmp_path)
        launcher = shell.start("python -m torch.distributed.run --standalone --nproc-per-node 1 other.py")
        assert launcher.stdout is not None
        while "here" not in launcher.stdout.readline():
            assert launcher.poll() is None

        printed = shell.type("rankdeck attach --headless", codes=(3,))
        assert re.search(
            r"of other launchers, \d+ ranks? on localhost: rankdeck inspect or rankdeck up localhost", printed
        )

        shell.type("rankdeck up localhost")
        console = shell.start("rankdeck attach --headless")
        assert console.stdout is not None
        while "of other launchers" not in (line := console.stdout.readline()):
            assert console.poll() is None
        assert line.endswith(": rankdeck inspect\n")
        console.send_signal(signal.SIGINT)
        console.communicate(timeout=60)
        shell.type("rankdeck down localhost")
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=60)
