"""NVIDIA's Xid errors: what each means, who is to blame, what is done about it; and which one explains a rank's end.

Source: the catalog https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html (columns "Description" and
"Resolution Bucket", for A100 to GB200), read in November 2026 in excerpts, its actions in public copies of its table;
https://docs.nvidia.com/deploy/gpu-debug-guidelines/.
Codes that are not here are unused, of video engines, or not known to NVIDIA's catalog either.
"""

from __future__ import annotations

import re
from enum import StrEnum
from signal import SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGTERM
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.machine import GpuCondition
from app.model.farewells import names_time_out

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from agent.wire.machine import Xid
    from agent.wire.reports import ExitReport


class Blame(StrEnum):
    """Whose fault an error is, as a rule."""

    HARDWARE = "hardware"
    DRIVER = "driver"
    """The driver, or the firmware of the GPU's own processors."""
    PROGRAM = "program"
    FABRIC = "fabric"
    """NVLink or NVSwitch: the GPU at the other end may be the one that failed."""
    NOBODY = "nobody"
    """A note on something that harms no program, or that follows from another error."""


class Action(StrEnum):
    """What NVIDIA advises to do first."""

    FIX_PROGRAM = "fix_program"
    RESTART_JOB = "restart_job"
    RESET_GPU = "reset_gpu"
    REBOOT_NODE = "reboot_node"
    CHECK_LINKS = "check_links"
    CHECK_POWER = "check_power"
    NOTHING = "nothing"


class XidKind(NamedTuple):
    """An error of the catalog."""

    what: str
    """Its meaning, as the end of `Xid 79 (...)`."""
    blame: Blame
    action: Action


_COPY = XidKind("a copy engine raised an exception", Blame.HARDWARE, Action.RESTART_JOB)
_LINK = XidKind("NVLink error", Blame.FABRIC, Action.CHECK_LINKS)
XIDS = {
    8: XidKind("it stopped processing", Blame.DRIVER, Action.RESTART_JOB),
    11: XidKind("a program sent it invalid commands", Blame.PROGRAM, Action.FIX_PROGRAM),
    13: XidKind("a kernel raised an exception", Blame.PROGRAM, Action.FIX_PROGRAM),
    31: XidKind("a kernel touched memory that it must not", Blame.PROGRAM, Action.FIX_PROGRAM),
    32: XidKind("a program sent it invalid commands", Blame.PROGRAM, Action.FIX_PROGRAM),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), _COPY),
    43: XidKind("a program's channel was stopped", Blame.PROGRAM, Action.FIX_PROGRAM),
    45: XidKind("a program was ended in the midst of its work", Blame.NOBODY, Action.NOTHING),
    46: XidKind("it stopped processing", Blame.HARDWARE, Action.RESET_GPU),
    48: XidKind("double-bit memory error", Blame.HARDWARE, Action.RESET_GPU),
    54: XidKind("its power cable is not connected", Blame.HARDWARE, Action.CHECK_POWER),
    62: XidKind("its microcontroller halted", Blame.HARDWARE, Action.RESET_GPU),
    63: XidKind("a faulty row of memory was replaced", Blame.NOBODY, Action.NOTHING),
    64: XidKind("a faulty row of memory could not be replaced", Blame.HARDWARE, Action.RESET_GPU),
    69: XidKind("a program sent it invalid commands", Blame.PROGRAM, Action.FIX_PROGRAM),
    74: _LINK,
    79: XidKind("it has fallen off the bus", Blame.HARDWARE, Action.REBOOT_NODE),
    80: XidKind("its commands came damaged over the bus", Blame.HARDWARE, Action.RESTART_JOB),
    92: XidKind("many single-bit memory errors", Blame.NOBODY, Action.NOTHING),
    94: XidKind("contained memory error", Blame.HARDWARE, Action.RESTART_JOB),
    95: XidKind("uncontained memory error", Blame.HARDWARE, Action.RESET_GPU),
    109: XidKind("it did not switch between programs in time", Blame.HARDWARE, Action.RESET_GPU),
    110: XidKind("its security processor failed", Blame.HARDWARE, Action.RESET_GPU),
    119: XidKind("the GPU's own processor does not answer", Blame.DRIVER, Action.RESET_GPU),
    120: XidKind("the GPU's own processor failed", Blame.DRIVER, Action.RESET_GPU),
    136: XidKind("an NVLink did not come up", Blame.FABRIC, Action.CHECK_LINKS),
    137: XidKind("a GPU at the other end of an NVLink refused an access", Blame.FABRIC, Action.CHECK_LINKS),
    140: XidKind("uncorrectable memory error", Blame.HARDWARE, Action.RESET_GPU),
    143: XidKind("it could not be initialised", Blame.HARDWARE, Action.RESET_GPU),
    **dict.fromkeys(range(144, 151), _LINK),
    154: XidKind("the driver asks for a recovery", Blame.NOBODY, Action.NOTHING),
    155: XidKind("NVLink error", Blame.FABRIC, Action.RESET_GPU),
    156: XidKind("a faulty part was taken out of use", Blame.HARDWARE, Action.RESET_GPU),
    157: XidKind("a faulty part could not be taken out of use", Blame.HARDWARE, Action.RESET_GPU),
    158: XidKind("it did not answer in time", Blame.HARDWARE, Action.RESET_GPU),
}
_BROKEN = frozenset({Action.RESET_GPU, Action.REBOOT_NODE})
BROKEN_XIDS = frozenset(code for code, kind in XIDS.items() if kind.action in _BROKEN) | {74}
"""Errors that mean broken hardware or a dead driver; a program causes most others."""
LASTING_XIDS = BROKEN_XIDS - {64, 74, 156, 157}
"""Errors after which a GPU runs nothing: a rank may hang on it until a timeout ends it. After a note about a row of
memory or a part (64, 156, 157) it computes on, and is reset later."""
_ORDER = (Blame.HARDWARE, Blame.DRIVER, Blame.PROGRAM, Blame.FABRIC, None)
_OWN_BLAMES = frozenset({Blame.HARDWARE, Blame.DRIVER, Blame.PROGRAM})
_RAISED = frozenset({*_OWN_BLAMES, Blame.FABRIC, None})
"""Blames of errors that a rank's next CUDA call raises; None of one that is not in the catalog."""

