"""The sampler on the real NVML, and torch's allocator on a real GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from agent.node_state.gpu_sample import GpuSample, decode_sample
from agent.wire.machine import GpuCondition
from tests.support.nvml_recordings import REPLAY_DIR
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        assert 0 < (figures.memory_used_bytes or 0) <= (figures.memory_total_bytes or 0)
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
            assert (gpu.figures.memory_used_bytes or 0) >= reserved
            return any((process.used_bytes or 0) >= reserved for process in gpu.processes if process.pid == program.pid)

        if str(Path("/proc/self/ns/pid").readlink()) == "pid:[4026531836]":
            assert until(gpu_of_program, PATIENCE_S, "the program among the GPU's processes")
        else:
            gpu_of_program()  # in a container the driver may know the program by another pid
    finally:
        program.communicate()


def test_the_recorder_writes_what_the_replay_reads() -> None:
    done = subprocess.run(
        [sys.executable, str(REPLAY_DIR / "record.py")], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    recorded = json.loads(done.stdout)
    assert recorded["system"]["nvmlDeviceGetCount"] == len(recorded["devices"])
    assert all(device["nvmlDeviceGetUUID"].startswith("GPU-") for device in recorded["devices"])
