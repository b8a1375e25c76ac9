"""Ranks that stand at the same place, grouped: a rank that is alone comes first, ranks that wait come last.

A rank's stack is the main thread's. Two are the same when they have the same calls on the same lines, wait in the same
collective, and the kernel lets both run or neither: a rank frozen in a wait has the stack of those that wait.
Lines count, also the innermost: two branches of a loop, or two barriers of a function, must not fall together.
Frames that depend on the observer are left out, since one of the ranks may have been seen from outside: native ones,
and those of the interpreter's own start. So are classes before a function's name, and where a node has its files.

All text is clean (`app.text`) from here on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from agent.wire.stacks import StackSource
from app.text import LINE_LIMIT, call_text, clean, clean_name, json_value, seconds_text
from app.view.rows import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from agent.wire.stacks import KernelFacts, RankStacks, Stacks
    from ddpcore.wire_stacks import Frame, RecordedCall, ThreadStack

_BLOCKED = "D"
_INSTALLED = re.compile(r"/(?:site-packages|dist-packages|lib(?:64)?/python3(?:\.\d+)?t?)(?=/)")


class NodeStacks(msgspec.Struct, frozen=True):
    """Answer of one node, or why there is none."""

    node: str
    stacks: Stacks | None
    trouble: str = ""
    """Clean text; empty when it has answered."""


class FrameRow(msgspec.Struct, frozen=True):
    """One call on a stack."""

    file: str
    line: int
    function: str
    is_own: bool
    is_native: bool


class ThreadRow(msgspec.Struct, frozen=True):
    """One thread."""

    name: str
    frames: list[FrameRow]
    """Innermost first."""
    is_cut: bool
    """Whether there are more frames further out."""


class KernelRow(msgspec.Struct, frozen=True):
    """The kernel's state of a process and its main thread."""

    state: str
    wchan: str
    syscall: int | None
    stack: list[str]


class RankStackRow(msgspec.Struct, frozen=True):
    """One rank."""

    rank: int
    node: str
    pid: int | None
    source: str
    """probe, py-spy, kernel (there are no frames) or none (there is no process)."""
    state: str
    """frozen, blocked (in the kernel), waiting, running, or gone."""
    waits_in: str
    """Oldest collective or barrier that it has called and not completed: `all_reduce #57`."""
    threads: list[ThreadRow]
    """The main thread first."""
    num_threads_left_out: int
    kernel: KernelRow | None
    note: str
    """Why a better source of its stacks was not available."""
    calls: list[str]
    """Latest calls in its flight recorder, the oldest first: `all_reduce #57 [4096], over, 3.2 s ago`."""
    versions: dict[str, str]
    """Versions of what it runs on: python, torch, cuda, nccl, kernel."""


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks that stand at the same place."""

    ranks: list[int]
    example: RankStackRow
    """The lowest rank."""
    notes: list[str]
    """Notes of the ranks, each once."""

    @property
    def is_waiting(self) -> bool:
        """Whether they wait for others: they come last."""
        return self.example.state == "waiting"

    @property
    def frames(self) -> list[FrameRow]:
        """The main thread's frames, innermost first."""
        return self.example.threads[0].frames if self.example.threads else []

    @property
    def place(self) -> FrameRow | None:
        """The innermost line of the user's own program, else where it was started; None without frames."""
        python = [frame for frame in self.frames if not frame.is_native and not frame.file.startswith("<frozen")]
        own = (frame for frame in python if frame.is_own)
        return next(own, python[-1] if python else None)


class StackPicture(msgspec.Struct, frozen=True):
    """The stacks of a job, as far as its nodes have answered."""

    job_id: str
    num_nodes: int
    took_s: float
    """Time of the slowest node."""
    groups: list[StackGroup]
    ranks: list[RankStackRow]
    troubles: list[str]


