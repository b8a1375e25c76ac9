"""Replays a recording of NVML in the GPU sampler: this directory goes on its PYTHONPATH, the file in NVML_RECORDING.

Python imports this module at start. The real `pynvml` stays, with its errors and constants; only what would call into
the driver's library is replaced. The recording is read again whenever it changes, so a test can let a GPU get lost.

An answer is a value, `{"error": 15}` as NVML's return code, `{"hang": true}`, or `{"exit": 3}`. What is not in the
recording is not supported.
"""

import ctypes
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

POLL_S = 0.02
MIG_PLACE = 1000


class Recording:
    """The file as it is now."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int] = (0, 0)
        self._content: dict[str, Any] = {}
        self.num_events_told = 0

    def content(self) -> dict[str, Any]:
        """Return the recording."""
        found = os.stat(self._path)  # noqa: PTH116 - no more imports than the sampler has
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp != self._stamp:
            with open(self._path, encoding="utf-8") as file:  # noqa: PTH123 - as above
                self._content = json.load(file)
            self._stamp = stamp
        return self._content

    def part(self, place: int) -> dict[str, Any]:
        """Return the answers of a GPU, or of a MIG instance."""
        device = self.content()["devices"][place % MIG_PLACE - 1]
        mig = place // MIG_PLACE
        part: dict[str, Any] = device["migs"][mig - 1] if mig else device
        return part


def replay(pynvml: Any, recording: Recording) -> None:  # noqa: C901, PLR0915 - one small function for each kind of call
    """Replace every call into the library."""

    def answered(answer: Any) -> Any:
        if isinstance(answer, dict):
            if "error" in answer:
                raise pynvml.NVMLError(answer["error"])
            if "hang" in answer:
                time.sleep(3600)
            if "exit" in answer:
                os._exit(answer["exit"])
            return SimpleNamespace(**answer)
        if isinstance(answer, list) and answer and isinstance(answer[0], dict):
            return [SimpleNamespace(**item) for item in answer]
        return answer

    def handle(place: int) -> Any:
        return ctypes.cast(ctypes.c_void_p(place), pynvml.c_nvmlDevice_t)

    def place_of(device: Any) -> int:
        return ctypes.cast(device, ctypes.c_void_p).value or 0

    def replayed(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if arguments and isinstance(arguments[0], pynvml.c_nvmlDevice_t):
                answers, rest = recording.part(place_of(arguments[0])), arguments[1:]
            else:
                answers, rest = recording.content()["system"], arguments
            key = f"{name}({', '.join(map(str, rest))})" if rest else name
            return answered(answers.get(key, {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}))

        return call

    def device_by_index(index: int) -> Any:
        answered(recording.part(index + 1).get("nvmlDeviceGetHandleByIndex"))
        return handle(index + 1)

    def mig_by_index(device: Any, index: int) -> Any:
        place = place_of(device)
        if index >= len(recording.part(place).get("migs", ())):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return handle(place + (index + 1) * MIG_PLACE)

    def register(device: Any, _kinds: int, _events: Any) -> None:
        answered(recording.part(place_of(device)).get("nvmlDeviceRegisterEvents"))

    def wait(_events: Any, timeout_ms: int) -> Any:
        deadline_s = time.monotonic() + timeout_ms / 1000
        while time.monotonic() < deadline_s:
            events = recording.content().get("events", [])
            if len(events) > recording.num_events_told:
                event = events[recording.num_events_told]
                recording.num_events_told += 1
                answered(event)
                return SimpleNamespace(device=handle(event["device"] + 1), eventData=event["xid"], eventType=8)
            time.sleep(POLL_S)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    for name, member in vars(pynvml).items():
        if name.startswith("nvml") and callable(member) and not isinstance(member, type):
            setattr(pynvml, name, replayed(name))
    pynvml.nvmlDeviceGetHandleByIndex = device_by_index
    pynvml.nvmlDeviceGetMigDeviceHandleByIndex = mig_by_index
    pynvml.nvmlDeviceRegisterEvents = register
    pynvml.nvmlEventSetWait_v2 = wait


if "agent.machine.gpu_sampler" in sys.orig_argv and "NVML_RECORDING" in os.environ:
    import pynvml  # type: ignore[import-untyped]

    replay(pynvml, Recording(os.environ["NVML_RECORDING"]))
