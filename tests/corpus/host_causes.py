"""Causes of slowness on real ranks of two hosts of the testbed: what happens to rank 1, and what a console says of it.

`rankdeck run` starts the ranks over SSH, and `rankdeck status --watch --json` is the console.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from app.diagnosis.causes import Cause
from tests.corpus.real_causes import AFTER_S, PROGRAMS, START_S, WITHIN_S, Machine, RealCause, Told
from tests.support.desk import Desk, named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.hosts import Network

HOSTS = ("gpu1", "gpu2")


class OnHosts(Machine):
    """Means to burden ranks on hosts.

    Attributes:
        program: What the ranks run, in the folder `programs`; its argument is the directory.
        ranks_a_host: Ranks of each host.
        hosts: Those of the ranks.
    """

    program: ClassVar[str]
    ranks_a_host: ClassVar[int]

    def __init__(self, network: Network, directory: Path) -> None:
        super().__init__(directory)
        self.hosts = [network[name] for name in HOSTS]

    def begin(self) -> None:
        """Take note that all ranks train."""

    def breathe(self) -> None:
        """Do what changes all the time, at each line of the console."""


Hosts = TypeVar("Hosts", bound=OnHosts)


@dataclass
class HostTold(Told):
    """What a console said of a run: the row by which the cause was first named, and the last sentence on rank 1."""

    because: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""


class _Run(Generic[Hosts]):
    """A job on the hosts, and a console that looks at it once a second."""

    def __init__(self, desk: Desk, machine: Hosts, cause: RealCause[Hosts], patience: float) -> None:
        self._machine, self._cause = machine, cause
        self._within_s = patience * (WITHIN_S if cause.is_slow else WITHIN_S / 2)
        self._told, self._struck_s = HostTold(cause.name), time.monotonic()
        self._status: dict[str, Any] = {}
        how = ("--no-doctor", "--detach", "--workdir", str(PROGRAMS), "--nproc-per-node", str(machine.ranks_a_host))
        code, _, stderr = desk.run("run", *named(*HOSTS), *how, machine.program, str(machine.directory))
        assert code == 0, stderr
        self._console = desk.start("status", *named(*HOSTS), "--watch", "--json")

    def told(self) -> HostTold:
        assert self._watch(START_S, self._trains), "not all ranks train"
        self._machine.begin()
        self._watch(self._cause.settled_s, lambda: False)
        self._told, self._struck_s = HostTold(self._cause.name), time.monotonic()
        self._cause.do(self._machine)
        self._watch(self._within_s, self._is_told)
        self._watch(AFTER_S, lambda: False)
        return self._told

    def _watch(self, for_s: float, is_enough: Callable[[], bool]) -> bool:
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            self._look()
            if is_enough():
                return True
        return False

    def _is_told(self) -> bool:
        return (self._told.because_s if self._cause.signals else self._told.named_s) is not None

    def _trains(self) -> bool:
        ranks = self._status["ranks"]
        self._machine.pids = [row["pid"] for row in ranks]
        return len(ranks) == self._machine.ranks_a_host * len(HOSTS) and all(row["step"] for row in ranks)

    def _look(self) -> None:
        assert self._console.stdout is not None
        line = self._console.stdout.readline()
        assert line, f"the console has ended: {self._console.communicate()[1]}"
        self._status, at_s = json.loads(line), time.monotonic() - self._struck_s
        self._machine.breathe()
        for verdict in self._status["verdicts"]:
            if verdict["cause"] == Cause.STRAGGLER:
                self._note(verdict, at_s)

    def _note(self, verdict: dict[str, Any], at_s: float) -> None:
        told, rows = self._told, verdict["because"]
        told.note(self._cause, verdict["culprits"], [row["signal"] for row in rows], at_s)
        if verdict["culprits"] == [1]:
            told.sentence = verdict["text"]
        if told.because_s == at_s:
            told.because = rows[0]


def play_on_hosts(cause: RealCause[Hosts], machine: Hosts, network: Network, patience: float) -> HostTold:
    """Run ranks on the hosts, do it to them, and return what a console says of them."""
    desk = Desk(network)
    try:
        with machine.undo:
            return _Run(desk, machine, cause, patience).told()
    finally:
        desk.run("down", *HOSTS, "--kill-jobs")
        desk.end()
