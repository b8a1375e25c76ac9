"""What py-spy prints, as stacks. Pure.

Its figures are read out of another process's memory: names and files may be anything, and as long as they like.
"""

from __future__ import annotations

import re

import msgspec

from ddpcore.wire import DECODE_ERRORS, LAUNCH_PLUGIN_DIR
from ddpcore.wire_stacks import MAX_FRAMES, MAX_THREADS, Frame, ThreadStack

_MAX_NAME_CHARS = 256
_MAX_FILE_CHARS = 4096
_MAX_LINE = 2**31

_LIBRARY = re.compile(r"^<|/lib(64)?/python3?(\.\d+)?t?/|/(site|dist)-packages/|\.zip/")
"""The standard library and what is installed, of any Python: the rank's own could say more exactly where that is."""
_DDPCORE = f"{LAUNCH_PLUGIN_DIR.parent}/"
_EXAMPLES = f"{_DDPCORE}examples/"


class MalformedOutputError(ValueError):
    """These bytes are not what py-spy prints."""


class _Frame(msgspec.Struct):
    """Source: py-spy 0.4, `Frame` in src/stack_trace.rs."""

    name: str
    filename: str
    line: int = 0
    module: str | None = None
    """The shared library of a native frame."""


class _Thread(msgspec.Struct):
    """Source: py-spy 0.4, `StackTrace` in src/stack_trace.rs."""

    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None


_decoder = msgspec.json.Decoder(list[_Thread])


def stacks_of_output(output: bytes, pid: int) -> tuple[list[ThreadStack], int]:
    """Return the threads in the output of `py-spy dump --json`, the main one first, and how many are left out.

    Args:
        output: Whole.
        pid: Of the process, and so of its main thread.

    Raises:
        MalformedOutputError: It is something else, or shows no thread.
    """
    try:
        threads = _decoder.decode(output)
    except DECODE_ERRORS as error:
        raise MalformedOutputError(f"it printed no stacks: {error}") from error
    if not threads:
        raise MalformedOutputError("it saw no thread")
    threads.sort(key=lambda thread: (thread.os_thread_id != pid, thread.os_thread_id or 0))
    return [_thread(one) for one in threads[:MAX_THREADS]], max(0, len(threads) - MAX_THREADS)


def is_own(file: str) -> bool:
    """Say whether a file is likely the user's own program."""
    if file.startswith(_DDPCORE):
        return file.startswith(_EXAMPLES)
    return _LIBRARY.search(file) is None


def _thread(thread: _Thread) -> ThreadStack:
    return ThreadStack(
        name=(thread.thread_name or "")[:_MAX_NAME_CHARS],
        native_id=max(0, thread.os_thread_id or 0),
        frames=[_frame(frame) for frame in thread.frames[:MAX_FRAMES]],
        is_cut=len(thread.frames) > MAX_FRAMES,
    )


def _frame(frame: _Frame) -> Frame:
    is_native = frame.module is not None
    return Frame(
        file=frame.filename[:_MAX_FILE_CHARS],
        line=min(max(0, frame.line), _MAX_LINE),
        function=frame.name[:_MAX_NAME_CHARS],
        is_own=not is_native and is_own(frame.filename),
        is_native=is_native,
    )
