"""GPUs without a GPU: `libnvidia-ml.so.1` of `stub.c`, which the real pynvml loads, and the file that it answers from.

A machine is a recording (`nvml_recordings.recording`): an answer is a value, `{"error": 15}` as NVML's return code,
`{"hang": true}`, `{"exit": 3}`, or `{"late_ms": 200, "value": ...}`. The library reads the file at each call, so a test
changes it while a program runs. `"7+2.5"` is a number that grows by 2.5 a second.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.nvml_recordings import GIB, GPU_IS_LOST, uuid

SOURCE = Path(__file__).with_name("stub.c")
LIBRARY = "libnvidia-ml.so.1"
_BUILD_DIR = Path(__file__).parents[3] / "build" / "nvml-stub"
_FIELDS = {
    "nvmlDeviceGetMemoryInfo": ("total", "free", "used", "reserved"),
    "nvmlDeviceGetUtilizationRates": ("gpu", "memory"),
}
_PROCESS_FIELDS = ("pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId")
_UNKNOWN_BYTES = 2**64 - 1
_NO_INSTANCE = 2**32 - 1
NVLINK_COUNT, NVLINK_STATE, NVLINK_REPLAY, NVLINK_RECOVERY, NVLINK_CRC = 91, 165, 161, 162, 163
"""Fields of nvmlDeviceGetFieldValues; all but the first are of a link."""
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x04, 0x08, 0x20, 0x40, 0x80
DRIVER_FILES = """
set -e
mkdir /run/dev
mount --rbind /dev /run/dev
mount -t tmpfs -o mode=755 tmpfs /dev
for name in null zero full random urandom tty; do
  touch /dev/$name
  mount --bind /run/dev/$name /dev/$name
done
mkdir /dev/shm
mount --rbind /run/dev/shm /dev/shm
ln -s /proc/self/fd /dev/fd
touch /dev/nvidia0
"""
"""For a shell of a testbed's host: gives it a /dev of its own, with a file of the driver that programs can open."""


@cache
def library_dir() -> Path:
    """Return the folder of the compiled library; it is compiled once for each content of its source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no C compiler for this test")
        pytest.skip("no C compiler (gcc, libc6-dev)")
    folder = _BUILD_DIR / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    if not (folder / LIBRARY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.so"
        flags = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
        subprocess.run([compiler, *flags, "-o", str(unfinished), str(SOURCE)], check=True)
        unfinished.rename(folder / LIBRARY)
    return folder


def h100(index: int, processes: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the answers of a busy H100 with 18 NVLinks; figures as public listings of nvidia-smi give them."""
    answers = {
        "nvmlDeviceGetUUID": uuid(index),
        "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetPciInfo": f"00000000:{0x18 + 0x10 * index:02X}:00.0",
        "nvmlDeviceGetUtilizationRates": {"gpu": 98, "memory": 44},
        "nvmlDeviceGetMemoryInfo": {"total": 80 * GIB, "free": 23 * GIB, "used": 56 * GIB, "reserved": GIB},
        "nvmlDeviceGetTemperature(0)": 61,
        "nvmlDeviceGetPowerUsage": 612_400,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetClockInfo(1)": 1980,
        "nvmlDeviceGetClockInfo(2)": 2619,
        "nvmlDeviceGetMaxClockInfo(1)": 1980,
        "nvmlDeviceGetMaxClockInfo(2)": 2619,
        "nvmlDeviceGetCurrentClocksEventReasons": 0,
        "nvmlDeviceGetTotalEccErrors(0, 0)": 0,
        "nvmlDeviceGetTotalEccErrors(1, 0)": 0,
        "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetCurrPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetCurrPcieLinkWidth": 16,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetPcieReplayCounter": 0,
        f"nvmlDeviceGetFieldValues({NVLINK_COUNT})": 18,
        f"nvmlDeviceGetFieldValues({NVLINK_STATE})": 1,
        f"nvmlDeviceGetFieldValues({NVLINK_REPLAY})": 0,
        f"nvmlDeviceGetFieldValues({NVLINK_RECOVERY})": 0,
        f"nvmlDeviceGetFieldValues({NVLINK_CRC})": 0,
        "nvmlDeviceGetComputeRunningProcesses_v3": processes or [],
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
    }
    return answers | changes


