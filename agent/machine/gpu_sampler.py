"""The process that samples GPUs: it asks NVML once a second and sends each `GpuSample` to the agent's inbox.

A call into NVML can hang in the kernel and never return. That is why this is a process of its own, which the agent
replaces (`agent.machine.gpu_watch`), why it holds nothing of the agent's, and why the agent's death ends it. It imports
little: there is one on every node.

A figure that a GPU or its driver does not have is None; a GPU that is lost is a state. A sampler whose driver is
unloaded or replaced reports it and ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any, NamedTuple

import pynvml  # type: ignore[import-untyped]

from agent.machine import nvml
from agent.machine.gpu_processes import GpuProcesses
from agent.machine.nvml import CONSTANT_S, SELDOM_S, DriverGoneError, KeptAnswers, UnusableGpuError, ask
from agent.node_state.gpu_sample import SAMPLE_VERSION, GpuProcess, GpuSample, SampledGpu, encode_sample
from agent.processes.shim import set_parent_death_signal
from agent.wire.machine import MAX_GPUS, MAX_HOLDERS, MAX_XIDS, GpuCondition, GpuFigures, Xid

SAMPLE_PERIOD_S = 1.0
MAX_EVENTS_A_SAMPLE = 256
"""Events taken in one sample: a GPU in trouble may log without pause, and the rest waits in the driver."""
LISTEN_PAUSE_S = 5.0
"""Seconds before events are listened for again: what broke the last set may still be there."""
_MAX_COUNT = 2**63 - 1
DRIVER_GONE = "the NVIDIA driver was unloaded or restarted"
_SINCE_LOADED = pynvml.NVML_VOLATILE_ECC
_UNAVAILABLE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "this machine has no NVIDIA driver (libnvidia-ml.so.1 is not there)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "NVIDIA's library and its kernel module are of different versions: reboot, or load the module again"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA driver's device files",
}


class _Gpu(NamedTuple):
    """A GPU at the sampler's start. `handle` is None for one that was lost already."""

    place: int
    handle: Any
    uuid: str
    name: str
    kept: KeptAnswers


