"""A person at a terminal, as tests and benchmarks need one: a real PTY, keys, what is painted; and a slow link.

The link is that of an SSH session: what the program writes is taken from it at once, as sshd does, and waits in
buffers of up to two megabytes for its turn on the wire; keys and the terminal's own answers travel the other way.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SIZE = (200, 50)
READ_BYTES = 65_536
SEGMENT_BYTES = 1_448
"""Of a TCP segment: what arrives at once."""
MAX_IN_FLIGHT_BYTES = 2 * 2**20
"""An SSH channel's window: what sshd takes from the program before it waits for the other side."""
QUERY = re.compile(rb"\x1b\[6n|\x1b\[\?2026\$p|\x1b\[(\d+);(\d+)H")
LOOK_S = 0.1
"""Between two looks at whether what is waited for is so."""
KEPT_BYTES = 4_096
"""Of what was painted before: a word may come in two pieces."""
ECHO = "import os, tty; tty.setraw(0); os.write(1, b'!')\nwhile True: os.write(1, os.read(0, 64))"


class Link(NamedTuple):
    """What lies between the program and the person."""

    bytes_s: float
    round_trip_s: float


class LocalUser:
    """Runs a program on a PTY, types, and sees what is painted; one thread, nothing happens between its calls.

    Attributes:
        num_bytes: How many the terminal has received.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], link: Link | None = None) -> None:
        master, slave = pty.openpty()
        width, height = SIZE
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.begun_s = time.monotonic()
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, **environment}
        )
        os.set_blocking(master, False)
        # Held open, as a shell holds it: what the program leaves unread is the shell's.
        self._slave = slave
        self._master = master
        self._link = link
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        """What is on its way: when it arrives, its number, what it does there."""
        self._num_events = 0
        self._wire_free_s = 0.0
        self._in_flight = 0
        self._kept = b""
        self._cursor = (1, 1)
        self._answers = True
        self._unanswered: list[bytes] = []
        """Answers that are kept back, the oldest first."""
        self._wanted = b""
        self._seen_s = 0.0
        self.num_bytes = 0

    def stop_answering(self) -> None:
        """Be a terminal that answers no question."""
        self._answers = False

    def answer(self) -> None:
        """Answer what was asked meanwhile, and every question from now on."""
        self._answers = True
        for answer in self._unanswered:
            self._send_up(answer)
        self._unanswered.clear()

    def type(self, keys: bytes) -> None:
        """Press keys."""
        self._send_up(keys)

    def wait(self, seconds: float) -> None:
        """Look on for a while."""
        self._io_thread(time.monotonic() + seconds, lambda: False)

    def wait_until(self, is_so: Callable[[], bool], within_s: float, what: str) -> None:
        """Look on until something is so."""
        self._io_thread(time.monotonic() + within_s, is_so)
        assert is_so(), f"not within {within_s} s: {what}"

    def until_painted(self, words: str, within_s: float) -> float:
        """Return when these words were painted (`time.monotonic`); they must not have been on their way before."""
        self._wanted, self._kept = words.encode(), b""
        self._io_thread(time.monotonic() + within_s, lambda: not self._wanted)
        if self._wanted:
            self._wanted = b""
            raise TimeoutError(f"{words!r} was not painted within {within_s} s; last: {self._kept[-300:]!r}")
        return self._seen_s

    def key(self, keys: bytes, words: str, within_s: float = 30.0) -> float:
        """Press keys and return how long it takes until they are answered by these words, in seconds."""
        typed_s = time.monotonic()
        self.type(keys)
        return self.until_painted(words, within_s) - typed_s

    def cpu_s(self) -> float:
        """Return the CPU time of the program so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def memory_bytes(self) -> tuple[int, int]:
        """Return the program's resident memory, and its share of it (PSS)."""
        memory = psutil.Process(self.process.pid).memory_full_info()
        return memory.rss, memory.pss

    def unread(self) -> bytes:
        """Return what was typed or answered and that the program, which has ended, has not read."""
        mode = termios.tcgetattr(self._slave)
        mode[3] &= ~termios.ICANON
        termios.tcsetattr(self._slave, termios.TCSANOW, mode)
        os.set_blocking(self._slave, False)
        try:
            return os.read(self._slave, READ_BYTES)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        """End the program as a closed terminal does, and see it end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            end_s = time.monotonic() + 15.0
            while self.process.poll() is None and time.monotonic() < end_s:
                self.wait(0.05)
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def _io_thread(self, end_s: float, is_done: Callable[[], bool]) -> None:
        """Let the program and the link go on until something is so."""
        while True:
            now_s = time.monotonic()
            while self._events and self._events[0][0] <= now_s:
                heapq.heappop(self._events)[2]()
            if is_done() or now_s >= end_s:
                return
            due_s = min(end_s, now_s + LOOK_S, self._events[0][0] if self._events else end_s)
            reads = [self._master] if self._in_flight < MAX_IN_FLIGHT_BYTES else []
            ready, _, _ = select.select(reads, [], [], max(0.0, due_s - now_s))
            if ready:
                self._take()

    def _take(self) -> None:
        data = os.read(self._master, READ_BYTES)
        if self._link is None:
            self._arrive(data)
            return
        for start in range(0, len(data), SEGMENT_BYTES):
            segment = data[start : start + SEGMENT_BYTES]
            self._in_flight += len(segment)
            self._wire_free_s = max(self._wire_free_s, time.monotonic()) + len(segment) / self._link.bytes_s
            self._later(self._wire_free_s + self._link.round_trip_s / 2, partial(self._land, segment))

    def _land(self, segment: bytes) -> None:
        self._in_flight -= len(segment)
        self._arrive(segment)

    def _arrive(self, data: bytes) -> None:
        """Be the terminal."""
        self.num_bytes += len(data)
        text = self._kept + data
        if self._wanted and self._wanted in text:
            self._wanted, self._seen_s = b"", time.monotonic()
        for match in QUERY.finditer(text):
            if match.end() <= len(self._kept):
                continue
            if match[1] is not None:
                self._cursor = (int(match[1]), int(match[2]))
                continue
            row, column = self._cursor
            is_place = match[0].endswith(b"6n")
            self._unanswered.append(f"\x1b[{row};{column}R".encode() if is_place else b"\x1b[?2026;2$y")
            if self._answers:
                self.answer()
        self._kept = text[-KEPT_BYTES:]

    def _send_up(self, data: bytes) -> None:
        if self._link is None:
            os.write(self._master, data)
        else:
            at_s = time.monotonic() + self._link.round_trip_s / 2
            self._later(at_s, partial(os.write, self._master, data))

    def _later(self, at_s: float, do: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, do))


def open_echo() -> LocalUser:
    """Return a person at a program that only says again what is typed: what a key costs here without any work."""
    echo = LocalUser([sys.executable, "-c", ECHO], {})
    echo.until_painted("!", 10.0)
    return echo
