"""Calls of NVML, each of which may have no answer: what one GPU answers, and how often it is worth to ask.

A figure that a GPU or its driver does not have is None. Calls take from 2 microseconds to milliseconds, by GPU and
driver. `KeptAnswers` asks for what changes seldom every few seconds, and for what proves dear less often.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import TYPE_CHECKING, Any

import pynvml  # type: ignore[import-untyped]

from agent.wire.machine import MAX_MIG_INSTANCES, GpuCondition, MigInstance, NvLinks, PcieLink, ThrottleReason

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

CONDITIONS = {
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuCondition.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuCondition.RESET_REQUIRED,
}
_GONE = frozenset(
    {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
)
"""Errors of a driver that was unloaded or replaced under an open NVML."""
_THROTTLE_BITS = {
    0x04: ThrottleReason.SW_POWER_CAP,
    0x08: ThrottleReason.HW_SLOWDOWN,
    0x10: ThrottleReason.SYNC_BOOST,
    0x20: ThrottleReason.SW_THERMAL,
    0x40: ThrottleReason.HW_THERMAL,
    0x80: ThrottleReason.HW_POWER_BRAKE,
}
"""Source: nvml.h, nvmlClocksEventReason*."""
_MAX_COUNT = 2**63 - 1
_MAX_CELSIUS = 1000
_MAX_MHZ = 100_000
_MAX_MILLIWATTS = 100_000_000
_MAX_PCIE = 64
"""Neither lanes nor generations come near."""
_UNKNOWN_U32 = 2**32 - 1
_MEGA = 1_000_000


class UnusableGpuError(Exception):
    """A GPU does not answer any more; `condition` is the reason."""

    def __init__(self, condition: GpuCondition) -> None:
        self.condition = condition
        super().__init__(condition)


class DriverGoneError(Exception):
    """The driver was unloaded or replaced: nothing answers before NVML is opened again."""


def ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer, None where this GPU or this driver has none.

    Raises UnusableGpuError if the GPU answers nothing any more, DriverGoneError if none does.
    """
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        if error.value in CONDITIONS:
            raise UnusableGpuError(CONDITIONS[error.value]) from error
        if error.value in _GONE:
            raise DriverGoneError(str(error)) from error
        return None


SELDOM_S = 10.0
"""Seconds between calls for figures that change seldom."""
CONSTANT_S = 300.0
"""Seconds between calls for what does not change while a driver runs: the first time there may be no answer."""
MOST_COST = 1 / 5000
"""Part of the time that one call of a GPU may take."""


class _Kept:
    """An answer, when to ask again, and what the call took."""

    def __init__(self, value: Any, due_s: float, took_s: float) -> None:
        self.value, self.due_s, self.took_s = value, due_s, took_s


