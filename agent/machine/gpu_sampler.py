"""The process that samples GPUs: it asks NVML once a second and sends each `GpuSample` to the agent's inbox.

A call into NVML can hang in the kernel and never return. That is why this is a process of its own, which the agent
replaces (`agent.machine.gpu_watch`), why it holds nothing of the agent's, and why the agent's death ends it. It imports
little: there is one on every node.

A figure that a GPU or its driver does not have is None; a GPU that is lost is a state.

`GpuProcesses` reads from /proc the processes that NVML names: ancestors, pids in containers, and how they see the GPUs.
NVML names pids of the machine. In a container they mean other processes, or nobody, unless the driver translates them;
so there a process is only believed to be on a GPU if it holds a device file of the driver open.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pynvml  # type: ignore[import-untyped]

from agent.node_state.gpu_sample import MAX_ANCESTORS, SAMPLE_VERSION, GpuProcess, GpuSample, SampledGpu, encode_sample
from agent.processes.shim import set_parent_death_signal
from agent.wire.machine import (
    MAX_GPUS,
    MAX_HOLDERS,
    MAX_MIG_INSTANCES,
    MAX_XIDS,
    GpuCondition,
    GpuFigures,
    MigInstance,
    ThrottleReason,
    Xid,
)
from ddpcore.wire import ENV_INBOX, ENV_JOB_ID

if TYPE_CHECKING:
    from collections.abc import Callable

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO."""
_DRIVER_FILES = "/dev/nvidia"
_MAX_ENVIRON_BYTES = 1 << 20
_MAX_VISIBLE_CHARS = 4096


class GpuProcesses:
    """Reads what is needed of a process; of one that has ended, or is another user's, only the pid is known.

    `inbox` is the mark of this agent's jobs: another agent may have a job of the same name.
    """

    def __init__(self, inbox: str, proc: str = "/proc") -> None:
        self._inbox = os.fsencode(inbox)
        self._proc = proc
        self._must_prove = _link(f"{proc}/self/ns/pid") != _INITIAL_PID_NAMESPACE

    def describe(self, pid: int, used_bytes: int | None, mig_uuid: str) -> GpuProcess:
        """Return the process behind a pid of NVML."""
        if self._must_prove and not self._has_driver_open(pid):
            return GpuProcess(pid, used_bytes, mig_uuid)
        environ = self._environ(pid)
        is_ours = environ.get(ENV_INBOX.encode()) == self._inbox
        rank = environ.get(b"RANK", b"") if is_ours else b""
        visible, order = environ.get(b"CUDA_VISIBLE_DEVICES"), environ.get(b"CUDA_DEVICE_ORDER")
        return GpuProcess(
            pid=pid,
            used_bytes=used_bytes,
            mig_uuid=mig_uuid,
            ancestors=self._ancestors(pid),
            inner_pids=self._inner_pids(pid),
            job_id=_text(environ.get(ENV_JOB_ID.encode(), b""), 256) if is_ours else "",
            rank=int(rank) if rank.isdigit() and len(rank) < 10 else None,
            visible_devices=None if visible is None else _text(visible, _MAX_VISIBLE_CHARS),
            device_order=None if order is None else _text(order, 64),
        )

    def _has_driver_open(self, pid: int) -> bool:
        directory = f"{self._proc}/{pid}/fd"
        try:
            names = os.listdir(directory)  # noqa: PTH208 - pathlib costs a megabyte here
        except OSError:
            return False
        return any(_link(f"{directory}/{name}").startswith(_DRIVER_FILES) for name in names)

    def _environ(self, pid: int) -> dict[bytes, bytes]:
        entries = self._read(pid, "environ").split(b"\0")
        return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)

    def _ancestors(self, pid: int) -> list[int]:
        found: list[int] = []
        while len(found) < MAX_ANCESTORS:
            line = self._read(pid, "stat")
            # The name in parentheses may hold anything, closing parentheses and blanks included.
            fields = line[line.rfind(b")") + 1 :].split()
            pid = int(fields[1]) if len(fields) > 1 else 0
            if pid <= 1 or pid in found:
                break
            found.append(pid)
        return found

    def _inner_pids(self, pid: int) -> list[int]:
        """Source: proc_pid_status(5), NSpid: the pid in each namespace, outermost first."""
        for line in self._read(pid, "status").splitlines():
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[2:]][:MAX_ANCESTORS]
        return []

    def _read(self, pid: int, name: str) -> bytes:
        try:
            with open(f"{self._proc}/{pid}/{name}", "rb") as file:  # noqa: PTH123 - as above
                return file.read(_MAX_ENVIRON_BYTES)
        except OSError:
            return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - as above
    except OSError:
        return ""


