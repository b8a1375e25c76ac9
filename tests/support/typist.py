"""A command on a terminal of its own, with somebody who reads and types: for questions, where no screen is drawn."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import termios
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

WITHIN_S = 60.0


class Typist:
    """Starts the command; the `with` block ends it.

    Attributes:
        said: All that has been on the terminal, what was typed and echoed included.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._near, far = pty.openpty()
        self.said = ""
        self._read = 0
        self.process = subprocess.Popen(
            # util-linux's: the terminal becomes the one of the command, which opens /dev/tty. What a shell starts in
            # the background ignores Ctrl-C, and so would all below it.
            ["setsid", "--ctty", "env", "--default-signal=INT", *argv],
            env=environment,
            stdin=far,
            stdout=far,
            stderr=far,
        )
        self._far = far  # kept open: what the terminal is set to is looked at when the command has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._near)
        os.close(self._far)

    def until_it_says(self, *words: str) -> str:
        """Read until some words come that were not read before; return the first of them that do."""
        deadline_s = time.monotonic() + WITHIN_S
        while not (found := [word for word in words if word in self.said[self._read :]]):
            assert time.monotonic() < deadline_s, f"{words!r} was never said, but this: {self.said}"
            self._take(0.1)
        first = min(found, key=lambda word: self.said.index(word, self._read))
        self._read = self.said.index(first, self._read) + len(first)
        return first

    def types(self, text: str) -> None:
        """Type a line."""
        os.write(self._near, f"{text}\r".encode())

    def presses_ctrl_c(self) -> None:
        os.write(self._near, b"\x03")

    def exit_code(self) -> int:
        """Return the exit code, having read all."""
        deadline_s = time.monotonic() + WITHIN_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline_s, f"it does not end: {self.said}"
            self._take(0.1)
        while self._take(0.0):
            pass
        return self.process.returncode

    def shows_what_is_typed(self) -> bool:
        """Say whether the terminal echoes."""
        return bool(termios.tcgetattr(self._far)[3] & termios.ECHO)

    def _take(self, timeout_s: float) -> bool:
        if not select.select([self._near], [], [], timeout_s)[0]:
            return False
        with contextlib.suppress(OSError):  # nobody holds the other end
            self.said += os.read(self._near, 65_536).decode(errors="replace")
        return True
