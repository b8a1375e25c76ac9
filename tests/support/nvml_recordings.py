"""Recordings of NVML to replay in the sampler, and what a test changes in them while it replays.

The figures are those that public listings of nvidia-smi give for an A100; `nvml/record.py` writes a recording of the
machine it runs on in the same form.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

REPLAY_DIR = Path(__file__).parent / "nvml"
GIB = 2**30
NOT_SUPPORTED, GPU_IS_LOST, DRIVER_NOT_LOADED, UNKNOWN = 3, 15, 9, 999


def uuid(index: int) -> str:
    """Return the UUID of a recorded GPU."""
    return f"GPU-{index:08x}-1111-2222-3333-444444444444"


def a100(index: int, processes: list[dict[str, Any]] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the answers of a busy A100; `processes` as `{"pid": ..., "usedGpuMemory": ...}`."""
    answers = {
        "nvmlDeviceGetUUID": uuid(index),
        "nvmlDeviceGetName": "NVIDIA A100-SXM4-40GB",
        "nvmlDeviceGetUtilizationRates": {"gpu": 97, "memory": 61},
        "nvmlDeviceGetMemoryInfo": {"total": 40 * GIB, "used": 31 * GIB, "free": 9 * GIB},
        "nvmlDeviceGetTemperature(0)": 54,
        "nvmlDeviceGetPowerUsage": 318_412,
        "nvmlDeviceGetEnforcedPowerLimit": 400_000,
        "nvmlDeviceGetClockInfo(1)": 1335,
        "nvmlDeviceGetClockInfo(2)": 1215,
        "nvmlDeviceGetMaxClockInfo(1)": 1410,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x04,
        "nvmlDeviceGetTotalEccErrors(0, 0)": 2,
        "nvmlDeviceGetTotalEccErrors(1, 0)": 0,
        "nvmlDeviceGetRemappedRows": [0, 0, 0, 0],
        "nvmlDeviceGetMigMode": [0, 0],
        "nvmlDeviceGetComputeRunningProcesses_v3": processes or [],
        "nvmlDeviceGetMPSComputeRunningProcesses_v3": [],
    }
    return answers | changes


def recording(*devices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a machine with these GPUs."""
    system = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": len(devices),
        "nvmlSystemGetDriverVersion": "550.127.05",
        "nvmlEventSetCreate": 1,
    }
    return {"source": "public listings", "system": system | changes, "devices": list(devices), "events": []}


class Replay:
    """A recording on disk, and the environment in which a sampler replays it."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content
        self.write()

    def write(self) -> None:
        """Let the sampler see the content as it is now, whole."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content))
        temporary.replace(self.path)

    def environ(self) -> dict[str, str]:
        """Return the environment of whoever starts the sampler."""
        return {**os.environ, "PYTHONPATH": str(REPLAY_DIR), "NVML_RECORDING": str(self.path)}
