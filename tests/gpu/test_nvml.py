"""The sampler on the real NVML, and torch's allocator on a real GPU."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
import torch

from agent.node_state.gpu_ranks import RankProcess, gpu_reports
from agent.node_state.gpu_sample import GpuSample, decode_sample
from agent.node_state.gpu_signals import GpuSignals
from agent.wire.machine import GpuCondition, GpuFigures, JobRank, PcieLink, ThrottleReason
from agent.wire.signals import Signal
from tests.support.nvml_recordings import REPLAY_DIR
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HAS_GPU = Path("/dev/nvidiactl").exists()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="this machine has no NVIDIA driver")]
needs_cuda = pytest.mark.skipif(not HAS_GPU or not torch.version.cuda, reason="this torch has no CUDA")

PATIENCE_S = 120.0
MIB = 2**20
HOLD = """
import sys, torch
from ddpcore.probe.gpu import GpuMemory
memory = GpuMemory()
assert memory.look(0.0) == () and not torch.cuda.is_initialized()
held = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
(told,) = memory.look(10.0)
print(told.uuid, told.allocated_bytes, told.reserved_bytes, told.peak_allocated_bytes, flush=True)
sys.stdin.read()
"""


BUSY = """
import sys, torch
one = torch.randn(4096, 4096, device="cuda")
print(torch.cuda.get_device_properties(0).uuid, flush=True)
while True:
    for _ in range(20):
        one = torch.nn.functional.normalize(one @ one)
    torch.cuda.synchronize()
