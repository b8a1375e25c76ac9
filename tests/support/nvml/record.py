"""Writes down what NVML says on a real machine, for `sitecustomize` to replay: `python record.py > FILE.json`."""

import json
import sys
from typing import Any

import pynvml  # type: ignore[import-untyped]

SYSTEM_CALLS = (
    ("nvmlInit", ()),
    ("nvmlDeviceGetCount", ()),
    ("nvmlSystemGetDriverVersion", ()),
    ("nvmlEventSetCreate", ()),
)
DEVICE_CALLS = (
    ("nvmlDeviceGetUUID", ()),
    ("nvmlDeviceGetName", ()),
    ("nvmlDeviceGetUtilizationRates", ()),
    ("nvmlDeviceGetMemoryInfo", ()),
    ("nvmlDeviceGetTemperature", (pynvml.NVML_TEMPERATURE_GPU,)),
    ("nvmlDeviceGetPowerUsage", ()),
    ("nvmlDeviceGetEnforcedPowerLimit", ()),
    ("nvmlDeviceGetClockInfo", (pynvml.NVML_CLOCK_SM,)),
    ("nvmlDeviceGetClockInfo", (pynvml.NVML_CLOCK_MEM,)),
    ("nvmlDeviceGetMaxClockInfo", (pynvml.NVML_CLOCK_SM,)),
    ("nvmlDeviceGetCurrPcieLinkGeneration", ()),
    ("nvmlDeviceGetMaxPcieLinkGeneration", ()),
    ("nvmlDeviceGetGpuMaxPcieLinkGeneration", ()),
    ("nvmlDeviceGetCurrPcieLinkWidth", ()),
    ("nvmlDeviceGetMaxPcieLinkWidth", ()),
    ("nvmlDeviceGetPcieReplayCounter", ()),
    ("nvmlDeviceGetCurrentClocksEventReasons", ()),
    ("nvmlDeviceGetCurrentClocksThrottleReasons", ()),
    ("nvmlDeviceGetTotalEccErrors", (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC)),
    ("nvmlDeviceGetTotalEccErrors", (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)),
    ("nvmlDeviceGetRemappedRows", ()),
    ("nvmlDeviceGetMigMode", ()),
    ("nvmlDeviceGetMaxMigDeviceCount", ()),
    ("nvmlDeviceGetComputeRunningProcesses_v3", ()),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", ()),
)


def answer(name: str, *arguments: Any) -> Any:
    """Return what a call says, or the error that it raises."""
    try:
        return plain(getattr(pynvml, name)(*arguments))
    except pynvml.NVMLError as error:
        return {"error": error.value}


def plain(value: Any) -> Any:
    """Return a value of ctypes or NVML as JSON's types."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "_fields_"):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, (int, float, str)) or value is None:
        return value
    return {name: plain(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else None


def record() -> dict[str, Any]:
    """Ask everything that the sampler asks."""
    system = {name: answer(name, *arguments) for name, arguments in SYSTEM_CALLS}
    count = system["nvmlDeviceGetCount"]
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count if isinstance(count, int) else 0)]
    return {"source": "recorded", "system": system, "devices": [of_device(handle) for handle in handles], "events": []}


def of_device(handle: Any) -> dict[str, Any]:
    """Ask a GPU and its MIG instances."""
    answers = {key(name, arguments): answer(name, handle, *arguments) for name, arguments in DEVICE_CALLS}
    most = answers["nvmlDeviceGetMaxMigDeviceCount"]
    answers["migs"] = []
    for index in range(most if isinstance(most, int) else 0):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError:
            continue
        answers["migs"].append({key(name, rest): answer(name, mig, *rest) for name, rest in DEVICE_CALLS})
    return answers


def key(name: str, arguments: tuple[int, ...]) -> str:
    """Return the key of a call in a recording."""
    return f"{name}({', '.join(map(str, arguments))})" if arguments else name


if __name__ == "__main__":
    json.dump(record(), sys.stdout, indent=1)
