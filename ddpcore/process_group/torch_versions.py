"""Torch versions with a known fault in data-parallel training, and what to install instead.

Pure. An entry needs a source that shows the fault. A version is matched by its release (1.12.0 of "1.12.0+cu116"): a
local build of a faulty release has its fault. A pre-release of it (1.12.0a0, as vendors build) may or may not, so it is
only warned of.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_RELEASE_PARTS = 3
_VERSION = re.compile(r"(\d+(?:\.\d+)*)((?:\.?(?:a|b|rc|dev|post)\d*)*)(?:\+.*)?")
"""The release, and what comes behind it; torch's own spelling, so that no package has to be there for it."""


class Fault(NamedTuple):
    """A known fault of one release."""

    release: tuple[int, int, int]
    what: str
    instead: str
    """What to install."""
    sources: tuple[str, ...]
    is_fatal: bool = False
    """Results would be wrong or the job would not run as asked; otherwise it is worth a warning."""
    backends: frozenset[str] = frozenset()
    """Only where one of these is in use; empty means always."""
    needs_cuda: bool = False
    workaround: Mapping[str, str] = MappingProxyType({})
    """Environment that avoids it."""


FAULTS = (
    Fault(
        release=(1, 12, 0),
        what=(
            "importing it initialises CUDA, so that CUDA_VISIBLE_DEVICES set by the program has no effect, "
            "and ranks land on GPUs that are not theirs"
        ),
        instead="torch>=1.12.1",
        sources=(
            "https://github.com/pytorch/pytorch/issues/80876",
            "https://github.com/ultralytics/yolov5/issues/8395",
            "https://github.com/ultralytics/yolov5/pull/8621",
        ),
        is_fatal=True,
    ),
    Fault(
        release=(2, 1, 0),
        what="DDP crashes in backward on sparse gradients of CUDA tensors over gloo",
        instead="torch>=2.2",
        sources=(
            "https://github.com/pytorch/pytorch/issues/111422",
            "https://github.com/pytorch/pytorch/pull/111485",
        ),
        backends=frozenset({"gloo"}),
        needs_cuda=True,
    ),
    Fault(
        release=(2, 7, 0),
        what="its NCCL 2.26 hangs at random in the non-blocking mode that binding a device turns on",
        instead="torch>=2.7.1",
        sources=(
            "https://github.com/pytorch/pytorch/issues/153960",
            "https://github.com/pytorch/pytorch/pull/154055",
        ),
        backends=frozenset({"nccl"}),
        workaround=MappingProxyType({"TORCH_NCCL_USE_COMM_NONBLOCKING": "0"}),
    ),
)


class Finding(NamedTuple):
    """A fault that this version has, or may have."""

    fault: Fault
    is_refused: bool
    text: str
    """One line for people."""


def known_faults(version: str, backends: Collection[str] = (), *, has_cuda: bool = False) -> list[Finding]:
    """Return known faults of a torch version, the refused first; what is no version has no known fault."""
    if (parsed := _VERSION.fullmatch(version)) is None:
        return []
    release = (*map(int, parsed[1].split(".")), *(0,) * _RELEASE_PARTS)[:_RELEASE_PARTS]
    is_early = re.search("a|b|rc|dev", parsed[2]) is not None
    findings = [
        _finding(fault, version, is_early=is_early)
        for fault in FAULTS
        if fault.release == release
        and (not fault.backends or not fault.backends.isdisjoint(backends))
        and (has_cuda or not fault.needs_cuda)
    ]
    return sorted(findings, key=lambda finding: not finding.is_refused)


def _finding(fault: Fault, version: str, *, is_early: bool) -> Finding:
    name = f"torch {version}" if not is_early else f"torch {version} is a pre-release of a faulty version:"
    text = f"{name} {'has a known fault: ' if not is_early else ''}{fault.what}; install {fault.instead}"
    return Finding(fault, is_refused=fault.is_fatal and not is_early, text=f"{text} (see {fault.sources[0]})")