def _text(value: bytes, limit: int) -> str:
    return value.decode(errors="replace")[:limit]


SAMPLE_PERIOD_S = 1.0
MAX_EVENTS_A_SAMPLE = 256
"""Events taken in one sample: a GPU in trouble may log without pause, and the rest waits in the driver."""
LISTEN_PAUSE_S = 5.0
"""Seconds before events are listened for again: what broke the last set may still be there."""

_MEGA = 1_000_000
_MAX_COUNT = 2**63 - 1
_MAX_CELSIUS = 1000
_THROTTLE_BITS = {
    0x04: ThrottleReason.SW_POWER_CAP,
    0x08: ThrottleReason.HW_SLOWDOWN,
    0x10: ThrottleReason.SYNC_BOOST,
    0x20: ThrottleReason.SW_THERMAL,
    0x40: ThrottleReason.HW_THERMAL,
    0x80: ThrottleReason.HW_POWER_BRAKE,
}
"""Source: nvml.h, nvmlClocksEventReason*."""
_CONDITIONS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuCondition.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuCondition.RESET_REQUIRED,
}
_UNAVAILABLE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "this machine has no NVIDIA driver (libnvidia-ml.so.1 is not there)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "NVIDIA's library and its kernel module are of different versions: reboot, or load the module again"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA driver's device files",
}


class _UnusableGpuError(Exception):
    """A GPU does not answer any more; `condition` is the reason."""

    def __init__(self, condition: GpuCondition) -> None:
        self.condition = condition
        super().__init__(condition)


