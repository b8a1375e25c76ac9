"""Causes of slowness on the GPUs of real ranks: what happens to the GPU of rank 1, and what a console must say of it.

Four gloo ranks train by DDP on two hosts of the testbed, started by `rankdeck run` over SSH, and `rankdeck status
--watch --json` is the console. Their GPUs are those of the NVML stub, which the agents' samplers read, and by which the
program takes longer: a lower clock makes it slower. Beside each cause stand its opposites.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.wire.signals import Signal
from app.diagnosis.causes import Cause
from tests.corpus.real_causes import AFTER_S, PROGRAMS, SETTLED_S, START_S, WITHIN_S, Machine, RealCause, Told
from tests.support.desk import Desk, named
from tests.support.hosts import Network
from tests.support.nvml.stub import DRIVER_FILES, HW_POWER_BRAKE, HW_SLOWDOWN, HW_THERMAL, SW_POWER_CAP, Stub, h100
from tests.support.nvml_recordings import GIB, recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.hosts import Host

ROOT = Path(__file__).parents[2]
HOSTS = ("gpu1", "gpu2")
GPUS_A_HOST = 2
RANKS = range(GPUS_A_HOST * len(HOSTS))
USUAL = {"megahertz": 1965, "celsius": 60}
CLOCK, TEMPERATURE = "nvmlDeviceGetClockInfo(1)", "nvmlDeviceGetTemperature(0)"
REASONS, POWER_LIMIT = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetEnforcedPowerLimit"
PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
LANES, GENERATION = "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkGeneration"
REPLAYS, CORRECTED = "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetTotalEccErrors(0, 0)"


class Gpus(Machine):
    """The GPUs of four ranks, by rank: what they are like, and what happens to them."""

    def __init__(self, network: Network, directory: Path) -> None:
        super().__init__(directory)
        self._hosts = [network[name] for name in HOSTS]
        self._stubs = [self._made(host) for host in self._hosts]
        self._states = {rank: dict(USUAL) for rank in RANKS}
        self._random = random.Random(0)

    @staticmethod
    def _made(host: Host) -> Stub:
        host.exec("sh", "-c", DRIVER_FILES)
        stub = Stub(host.directory / "gpus", recording(*(h100(index) for index in range(GPUS_A_HOST))))
        host.tell_sshd(**stub.environ(), PYTHONPATH=str(ROOT))
        return stub

    def breathe(self) -> None:
        """Let figures be a little different from those of a second ago, as of GPUs that work."""
        for rank, state in self._states.items():
            megahertz = state["megahertz"] + self._random.choice((0, 0, 15))
            self.change(rank, {CLOCK: megahertz, TEMPERATURE: state["celsius"] + self._random.choice((-1, 0, 1))})

    def change(self, rank: int, answers: dict[str, Any]) -> None:
        """Let the GPU of a rank answer otherwise from now on."""
        self._stubs[rank // GPUS_A_HOST].change(rank % GPUS_A_HOST, **answers)

    def throttle(self, rank: int, reasons: int, celsius: int = 60) -> None:
        """Let the GPU of a rank run at 1,230 MHz, for a reason of NVML."""
        self._states[rank] = {"megahertz": 1230, "celsius": celsius}
        self.change(rank, {REASONS: reasons})
        self.breathe()

    def heat(self, rank: int) -> None:
        """Let the hardware slow the GPU of a rank, since it is too hot."""
        self.throttle(rank, HW_SLOWDOWN | HW_THERMAL, 88)

    def limit_power(self, rank: int) -> None:
        """Lower the power limit of the GPU of a rank, and with it its clock."""
        self.throttle(rank, SW_POWER_CAP)
        self.change(rank, {POWER_LIMIT: 350_000})

    def count(self, rank: int, counter: str, per_s: int) -> None:
        """Let a counter of the GPU of a rank grow from now on."""
        self.change(rank, {counter: f"{-int(per_s * time.monotonic())}+{per_s}"})

    def hold(self) -> None:
        """Let each rank hold memory of its GPU alone."""
        for rank in RANKS:
            self.change(rank, {PROCESSES: [_held(self.pids[rank])]})

    def share(self, rank: int) -> None:
        """Let a process of no job use the GPU of a rank, too."""
        program = "exec 3</dev/nvidia0; sleep 1000 >/dev/null 2>&1 & echo $!"
        stranger = self._hosts[rank // GPUS_A_HOST].exec("sh", "-c", program)
        self.change(rank, {PROCESSES: [_held(self.pids[rank]), _held(int(stranger))]})


def _held(pid: int) -> dict[str, int]:
    return {"pid": pid, "usedGpuMemory": 20 * GIB}


def _heat_all(gpus: Gpus) -> None:
    for rank in RANKS:
        gpus.heat(rank)


def _heat_one_that_keeps_up(gpus: Gpus) -> None:
    gpus.ask("unbound")
    gpus.heat(1)


def _heat_and_share(gpus: Gpus) -> None:
    gpus.heat(1)
    gpus.share(1)


def _heat_another_one(gpus: Gpus) -> None:
    gpus.ask("unbound")
    gpus.heat(2)
    gpus.ask("program")


HEAT: RealCause[Gpus] = RealCause("heat", lambda on: on.heat(1), frozenset({Signal.GPU_THERMAL}))
GPU_CAUSES: tuple[RealCause[Gpus], ...] = (
    HEAT,
    RealCause("a slowdown by hardware", lambda on: on.throttle(1, HW_SLOWDOWN), frozenset({Signal.GPU_HW_SLOWDOWN})),
    RealCause(
        "a power brake", lambda on: on.throttle(1, HW_SLOWDOWN | HW_POWER_BRAKE), frozenset({Signal.GPU_POWER_BRAKE})
    ),
    RealCause("a lower power limit", lambda on: on.limit_power(1), frozenset({Signal.GPU_POWER_LIMIT})),
    RealCause("another process", lambda on: on.share(1), frozenset({Signal.GPU_OTHERS})),
    RealCause("4 PCIe lanes of 16", lambda on: on.change(1, {LANES: 4}), frozenset({Signal.PCIE_WIDTH})),
    RealCause("PCIe packets sent again", lambda on: on.count(1, REPLAYS, 200), frozenset({Signal.PCIE_REPLAYS})),
    RealCause("memory errors", lambda on: on.count(1, CORRECTED, 50), frozenset({Signal.GPU_ECC_CORRECTED})),
    RealCause("PCIe 3 of 5", lambda on: on.change(1, {GENERATION: 3}), frozenset({Signal.PCIE_GENERATION})),
    RealCause("heat and another process", _heat_and_share, frozenset({Signal.GPU_THERMAL, Signal.GPU_OTHERS})),
)
GPU_OPPOSITES: tuple[RealCause[Gpus], ...] = (
    RealCause("its program, on a healthy GPU", lambda on: on.ask("program")),
    RealCause("its program, while another rank's GPU is hot", _heat_another_one),
    RealCause("all GPUs hot", _heat_all, is_slow=False),
    RealCause("a hot GPU of a rank that keeps up", _heat_one_that_keeps_up, is_slow=False),
)


@dataclass
class GpuTold(Told):
    """What a console said of a run: the row by which the cause was first named, and the last sentence on rank 1."""

    because: dict[str, Any] = field(default_factory=dict)
    sentence: str = ""


class _Run:
    """A job on the hosts, and a console that looks at it once a second."""

    def __init__(self, desk: Desk, gpus: Gpus, cause: RealCause[Gpus], patience: float) -> None:
        self._gpus, self._cause = gpus, cause
        self._within_s = patience * (WITHIN_S if cause.is_slow else WITHIN_S / 2)
        self._told, self._struck_s = GpuTold(cause.name), time.monotonic()
        self._status: dict[str, Any] = {}
        how = ("--no-doctor", "--detach", "--workdir", str(PROGRAMS), "--nproc-per-node", str(GPUS_A_HOST))
        code, _, stderr = desk.run("run", *named(*HOSTS), *how, "on_gpus.py", str(gpus.directory))
        assert code == 0, stderr
        self._console = desk.start("status", *named(*HOSTS), "--watch", "--json")

    def told(self) -> GpuTold:
        assert self._watch(START_S, self._trains), "not all ranks train"
        self._gpus.hold()
        self._watch(SETTLED_S, lambda: False)
        self._told, self._struck_s = GpuTold(self._cause.name), time.monotonic()
        self._cause.do(self._gpus)
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
        self._gpus.pids = [row["pid"] for row in ranks]
        return len(ranks) == len(RANKS) and all(row["step"] for row in ranks)

    def _look(self) -> None:
        assert self._console.stdout is not None
        line = self._console.stdout.readline()
        assert line, f"the console has ended: {self._console.communicate()[1]}"
        self._status, at_s = json.loads(line), time.monotonic() - self._struck_s
        self._gpus.breathe()
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


def play_gpu_cause(cause: RealCause[Gpus], directory: Path, patience: float = 1.0) -> GpuTold:
    """Run four ranks on two hosts, do it to a GPU, and return what a console says of them."""
    with Network(*HOSTS) as network:
        desk = Desk(network)
        gpus = Gpus(network, directory)
        try:
            with gpus.undo:
                return _Run(desk, gpus, cause, patience).told()
        finally:
            desk.run("down", *HOSTS, "--kill-jobs")
            desk.end()
