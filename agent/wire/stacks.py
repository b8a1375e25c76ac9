"""What a node reports of where its ranks stand, down to every frame: asked for, and found in the best way there is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from agent.wire.codec import MAX_COMMAND_BYTES, JobId
from ddpcore.wire import Count, Name, Rank, Seconds, Word
from ddpcore.wire_stacks import PendingCalls, Recorded, Threads, Versions, fitting

MAX_KERNEL_FRAMES = 16
REPLY_BYTES = MAX_COMMAND_BYTES * 7 // 8
"""Bytes of all stacks in one reply; each rank has an equal share."""


class StackSource(StrEnum):
    """How a rank's stacks were got."""

    PROBE = "probe"
    """Read by the rank itself."""
    PY_SPY = "py-spy"
    """Read from outside, out of its memory."""
    KERNEL = "kernel"
    """No stacks, only the kernel's facts of the process."""
    NONE = "none"
    """No stacks, since there is no process."""


class KernelFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What /proc shows of a process and its main thread.

    Source: proc_pid_stat(5), proc_pid_wchan(5), proc_pid_syscall(5), proc_pid_stack(5).
    """

    state: Word
    """The kernel's letter: R, S, D (cannot be interrupted), T (stopped), t (stopped by a debugger)."""
    wchan: Name = ""
    """The kernel's function in which the main thread sleeps."""
    syscall: Count | None = None
    """Number of the system call that it is in; None outside, or where we may not know."""
    stack: Annotated[list[Name], msgspec.Meta(max_length=MAX_KERNEL_FRAMES)] = []
    """The kernel's frames, innermost first; root alone may read them."""

    @property
    def is_stopped(self) -> bool:
        """True when no thread of the process gets any further until somebody lets it."""
        return self.state in {"T", "t"}


class RankStacks(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank."""

    rank: Rank
    source: StackSource
    pid: Count = 0
    threads: Threads = []
    """The main thread first."""
    num_threads_left_out: Count = 0
    pending: PendingCalls = []
    """What the rank has called and not completed, as far as its probe reports."""
    recorded: Recorded = []
    """The latest calls in its flight recorder, as far as its probe reports; left out where there is no room."""
    versions: Versions = {}
    """Versions of what it runs on, as far as its probe reports them."""
    kernel: KernelFacts | None = None
    note: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """Why it was got in no better way."""


class GetStacks(msgspec.Struct, frozen=True, tag="stacks", forbid_unknown_fields=True, omit_defaults=True):
    """Ask for the stacks of all ranks that a job has on the node. Takes up to eight seconds where a rank is stuck."""

    job_id: JobId
    is_native: bool = False
    """Include the frames of C and C++, where py-spy is installed; it stops each rank for up to half a second."""


class Stacks(msgspec.Struct, frozen=True, tag="stacks"):
    """The stacks of a job's ranks on a node, by rank."""

    job_id: JobId
    attempt: Count
    took_s: Seconds
    ranks: list[RankStacks]


def sendable_ranks(ranks: list[RankStacks]) -> list[RankStacks]:
    """Return ranks that fit into one reply: of those with more than their share, the first threads."""
    rank_bytes = REPLY_BYTES // max(1, len(ranks))
    return [_within(one, rank_bytes) for one in ranks]


def _within(stacks: RankStacks, max_bytes: int) -> RankStacks:
    rest_bytes = _size_without_threads(stacks)
    if rest_bytes > max_bytes / 2:
        stacks = msgspec.structs.replace(stacks, recorded=[])
        rest_bytes = _size_without_threads(stacks)
    kept = fitting(stacks.threads, max_bytes - rest_bytes)
    num_left_out = stacks.num_threads_left_out + len(stacks.threads) - len(kept)
    return msgspec.structs.replace(stacks, threads=kept, num_threads_left_out=num_left_out)


def _size_without_threads(stacks: RankStacks) -> int:
    return len(msgspec.json.encode(msgspec.structs.replace(stacks, threads=[])))
