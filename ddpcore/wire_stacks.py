"""What a rank reports of its stacks on request: the vocabulary of a file, beside that of `ddpcore.wire`.

A `DumpStacks` request is answered by a file beside the probe's socket, written whole: stacks are too long for a
datagram, and nobody wants them five times a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ddpcore.wire import DECODE_ERRORS, WIRE_VERSION, Count, FilePath, MalformedReportError, Name, Rank, Seconds, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_STACK_FILE_BYTES = 262_144
"""A larger file is refused before it is decoded; a rank with 40 frames on the main thread and 8 more threads writes
16 KB."""
MAX_THREADS = 64
MAX_FRAMES = 100
"""Innermost frames of a thread."""
INNERMOST_KEPT = 3
"""Frames of a library that stay where there is no room for all."""
MAX_PENDING = 16
MAX_RECORDED = 32
"""Latest calls of the flight recorder."""
MAX_TENSORS = 4
"""Tensors of a call whose sizes are reported."""


class Frame(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One call on a stack."""

    file: FilePath
    """Name by the interpreter; a shared library in a native frame."""
    line: Count
    """0 where it is not known."""
    function: Name
    """Name with its class, as far as that is known: `Trainer.step`."""
    is_own: bool = False
    """The user's own program, as against torch, ddpcore, the standard library and what else is installed."""
    is_native: bool = False
    """Whether it is of a shared library, seen from outside."""


class ThreadStack(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thread."""

    name: Name
    """Empty for a thread that Python has not started."""
    native_id: Count = 0
    """The kernel's id of it; 0 where it is not known."""
    frames: Annotated[list[Frame], msgspec.Meta(max_length=MAX_FRAMES)] = []
    """Innermost first."""
    is_cut: bool = False
    """Whether there are more frames further out."""


class PendingCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A collective, or a named barrier, that has been called and is not over."""

    group: Name
    seq: Count
    op: Word = ""
    label: Name = ""


Sizes = Annotated[list[Count], msgspec.Meta(max_length=8)]


class RecordedCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One call as the flight recorder has it."""

    group: Name
    seq: Count
    op: Word
    sizes: Annotated[list[Sizes], msgspec.Meta(max_length=MAX_TENSORS)] = []
    """Shapes of the first tensors."""
    is_over: bool = False
    age_s: Seconds | None = None
    """How long ago it was called; None where the recorder has no time."""


Threads = Annotated[list[ThreadStack], msgspec.Meta(max_length=MAX_THREADS)]
PendingCalls = Annotated[list[PendingCall], msgspec.Meta(max_length=MAX_PENDING)]

Recorded = Annotated[list[RecordedCall], msgspec.Meta(max_length=MAX_RECORDED)]
Versions = Annotated[dict[Word, Word], msgspec.Meta(max_length=16)]
"""`{"python": "3.11.7", "torch": "2.13.0", "nccl": "2.27.3"}`: of what is there."""


class StackDump(msgspec.Struct, frozen=True, omit_defaults=True):
    """All Python threads of a rank at one moment, but for the probe's own."""

    wire_version: int
    request_id: Count
    """Id of the latest request that it answers."""
    rank: Rank
    pid: Count
    threads: Threads
    """The main thread first."""
    num_threads_left_out: Count = 0
    """Threads that there was no room for."""
    pending: PendingCalls = []
    """What the flight recorder and the named barriers have open, in the order of its calling."""
    recorded: Recorded = []
    """The latest calls that the flight recorder has, the oldest first."""
    versions: Versions = {}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(StackDump)


def stack_file(rank: int) -> str:
    """Return the name of the file beside the probe's socket `rank-N.sock`."""
    return f"rank-{rank}.stacks.json"


def encode_stack_dump(dump: StackDump) -> bytes:
    """Return the content of the file."""
    return _encoder.encode(dump)


def decode_stack_dump(content: bytes) -> StackDump:
    """Return what a file holds.

    Raises:
        MalformedReportError: The bytes are too many, no StackDump, or of another wire version.
    """
    if len(content) > MAX_STACK_FILE_BYTES:
        raise MalformedReportError(f"stacks of {len(content)} bytes, at most {MAX_STACK_FILE_BYTES} are taken")
    try:
        dump = _decoder.decode(content)
    except DECODE_ERRORS as error:
        raise MalformedReportError(f"not the stacks of a rank: {error}") from error
    if dump.wire_version != WIRE_VERSION:
        raise MalformedReportError(f"a rank speaks wire version {dump.wire_version}, this agent {WIRE_VERSION}")
    return dump


def fitting(threads: Sequence[ThreadStack], max_bytes: int) -> list[ThreadStack]:
    """Return the first threads whose JSON fits into `max_bytes`; the very first one always, if need be cut."""
    kept: list[ThreadStack] = []
    left_bytes = max_bytes
    for thread in threads[:MAX_THREADS]:
        size_bytes = _size_bytes(thread)
        if size_bytes > left_bytes:
            return kept or [_cut(thread, left_bytes)]
        kept.append(thread)
        left_bytes -= size_bytes
    return kept


def _cut(thread: ThreadStack, max_bytes: int) -> ThreadStack:
    """Return a thread with what fits of it: the user's own frames are worth more than a library's.

    First go a library's frames but for the innermost, then the outermost half, time and again.
    """
    if _size_bytes(thread) > max_bytes:
        kept = [frame for index, frame in enumerate(thread.frames) if frame.is_own or index < INNERMOST_KEPT]
        thread = msgspec.structs.replace(thread, frames=kept, is_cut=True)
    while thread.frames and _size_bytes(thread) > max_bytes:
        thread = msgspec.structs.replace(thread, frames=thread.frames[: len(thread.frames) // 2], is_cut=True)
    return thread


def _size_bytes(thread: ThreadStack) -> int:
    return len(_encoder.encode(thread)) + 1
