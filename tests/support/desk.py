"""A person's machine for tests: the command `rankdeck` as it is run there, towards hosts of `tests.support.hosts`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from tests.support.terminals import Terminal, end_terminals
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.hosts import Network

IMPORT_S = 150.0
"""Ranks import torch on a machine with other work."""
COMMAND_S = 150.0
"""The longest command takes some seconds on a quiet machine."""


def named(*hosts: str) -> list[str]:
    """Return the options that name some hosts."""
    return [word for host in hosts for word in ("--host", host)]


class Desk:
    """A console's machine: this one, with a runtime directory of its own."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.runtime = network.directory / "run"
        self.runtime.mkdir(mode=0o700)
        self.directory = network.directory
        """In which commands are run: the inventory is looked for from here upwards."""
        self.at: tuple[str, ...] = ("h1",)
        """Hosts whose steps are watched; none are those of the inventory."""
        self._started: list[subprocess.Popen[str]] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "RANKDECK_PYTHON": sys.executable,
            "RANKDECK_SSH_CONFIG": str(self.network.ssh_config),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_STATE_HOME": str(self.network.directory / "state"),
        }

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-P", "-m", "app", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.argv(*arguments),
            env=self.environment,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def terminal(self, name: str, *arguments: str) -> Terminal:
        """Return a terminal in which the command runs; each has a server of its own, which takes a while to end."""
        directory = self.network.directory / f"terminal-{name}"
        directory.mkdir()
        here = ["env", "-C", str(self.directory)]
        return Terminal(directory, self.environment, [*here, *self.argv(*arguments)], 120, 35)

    def run(self, *arguments: str, timeout_s: float = COMMAND_S) -> tuple[int, str, str]:
        """Return the exit code and what was said, once it has ended."""
        process = self.start(*arguments)
        stdout, stderr = process.communicate(timeout=timeout_s)
        assert "Traceback" not in stderr
        return process.returncode, stdout, stderr

    def json(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        code, stdout, stderr = self.run(*arguments, "--json")
        assert code in codes, stderr
        answer: dict[str, Any] = json.loads(stdout)
        assert answer["schema"] == 1
        if arguments[0] in {"up", "down"} and len(answer["hosts"]) == 1:
            (row,) = answer["hosts"]
            return dict(row)
        return answer

    def step(self) -> int:
        """Return the step that the slowest rank has finished; 0 before the first."""
        status = self.json("status", *named(*self.at), codes=(0, 10))  # a slow machine may well have a straggler
        steps = [rank["step"] for rank in status["ranks"]]
        return min(steps) if steps and None not in steps else 0

    def watch_until_steps_move(self) -> int:
        """Return a step, having seen an earlier one."""
        first = until(self.step, IMPORT_S, "ranks step")
        return until(lambda: step if (step := self.step()) > first else 0, IMPORT_S, "steps move")

    def end(self) -> None:
        for directory in self.network.directory.glob("terminal-*"):
            end_terminals(directory)
        for process in self._started:
            process.kill()
            process.communicate()


def told_of(status: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """Return cause and culprits of the verdicts that stand."""
    return [(verdict["cause"], verdict["culprits"]) for verdict in status["verdicts"]]


def read_until(process: subprocess.Popen[str], words: str, within_s: float = COMMAND_S) -> str:
    """Return the line of standard error that holds some words."""
    assert process.stderr
    said: list[str] = []
    deadline_s = time.monotonic() + within_s
    for line in process.stderr:  # whoever is followed says something every half a minute
        said.append(line)
        if words in line:
            return line
        if time.monotonic() > deadline_s:
            break
    raise AssertionError(f"{words!r} was not said in {within_s} s, but this: {''.join(said)}")
