"""The library without GPUs speaks NVML's ABI, by what the real pynvml knows of it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pynvml  # type: ignore[import-untyped]
import pytest

from tests.support.nvml.stub import LIBRARY, Stub, h100, in_parts, library_dir, mig
from tests.support.nvml_recordings import GIB, GPU_IS_LOST, REPLAY_DIR, recording, uuid

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 20.0
UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, VERSION_MISMATCH = 1, 2, 3, 25
LAYOUTS = {
    "nvmlMemory_t": pynvml.c_nvmlMemory_t,
    "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
    "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
    "nvmlProcessInfo_v2_t": pynvml.c_nvmlProcessInfo_v3_t,
    "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
    "nvmlEventData_t": pynvml.c_nvmlEventData_t,
    "nvmlFieldValue_t": pynvml.c_nvmlFieldValue_t,
}

ASK = """
import json, sys
import pynvml as n

def said(call):
    try:
        return call()
    except n.NVMLError as error:
        return {"error": error.value}

def struct(found):
    return {name: getattr(found, name) for name, *_ in found._fields_}

def processes(call, handle):
    return [[p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId] for p in call(handle)]

found = {"early": said(n.nvmlDeviceGetCount)}
n.nvmlInit()
found["count"], found["driver"] = n.nvmlDeviceGetCount(), n.nvmlSystemGetDriverVersion()
one, two = (n.nvmlDeviceGetHandleByIndex(at) for at in range(2))
found["third"] = said(lambda: n.nvmlDeviceGetHandleByIndex(2))
for name in sys.argv[1:]:
    call, _, rest = name.partition("(")
    found[name] = said(lambda: getattr(n, call)(one, *map(int, rest.rstrip(")").split(", ")) if rest else ()))
found["memory"] = struct(n.nvmlDeviceGetMemoryInfo(one))
found["memory_v2"] = struct(n.nvmlDeviceGetMemoryInfo(one, n.nvmlMemory_v2))
found["memory_v9"] = said(lambda: n.nvmlDeviceGetMemoryInfo(one, 9))
found["busy"] = struct(n.nvmlDeviceGetUtilizationRates(one))
pci = n.nvmlDeviceGetPciInfo(one)
found["pci"] = [pci.busId, pci.busIdLegacy, pci.domain, pci.bus, pci.device]
found["compute"] = processes(n.nvmlDeviceGetComputeRunningProcesses_v3, one)
found["mps"] = processes(n.nvmlDeviceGetMPSComputeRunningProcesses_v3, one)
fields = n.nvmlDeviceGetFieldValues(one, [91, (165, 3), (161, 2), (163, 0), 9999])
found["fields"] = [[f.fieldId, f.scopeId, f.nvmlReturn, f.valueType, f.value.ullVal] for f in fields]
(part,) = [n.nvmlDeviceGetMigDeviceHandleByIndex(two, at) for at in range(1)]
found["no_part"] = said(lambda: n.nvmlDeviceGetMigDeviceHandleByIndex(two, 1))
found["part"] = [n.nvmlDeviceGetUUID(part), n.nvmlDeviceGetMemoryInfo(part).used, n.nvmlDeviceGetMigMode(two)]
found["of_part"] = processes(n.nvmlDeviceGetComputeRunningProcesses_v3, part)
events = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(two, n.nvmlEventTypeXidCriticalError, events)
found["no_event"] = said(lambda: n.nvmlEventSetWait_v2(events, 1))
print(json.dumps(found), flush=True)
sys.stdin.readline()
event = n.nvmlEventSetWait_v2(events, 20000)
print(json.dumps([n.nvmlDeviceGetUUID(event.device), event.eventType, event.eventData]), flush=True)
sys.stdin.readline()
print(json.dumps([said(lambda: n.nvmlEventSetWait_v2(events, 1)), said(lambda: n.nvmlDeviceGetName(two)),
                  said(lambda: n.nvmlDeviceGetName(one))]), flush=True)
