"""What a node knows of how a process ended, beside its exit status and what it wrote itself.

Each fact is measured: what is not known is None or empty, and nothing is inferred from a fact that is missing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from agent.wire.machine import MAX_XIDS, GpuCondition, LimitReport, Xid
from ddpcore.wire import Count, FilePath


class GpuFault(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What happened to the GPU that was a rank's home while the rank ran, or as it ended."""

    index: Count
    """Index by PCI bus, as in nvidia-smi."""
    condition: GpuCondition = GpuCondition.OK
    xids: Annotated[list[Xid], msgspec.Meta(max_length=MAX_XIDS)] = []
    """Errors since the rank began, the latest first; an age counts back from the rank's end, 0.0 is after it."""


class DiskLimit(StrEnum):
    """What is used up on a file system."""

    SPACE = "space"
    INODES = "inodes"
    """Numbers for files: many small files need more of them than a file system was made with."""
    QUOTA = "quota"
    """What a user, a group or a project may use there; the file system itself may have room."""


class FullDisk(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A file system on which a rank could not write."""

    path: FilePath
    """Where it is mounted."""
    limit: DiskLimit
    total_bytes: Count | None = None
    free_bytes: Count | None = None
    """Bytes that a user without privileges may still write, just after the end."""


class Sender(StrEnum):
    """Who sent the signal that ended a process, where that is known for certain."""

    RANKDECK = "rankdeck"
    """An operator's `rankdeck fault`, through this node's agent."""
    OOMD = "oomd"
    """A guard against memory pressure: systemd-oomd, or Meta's oomd, which leaves the same mark."""


class EndFacts(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Facts of a node on the end of a rank."""

    gpu: GpuFault | None = None
    memory_limit: LimitReport | None = None
    """Limit of a cgroup at which the kernel killed a process of the rank's; its use is as it was before."""
    cgroup: FilePath = ""
    """That cgroup, or the one in which oomd has killed."""
    disk: FullDisk | None = None
    sender: Sender | None = None
