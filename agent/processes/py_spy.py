"""Runs py-spy, which reads a Python process's stacks out of its memory, also of one that is stopped or holds its lock.

py-spy is an extra (`rankdeck[stacks]`), looked for where the agent, the job, pip's --target and --user, and PATH have
their programs. Without native frames it reads beside the running process and never stops it, so a process may move
under it: then `PySpy` asks it again.

`stacks_of_output` turns what py-spy prints into stacks, without side effects. Its figures are read out of another
process's memory: names and files may be anything, and of any length.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import site
import sys
from pathlib import Path

import msgspec

from agent.processes import shim
from agent.slow_reader import TimedReads
from ddpcore.wire import DECODE_ERRORS
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR
from ddpcore.wire_stacks import MAX_FRAMES, MAX_THREADS, Frame, ThreadStack

MAX_OUTPUT_BYTES = 4 * 2**20
"""32 threads of 100 frames; a recursion may go deeper."""
MAX_SPIES = 4
"""py-spys at a time: with native frames each takes a core for up to half a second."""
ATTEMPTS = 3
KILLED_S = 0.5
"""Seconds that a killed py-spy has to be gone: in a read that hangs it stays longer."""
_MAX_OUTPUT_BYTES = 8192
_MAX_ERROR_CHARS = 200


class SpyError(Exception):
    """py-spy could not see the process; the message is for the user."""


def find_py_spy(python: str) -> str | None:
    """Return the path of py-spy, None where it is not installed; `python` is the job's interpreter."""
    job_python = shutil.which(python)
    beside = [Path(one).parent for one in (sys.executable, job_python) if one]
    # Not by the package's own list of files: after --target it has ../../bin/py-spy, which is nowhere (seen, pip 23).
    of_pip = [Path(one, "bin") for one in (*sys.path, site.getuserbase()) if one]
    return shutil.which("py-spy", path=":".join(map(str, (*beside, *of_pip)))) or shutil.which("py-spy")


class PySpy:
    """All py-spys of an agent; lives on the event loop's thread."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        """Pids that may still live: they are no leftovers."""
        self._room = asyncio.Semaphore(MAX_SPIES)
        self._reads = TimedReads("rankdeck-py-spy")

    async def find(self, python: str, within_s: float) -> str | None:
        """Return what `find_py_spy` does; raise TimeoutError where a directory does not answer."""
        return await self._reads.read(python, lambda: find_py_spy(python), within_s)

    async def dump(
        self, executable: str, pid: int, *, is_native: bool, deadline_s: float
    ) -> tuple[list[ThreadStack], int]:
        """Return the threads of a process, the main one first, and how many are left out.

        With `is_native` the frames of C and C++ are included, and the process is stopped for it. `deadline_s` is of the
        event loop's clock. Raises SpyError.
        """
        # A stopped process cannot be traced, only read: --native and py-spy's blocking mode fail on it (seen, 0.4).
        options = ("--native",) if is_native else ("--nonblocking",)
        argv = (executable, "dump", "--json", *options, "--pid", str(pid))
        try:
            async with asyncio.timeout_at(deadline_s), self._room:
                for _ in range(ATTEMPTS - 1):
                    with contextlib.suppress(SpyError):
                        return await self._run(argv, pid, is_native=is_native)
                return await self._run(argv, pid, is_native=is_native)
        except TimeoutError:
            raise SpyError("py-spy took too long") from None

    async def _run(self, argv: tuple[str, ...], pid: int, *, is_native: bool) -> tuple[list[ThreadStack], int]:
        pipe = asyncio.subprocess.PIPE
        fields = shim.stat_fields(pid)
        try:
            spy = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise SpyError(f"py-spy does not start: {error.strerror}") from error
        self.pids.add(spy.pid)
        assert spy.stdout is not None
        assert spy.stderr is not None
        try:
            output = await _read(spy.stdout, MAX_OUTPUT_BYTES + 1)
            if len(output) > MAX_OUTPUT_BYTES:
                raise SpyError(f"py-spy printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
            stderr_bytes = await _read(spy.stderr, _MAX_OUTPUT_BYTES)
            if await spy.wait():
                raise SpyError(f"py-spy: {_first_line(stderr_bytes)}")
        finally:
            was_cut_short = spy.returncode is None
            await self._end(spy)
            if is_native and was_cut_short and fields:
                # One that is killed while it traces may leave the process with a stop that it has asked for.
                shim.send_signal(pid, int(fields[19]), signal.SIGCONT)
        try:
            return stacks_of_output(output, pid)
        except MalformedOutputError as error:
            raise SpyError(f"py-spy: {error}") from error

    async def _end(self, spy: asyncio.subprocess.Process) -> None:
        if spy.returncode is None:
            spy.kill()
        with contextlib.suppress(TimeoutError):
            # Takes what is still in the pipes: they close when they are empty.
            await asyncio.wait_for(spy.communicate(), KILLED_S)
        if spy.returncode is not None:
            self.pids.discard(spy.pid)


async def _read(stream: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Return at most so many bytes of what comes until the end."""
    try:
        return await stream.readexactly(max_bytes)
    except asyncio.IncompleteReadError as end:
        return end.partial


def _first_line(stderr_bytes: bytes) -> str:
    """Return the first line of py-spy's error, and its cause."""
    text = stderr_bytes.decode(errors="replace").partition("Stack backtrace:")[0]
    lines = [line.strip() for line in text.splitlines()]
    causes = [line.partition(": ")[2] for line in lines if line[:2] in {"0:", "1:"}]
    first = next((line.removeprefix("Error: ") for line in lines if line), "it failed without a word")
    return f"{first} ({causes[-1]})"[:_MAX_ERROR_CHARS] if causes else first[:_MAX_ERROR_CHARS]


_MAX_NAME_CHARS = 256
_MAX_FILE_CHARS = 4096
_MAX_LINE = 2**31

_LIBRARY = re.compile(r"^<|/lib(64)?/python3?(\.\d+)?t?/|/(site|dist)-packages/|\.zip/")
"""Paths of the standard library and of installed packages, of any Python: the rank's own could be more exact."""
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
    """Shared library of a native frame."""


class _Thread(msgspec.Struct):
    """Source: py-spy 0.4, `StackTrace` in src/stack_trace.rs."""

    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None


_decoder = msgspec.json.Decoder(list[_Thread])


def stacks_of_output(output: bytes, pid: int) -> tuple[list[ThreadStack], int]:
    """Return the threads in the output of `py-spy dump --json`, the main one first, and how many are left out.

    Raises MalformedOutputError if it is something else, or shows no thread.
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
    """Return whether a file is likely the user's own program."""
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