sys.stdin.readline()
gone = said(lambda: n.nvmlDeviceGetName(one))
n.nvmlInit()
print(json.dumps([gone, said(lambda: n.nvmlDeviceGetName(one))]), flush=True)
"""
FIGURES = {
    "nvmlDeviceGetUUID": uuid(0),
    "nvmlDeviceGetPowerUsage": 612_401,
    "nvmlDeviceGetEnforcedPowerLimit": 700_002,
    "nvmlDeviceGetTemperature(0)": 63,
    "nvmlDeviceGetClockInfo(1)": 1984,
    "nvmlDeviceGetClockInfo(2)": 2615,
    "nvmlDeviceGetMaxClockInfo(1)": 1986,
    "nvmlDeviceGetMaxClockInfo(2)": 2617,
    "nvmlDeviceGetCurrentClocksEventReasons": 2**40 + 0x68,
    "nvmlDeviceGetTotalEccErrors(0, 0)": 2**33 + 9,
    "nvmlDeviceGetTotalEccErrors(1, 0)": 10,
    "nvmlDeviceGetRemappedRows": [11, 12, 13, 14],
    "nvmlDeviceGetMigMode": [0, 1],
    "nvmlDeviceGetCurrPcieLinkGeneration": 3,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPcieReplayCounter": 17,
    "nvmlDeviceGetNvLinkState(3)": 1,
}
MEMORY = "nvmlDeviceGetMemoryInfo"
ABSENT = "nvmlDeviceGetPerformanceState"
OF_GPU = [{"pid": 4711, "usedGpuMemory": 2**35, "gpuInstanceId": 3, "computeInstanceId": 4}, {"pid": 4712}]


def test_layouts_are_those_of_pynvml() -> None:
    library = ctypes.CDLL(str(library_dir() / LIBRARY))
    library.stubAbi.restype = ctypes.c_char_p
    lines = [line.split() for line in library.stubAbi().decode().splitlines() if line]

    theirs = [[name, f"size={ctypes.sizeof(layout)}", *fields_of(layout)] for name, layout in LAYOUTS.items()]
    assert lines == theirs


def fields_of(layout: Any) -> list[str]:
    fields = {name: getattr(layout, name) for name, *_ in layout._fields_}
    return [f"{name}={field.offset}+{field.size}" for name, field in fields.items()]


def test_no_call_writes_past_the_end_of_what_it_is_given(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "gpus", recording(h100(0, OF_GPU)))
    program = """
import ctypes, pynvml
pynvml.nvmlInit()
library, handle = pynvml.nvmlLib, pynvml.nvmlDeviceGetHandleByIndex(0)
def guarded(name, size, *more, first=b""):
    room = ctypes.create_string_buffer(first + b"\\xaa" * (size + 64 - len(first)), size + 64)
    assert getattr(library, name)(handle, *more, room) == 0, name
    assert room.raw[size:] == b"\\xaa" * 64, name
    assert room.raw[:size] != b"\\xaa" * size, name
