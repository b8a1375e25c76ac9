"""Answers the agent's requests to a rank: a datagram socket beside the rank's logs, and the stacks it asks for.

`RequestSocket` is `rank-N.sock`; nothing in it blocks.

`StackDumps` writes the stacks of all threads of this rank into a file. Only the probe's thread calls it: a disk that
hangs costs the probe's reports, never training. `threading.enumerate()` would take a lock that a program's threads take
too, so names come from a copy of its table.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.probe.process_facts import versions
from ddpcore.probe.stack import StackReader, all_stacks, sendable
from ddpcore.wire import WIRE_VERSION, MalformedReportError, decode_request
from ddpcore.wire_stacks import (
    MAX_FRAMES,
    MAX_PENDING,
    MAX_RECORDED,
    MAX_STACK_FILE_BYTES,
    MAX_TENSORS,
    Frame,
    PendingCall,
    RecordedCall,
    StackDump,
    ThreadStack,
    encode_stack_dump,
    fitting,
    stack_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpcore.probe.samples import BarrierMark, RecorderDump, RecorderEntry
    from ddpcore.probe.stack import CodeRoots, StackLine
    from ddpcore.wire import ProbeRequest

MAX_REQUEST_BYTES = 4096
MAX_REQUESTS_PER_TICK = 16


class RequestSocket:
    """Socket of one rank, from its making to `close`.

    An empty `directory` makes none. Where it cannot be made the rank takes no requests, and trains on.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = Path(directory) if directory else None
        self._path = Path(directory, f"rank-{rank}.sock")
        self._socket = _bind(self._path) if directory else None

    @property
    def fd(self) -> int | None:
        """Descriptor that is readable when there is a request; None without a socket."""
        return self._socket.fileno() if self._socket else None

    def take(self) -> Iterator[ProbeRequest]:
        """Yield the requests since the last call, at most `MAX_REQUESTS_PER_TICK`; malformed ones are passed over."""
        for _ in range(MAX_REQUESTS_PER_TICK if self._socket else 0):
            assert self._socket is not None
            try:
                yield decode_request(self._socket.recv(MAX_REQUEST_BYTES))
            except MalformedReportError:
                continue
            except OSError:
                return

    def let_go(self) -> None:
        """Forget the descriptor without closing it."""
        if self._socket is not None:
            self._socket.detach()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket | None:
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        requests.bind(str(path))
        path.chmod(0o600)
    except OSError:
        requests.close()
        return None
    return requests


ROOM_BYTES = 65_536
"""Bytes of the file for all but the threads."""
_MAX_NAME_CHARS = 256
_MAX_OP_CHARS = 64
_MAX_FILE_CHARS = 4096


class StackDumps:
    """Requests for stacks, and the file that answers them; `directory` is None where the rank takes no requests."""

    def __init__(self, directory: Path | None, rank: int, roots: CodeRoots) -> None:
        self._path = directory / stack_file(rank) if directory else None
        self._rank = rank
        self._reader = StackReader(roots)
        self._wanted_id: int | None = None

    def want(self, request_id: int) -> None:
        """Write the file at the next tick; it answers all requests until then."""
        self._wanted_id = max(self._wanted_id or 0, request_id)

    @property
    def is_wanted(self) -> bool:
        """True while a request is not answered."""
        return self._wanted_id is not None

    def write(self, recorded: RecorderDump, marks: Iterable[BarrierMark | None]) -> None:
        """Answer what is requested; raise OSError if the file cannot be written: the agent then looks from outside."""
        request_id, self._wanted_id = self._wanted_id, None
        if request_id is None or self._path is None:
            return
        threads = self._threads()
        kept = fitting(threads, MAX_STACK_FILE_BYTES - ROOM_BYTES)
        dump = StackDump(
            wire_version=WIRE_VERSION,
            request_id=request_id,
            rank=self._rank,
            pid=os.getpid(),
            threads=kept,
            num_threads_left_out=len(threads) - len(kept),
            pending=_pending(recorded, marks),
            recorded=_latest_calls(recorded),
            versions=versions(),
        )
        _replace(self._path, encode_stack_dump(dump))

    def _threads(self) -> list[ThreadStack]:
        """Return the stacks, the main thread's first, then the oldest; the probe's own is left out."""
        stacks = all_stacks(MAX_FRAMES)
        stacks.pop(threading.get_ident(), None)
        # A private table, but the same in every Python so far; without it threads have no names.
        known: Mapping[int, threading.Thread] = dict(vars(threading).get("_active", {}))
        main_id = threading.main_thread().ident or 0
        main = self._thread(known.get(main_id), *stacks.pop(main_id, ([], False)))
        others = [self._thread(known.get(thread_id), *stack) for thread_id, stack in stacks.items()]
        return [main, *sorted(others, key=lambda thread: (not thread.native_id, thread.native_id))]

    def _thread(self, thread: threading.Thread | None, stack: Sequence[StackLine], is_cut: bool) -> ThreadStack:  # noqa: FBT001 - as `all_stacks` says it
        return ThreadStack(
            name=sendable(thread.name, _MAX_NAME_CHARS) if thread else "",
            native_id=(thread.native_id or 0) if thread else 0,
            frames=[
                Frame(
                    sendable(file, _MAX_FILE_CHARS),
                    line,
                    sendable(function, _MAX_NAME_CHARS),
                    is_own=self._reader.is_own(file, function.rpartition(".")[2]),
                )
                for file, line, function in stack
            ],
            is_cut=is_cut,
        )


def _pending(recorded: RecorderDump, marks: Iterable[BarrierMark | None]) -> list[PendingCall]:
    """Return calls that are not over: those of the flight recorder, the oldest first, then a named barrier."""
    calls = [
        PendingCall(sendable(entry.group, _MAX_NAME_CHARS), entry.seq, _op(entry))
        for entry in recorded.entries
        if not entry.is_retired and not entry.is_p2p and entry.seq >= 1
    ]
    named = [
        PendingCall(sendable(mark.group, _MAX_NAME_CHARS), mark.seq, "barrier", sendable(mark.label, _MAX_NAME_CHARS))
        for mark in marks
        if mark is not None and not mark.is_over
    ]
    return [*calls[: MAX_PENDING - len(named)], *named][:MAX_PENDING]


def _latest_calls(recorded: RecorderDump) -> list[RecordedCall]:
    """Return the latest calls of all recorders together, the oldest first."""
    now_s = time.time()  # noqa: TID251 - the recorder's clock
    # Stable: where times are missing, the order is the recorder's.
    entries = sorted(recorded.entries, key=lambda entry: entry.called_us)
    return [_recorded(entry, now_s) for entry in entries[-MAX_RECORDED:]]


def _recorded(entry: RecorderEntry, now_s: float) -> RecordedCall:
    age_s = now_s - entry.called_us / 1e6
    return RecordedCall(
        sendable(entry.group, _MAX_NAME_CHARS),
        max(0, entry.seq),
        _op(entry),
        sizes=[[max(0, size) for size in sizes[:8]] for sizes in entry.sizes[:MAX_TENSORS]],
        is_over=entry.is_retired,
        age_s=max(0.0, age_s) if entry.called_us else None,
    )


def _op(entry: RecorderEntry) -> str:
    """Return an operation without its backend's name."""
    return sendable(entry.op.partition(":")[2] or entry.op, _MAX_OP_CHARS)


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, for this user alone."""
    made = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        made.unlink()
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    made.replace(path)