"""


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.settimeout(PATIENCE_S)
        inbox.bind(str(tmp_path / "inbox"))
        argv = [sys.executable, "-P", "-m", "agent.machine.gpu_sampler", str(tmp_path / "inbox"), str(os.getpid())]
        sampler = subprocess.Popen(argv)
        yield inbox
        sampler.kill()
        sampler.wait()


def sample(inbox: socket.socket) -> GpuSample:
    """Return the next sample."""
    return decode_sample(inbox.recv(1 << 20))


def test_the_real_nvml_tells_the_figures_of_each_gpu(inbox: socket.socket) -> None:
    told = sample(inbox)

    assert (told.unavailable, bool(told.driver_version)) == ("", True)
    assert told.gpus
    for gpu in told.gpus:
        figures = gpu.figures
        assert figures.condition is GpuCondition.OK
        assert figures.uuid.startswith("GPU-")
        assert figures.name
        # What the driver keeps for itself is not counted: nothing may be used.
        assert figures.memory_used_bytes is not None
        assert 0 <= figures.memory_used_bytes <= (figures.memory_total_bytes or 0)
        assert 0 < (figures.temperature_celsius or 0) < 120
        assert figures.sm_clock_hz is None or figures.sm_clock_hz > 10**8
    assert [gpu.figures.uuid for gpu in sample(inbox).gpus] == [gpu.figures.uuid for gpu in told.gpus]


@needs_cuda
def test_what_torch_reserves_is_part_of_what_nvml_says_of_the_process(inbox: socket.socket) -> None:
    program = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        uuid, *figures = program.stdout.readline().split()
        allocated, reserved, peak = map(int, figures)
        assert 256 * MIB <= allocated <= min(reserved, peak)

        def gpu_of_program() -> bool:
            gpu = next(gpu for gpu in sample(inbox).gpus if gpu.figures.uuid == uuid)
            if (gpu.figures.memory_used_bytes or 0) < reserved:
                return False  # a sample of before it had its memory
            own = (process.used_bytes or 0 for process in gpu.processes if process.pid == program.pid)
            return is_in_container or any(used_bytes >= reserved for used_bytes in own)

        # In a container the driver may know the program by another pid.
        is_in_container = str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]"
        assert until(gpu_of_program, PATIENCE_S, "the program's memory, and the program among the GPU's processes")
    finally:
        program.communicate()


def test_the_recorder_writes_what_the_replay_reads() -> None:
    done = subprocess.run(
        [sys.executable, str(REPLAY_DIR / "record.py")], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    recorded = json.loads(done.stdout)
    assert recorded["system"]["nvmlDeviceGetCount"] == len(recorded["devices"])
    assert all(device["nvmlDeviceGetUUID"].startswith("GPU-") for device in recorded["devices"])


@pytest.fixture
def busy() -> Iterator[Callable[[], int]]:
    """Start programs that keep the first GPU busy; each call returns the pid of another one."""
    programs: list[subprocess.Popen[str]] = []

    def start() -> int:
        programs.append(subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True))
        assert programs[-1].stdout is not None
        assert programs[-1].stdout.readline(), "it did not start"
        return programs[-1].pid

    yield start
    for program in programs:
        program.kill()
        program.communicate()


def smi(uuid: str) -> dict[str, str]:
    """Return what nvidia-smi says of a GPU, by the path of names; what it does not know is left out."""
    done = subprocess.run(["nvidia-smi", "-q", "-x", "-i", uuid], capture_output=True, check=True, timeout=PATIENCE_S)
    found: dict[str, str] = {}

    def walk(element: ElementTree.Element, path: str) -> None:
        text = (element.text or "").strip()
        if text and text not in {"N/A", "[N/A]", "Unknown Error"}:
            found.setdefault(path, text)
        for child in element:
            walk(child, f"{path}/{child.tag}".removeprefix("/"))

    walk(next(iter(ElementTree.fromstring(done.stdout).iter("gpu"))), "")
    return found


def number(text: str | None) -> float | None:
    """Return the number that begins a text of nvidia-smi, as of "16x" and "700.00 W"."""
    match = re.match(r"[0-9.]+", text or "")
    return float(match[0]) if match else None


def differing(figures: GpuFigures, said: dict[str, str]) -> dict[str, tuple[object, object]]:
    """Return the figures that are not those of nvidia-smi, each as (ours, its own), of those that it knows."""
    link = "pci/pci_gpu_link_info"
    pcie = figures.pcie or PcieLink()
    numbers = {
        f"{link}/pcie_gen/current_link_gen": pcie.generation,
        f"{link}/pcie_gen/max_link_gen": pcie.generation_max,
        f"{link}/pcie_gen/max_device_link_gen": pcie.generation_gpu_max,
        f"{link}/link_widths/current_link_width": pcie.width,
        f"{link}/link_widths/max_link_width": pcie.width_max,
        "pci/replay_counter": pcie.replays,
        "max_clocks/sm_clock": figures.sm_clock_max_hz and figures.sm_clock_max_hz / 1e6,
        "gpu_power_readings/current_power_limit": figures.power_limit_watts,
    }
    rows = {"pending": figures.is_row_remap_pending, "failure": figures.has_row_remap_failed}
    found: dict[str, tuple[object, object]] = {
        path: (ours, said[path]) for path, ours in numbers.items() if path in said and number(said[path]) != ours
    }
    for name, fact in rows.items():
        path = f"remapped_rows/remapped_row_{name}"
        if path in said and (said[path] == "Yes") is not fact:
            found[path] = (fact, said[path])
    for reason, name in SMI_REASONS.items():
        state = said.get(smi_path(name, "event"), said.get(smi_path(name, "throttle")))
        if state is not None and (state == "Active") is not (reason in figures.throttle_reasons):
            found[name] = (reason in figures.throttle_reasons, state)
    return found


SMI_REASONS = {
    ThrottleReason.SW_POWER_CAP: "sw_power_cap",
    ThrottleReason.HW_SLOWDOWN: "hw_slowdown",
    ThrottleReason.SYNC_BOOST: "sync_boost",
    ThrottleReason.SW_THERMAL: "sw_thermal_slowdown",
    ThrottleReason.HW_THERMAL: "hw_thermal_slowdown",
    ThrottleReason.HW_POWER_BRAKE: "hw_power_brake_slowdown",
}


def smi_path(reason: str, word: str) -> str:
    """Return where nvidia-smi writes a reason; it called them throttle reasons before 535."""
    return f"clocks_{word}_reasons/clocks_{word}_reason_{reason}"


@needs_cuda
def test_links_limits_rows_and_throttling_are_those_of_nvidia_smi(
    inbox: socket.socket, busy: Callable[[], int]
) -> None:
    busy()

    def first_busy() -> GpuFigures | None:
        found = [gpu.figures for gpu in sample(inbox).gpus if (gpu.figures.busy_frac or 0) > 0.9]
        return found[0] if found else None

    figures = until(first_busy, PATIENCE_S, "a busy GPU")
    assert figures is not None
    said = smi(figures.uuid)
    assert figures.pcie is not None
    known = {"pci/pci_gpu_link_info/link_widths/current_link_width", "pci/pci_gpu_link_info/pcie_gen/current_link_gen"}
    assert known < said.keys(), sorted(said)
    assert {smi_path("hw_slowdown", word) for word in ("event", "throttle")} & said.keys(), sorted(said)
    rest: dict[str, tuple[object, object]] = {}

    def is_the_same() -> bool:
        # Clocks, and so reasons, change from one moment to the next.
        nonlocal rest
        now = first_busy()
        rest = {"busy": (now, True)} if now is None else differing(now, smi(now.uuid))
        return not rest

    try:
        until(is_the_same, 20.0, "figures of one moment")
    except AssertionError:
        raise AssertionError(f"ours and nvidia-smi's: {rest}") from None
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    rows = [line for line in topology.splitlines() if line.startswith("GPU0")]
    if figures.numa_node is not None and rows and "NUMA Affinity" in topology:
        assert str(figures.numa_node) in [cell.strip() for cell in rows[0].split("\t")]


@needs_cuda
def test_another_process_on_a_rank_s_gpu_is_counted(inbox: socket.socket, busy: Callable[[], int]) -> None:
    rank = RankProcess(JobRank("job", 0), 0, busy())
    signals = GpuSignals()

    def others() -> float | None:
        reports = gpu_reports(until(lambda: sample(inbox).gpus, PATIENCE_S, "a sample"), [rank])
        found = {signal: value for _, signal, value in signals.values(reports, time.monotonic())}
        return found.get(Signal.GPU_OTHERS)

    until(lambda: any(gpu.processes for gpu in sample(inbox).gpus), PATIENCE_S, "a process on the GPU")
    before = others()
    if before is None:
        pytest.skip("the driver names pids of another namespace: nobody can be told from the rank")
    busy()
    assert until(lambda: others() == before + 1, PATIENCE_S, "another process beside the rank")


def test_each_call_of_the_sampler_is_made_so_rarely_that_it_costs_little() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.nvml_costs"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    sys.stdout.write(done.stdout)
    assert "of the time." in done.stdout
    share = re.search(r"([0-9.]+) % of the time", done.stdout)
    assert share is not None
    assert float(share[1]) < 2.0, done.stdout