class KeptAnswers:
    """Answers of one GPU by call, each asked for again when it is due.

    A call that takes long is made more rarely than its period. One long call may have waited for something
    else: of the last two the shorter counts. `shift_s` lets GPUs be asked at different times.
    """

    def __init__(self, shift_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._shift_s = shift_s
        self._clock = clock
        self._kept: dict[Hashable, _Kept] = {}

    def last(self, period_s: float, now_s: float, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the last answer, at most about `period_s` old."""
        self._renew(period_s, now_s, call, arguments)
        return self._kept[call, arguments[1:]].value

    def fresh(self, now_s: float, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the answer of this moment, None where the call is too dear for this sample."""
        is_new = self._renew(0.0, now_s, call, arguments)
        return self._kept[call, arguments[1:]].value if is_new else None

    def _renew(self, period_s: float, now_s: float, call: Callable[..., Any], arguments: tuple[Any, ...]) -> bool:
        """Ask if it is due. The first argument is the handle of the GPU, and no part of the key."""
        key = (call, arguments[1:])
        kept = self._kept.get(key)
        if kept is not None and now_s < kept.due_s:
            return False
        began_s = self._clock()
        value = ask(call, *arguments)
        took_s = self._clock() - began_s
        cost_s = 0.0 if kept is None else min(took_s, kept.took_s)
        shift_s = self._shift_s if kept is None and period_s else 0.0
        self._kept[key] = _Kept(value, now_s + shift_s + max(period_s, cost_s / MOST_COST), took_s)
        return True


def count(value: int | None) -> int | None:
    """Return what can be a count: NVML marks an unknown figure by the highest number there is."""
    return value if value is not None and 0 <= value <= _MAX_COUNT else None


def _count_32(value: int | None) -> int | None:
    """Return what can be a count of 32 bits."""
    return value if value is not None and 0 <= value < _UNKNOWN_U32 else None


def celsius(value: int | None) -> float | None:
    """Return a temperature that can be."""
    return value if value is not None and abs(value) < _MAX_CELSIUS else None


def frac(percent: int) -> float:
    """Return a part of 1."""
    return min(1.0, max(0.0, percent / 100))


def watts(milliwatts: int | None) -> float | None:
    """Return a power that can be."""
    return milliwatts / 1000 if milliwatts is not None and 0 <= milliwatts < _MAX_MILLIWATTS else None


def hertz(megahertz: int | None) -> int | None:
    """Return a clock that can be."""
    return megahertz * _MEGA if megahertz is not None and 0 <= megahertz < _MAX_MHZ else None


def _pcie(value: int | None) -> int | None:
    """Return a number of lanes, or a generation, that can be."""
    return value if value is not None and 0 < value <= _MAX_PCIE else None


def pcie_link(kept: KeptAnswers, handle: Any, now_s: float) -> PcieLink | None:
    """Return the PCIe link of a GPU, None where nothing of it is known."""
    found = PcieLink(
        generation=_pcie(kept.fresh(now_s, pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)),
        width=_pcie(kept.fresh(now_s, pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle)),
        generation_max=_pcie(kept.last(CONSTANT_S, now_s, pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)),
        width_max=_pcie(kept.last(CONSTANT_S, now_s, pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)),
        generation_gpu_max=_pcie(kept.last(CONSTANT_S, now_s, pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, handle)),
        replays=_count_32(kept.last(SELDOM_S, now_s, pynvml.nvmlDeviceGetPcieReplayCounter, handle)),
    )
    return None if found == PcieLink() else found


def throttle_reasons(handle: Any) -> list[ThrottleReason]:
    """Return why a GPU runs below its possible clock."""
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 know them by their old name
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return [reason for bit, reason in _THROTTLE_BITS.items() if bits & bit]


def running_on(handle: Any) -> list[Any]:
    """Return the processes that compute on a GPU or a part of it, by themselves or through MPS."""
    calls = (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3)
    return [process for call in calls for process in ask(call, handle) or ()]


def mig_handles(handle: Any) -> list[Any]:
    """Return the handles of a GPU's parts, none of a whole one."""
    mode = ask(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    most = min(MAX_MIG_INSTANCES, ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0)
    found = (ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(most))
    return [mig for mig in found if mig is not None]


def memory(device: Any) -> Any:
    """Return total and used bytes without what the driver keeps for itself (615 MiB of an H200), as nvidia-smi does."""
    known = ask(pynvml.nvmlDeviceGetMemoryInfo, device, pynvml.nvmlMemory_v2)
    return ask(pynvml.nvmlDeviceGetMemoryInfo, device) if known is None else known


def mig_instance(mig: Any) -> MigInstance:
    """Return the figures of a part."""
    known = memory(mig)
    return MigInstance(
        uuid=(ask(pynvml.nvmlDeviceGetUUID, mig) or "")[:256],
        memory_total_bytes=None if known is None else count(known.total),
        memory_used_bytes=None if known is None else count(known.used),
    )


def address(handle: Any) -> int:
    """Return the address in a handle: two handles of one GPU are different objects."""
    return 0 if handle is None else ctypes.cast(handle, ctypes.c_void_p).value or 0


def numa_node(handle: Any, devices: str = "/sys/bus/pci/devices") -> int | None:
    """Return the NUMA node that a GPU is attached to, None where the machine has but one or it is not known.

    NVML writes a PCI domain in 8 digits, the kernel in 4, or in 5 where it needs them.
    """
    found = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    domain, _, rest = ("" if found is None else _decoded(found.busId)).partition(":")
    try:
        path = f"{devices}/{int(domain, 16):04x}:{rest.lower()}/numa_node"
        with open(path, encoding="ascii") as file:  # noqa: PTH123 - pathlib costs a megabyte here
            return node if (node := int(file.read())) >= 0 else None
    except (OSError, ValueError):
        return None


def _decoded(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


_LINK_COUNT, _LINK_STATE = 91, 165
_TOTALS = (38, 45, 52, 59, 160)
"""Errors of all links together, up to the A100: CRC of flits, CRC of data, replays, recoveries, ECC."""
_OF_A_HOPPER_LINK = (161, 162, 163)
"""Errors of one link: replays, recoveries, CRC."""
_OF_A_BLACKWELL_LINK = (208, 211, 215)
"""Errors of one link: packets received with errors, local integrity, recoveries."""
_MAX_LINKS = 36
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of nvmlValue_t by nvmlValueType_t. Source of all of these: nvml.h of CUDA 12.9, NVML_FI_DEV_NVLINK_*."""


def nvlinks(handle: Any) -> NvLinks | None:
    """Return the NVLinks of a GPU, None where it has none: three calls of several fields each."""
    (num_links,) = _fields(handle, [(_LINK_COUNT, 0)])
    if not num_links:
        return None
    links = range(min(_MAX_LINKS, num_links))
    states = _fields(handle, [(_LINK_STATE, link) for link in links])
    if states[0] is None:
        states = [ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in links]
    return NvLinks(len(links), sum(bool(state) for state in states), _link_errors(handle, links))


def _link_errors(handle: Any, links: Iterable[int]) -> int | None:
    """Return the errors of all links, by the first kind of counter that this GPU has."""
    totals = [value for value in _fields(handle, [(field, 0) for field in _TOTALS]) if value is not None]
    if totals:
        return count(sum(totals))
    for kinds in (_OF_A_HOPPER_LINK, _OF_A_BLACKWELL_LINK):
        answers = _fields(handle, [(kind, link) for link in links for kind in kinds])
        known = [value for value in answers if value is not None]
        if known:
            return count(sum(known))
    return None


def _fields(handle: Any, wanted: list[tuple[int, int]]) -> list[int | None]:
    """Return the values of fields, each with its link; None for one that this GPU does not have."""
    answers = ask(pynvml.nvmlDeviceGetFieldValues, handle, wanted) if wanted else []
    if answers is None:
        return [None] * len(wanted)
    return [_field_value(answer) for answer in answers]


def _field_value(answer: Any) -> int | None:
    if answer.nvmlReturn != pynvml.NVML_SUCCESS or answer.valueType >= len(_VALUES):
        return None
    value = getattr(answer.value, _VALUES[answer.valueType])
    return count(int(value)) if math.isfinite(value) else None