class GpuSampler:
    """GPUs of this machine, from `open` on; lives on the main thread."""

    def __init__(self, inbox: str) -> None:
        self._processes = GpuProcesses(inbox)
        self._gpus: list[_Gpu] = []
        self._lost: dict[int, GpuCondition] = {}
        self._driver_version = ""
        self._events: Any = None
        self._listen_due_s = float("-inf")
        """Time at which to make the set of events, where there is none."""
        self._xids: dict[str, dict[int, tuple[int, float]]] = {}
        """Number and last time of each code, by UUID."""

    def open(self) -> str:
        """Find the GPUs; return why there is nothing to sample, or ""."""
        try:
            pynvml.nvmlInit()
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            return _UNAVAILABLE.get(error.value, f"NVML cannot be used: {error}")
        if not count:
            return "the NVIDIA driver knows of no GPU that this process may see"
        self._driver_version = (ask(pynvml.nvmlSystemGetDriverVersion) or "")[:64]
        self._gpus = [self._found(index) for index in range(min(count, MAX_GPUS))]
        self._listen()
        return ""

    def sample(self, now_s: float) -> GpuSample:
        """Sample every GPU."""
        self._processes.begin_sample()
        gpus = [self._sampled(gpu, now_s) for gpu in self._gpus]
        return GpuSample(SAMPLE_VERSION, os.getpid(), driver_version=self._driver_version, gpus=gpus)

    def listen_until(self, deadline_s: float) -> None:
        """Take Xid events until then; sleep where none can be had."""
        if self._events is None and time.monotonic() >= self._listen_due_s:
            self._listen()
        for _ in range(MAX_EVENTS_A_SAMPLE):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            if self._events is None:
                break
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, max(1, int(1000 * left_s)))
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    return
                # A lost GPU makes the whole set useless, for the others too.
                self._stop_listening()
                break
            self._note(event)
        time.sleep(max(0.0, deadline_s - time.monotonic()))

    def _found(self, index: int) -> _Gpu:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = ask(pynvml.nvmlDeviceGetUUID, handle), ask(pynvml.nvmlDeviceGetName, handle)
        except UnusableGpuError as error:
            self._lost[index] = error.condition
        except pynvml.NVMLError as error:
            self._lost[index] = nvml.CONDITIONS.get(error.value, GpuCondition.UNREADABLE)
        else:
            return _Gpu(index, handle, (uuid or "")[:256], (name or "")[:256], KeptAnswers(index % SELDOM_S))
        return _Gpu(index, None, "", "", KeptAnswers())

    def _stop_listening(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._events)
        self._events = None
        self._listen_due_s = time.monotonic() + LISTEN_PAUSE_S

    def _listen(self) -> None:
        """Make the set of events, of the GPUs that still answer."""
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            self._listen_due_s = time.monotonic() + LISTEN_PAUSE_S
            return
        for gpu in self._gpus:
            if gpu.place in self._lost:
                continue
            try:
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError:
                continue  # this kind has no events, or is lost

    def _note(self, event: Any) -> None:
        try:
            uuid = ask(pynvml.nvmlDeviceGetUUID, event.device) or ""
        except UnusableGpuError:
            # An error that is the last of its GPU: its handle is all that is left of the name.
            same = (gpu.uuid for gpu in self._gpus if nvml.address(gpu.handle) == nvml.address(event.device))
            uuid = next(same, "")
        codes = self._xids.setdefault(uuid, {})
        code = min(event.eventData, _MAX_COUNT)
        times, _ = codes.get(code, (0, 0.0))
        codes[code] = (times + 1, time.monotonic())

    def _sampled(self, gpu: _Gpu, now_s: float) -> SampledGpu:
        condition = self._lost.get(gpu.place, GpuCondition.OK)
        if condition is not GpuCondition.LOST and gpu.handle is not None:
            try:
                migs = nvml.mig_handles(gpu.handle)
                return SampledGpu(self._figures(gpu, migs, now_s), self._held_by(gpu.handle, migs))
            except UnusableGpuError as error:
                condition = error.condition
        if condition is GpuCondition.LOST:
            self._lost[gpu.place] = condition  # it does not come back without a new driver session
        bare = GpuFigures(gpu.place, gpu.uuid, gpu.name, condition, xids=self._xids_of(gpu.uuid, now_s))
        return SampledGpu(bare)

    def _figures(self, gpu: _Gpu, migs: list[Any], now_s: float) -> GpuFigures:
        handle, kept = gpu.handle, gpu.kept
        busy = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = nvml.memory(handle)
        temperature = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        if memory is None and temperature is None and ask(pynvml.nvmlDeviceGetName, handle) is None:
            raise UnusableGpuError(GpuCondition.UNREADABLE)  # every GPU has at least one of them

        def constant(call: Any, *arguments: Any) -> Any:
            return kept.last(CONSTANT_S, now_s, call, handle, *arguments)

        def seldom(call: Any, *arguments: Any) -> Any:
            return kept.last(SELDOM_S, now_s, call, handle, *arguments)

        rows = seldom(pynvml.nvmlDeviceGetRemappedRows)
        corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return GpuFigures(
            index=gpu.place,
            uuid=gpu.uuid,
            name=gpu.name,
            busy_frac=None if busy is None else nvml.frac(busy.gpu),
            memory_busy_frac=None if busy is None else nvml.frac(busy.memory),
            memory_total_bytes=None if memory is None else nvml.count(memory.total),
            memory_used_bytes=None if memory is None else nvml.count(memory.used),
            temperature_celsius=nvml.celsius(temperature),
            power_watts=nvml.watts(ask(pynvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_watts=nvml.watts(seldom(pynvml.nvmlDeviceGetEnforcedPowerLimit)),
            sm_clock_hz=nvml.hertz(ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)),
            sm_clock_max_hz=nvml.hertz(constant(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM)),
            memory_clock_hz=nvml.hertz(ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)),
            throttle_reasons=nvml.throttle_reasons(handle),
            ecc_corrected_errors=nvml.count(seldom(pynvml.nvmlDeviceGetTotalEccErrors, corrected, _SINCE_LOADED)),
            ecc_uncorrected_errors=nvml.count(seldom(pynvml.nvmlDeviceGetTotalEccErrors, uncorrected, _SINCE_LOADED)),
            is_row_remap_pending=None if rows is None else bool(rows[2]),
            has_row_remap_failed=None if rows is None else bool(rows[3]),
            pcie=nvml.pcie_link(kept, handle, now_s),
            nvlinks=seldom(nvml.nvlinks),
            numa_node=constant(nvml.numa_node),
            xids=self._xids_of(gpu.uuid, now_s),
            mig_instances=[nvml.mig_instance(mig) for mig in migs],
        )

    def _xids_of(self, uuid: str, now_s: float) -> list[Xid]:
        codes = self._xids.get(uuid, {})
        xids = [Xid(code, times, max(0.0, now_s - last_s)) for code, (times, last_s) in codes.items()]
        return sorted(xids, key=lambda xid: xid.age_s)[:MAX_XIDS]

    def _held_by(self, handle: Any, migs: list[Any]) -> list[GpuProcess]:
        places = [(mig, (ask(pynvml.nvmlDeviceGetUUID, mig) or "")[:256]) for mig in migs] or [(handle, "")]
        held: dict[tuple[int, str], int | None] = {}
        for place, mig_uuid in places:
            for process in nvml.running_on(place):
                held[process.pid, mig_uuid] = nvml.count(process.usedGpuMemory)
        largest = sorted(held.items(), key=lambda item: -(item[1] or 0))[:MAX_HOLDERS]
        return [self._processes.describe(pid, used, mig_uuid) for (pid, mig_uuid), used in largest]


def serve(inbox: str) -> int:
    """Send samples until the process ends; returns only where there is nothing to sample."""
    out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    sampler = GpuSampler(inbox)
    unavailable = sampler.open()
    if unavailable:
        _send(out, inbox, GpuSample(SAMPLE_VERSION, os.getpid(), unavailable[:1024]))
        return 0
    while True:
        now_s = time.monotonic()
        try:
            sample = sampler.sample(now_s)
        except DriverGoneError as error:
            _send(out, inbox, GpuSample(SAMPLE_VERSION, os.getpid(), f"{DRIVER_GONE}: {error}"[:1024]))
            return 0
        _send(out, inbox, sample)
        sampler.listen_until(now_s + SAMPLE_PERIOD_S)


def _send(out: socket.socket, inbox: str, sample: GpuSample) -> None:
    try:
        out.sendto(encode_sample(sample), inbox)
    except OSError:
        return  # no agent, or a full inbox: the next sample says it all again


def main(arguments: list[str]) -> int:
    """Run as `python -P -m agent.machine.gpu_sampler INBOX AGENT_PID`."""
    inbox, agent_pid = arguments
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != int(agent_pid):
        return 1  # the agent died before the kernel knew whom to tell
    return serve(inbox)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
