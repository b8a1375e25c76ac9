"""Reads what a failed rank has printed: which exception everything followed from, and on which line of the program.

`failure_in` reads tracebacks of Python with their chains, groups and syntax errors; of rich; those that torch and the
standard library put into a message when the exception was another process's; native aborts, with faulthandler's frames
and the place where they end. It is linear in the text.

`last_line` is for a rank that left no exception: the last line on its standard error, as of `sys.exit("...")` and
argparse.

`FailureText` and `FoundFailure` hold a failure that has been read from a job's files.
"""

from __future__ import annotations

import itertools
import re
from enum import Enum
from signal import Signals

import msgspec

from agent.wire.logs import INTERRUPTED, LAUNCHER_RANK, MAX_TRACEBACK_BYTES, exception_line
from ddpcore.wire import Place

MAX_EXCEPTION_CHARS = 1024
MAX_WHERE_CHARS = 512
MAX_MESSAGE_LINES = 40
"""Lines of a message that runs on behind its first line."""
MAX_PATH_CHARS = 4096
MAX_FUNCTION_CHARS = 256
MAX_LINE_DIGITS = 9
FATAL_SIGNALS = frozenset({Signals.SIGABRT, Signals.SIGSEGV, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL})
"""Signals at which faulthandler writes where each thread stands. Source: Modules/faulthandler.c."""

