"""How a rank's memory grows, and what limits it, as its node reports them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from agent.wire.machine import Amount
from ddpcore.wire import Count, Seconds

MAX_GROWTHS = 4
"""Of one rank: its host memory, and that on its GPU."""


class LimitKind(StrEnum):
    """What ends a process that holds too much memory."""

    MACHINE = "machine"
    """The memory of the machine, with its swap: shared by all that runs there, /dev/shm included."""
    CGROUP = "cgroup"
    """memory.max of a cgroup (v2) or memory.limit_in_bytes (v1), of the process or of one above it."""
    ADDRESS_SPACE = "address_space"
    """RLIMIT_AS of the process."""
    DATA = "data"
    """RLIMIT_DATA of the process."""
    GPU = "gpu"
    """The memory of a GPU: shared by all processes on it."""


class LimitReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A limit of a rank's memory, and how far it is used, by whomever it counts."""

    kind: LimitKind
    limit_bytes: Count
    used_bytes: Count
    """Without what the kernel, or torch's allocator, gives back on demand."""


class GrowthReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Steady growth of a rank's memory, and when it comes to the limit that is nearest in time."""

    limit: LimitReport
    held_bytes: Count
    """What the rank holds, its child processes included."""
    rate_bytes_hz: Amount
    """Of this rank, bytes a second."""
    for_s: Seconds
    """How long it has grown so."""
    remaining_s: Seconds
    """Until the limit is reached, with the growth of the other ranks that share it."""
    is_near: bool = False
    """The limit is near, and the growth has lasted long enough to be no filling cache: worth a warning."""


class MemoryReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The memory of a rank's process and of its child processes."""

    tree_bytes: Count
    """Resident memory of the process, and what its child processes hold besides shared pages; swap included."""
    limits: Annotated[list[LimitReport], msgspec.Meta(max_length=8)] = []
    """Those of the host's memory that are known, the nearest first; the machine's is in the node's own report."""
    growths: Annotated[list[GrowthReport], msgspec.Meta(max_length=MAX_GROWTHS)] = []
