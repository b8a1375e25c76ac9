"""Groups of stacks as lines of text, each with its tone: the same for the screen and for printed output.

The user's own frames are marked, the library's around them are few: the innermost ones, where a rank stands, and one
line for those between.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from app.stacks.groups import is_installed, short_file
from app.text import ranks_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.stacks.groups import FrameRow, KernelRow, RankStackRow, StackGroup, StackPicture, ThreadRow

MAX_GROUPS = 100
"""Limit of groups on one page: `--json` has them all."""
INNERMOST_SHOWN = 3
"""Number of library frames shown below the user's innermost line."""
NATIVE_SHOWN = 16
"""The same number where native frames are among them: they are there only on request."""
MAX_THREAD_NAMES = 6
_KERNEL_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "sleeps and cannot be interrupted",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
}


class Tone(Enum):
    """Meaning of a line."""

    STUCK = auto()
    """Heading of a group that cannot get any further by itself, or has no process."""
    ODD = auto()
    """Heading of a group that does not wait, while others do."""
    USUAL = auto()
    """Heading of any other group."""
    NOTE = auto()
    TROUBLE = auto()
    OWN = auto()
    LIBRARY = auto()
    FOLDED = auto()
    THREAD = auto()
    BLANK = auto()


class StackText(NamedTuple):
    """One line."""

    tone: Tone
    text: str


def summary_text(picture: StackPicture) -> str:
    """Return `job train: 4 ranks in 2 groups, taken in 40 ms`."""
    num_ranks, num_groups = len(picture.ranks), len(picture.groups)
    ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    groups = f"{num_groups} group{'' if num_groups == 1 else 's'}"
    took = f"{1000 * picture.took_s:.0f} ms" if picture.took_s < 1 else seconds_text(picture.took_s)
    return f"job {picture.job_id}: {ranks} in {groups}, taken in {took}"


def picture_lines(picture: StackPicture, *, is_whole: bool) -> list[StackText]:
    """Return all groups.

    Args:
        picture: The groups to show.
        is_whole: With every frame, every thread, whole paths, the flight recorder and the kernel's state.
    """
    lines = [StackText(Tone.TROUBLE, trouble) for trouble in picture.troubles]
    does_any_wait = any(group.is_waiting for group in picture.groups)
    for group in picture.groups[:MAX_GROUPS]:
        if lines:
            lines.append(StackText(Tone.BLANK, ""))
        lines.append(StackText(_heading_tone(group, does_any_wait=does_any_wait), heading_text(group)))
        lines += _group_lines(group, is_whole=is_whole)
    left = picture.groups[MAX_GROUPS:]
    if left:
        num_ranks = sum(len(group.ranks) for group in left)
        lines += [StackText(Tone.BLANK, ""), StackText(Tone.NOTE, f"{len(left)} more groups of {num_ranks} ranks")]
    return lines


def heading_text(group: StackGroup) -> str:
    """Return `rank 2 (1 rank): frozen at train.py:41 in step`."""
    row, place = group.example, group.place
    num_ranks = len(group.ranks)
    at = f"at {_place_text(place)}" if place else "no stack is to be had"
    what = {
        "gone": row.note,
        "frozen": f"frozen, {at}" if place is None else f"frozen {at}",
        "waiting": f"waiting in {row.waits_in}, {at}",
        "blocked": f"blocked in the kernel, {at}",
    }.get(row.state, at)
    return f"{ranks_text(group.ranks)} ({num_ranks} rank{'' if num_ranks == 1 else 's'}): {what}"


def _heading_tone(group: StackGroup, *, does_any_wait: bool) -> Tone:
    if group.example.state in {"frozen", "blocked", "gone"}:
        return Tone.STUCK
    return Tone.ODD if does_any_wait and not group.is_waiting else Tone.USUAL