_HEADER = re.compile(
    r"(?P<kind>Original |(?:\+ )?Exception Group )?Traceback \(most recent call last\):$"
    r"|\u256d\u2500+ Traceback \(most recent call last\) \u2500+\u256e$"
)
_FRAME = re.compile(
    r'(?:  )?File "(?P<file>[^"]+)", line (?P<line>\d+)(?:(?:, in| in) (?P<function>.+))?$'
    r"|\u2502 (?P<rich_file>\S+):(?P<rich_line>\d+) in (?P<rich_function>\S+)"
)
_EXCEPTION = re.compile(r"(?!INFO|DEBUG|WARNING)[^\W\d][\w.<>]*(?::|: .*)?$")
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_WITHIN = re.compile(r'-- Process \d+ terminated with the following error:$|"""$')
_GROUP_MEMBER = re.compile(r"\s*(?:\+-)?\+-+ (?P<number>\d+|\.\.\.) -+$")
_GROUP_MARGIN = re.compile(r"\s+(?P<mark>[|+]) ?(?=[^-]|$)")
_BARE_GROUP = re.compile(r"  \| (?P<text>[\w.]*ExceptionGroup: .*\(\d+ sub-exceptions?\))$")
"""A group that was made by the interpreter and never raised has no traceback."""
_IGNORED = re.compile(r"Exception ignored (in|on)\b|on rank \d+:$")
"""What follows is no end of this rank: an exception in a finalizer, or another rank's. Source: ddpcore.errors."""
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
"""torch puts it before each line of an uncaught exception's traceback."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

_THROWN = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']+)'")
_TEARDOWN = "terminate called without an active exception"
"""Text of a gloo thread that may come while Python ends, whatever it ends of. Source: torch 2.13, seen."""
_WHAT = re.compile(r"\s*what\(\):\s*(?P<text>.*)$")
_PROBE = "/ddpcore/probe/"
"""Part of the path of the probe's own code, which runs in threads of its own."""
_FATAL = re.compile(r"Fatal Python error: .+$")
_NATIVE_THREAD = re.compile(r"(?P<current>Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_OF_COLLECTIVE = re.compile(r"(?P<gloo>gloo::)|nccl|Dist\w+Error", re.IGNORECASE)
"""What a thread of gloo or NCCL throws, beside the thread that has called a collective."""
_CALLS_COLLECTIVE = re.compile(r"/torch/(?:distributed/|nn/parallel/|autograd/graph\.py$)")
"""Files of torch in which a thread makes collectives, DDP's in a backward pass too, or waits for them."""
_STARTED = "_bootstrap"
"""Outermost function of a thread that the program has started. Source: threading.py."""

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen |/ddpcore/(?!examples/)")
"""Files that are not the program's own. A probe's or an engine's frame is ours, and no news."""


class _Link(Enum):
    """How an exception belongs to the one printed before it."""

    FIRST = 0
    AFTER = 1
    """That one was its cause or context."""
    WITHIN = 2
    """That one encloses it: a group's first member, another process's exception."""
    BESIDE = 3
    """Both are members of a group."""


class _Frame(msgspec.Struct):
    file: str
    line: str
    function: str

    @property
    def is_own(self) -> bool:
        return not _LIBRARY.search(self.file)

    @property
    def error_text(self) -> str:
        name = self.file.rpartition("/")[2]
        return f"{name}:{self.line} in {self.function}" if self.function else f"{name}:{self.line}"


class _Thread(msgspec.Struct):
    """A thread that faulthandler has written."""

    is_current: bool
    frames: list[_Frame] = []
    """Its frames, the innermost first."""

    @property
    def calls_collective(self) -> bool:
        """Whether its innermost line of the program calls a collective, or waits for one."""
        inside = itertools.takewhile(lambda frame: not frame.is_own, self.frames)
        return any(_CALLS_COLLECTIVE.search(frame.file) for frame in inside)


class _Exception(msgspec.Struct):
    """One exception of a block, as it is printed."""

    link: _Link
    depth: int
    text: str = ""
    """Its first line, once it has come."""
    frames: list[_Frame] = []
    message: list[str] = []
    """Lines behind the first one."""

    @property
    def line(self) -> str:
        return exception_line("\n".join((self.text, *self.message)))


class _Block(msgspec.Struct):
    """Exceptions that belong together, or one native abort."""

    start: int
    end: int
    """The line behind its last one."""
    is_prefixed: bool = False
    is_ignored: bool = False
    is_native: bool = False
    exceptions: list[_Exception] = []
    threads: list[_Thread] = []
    """Threads of a native abort: the one that started last is the first."""

    @property
    def has_text(self) -> bool:
        return any(one.text for one in self.exceptions)

    def may_end_by(self, signal: int | None) -> bool:
        """Return whether a rank that ended by a signal, None is an exit code, may have ended of this."""
        if self.is_prefixed or self.is_native or signal in (None, Signals.SIGABRT):
            return True
        return signal == Signals.SIGINT and any(one.text.startswith(INTERRUPTED) for one in self.exceptions)

    @property
    def native_frames(self) -> list[_Frame]:
        """Frames of the thread in which a native abort happened, the innermost last.

        A library's own thread has no frames of Python: then it is the thread that calls a collective, where the abort
        is of one, else the main thread, which is the last. A call of gloo that no thread is in was made before: none.
        """
        found = [thread for thread in self.threads if thread.is_current]
        of_collective = None if found else _OF_COLLECTIVE.search(self.exceptions[0].text)
        if of_collective:
            found = [thread for thread in self.threads if thread.calls_collective]
        if len(found) != 1 and of_collective and of_collective["gloo"]:
            return []
        if len(found) != 1:
            # faulthandler writes a hundred threads at most: the main thread may not be among them.
            found = [thread for thread in self.threads[-1:] if thread.frames and thread.frames[-1].function != _STARTED]
        return found[0].frames[::-1] if found else []


def failure_in(text: str, signal: int | None = None) -> FailureText | None:
    """Return what ended a rank by the text that it left; None when that names no exception.

    A program may have printed exceptions that it survived. What torch marked as uncaught counts before everything else,
    then what was printed last. Of a rank that a signal ended other tracebacks do not count: an uncaught exception ends
    by an exit code, but for SIGABRT, and KeyboardInterrupt by SIGINT.
    """
    lines = text.splitlines()
    blocks = [block for block in _Reader(lines).blocks() if block.has_text and not block.is_ignored]
    raised = [block for block in blocks if block.may_end_by(signal)]
    if not raised:
        return None
    marked = [block for block in raised if block.is_prefixed and not block.is_native]
    block = (marked or raised)[-1]
    # One whose last line never came, since another process wrote into it, says nothing.
    block.exceptions = [one for one in block.exceptions if one.text]
    root, outer = _root(block.exceptions), _outermost(block.exceptions)
    exception, last = block.exceptions[root].line, block.exceptions[outer].line
    frames = block.exceptions[root].frames
    if block.is_native and frames and _PROBE in frames[-1].file and not any(frame.is_own for frame in frames):
        exception = last = f"{exception}, in a thread of rankdeck's probe"
    body = "\n".join(_RANK_PREFIX.sub("", line, count=1) for line in lines[block.start : block.end])
    return FailureText(
        exception=cleaned(exception).expandtabs(1)[:MAX_EXCEPTION_CHARS],
        outer=cleaned(last).expandtabs(1)[:MAX_EXCEPTION_CHARS] if last != exception else "",
        where=cleaned(_where(block, root)).expandtabs(1)[:MAX_WHERE_CHARS],
        traceback=shortened(cleaned(body), MAX_TRACEBACK_BYTES),
        place=_place(frames) if block.is_native and signal in FATAL_SIGNALS else None,
    )


def cleaned(text: str) -> str:
    """Return text without colours, with what else no terminal should get as U+FFFD; tabs and line ends stay."""
    return _CONTROL.sub("\ufffd", _COLOUR.sub("", text))


def shortened(text: str, max_bytes: int) -> str:
    """Return text that takes at most `max_bytes` as UTF-8: head and tail, for the exception is at the end."""
    data = text.encode(errors="replace")
    if len(data) <= max_bytes:
        return data.decode()
    note = f"\n... {len(data)} bytes, not all of them are shown ...\n".encode()
    head = (max_bytes - len(note)) // 3
    tail = max_bytes - len(note) - head
    return (data[:head] + note + data[-tail:]).decode(errors="ignore")


class _Reader:
    """Finds the blocks in lines, one pass."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._blocks: list[_Block] = []
        self._block: _Block | None = None
        self._open: _Exception | None = None
        """The exception whose frames are being printed."""
        self._ended: _Exception | None = None
        """The exception whose message may run on."""
        self._ended_at = 0
        self._link: _Link | None = None
        """How the next exception belongs to the last one, if a line has shown it."""
        self._is_in_group = False
        self._ignores_next = False

    def blocks(self) -> list[_Block]:
        """Return the blocks in order."""
        for index, raw in enumerate(self._lines):
            line = _COLOUR.sub("", raw.rstrip())
            text = _RANK_PREFIX.sub("", line, count=1) if line.startswith("[rank") else line
            self._read(index, text, is_prefixed=text is not line and text != line)
        for block in self._blocks:
            if block.is_native:
                block.exceptions[0].frames = block.native_frames
        return self._blocks

    def _read(self, index: int, line: str, *, is_prefixed: bool) -> None:
        depth = 0
        if self._is_in_group and (margin := _GROUP_MARGIN.match(line)):
            depth, body = max(0, margin.start("mark") - 2), line[margin.end() :]
        else:
            body = line
        header = _HEADER.match(body.lstrip() if not self._is_in_group else body) if "Traceback (" in body else None
        if header:
            self._on_header(index, header, depth, is_prefixed=is_prefixed)
        elif self._is_native_line(index, line):
            return
        elif self._open is not None:
            self._on_frame_or_end(index, body)
        elif self._on_link(line):
            return
        else:
            self._on_other(index, line, body, depth)

    def _on_header(self, index: int, header: re.Match[str], depth: int, *, is_prefixed: bool) -> None:
        kind = header["kind"] or ""
        link = _Link.WITHIN if kind == "Original " else self._link
        if self._block is None or self._block.is_native or link is None:
            self._begin_block(index, is_prefixed=is_prefixed)
            link = _Link.FIRST
        self._begin_exception(link, depth)
        if "Group" in kind:
            self._is_in_group = True

    def _begin_block(self, index: int, *, is_prefixed: bool = False) -> _Block:
        self._block = _Block(index, index + 1, is_prefixed, self._ignores_next)
        self._blocks.append(self._block)
        self._ignores_next = self._is_in_group = False
        return self._block

    def _begin_exception(self, link: _Link, depth: int = 0, text: str = "") -> None:
        assert self._block is not None
        one = _Exception(link, depth, text)
        self._block.exceptions.append(one)
        self._open, self._ended = (None, one) if text else (one, None)
        self._link = None

    def _on_frame_or_end(self, index: int, body: str) -> None:
        assert self._block is not None
        assert self._open is not None
        if frame := _FRAME.match(body):
            self._open.frames.append(_frame(frame))
        elif _EXCEPTION.match(body):
            self._open.text = body
            self._open, self._ended, self._ended_at = None, self._open, index
        self._block.end = index + 1

    def _on_link(self, line: str) -> bool:
        """Take a line that shows how exceptions belong together; return whether it was one."""
        sentence = line.strip(" |")
        member = _GROUP_MEMBER.match(line) if self._is_in_group else None
        if sentence in (_CAUSE, _CONTEXT):
            self._link = _Link.AFTER
        elif _WITHIN.match(sentence):
            self._link = _Link.WITHIN
        elif member:
            self._link = _Link.WITHIN if member["number"] == "1" else _Link.BESIDE
        else:
            return False
        return True

    def _on_other(self, index: int, line: str, body: str, depth: int) -> None:
        if depth and self._link in (_Link.WITHIN, _Link.BESIDE) and _EXCEPTION.match(body) and self._block:
            self._begin_exception(self._link, depth, body)  # a member that was never raised has no traceback
            self._block.end = index + 1
        elif line.startswith('  File "') and (frame := _FRAME.match(line)) and not frame["function"]:
            self._begin_block(index)  # a syntax error of the program's first file has no header
            self._begin_exception(_Link.FIRST)
            self._on_frame_or_end(index, line)
        elif group := _BARE_GROUP.match(line):
            self._begin_block(index)
            self._begin_exception(_Link.FIRST, 0, group["text"])
            self._is_in_group = True
        elif _IGNORED.match(line):
            self._ignores_next = True
            self._block = self._ended = None
        elif self._ended is not None and self._block is not None:
            self._on_message(index, body)

    def _on_message(self, index: int, body: str) -> None:
        """Take a line that may be a part of the message of the exception above it."""
        assert self._block is not None
        assert self._ended is not None
        if index - self._ended_at > MAX_MESSAGE_LINES:
            return
        self._ended.message.append(body)
        if not body.strip():
            return
        if self._ended.text.endswith(":"):
            self._ended.text = f"{self._ended.text} {body.strip()}"
        if index == self._block.end:
            self._block.end = index + 1

    def _is_native_line(self, index: int, line: str) -> bool:
        """Take a line of a native abort; return whether it was one."""
        if _TEARDOWN in line:
            return True
        thrown, what, fatal = _THROWN.match(line), _WHAT.match(line), _FATAL.match(line)
        if not (thrown or what or fatal):
            return self._is_in_native_block(index, line)
        block = self._block
        if block is None or not block.is_native:
            block = self._begin_block(index)
            block.is_native = True
            block.exceptions.append(_Exception(_Link.FIRST, 0))
        self._open = self._ended = None
        one = block.exceptions[0]
        if thrown:
            one.text = thrown["type"]
        elif what:
            one.text = f"{one.text}: {what['text']}" if one.text else what["text"]
        elif not one.text:
            one.text = line
        block.end = index + 1
        return True

    def _is_in_native_block(self, index: int, line: str) -> bool:
        block = self._block
        if block is None or not block.is_native:
            return False
        if thread := _NATIVE_THREAD.match(line):
            block.threads.append(_Thread(thread["current"] == "Current thread"))
        elif frame := _FRAME.match(line):
            if block.threads:
                block.threads[-1].frames.append(_frame(frame))
        else:
            return False
        block.end = index + 1
        return True


def _frame(match: re.Match[str]) -> _Frame:
    if match["file"]:
        return _Frame(match["file"], match["line"], match["function"] or "")
    return _Frame(match["rich_file"], match["rich_line"], match["rich_function"])


def _root(exceptions: list[_Exception]) -> int:
    """Return the exception that the others followed from: the first of a chain, and what that one speaks of."""
    index = 0
    while index + 1 < len(exceptions) and exceptions[index + 1].link is _Link.WITHIN:
        index += 1
    return index


def _outermost(exceptions: list[_Exception]) -> int:
    """Return the exception that ended the rank: the last of the chain."""
    return max(
        (
            index
            for index, one in enumerate(exceptions)
            if one.depth == exceptions[0].depth and one.link in (_Link.FIRST, _Link.AFTER)
        ),
        default=0,
    )


def _where(block: _Block, root: int) -> str:
    """Return the innermost of the program's own frames, of the root if it has some."""
    others = [*range(root - 1, -1, -1), *range(root + 1, len(block.exceptions))]
    for index in (root, *others):
        frames = block.exceptions[index].frames
        own = [frame for frame in frames if frame.is_own]
        if frames:
            innermost: _Frame = (own or frames)[-1]
            return innermost.error_text
    return ""


def _place(frames: list[_Frame]) -> Place | None:
    """Return the innermost of the program's own frames; None where there is none that the wire can carry."""
    found = next((frame for frame in reversed(frames) if frame.is_own), None)
    if found is None or len(found.file) > MAX_PATH_CHARS or len(found.line) > MAX_LINE_DIGITS:
        return None
    return Place(cleaned(found.file), int(found.line), cleaned(found.function)[:MAX_FUNCTION_CHARS])


_NOISE = re.compile(
    r"\[?[WI]\d{4} \d\d:\d\d"
    r"|\S+:\d+: \w*Warning: "
    r"|.*\b\d{1,3}%\|"
    r"|.*resource_tracker"
)
"""torch's own notes at its end, Python's warnings, progress bars. Source: c10/util/Logging.cpp, tqdm."""


def last_line(text: str) -> str:
    """Return the last line that may show why a rank ended, cleaned and cut; empty when there is none."""
    lines = text.splitlines()
    for index in range(len(lines) - 1, -1, -1):
        line = cleaned(_RANK_PREFIX.sub("", lines[index], count=1)).strip()
        is_source = lines[index].startswith("  ") and index > 0 and "Warning: " in lines[index - 1]
        if line and not is_source and not _NOISE.match(line):
            return line[:MAX_EXCEPTION_CHARS]
    return ""


class FailureText(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a failed rank has left; see `agent.wire.logs.RootCause` for the fields."""

    exception: str = ""
    outer: str = ""
    where: str = ""
    traceback: str = ""
    last_line: str = ""
    """Last line of standard error, where there is no exception: by `sys.exit("...")` or argparse."""
    place: Place | None = None
    """Line of the program at which a fatal signal ended the rank, as faulthandler has written it."""


class FoundFailure(msgspec.Struct, frozen=True):
    """What the files of a job hold of a failure."""

    text: FailureText
    rank: int = LAUNCHER_RANK
    failed_s: float | None = None
    """Time of the failure, if that was written too."""