class _Gpu(NamedTuple):
    """A GPU at the sampler's start. `handle` is None for one that was lost already."""

    place: int
    handle: Any
    uuid: str
    name: str


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
        self._driver_version = (_ask(pynvml.nvmlSystemGetDriverVersion) or "")[:64]
        self._gpus = [self._found(index) for index in range(min(count, MAX_GPUS))]
        self._listen()
        return ""

    def sample(self, now_s: float) -> GpuSample:
        """Sample every GPU."""
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
            uuid, name = _ask(pynvml.nvmlDeviceGetUUID, handle), _ask(pynvml.nvmlDeviceGetName, handle)
        except _UnusableGpuError as error:
            self._lost[index] = error.condition
        except pynvml.NVMLError as error:
            self._lost[index] = _CONDITIONS.get(error.value, GpuCondition.UNREADABLE)
        else:
            return _Gpu(index, handle, (uuid or "")[:256], (name or "")[:256])
        return _Gpu(index, None, "", "")

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
            uuid = _ask(pynvml.nvmlDeviceGetUUID, event.device) or ""
        except _UnusableGpuError:
            # An error that is the last of its GPU: its handle is all that is left of the name.
            same = (gpu.uuid for gpu in self._gpus if _address(gpu.handle) == _address(event.device))
            uuid = next(same, "")
        codes = self._xids.setdefault(uuid, {})
        code = min(event.eventData, _MAX_COUNT)
        times, _ = codes.get(code, (0, 0.0))
        codes[code] = (times + 1, time.monotonic())

    def _sampled(self, gpu: _Gpu, now_s: float) -> SampledGpu:
        condition = self._lost.get(gpu.place, GpuCondition.OK)
        if condition is not GpuCondition.LOST and gpu.handle is not None:
            try:
                migs = _mig_handles(gpu.handle)
                return SampledGpu(self._figures(gpu, migs, now_s), self._held_by(gpu.handle, migs))
            except _UnusableGpuError as error:
                condition = error.condition
        if condition is GpuCondition.LOST:
            self._lost[gpu.place] = condition  # it does not come back without a new driver session
        bare = GpuFigures(gpu.place, gpu.uuid, gpu.name, condition, xids=self._xids_of(gpu.uuid, now_s))
        return SampledGpu(bare)

    def _figures(self, gpu: _Gpu, migs: list[Any], now_s: float) -> GpuFigures:
        handle = gpu.handle
        busy = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _memory(handle)
        temperature = _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
        if memory is None and temperature is None and _ask(pynvml.nvmlDeviceGetName, handle) is None:
            raise _UnusableGpuError(GpuCondition.UNREADABLE)  # every GPU has at least one of them
        rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)
        return GpuFigures(
            index=gpu.place,
            uuid=gpu.uuid,
            name=gpu.name,
            busy_frac=None if busy is None else _frac(busy.gpu),
            memory_busy_frac=None if busy is None else _frac(busy.memory),
            memory_total_bytes=None if memory is None else _count(memory.total),
            memory_used_bytes=None if memory is None else _count(memory.used),
            temperature_celsius=_celsius(temperature),
            power_watts=_thousandth(_ask(pynvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_watts=_thousandth(_ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            sm_clock_hz=_mega(_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)),
            sm_clock_max_hz=_mega(_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM)),
            memory_clock_hz=_mega(_ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)),
            throttle_reasons=_throttle_reasons(handle),
            ecc_corrected_errors=_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected_errors=_ecc_errors(handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            is_row_remap_pending=None if rows is None else bool(rows[2]),
            has_row_remap_failed=None if rows is None else bool(rows[3]),
            xids=self._xids_of(gpu.uuid, now_s),
            mig_instances=[_mig_instance(mig) for mig in migs],
        )

    def _xids_of(self, uuid: str, now_s: float) -> list[Xid]:
        codes = self._xids.get(uuid, {})
        xids = [Xid(code, times, max(0.0, now_s - last_s)) for code, (times, last_s) in codes.items()]
        return sorted(xids, key=lambda xid: xid.age_s)[:MAX_XIDS]

    def _held_by(self, handle: Any, migs: list[Any]) -> list[GpuProcess]:
        places = [(mig, (_ask(pynvml.nvmlDeviceGetUUID, mig) or "")[:256]) for mig in migs] or [(handle, "")]
        held: dict[tuple[int, str], int | None] = {}
        for place, mig_uuid in places:
            for process in _running_on(place):
                held[process.pid, mig_uuid] = _count(process.usedGpuMemory)
        largest = sorted(held.items(), key=lambda item: -(item[1] or 0))[:MAX_HOLDERS]
        return [self._processes.describe(pid, used, mig_uuid) for (pid, mig_uuid), used in largest]


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, None where this GPU or this driver has none.

    Raises _UnusableGpuError if the GPU answers nothing any more.
    """
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _CONDITIONS:
            raise _UnusableGpuError(_CONDITIONS[error.value]) from error
        return None


def _count(value: int | None) -> int | None:
    """Return what can be a count: NVML marks an unknown figure by the highest number there is."""
    return value if value is not None and 0 <= value <= _MAX_COUNT else None


def _celsius(value: int | None) -> float | None:
    return value if value is not None and abs(value) < _MAX_CELSIUS else None


def _frac(percent: int) -> float:
    return min(1.0, max(0.0, percent / 100))


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _mega(value: int | None) -> int | None:
    return None if value is None else value * _MEGA


def _throttle_reasons(handle: Any) -> list[ThrottleReason]:
    bits = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 know them by their old name
        bits = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return [reason for bit, reason in _THROTTLE_BITS.items() if bits & bit]


def _running_on(handle: Any) -> list[Any]:
    """Return the processes that compute on a GPU or a part of it, by themselves or through MPS."""
    calls = (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3)
    return [process for call in calls for process in _ask(call, handle) or ()]


def _ecc_errors(handle: Any, kind: int) -> int | None:
    return _count(_ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, pynvml.NVML_VOLATILE_ECC))


def _mig_handles(handle: Any) -> list[Any]:
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    count = min(MAX_MIG_INSTANCES, _ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    found = (_ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(count))
    return [mig for mig in found if mig is not None]


def _memory(device: Any) -> Any:
    """Return total and used bytes without what the driver keeps for itself (615 MiB of an H200), as nvidia-smi does."""
    known = _ask(pynvml.nvmlDeviceGetMemoryInfo, device, pynvml.nvmlMemory_v2)
    return _ask(pynvml.nvmlDeviceGetMemoryInfo, device) if known is None else known


def _mig_instance(mig: Any) -> MigInstance:
    memory = _memory(mig)
    return MigInstance(
        uuid=(_ask(pynvml.nvmlDeviceGetUUID, mig) or "")[:256],
        memory_total_bytes=None if memory is None else _count(memory.total),
        memory_used_bytes=None if memory is None else _count(memory.used),
    )


def _address(handle: Any) -> int:
    """Return the address in a handle: two handles of one GPU are different objects."""
    return 0 if handle is None else ctypes.cast(handle, ctypes.c_void_p).value or 0


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
        _send(out, inbox, sampler.sample(now_s))
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