def _group_lines(group: StackGroup, *, is_whole: bool) -> list[StackText]:
    row = group.example
    lines: list[StackText] = []
    if row.state == "gone":
        return lines
    notes = [_note_text(row, note) for note in group.notes]
    if len(group.ranks) == 1 and row.pid is not None:
        # Where to continue with a debugger.
        notes = ["; ".join((f"pid {row.pid} on {row.node}", *notes))]
    lines += [StackText(Tone.NOTE, f"  {note}") for note in notes]
    if row.kernel and (is_whole or not row.threads or row.state == "blocked"):
        lines.append(StackText(Tone.NOTE, f"  the kernel: the main thread {_kernel_text(row.kernel)}"))
    if is_whole and row.versions:
        lines.append(StackText(Tone.NOTE, f"  {', '.join(f'{name} {one}' for name, one in row.versions.items())}"))
    if not row.threads:
        return lines
    main, *others = row.threads
    lines += _thread_lines(main, is_whole=is_whole)
    if is_whole:
        for thread in others:
            lines.append(StackText(Tone.THREAD, f"  thread {thread.name or 'without a name'} of rank {row.rank}"))
            lines += _thread_lines(thread, is_whole=True)
        if row.calls:
            lines.append(StackText(Tone.THREAD, f"  flight recorder of rank {row.rank}, the latest call last"))
            lines += [StackText(Tone.LIBRARY, f"    {call}") for call in row.calls]
    num_hidden = row.num_threads_left_out + (0 if is_whole else len(others))
    if num_hidden:
        names = [] if is_whole else [thread.name or "without a name" for thread in others]
        lines.append(StackText(Tone.FOLDED, f"    {_threads_text(num_hidden, names)}"))
    return lines


def _note_text(row: RankStackRow, note: str) -> str:
    return f"seen by py-spy: {note}" if row.source == "py-spy" else note


def _threads_text(num_threads: int, names: Sequence[str]) -> str:
    label = f"{num_threads} more thread{'' if num_threads == 1 else 's'}"
    shown = ", ".join(names[:MAX_THREAD_NAMES])
    more = ", ..." if len(names) > MAX_THREAD_NAMES else ""
    return f"{label}: {shown}{more}" if shown else label


def _thread_lines(thread: ThreadRow, *, is_whole: bool) -> Iterator[StackText]:
    is_innermost = True
    for is_own, run in groupby(thread.frames, key=lambda frame: frame.is_own):
        frames = list(run)
        if is_own or is_whole:
            num_shown = len(frames)
        elif is_innermost:
            num_shown = NATIVE_SHOWN if any(frame.is_native for frame in frames) else INNERMOST_SHOWN
            num_shown += len(frames) == num_shown + 1  # a line with "1 more" would take its place
        else:
            num_shown = 1 if len(frames) == 1 else 0
        yield from (_frame_line(frame, is_whole=is_whole) for frame in frames[:num_shown])
        if folded := frames[num_shown:]:
            yield StackText(Tone.FOLDED, f"    {_folded_text(folded, is_more=num_shown > 0)}")
        is_innermost = False
    if thread.is_cut:
        yield StackText(Tone.FOLDED, "    further out there are more frames")


def _frame_line(frame: FrameRow, *, is_whole: bool) -> StackText:
    if frame.is_own:
        return StackText(Tone.OWN, f"  > {_place_text(frame, is_whole=is_whole)}")
    return StackText(Tone.LIBRARY, f"    {_place_text(frame, is_whole=is_whole)}")


def _place_text(frame: FrameRow, *, is_whole: bool = False) -> str:
    """Return `train.py:41 in Trainer.step`, `torch/autograd/graph.py:865 in backward` or `poll of libc.so.6`."""
    if frame.is_native and not frame.line:
        return f"{frame.function} of {frame.file.rpartition('/')[2]}"
    file = frame.file if is_whole else short_file(frame.file)
    return f"{file}:{frame.line} in {frame.function}"


def _folded_text(frames: Sequence[FrameRow], *, is_more: bool) -> str:
    """Return `... 5 more frames of torch, runpy`."""
    packages = list(dict.fromkeys(_package(frame) for frame in frames))
    label = f"{'more ' if is_more else ''}frame{'' if len(frames) == 1 else 's'}"
    return f"... {len(frames)} {label} of {', '.join(packages[:3])}{', ...' if len(packages) > 3 else ''}"


def _package(frame: FrameRow) -> str:
    """Return the package or file of a frame: `torch`, `threading`, `libc.so.6`."""
    if frame.file.startswith("<"):
        return frame.file.strip("<>").removeprefix("frozen ")
    name = short_file(frame.file)
    return (name.partition("/")[0] if is_installed(frame.file) else name).removesuffix(".py")


def _kernel_text(kernel: KernelRow) -> str:
    label = _KERNEL_STATES.get(kernel.state, f"is in state {kernel.state}")
    if kernel.stack:
        return f"{label}, in {' < '.join(kernel.stack)}"
    where = f" in {kernel.wchan}" if kernel.wchan else ""
    return f"{label}{where}" + ("" if kernel.syscall is None else f", system call {kernel.syscall}")