def mig(gpu: int, number: int, processes: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the answers of an instance of a GPU in MIG mode."""
    return {
        "nvmlDeviceGetUUID": f"MIG-{gpu:08x}-0000-0000-0000-{number:012x}",
        "nvmlDeviceGetMemoryInfo": {"total": 10 * GIB, "free": 8 * GIB, "used": 2 * GIB, "reserved": 0},
        "nvmlDeviceGetComputeRunningProcesses_v3": processes or [],
    }


def in_parts(index: int, *instances: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of an H100 in MIG mode, which has no utilization."""
    changes: dict[str, Any] = {
        "nvmlDeviceGetMigMode": [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        "migs": list(instances),
    }
    return h100(index) | changes | {"nvmlDeviceGetUtilizationRates": {"error": 3}}


class Stub:
    """A machine's GPUs as the library shows them; `content` is a recording, written by `write`."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self.write()

    def environ(self) -> dict[str, str]:
        """Return what the environment of a program needs, to see these GPUs."""
        paths = [str(library_dir()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"LD_LIBRARY_PATH": ":".join(paths), "NVML_STUB": str(self.path)}

    def write(self) -> None:
        """Let the library see the content as it is now, whole."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in _lines(self.content)))
        # The clock of a file system may tick every few milliseconds, and a new file may get the number of an old one.
        os.utime(temporary, ns=(time.monotonic_ns(), time.monotonic_ns()))
        temporary.replace(self.path)

    def change(self, gpu: int, **answers: Any) -> None:
        """Let a GPU answer otherwise from now on; None takes an answer away."""
        device = self.content["devices"][gpu]
        device.update(answers)
        self.content["devices"][gpu] = {key: answer for key, answer in device.items() if answer is not None}
        self.write()

    def lose(self, gpu: int, xid: int = 79) -> None:
        """Let a GPU fall off the bus: the driver logs it, and each call says so."""
        self.content["events"].append({"device": gpu, "xid": xid})
        self.change(gpu, **{"*": {"error": GPU_IS_LOST}})

    def log(self, gpu: int, *xids: int) -> None:
        """Let the driver log errors of a GPU."""
        self.content["events"] += [{"device": gpu, "xid": xid} for xid in xids]
        self.write()

    def restart_driver(self, **system: Any) -> None:
        """End what programs have opened: each call says UNINITIALIZED until the next nvmlInit."""
        self.content["system"].update(system)
        self.content["system"]["generation"] = self.content["system"].get("generation", 0) + 1
        self.write()


def _lines(content: dict[str, Any]) -> list[str]:
    # The library counts the GPUs that it has, unless it is to say otherwise.
    count = content["system"].get("nvmlDeviceGetCount")
    counted = {"nvmlDeviceGetCount"} if isinstance(count, int) and count else set()
    lines = _answers("system", {key: answer for key, answer in content["system"].items() if key not in counted})
    for gpu, device in enumerate(content["devices"]):
        lines += _answers(str(gpu), device)
        for number, instance in enumerate(device.get("migs", ())):
            lines += _answers(f"{gpu}.{number}", instance)
    return lines + [f"event\t{event['device']}\t{event['xid']}" for event in content["events"]]


def _answers(where: str, answers: dict[str, Any]) -> list[str]:
    return [
        f"{where}\t{key.removesuffix('_v3')}\t{_answer(key, answer)}"
        for key, answer in answers.items()
        if key != "migs"
    ]


def _answer(key: str, answer: Any) -> str:
    if isinstance(answer, dict):
        for fault in ("error", "hang", "exit"):
            if fault in answer:
                return f"!{fault} {int(answer[fault])}"
        if "late_ms" in answer:
            return f"!late {answer['late_ms']} {_answer(key, answer['value'])}"
        return " ".join(str(answer.get(name, 0)) for name in _FIELDS[key])
    if isinstance(answer, list):
        return " ".join(_process(item) if isinstance(item, dict) else str(item) for item in answer)
    return "" if answer is None else str(answer)


def _process(process: dict[str, Any]) -> str:
    used = process.get("usedGpuMemory")
    defaults = {"gpuInstanceId": _NO_INSTANCE, "computeInstanceId": _NO_INSTANCE}
    values = {**defaults, **process, "usedGpuMemory": _UNKNOWN_BYTES if used is None else used}
    return " ".join(str(values[name]) for name in _PROCESS_FIELDS)
