"""Causes of slowness on the GPUs of real ranks: what happens to the GPU of rank 1, and what a console must say of it.

Four gloo ranks train by DDP on two hosts of the testbed. Their GPUs are those of the NVML stub, which the agents'
samplers read, and by which the program takes longer: a lower clock makes it slower. Beside each cause stand its
opposites.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.wire.signals import Signal
from tests.corpus.host_causes import HOSTS, HostTold, OnHosts, play_on_hosts
from tests.corpus.real_causes import RealCause
from tests.support.hosts import Network
from tests.support.nvml.stub import (
    DRIVER_FILES,
    HW_POWER_BRAKE,
    HW_SLOWDOWN,
    HW_THERMAL,
    NVLINK_CRC,
    NVLINK_STATE,
    SW_POWER_CAP,
    Stub,
    h100,
    in_parts,
    mig,
)
from tests.support.nvml_recordings import GIB, recording

if TYPE_CHECKING:
    from tests.support.hosts import Host

ROOT = Path(__file__).parents[2]
GPUS_A_HOST = 2
RANKS = range(GPUS_A_HOST * len(HOSTS))
USUAL = {"megahertz": 1965, "celsius": 60}
CLOCK, TEMPERATURE = "nvmlDeviceGetClockInfo(1)", "nvmlDeviceGetTemperature(0)"
REASONS, POWER_LIMIT = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetEnforcedPowerLimit"
PROCESSES, CLIENTS = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"
LANES, GENERATION = "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetCurrPcieLinkGeneration"
REPLAYS, CORRECTED = "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetTotalEccErrors(0, 0)"
LAST_LINK, LINK_ERRORS = f"nvmlDeviceGetFieldValues({NVLINK_STATE}, 17)", f"nvmlDeviceGetFieldValues({NVLINK_CRC}, 3)"
ROWS = "nvmlDeviceGetRemappedRows"


class Gpus(OnHosts):
    """The GPUs of four ranks, by rank: what they are like, and what happens to them.

    With `has_parts` the GPU of rank 1 is in MIG mode, and the rank has the first of its two instances.
    """

    program, ranks_a_host = "on_gpus.py", GPUS_A_HOST

    def __init__(self, network: Network, directory: Path, *, has_parts: bool = False) -> None:
        super().__init__(network, directory)
        self._has_parts = has_parts
        self._stubs = [self._made(host) for host in self.hosts]
        if has_parts:
            self._stubs[0].content["devices"][1] = in_parts(1, mig(1, 0), mig(1, 1))
            self._stubs[0].write()
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

    def occupy(self, rank: int, *pids: int, key: str = PROCESSES, instance: int = 0) -> None:
        """Let processes use the GPU of a rank, or an instance of a GPU in MIG mode."""
        held = [{"pid": pid, "usedGpuMemory": 20 * GIB} for pid in pids]
        if rank == 1 and self._has_parts:
            self._stubs[0].content["devices"][1]["migs"][instance][key] = held
            self._stubs[0].write()
        else:
            self.change(rank, {key: held})

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

    def begin(self) -> None:
        """Let each rank hold memory of its GPU alone."""
        for rank in RANKS:
            self.occupy(rank, self.pids[rank])

    def share(self, rank: int) -> None:
        """Let a process of no job use the GPU of a rank, too."""
        self.occupy(rank, self.pids[rank], self.stranger(rank))

    def share_by_mps(self, rank: int) -> None:
        """Let a process of no job use the GPU of a rank, too, both as clients of MPS."""
        self.occupy(rank)
        self.occupy(rank, self.pids[rank], self.stranger(rank), key=CLIENTS)

    def stranger(self, rank: int) -> int:
        """Start a process of no job on the host of a rank, and return its pid."""
        program = "exec 3</dev/nvidia0; sleep 1000 >/dev/null 2>&1 & echo $!"
        return int(self.hosts[rank // GPUS_A_HOST].exec("sh", "-c", program))


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


def _use_another_part(gpus: Gpus) -> None:
    gpus.occupy(1, gpus.stranger(1), instance=1)
    gpus.ask("program")


@dataclass(frozen=True)
class GpuCause(RealCause[Gpus]):
    """What happens to GPUs; with `has_parts` the GPU of rank 1 is in MIG mode."""

    has_parts: bool = False


COUNTED_S = 80.0
"""Until an agent knows the level of a counter of errors, of which it takes a sample each 10 s."""
HEAT = GpuCause("heat", lambda on: on.heat(1), frozenset({Signal.GPU_THERMAL}))
GPU_CAUSES: tuple[GpuCause, ...] = (
    HEAT,
    GpuCause("a slowdown by hardware", lambda on: on.throttle(1, HW_SLOWDOWN), frozenset({Signal.GPU_HW_SLOWDOWN})),
    GpuCause(
        "a power brake", lambda on: on.throttle(1, HW_SLOWDOWN | HW_POWER_BRAKE), frozenset({Signal.GPU_POWER_BRAKE})
    ),
    GpuCause("a lower power limit", lambda on: on.limit_power(1), frozenset({Signal.GPU_POWER_LIMIT})),
    GpuCause("another process", lambda on: on.share(1), frozenset({Signal.GPU_OTHERS})),
    GpuCause("4 PCIe lanes of 16", lambda on: on.change(1, {LANES: 4}), frozenset({Signal.PCIE_WIDTH})),
    GpuCause(
        "PCIe packets sent again",
        lambda on: on.count(1, REPLAYS, 200),
        frozenset({Signal.PCIE_REPLAYS}),
        settled_s=COUNTED_S,
    ),
    GpuCause(
        "memory errors",
        lambda on: on.count(1, CORRECTED, 50),
        frozenset({Signal.GPU_ECC_CORRECTED}),
        settled_s=COUNTED_S,
    ),
    GpuCause("PCIe 3 of 5", lambda on: on.change(1, {GENERATION: 3}), frozenset({Signal.PCIE_GENERATION})),
    GpuCause("an NVLink down", lambda on: on.change(1, {LAST_LINK: 0}), frozenset({Signal.NVLINKS})),
    GpuCause(
        "errors of an NVLink",
        lambda on: on.count(1, LINK_ERRORS, 50),
        frozenset({Signal.NVLINK_ERRORS}),
        settled_s=COUNTED_S,
    ),
    GpuCause(
        "a memory row to replace", lambda on: on.change(1, {ROWS: [0, 1, 1, 0]}), frozenset({Signal.GPU_ROW_REMAP})
    ),
    GpuCause("another client of MPS", lambda on: on.share_by_mps(1), frozenset({Signal.GPU_OTHERS})),
    GpuCause(
        "another process on its MIG instance", lambda on: on.share(1), frozenset({Signal.GPU_OTHERS}), has_parts=True
    ),
    GpuCause("heat and another process", _heat_and_share, frozenset({Signal.GPU_THERMAL, Signal.GPU_OTHERS})),
)
GPU_OPPOSITES: tuple[GpuCause, ...] = (
    GpuCause("its program, on a healthy GPU", lambda on: on.ask("program")),
    GpuCause("its program, while another rank's GPU is hot", _heat_another_one),
    GpuCause("its program, while another MIG instance of its GPU is used", _use_another_part, has_parts=True),
    GpuCause("all GPUs hot", _heat_all, is_slow=False),
    GpuCause("a hot GPU of a rank that keeps up", _heat_one_that_keeps_up, is_slow=False),
)


def play_gpu_cause(cause: GpuCause, directory: Path, patience: float = 1.0) -> HostTold:
    """Run four ranks on two hosts, do it to a GPU, and return what a console says of them."""
    with Network(*HOSTS) as network:
        return play_on_hosts(cause, Gpus(network, directory, has_parts=cause.has_parts), network, patience)