def picture_of(answers: Sequence[NodeStacks]) -> StackPicture:
    """Return the groups of all ranks of a job."""
    rows: list[RankStackRow] = []
    groups: dict[Hashable, list[RankStackRow]] = {}
    stacks = [(answer.node, answer.stacks) for answer in answers if answer.stacks is not None]
    for node, found in stacks:
        for one in found.ranks:
            row = _row(clean_name(node), one)
            rows.append(row)
            groups.setdefault(_key(row), []).append(row)
    made = [_group(members) for members in groups.values()]
    return StackPicture(
        job_id=clean_name(stacks[0][1].job_id) if stacks else "",
        num_nodes=len(answers),
        took_s=max((found.took_s for _, found in stacks), default=0.0),
        groups=sorted(made, key=lambda group: (group.is_waiting, len(group.ranks), group.ranks[0])),
        ranks=sorted(rows, key=lambda row: row.rank),
        troubles=[f"{clean_name(answer.node)}: {answer.trouble}" for answer in answers if answer.trouble],
    )


def short_file(file: str) -> str:
    """Return a file's path below the last directory of installed packages in it, else its name."""
    below = _INSTALLED.split(file)[-1]
    return file.rpartition("/")[2] if below == file else below.removeprefix("/")


def is_installed(file: str) -> bool:
    return _INSTALLED.search(file) is not None


def stacks_object(picture: StackPicture) -> dict[str, object]:
    """Return the object that `rankdeck stacks --json` prints."""
    groups = [
        {"ranks": group.ranks, "state": group.example.state, "waits_in": group.example.waits_in, "place": group.place}
        for group in picture.groups
    ]
    return {
        "schema": SCHEMA,
        "job_id": picture.job_id,
        "took_s": json_value(picture.took_s),
        "groups": json_value(groups),
        "ranks": json_value(picture.ranks),
        "troubles": picture.troubles,
    }


def _group(members: Iterable[RankStackRow]) -> StackGroup:
    rows = sorted(members, key=lambda row: row.rank)
    return StackGroup(
        ranks=[row.rank for row in rows],
        example=rows[0],
        notes=list(dict.fromkeys(row.note for row in rows if row.note)),
    )


def _key(row: RankStackRow) -> Hashable:
    main = row.threads[0] if row.threads else None
    if main is None:
        return row.source, row.state, row.waits_in, row.kernel and row.kernel.wchan
    frames = tuple(
        (short_file(frame.file), frame.line, frame.function.rpartition(".")[2])
        for frame in main.frames
        if not frame.is_native and not frame.file.startswith("<frozen")
    )
    return row.state, row.waits_in, main.is_cut, frames


def _row(node: str, found: RankStacks) -> RankStackRow:
    oldest = found.pending[0] if found.pending else None
    return RankStackRow(
        rank=found.rank,
        node=node,
        pid=found.pid or None,
        source=found.source.value,
        state=_state(found),
        waits_in=call_text(oldest.group, oldest.seq, oldest.op, oldest.label) if oldest else "",
        threads=[_thread_row(thread) for thread in found.threads],
        num_threads_left_out=found.num_threads_left_out,
        kernel=_kernel_row(found.kernel),
        note=clean(found.note, LINE_LIMIT),
        calls=[_call_text(call) for call in found.recorded],
        versions={clean_name(name): clean_name(version) for name, version in found.versions.items()},
    )


def _call_text(call: RecordedCall) -> str:
    sizes = " ".join(str(list(sizes)) for sizes in call.sizes)
    what = f"{call_text(call.group, call.seq, call.op, '')} {sizes}".rstrip()
    age = "" if call.age_s is None else f", called {seconds_text(call.age_s)} ago"
    return f"{what}, {'over' if call.is_over else 'not over'}{age}"


def _state(found: RankStacks) -> str:
    """Return a rank's state; the kernel's state outranks the rank's earlier report."""
    if found.source is StackSource.NONE:
        return "gone"
    if found.kernel and found.kernel.is_stopped:
        return "frozen"
    if found.pending:
        return "waiting"
    return "blocked" if found.kernel and found.kernel.state == _BLOCKED else "running"


def _kernel_row(kernel: KernelFacts | None) -> KernelRow | None:
    if kernel is None:
        return None
    return KernelRow(
        clean_name(kernel.state), clean_name(kernel.wchan), kernel.syscall, [clean_name(name) for name in kernel.stack]
    )


def _thread_row(thread: ThreadStack) -> ThreadRow:
    return ThreadRow(clean_name(thread.name), [_frame_row(frame) for frame in thread.frames], thread.is_cut)


def _frame_row(frame: Frame) -> FrameRow:
    return FrameRow(
        clean(frame.file, LINE_LIMIT), frame.line, clean_name(frame.function), frame.is_own, frame.is_native
    )