guarded("nvmlDeviceGetMemoryInfo", 24)
guarded("nvmlDeviceGetMemoryInfo_v2", 40, first=pynvml.nvmlMemory_v2.to_bytes(4, "little"))
guarded("nvmlDeviceGetUtilizationRates", 8)
guarded("nvmlDeviceGetPciInfo_v3", 68)
guarded("nvmlDeviceGetPowerUsage", 4)
guarded("nvmlDeviceGetCurrentClocksEventReasons", 8)
guarded("nvmlDeviceGetTotalEccErrors", 8, 0, 0)
guarded("nvmlDeviceGetFieldValues", 40, 1, first=(91).to_bytes(4, "little"))
guarded("nvmlDeviceGetComputeRunningProcesses_v3", 48, ctypes.byref(ctypes.c_uint(2)))
guarded("nvmlDeviceGetComputeRunningProcesses", 32, ctypes.byref(ctypes.c_uint(2)))
name = ctypes.create_string_buffer(8)
assert library.nvmlDeviceGetName(handle, name, 8) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE and not name.value
"""
    subprocess.run([sys.executable, "-c", program], env=os.environ | stub.environ(), check=True, timeout=PATIENCE_S)


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    """Return all that pynvml learns, with the answers to three changes."""
    first = h100(0, OF_GPU, **FIGURES) | {
        "nvmlDeviceGetMemoryInfo": {"total": 90 * GIB, "free": 21 * GIB, "used": 68 * GIB, "reserved": GIB},
        "nvmlDeviceGetUtilizationRates": {"gpu": 91, "memory": 37},
        "nvmlDeviceGetFieldValues(161, 2)": 2**40,
        "nvmlDeviceGetFieldValues(163, 0)": "7+0",
    }
    stub = Stub(tmp_path / "gpus", recording(first, in_parts(1, mig(1, 5, [{"pid": 4713, "usedGpuMemory": GIB}]))))
    program = subprocess.Popen(
        [sys.executable, "-c", ASK, *FIGURES, ABSENT],
        env=os.environ | stub.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdin is not None
        assert program.stdout is not None

        def answer() -> Any:
            return json.loads(program.stdout.readline())  # type: ignore[union-attr]

        def go_on() -> None:
            program.stdin.write("\n")  # type: ignore[union-attr]
            program.stdin.flush()  # type: ignore[union-attr]

        found: dict[str, Any] = answer()
        stub.log(0, 13)  # of a GPU whose events nobody wants
        stub.log(1, 94)
        go_on()
        found["event"] = answer()
        stub.lose(1)
        stub.content["events"].pop()
        stub.write()
        go_on()
        found["lost"] = answer()
        stub.restart_driver()
        go_on()
        found["restarted"] = answer()
    return found


def test_pynvml_reads_every_figure_as_it_was_written(told: dict[str, Any]) -> None:
    assert {name: told[name] for name in FIGURES} == FIGURES
    assert told[ABSENT] == {"error": NOT_SUPPORTED}
    assert told["early"] == {"error": UNINITIALIZED}
    assert (told["count"], told["driver"], told["third"]) == (2, "550.127.05", {"error": INVALID_ARGUMENT})
    assert told["memory"] == {"total": 90 * GIB, "free": 21 * GIB, "used": 68 * GIB}
    assert told["memory_v2"] == {**told["memory"], "reserved": GIB, "version": pynvml.nvmlMemory_v2}
    assert told["memory_v9"] == {"error": VERSION_MISMATCH}
    assert told["busy"] == {"gpu": 91, "memory": 37}
    assert told["pci"] == ["00000000:18:00.0", "0000:18:00.0", 0, 0x18, 0]
    assert told["fields"] == [
        [91, 0, 0, 1, 18],
        [165, 3, 0, 1, 1],
        [161, 2, 0, 3, 2**40],
        [163, 0, 0, 1, 7],
        [9999, 0, NOT_SUPPORTED, 1, 0],
    ]


def test_pynvml_finds_processes_and_parts(told: dict[str, Any]) -> None:
    assert told["compute"] == [[4711, 2**35, 3, 4], [4712, None, 2**32 - 1, 2**32 - 1]]
    assert told["mps"] == []
    assert told["part"] == [f"MIG-{1:08x}-0000-0000-0000-{5:012x}", 2 * GIB, [1, 1]]
    assert told["of_part"] == [[4713, GIB, 2**32 - 1, 2**32 - 1]]
    assert told["no_part"] == {"error": pynvml.NVML_ERROR_NOT_FOUND}


def test_pynvml_gets_events_the_loss_of_a_gpu_and_a_driver_s_restart(told: dict[str, Any]) -> None:
    assert told["no_event"] == {"error": pynvml.NVML_ERROR_TIMEOUT}
    assert told["event"] == [uuid(1), pynvml.nvmlEventTypeXidCriticalError, 94]
    lost = {"error": GPU_IS_LOST}
    assert told["lost"] == [lost, lost, "NVIDIA H100 80GB HBM3"]
    assert told["restarted"] == [{"error": UNINITIALIZED}, "NVIDIA H100 80GB HBM3"]


def test_a_recording_of_it_is_what_it_was_given(tmp_path: Path) -> None:
    given = recording(h100(0, OF_GPU[:1]), in_parts(1, mig(1, 5)))
    stub = Stub(tmp_path / "gpus", given)

    done = subprocess.run(
        [sys.executable, str(REPLAY_DIR / "record.py")],
        env=os.environ | stub.environ(),
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )

    recorded = json.loads(done.stdout)
    assert recorded["system"]["nvmlDeviceGetCount"] == 2
    for seen, device in zip(recorded["devices"], given["devices"], strict=True):
        known = {key: answer for key, answer in seen.items() if key in device and key not in {"migs", MEMORY}}
        assert len(known) > 20
        assert known == {key: device[key] for key in known}
        assert {**device[MEMORY], **seen[MEMORY]} == device[MEMORY], "v1 has no reserved bytes"
    (part,) = recorded["devices"][1]["migs"]
    assert part["nvmlDeviceGetUUID"] == given["devices"][1]["migs"][0]["nvmlDeviceGetUUID"]
    assert recorded["devices"][0]["nvmlDeviceGetMaxMigDeviceCount"] == {"error": NOT_SUPPORTED}
