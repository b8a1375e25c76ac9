"""The GPUs of this node, as the agent's own sampler sees them: one sample of a process that may hang in the driver."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agent.doctor.interpreter import END_S
from agent.node_state.gpu_sample import MAX_SAMPLE_BYTES, SAMPLE_VERSION, GpuSample, MalformedSampleError, decode_sample
from agent.wire.examination import Health, Row
from agent.wire.machine import GpuCondition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.doctor.interpreter import Interpreter
    from agent.node_state.gpu_sample import SampledGpu

ANSWER_S = 15.0
"""Seconds to wait: without persistence mode a driver loads at the first question, for seconds a GPU."""
MAX_NAMED = 3
PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
"""Source: PCI Code and ID Assignment Specification, class 03h: VGA and 3D controllers."""


def sample_gpus(timeout_s: float = ANSWER_S) -> GpuSample | None:
    """Return one sample; None when NVML does not answer in time."""
    try:
        return _sample(timeout_s)
    except OSError as error:
        return GpuSample(SAMPLE_VERSION, os.getpid(), f"its answer cannot be received: {error}"[:1024])


def _sample(timeout_s: float) -> GpuSample | None:
    with (
        tempfile.TemporaryDirectory(prefix="rd-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as inbox,
    ):
        path = f"{directory}/inbox"
        inbox.bind(path)
        sampler = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.machine.gpu_sampler", path, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            return _first_sample(inbox, sampler, time.monotonic() + timeout_s)
        finally:
            sampler.kill()
            try:
                sampler.wait(END_S)
            except subprocess.TimeoutExpired:
                sampler.returncode = 0  # it hangs in the kernel, and ends when it can


def _first_sample(inbox: socket.socket, sampler: subprocess.Popen[bytes], deadline_s: float) -> GpuSample | None:
    inbox.settimeout(0.2)
    while time.monotonic() < deadline_s:
        has_ended = sampler.poll() is not None
        try:
            return decode_sample(inbox.recv(MAX_SAMPLE_BYTES + 1))
        except TimeoutError:
            if has_ended:
                return None
        except MalformedSampleError:
            continue
    return None


def gpu_rows(sample: GpuSample | None, interpreter: Interpreter, pci_devices: Path = PCI_DEVICES) -> Iterator[Row]:
    """Yield the rows about GPUs; `sample` is None when NVML did not answer."""
    if sample is None:
        todo = "look at dmesg for NVRM, and try: nvidia-smi"
        yield Row("gpus", Health.BAD, "the NVIDIA driver does not answer", todo)
        return
    if sample.unavailable:
        num_plugged_in = _count_nvidia(pci_devices)
        if num_plugged_in:
            detail = f"{num_plugged_in} plugged in, and none to be used: {sample.unavailable}"
            yield Row("gpus", Health.BAD, detail, "mend the driver, and try: nvidia-smi")
        else:
            yield Row("gpus", Health.OK, f"none: {sample.unavailable}")
        return
    yield _found_row(sample)
    yield from _use_rows(sample)
    if interpreter.num_gpus and not interpreter.nccl:
        detail = f"torch {interpreter.torch} has no NCCL: its ranks on GPUs would speak over the CPU, by gloo"
        yield Row("torch_gpus", Health.WARN, detail, "install another build of torch")
    if interpreter.num_gpus == 0:
        built = f"built for {interpreter.cuda}" if interpreter.cuda else "built without CUDA"
        detail = f"torch {interpreter.torch} can use none of the {len(sample.gpus)} GPUs ({built})"
        todo = f"install a torch that goes with driver {sample.driver_version or 'there'}; is CUDA_VISIBLE_DEVICES set?"
        yield Row("torch_gpus", Health.BAD, detail, todo)


def _found_row(sample: GpuSample) -> Row:
    broken = [gpu.figures for gpu in sample.gpus if gpu.figures.condition is not GpuCondition.OK]
    if broken:
        named = ", ".join(f"GPU {figures.index} is {figures.condition}" for figures in broken[:MAX_NAMED])
        more = f" and {len(broken) - MAX_NAMED} more" if len(broken) > MAX_NAMED else ""
        todo = "reset it (nvidia-smi --gpu-reset), or reboot and look at dmesg for Xid"
        return Row("gpus", Health.BAD, f"{named}{more}, of {len(sample.gpus)}", todo)
    return Row("gpus", Health.OK, f"{models_text(models(sample))}, driver {sample.driver_version or 'unknown'}")


def _use_rows(sample: GpuSample) -> Iterator[Row]:
    """Yield the processes that use GPUs already."""
    used = [gpu for gpu in sample.gpus if gpu.processes]
    if used:
        holders = "; ".join(map(_holder_text, used[:MAX_NAMED]))
        more = f"; {len(used) - MAX_NAMED} more" if len(used) > MAX_NAMED else ""
        yield Row("gpu_use", Health.WARN, f"{holders}{more}", "end it, or let it finish: it takes memory and time")


def _holder_text(gpu: SampledGpu) -> str:
    largest = gpu.processes[0]
    memory = "" if largest.used_bytes is None else f" with {largest.used_bytes >> 20} MiB"
    job = f" of job {largest.job_id}" if largest.job_id else ""
    return f"pid {largest.pid}{job} is on GPU {gpu.figures.index}{memory}"


def models(sample: GpuSample | None) -> list[str]:
    return [] if sample is None else [gpu.figures.name for gpu in sample.gpus]


def models_text(names: list[str]) -> str:
    """Return `8 x NVIDIA H200`, kind by kind."""
    kinds = list(dict.fromkeys(names))
    return ", ".join(f"{names.count(kind)} x {kind or 'unknown'}" for kind in kinds)


def _count_nvidia(pci_devices: Path) -> int:
    """Return how many of NVIDIA's GPUs are plugged in, with or without a driver."""
    count = 0
    for device in pci_devices.glob("*"):
        try:
            is_nvidia = (device / "vendor").read_text().strip() == _NVIDIA
            count += is_nvidia and (device / "class").read_text().startswith(_DISPLAY_CLASSES)
        except OSError:
            continue
    return count
