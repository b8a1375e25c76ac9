"""Runs a program as a user does, by `rankdeck run --headless --json` on this machine, and keeps all that was shown."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.diagnosis.causes import Severity
from tests.support.demo_runs import DemoHouse
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.corpus.reported.truth import Program

ROOT = Path(__file__).parents[3]
OBSERVED_RUN = Path(__file__).with_name("observed_run.py")
START_S = 150.0
"""For the ranks to start and come to the fault."""
END_S = 120.0
"""For a program to end that ends itself, after the watch."""
LOOK_ON_S = 4.0
"""How long to look on after the right verdict: it must not be dropped."""
POLL_S = 0.25


@dataclass(frozen=True)
class Look:
    """What was shown at a moment; rows are those of `--json`."""

    at_s: float
    headline: str
    verdicts: list[dict[str, Any]]

    def alarms(self) -> list[dict[str, Any]]:
        return [verdict for verdict in self.verdicts if verdict["severity"] != Severity.QUIET]


@dataclass(frozen=True)
class Played:
    """What a user saw of a program's life.

    Attributes:
        fault_s: When the program said that its fault begins, on the looks' clock; None is never.
        looks: What was shown while it ran, oldest first.
        ended_at_s: When the harness began to end it; looks from then on are of its end.
        status: What `rankdeck status --json` said just before; None where it was not asked.
        summary: The last object on stdout.
        exit_code: Of the command.
        printed: Its lines on stderr.
    """

    fault_s: float | None
    looks: list[Look]
    ended_at_s: float
    status: dict[str, Any] | None
    summary: dict[str, Any]
    exit_code: int
    printed: list[str]


def play(program: Program, is_right: Callable[[Look], bool], patience: float = 1.0) -> Played:
    """Run a program to its end, or until its verdict has come or is overdue."""
    with DemoHouse() as house:
        return _Run(program, house).watch(is_right, patience)


class _Run:
    def __init__(self, program: Program, house: DemoHouse) -> None:
        self._program = program
        self._house = house
        self._log = house.directory / "looks"
        self._fault = house.directory / "fault"
        self._process = house.start_command(
            sys.executable, "-P", str(OBSERVED_RUN), str(self._log), "run", "--headless", "--json", "--no-config",
            "--no-evidence", "--host", "localhost", "--name", "reported", "--workdir", str(program.path.parent),
            "--nproc-per-node", str(program.ranks), "--env", f"FAULT_AT={self._fault}", "--env", f"PYTHONPATH={ROOT}",
            "--env", "OMP_NUM_THREADS=1", "--", program.path.name, program.mode,
        )  # fmt: skip

    def watch(self, is_right: Callable[[Look], bool], patience: float) -> Played:
        try:
            self._wait_for_the_fault()
            self._wait_for_the_verdict(is_right, patience)
            stands = not self._program.ends_itself and self._process.poll() is None
            status = json.loads(self._ask("status", "--json", "--no-config")) if stands else None
            ended_at_s = time.monotonic()
            if stands:
                self._ask("kill", "reported")
            stdout, stderr = self._process.communicate(timeout=END_S)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            last = [look.headline for look in self._looks()[-3:]]
            raise AssertionError(f"{self._program.name}: {error}; shown last: {last}") from error
        return Played(
            fault_s=self._fault_s(),
            looks=self._looks(),
            ended_at_s=ended_at_s,
            status=status,
            summary=json.loads(stdout) if stdout.strip() else {},
            exit_code=self._process.returncode,
            printed=stderr.splitlines(),
        )

    def _wait_for_the_fault(self) -> None:
        def has_begun() -> bool:
            return self._process.poll() is not None or (self._program.is_fault and self._fault_s() is not None)

        until(has_begun, START_S, "the fault" if self._program.is_fault else "the end")

    def _wait_for_the_verdict(self, is_right: Callable[[Look], bool], patience: float) -> None:
        fault_s = self._fault_s()
        if fault_s is None:
            return
        deadline_s = fault_s + patience * self._program.within_s + 6.0
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if any(is_right(look) for look in self._looks() if look.at_s > fault_s):
                deadline_s = min(deadline_s, time.monotonic() + LOOK_ON_S)
                is_right = _never
            time.sleep(POLL_S)

    def _ask(self, verb: str, *arguments: str) -> str:
        command = self._house.start_command(sys.executable, "-P", "-m", "app", verb, "--host", "localhost", *arguments)
        return command.communicate(timeout=END_S)[0]

    def _fault_s(self) -> float | None:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not there yet, or not written to its end
            return float(self._fault.read_text())
        return None

    def _looks(self) -> list[Look]:
        if not self._log.exists():
            return []
        lines = self._log.read_text(encoding="utf-8").splitlines(keepends=True)
        parsed = [json.loads(line) for line in lines if line.endswith("\n")]
        return [Look(one["at_s"], one["headline"], one["verdicts"]) for one in parsed]


def _never(_: Look) -> bool:
    return False