NEAR_S = 60.0
"""Seconds before a rank's end in which an error counts that its next CUDA call raises."""
LASTING_S = 3600.0
"""Seconds before a rank's end in which an error counts after which its GPU runs nothing: a process group's timeout, 10
or 30 minutes by default, ends a rank that hangs."""
_OF_GPU = re.compile(r"CUDA|NCCL|CUBLAS|CUDNN|NVLink|NVML|\bECC\b|\bGPU\b|\bXid\b|watchdog|timed? ?out", re.IGNORECASE)
"""Texts of an error that may come of a GPU. One that names none of these has its reason in the program."""
_BY_ABORT = frozenset({int(SIGABRT), int(SIGSEGV), int(SIGBUS)})
_BY_OTHERS = frozenset({int(SIGKILL), int(SIGTERM)})


class GpuCause(NamedTuple):
    """What happened to a rank's GPU that explains its end."""

    gpu: int
    """Index by PCI bus, as in nvidia-smi."""
    xids: list[Xid]
    """Errors, the gravest first."""
    condition: GpuCondition

    @property
    def is_gone(self) -> bool:
        """Whether the GPU is lost, or runs nothing before it is reset."""
        return self.condition is not GpuCondition.OK

    @property
    def is_own(self) -> bool:
        """Whether it began with this rank: an error of the fabric, or an unknown one, may be another's."""
        return self.is_gone or any(blame_of(xid) in _OWN_BLAMES for xid in self.xids)

    @property
    def kind(self) -> XidKind | None:
        """The gravest error; None where it is not in the catalog, or there is none."""
        return XIDS.get(self.xids[0].code) if self.xids else None


def blame_of(xid: Xid) -> Blame | None:
    """Return who is to blame for an error, None for one that is not in the catalog."""
    return XIDS[xid.code].blame if xid.code in XIDS else None


def gpu_cause(end: ExitReport | None) -> GpuCause | None:
    """Return what happened to a rank's GPU that explains a bad end; None where nothing did, or another reason is known.

    An exception that does not speak of a GPU has its reason in the program. A rank that others end, by SIGKILL or
    SIGTERM, may have hung on a GPU that ran nothing any more; another error of its GPU did not bring that about. Nor
    did it let a collective time out, unless it is one of a link: the rank would have raised it.
    """
    if end is None or end.facts.gpu is None or end.code == 0 or (end.oom_kills and end.signal == SIGKILL):
        return None
    if end.error_text and not _OF_GPU.search(end.error_text):
        return None
    if end.signal is not None and end.signal not in _BY_ABORT | _BY_OTHERS and not end.error_text:
        return None
    gpu = end.facts.gpu
    blames = frozenset() if end.signal in _BY_OTHERS and not end.error_text else _RAISED
    if names_time_out(end.error_text) and "CUDA error" not in end.error_text:
        blames &= {Blame.FABRIC}
    xids = [xid for xid in gpu.xids if _explains(xid, blames)]
    if not xids and gpu.condition is GpuCondition.OK:
        return None
    xids.sort(key=lambda xid: (_ORDER.index(blame_of(xid)), xid.age_s))
    return GpuCause(gpu.index, xids, gpu.condition)


def facts_key(end: ExitReport) -> tuple[object, ...]:
    """Return what distinguishes ends beside their own words, without figures that each rank has its own of."""
    gpu, facts = gpu_cause(end), end.facts
    codes = () if gpu is None else (gpu.condition, *sorted(xid.code for xid in gpu.xids))
    return (codes, facts.cgroup, facts.sender, None if facts.disk is None else (facts.disk.path, facts.disk.limit))


def _explains(xid: Xid, blames: AbstractSet[Blame | None]) -> bool:
    if xid.code in LASTING_XIDS:
        return xid.age_s <= LASTING_S
    # The driver logs others as a process ends, too: those follow from the end.
    return 0.0 < xid.age_s <= NEAR_S and blame_of(xid) in blames


def is_gpu_at_fault(end: ExitReport) -> bool:
    """Return whether an error of a rank's own GPU ended it, whatever its exception reports of its peers."""
    cause = gpu_cause(end)
    return cause is not None and cause.is_own
