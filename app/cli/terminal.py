"""Asks the user at the terminal, for all logins of this command.

`TerminalPrompter` asks only on the terminal, one question at a time, and not while a screen is drawn.

`LOGINS` holds the logins of this command to all hosts: it has one terminal and one user. Import this module only where
the first host is connected to: it imports paramiko, which is slow.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import sys
import termios
import threading
from typing import TYPE_CHECKING

from app.cli.headless import asking, print_line
from app.ssh.login import Logins
from app.ssh.questions import ANSWER_WITHIN_S, QuestionDesk

if TYPE_CHECKING:
    from collections.abc import Iterator

TERMINAL = "/dev/tty"
"""Path that works with redirected input and output too; a program without a terminal has none."""
MAX_ANSWER_BYTES = 4096
"""Limit of bytes in one line of a terminal."""
_LOCAL_MODES = 3
"""Index of the local modes in termios's list."""


class TerminalPrompter:
    """Asks on the terminal, as `ssh` does: input is hidden unless it is no secret, and is stored nowhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def can_ask(self) -> bool:
        """Return whether a user can answer; not with redirected output, as a script's is."""
        return sys.stdin.isatty() and sys.stderr.isatty() and not self._has_screen()

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return the user's answer; None after two minutes or Ctrl-D."""
        with self._lock, asking(), contextlib.suppress(OSError, termios.error), _opened() as terminal:
            if _is_raw(terminal):
                return None
            with _typed_line(terminal, is_shown=is_shown):
                os.write(terminal, text.encode(errors="replace"))
                return _line(terminal)
        return None

    def show(self, text: str) -> None:
        """Print a text to standard error, unless a screen is drawn."""
        with self._lock:
            if not self._has_screen():
                print_line(text)

    def _has_screen(self) -> bool:
        with contextlib.suppress(OSError, termios.error), _opened() as terminal:
            return _is_raw(terminal)
        return False


@contextlib.contextmanager
def _opened() -> Iterator[int]:
    terminal = os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        yield terminal
    finally:
        os.close(terminal)


def _is_raw(terminal: int) -> bool:
    """Return whether a program reads the terminal key by key, as the console does; the terminal is in use then."""
    return not termios.tcgetattr(terminal)[_LOCAL_MODES] & termios.ICANON


@contextlib.contextmanager
def _typed_line(terminal: int, *, is_shown: bool) -> Iterator[None]:
    """Discard what was typed before, and hide what is typed now."""
    before = termios.tcgetattr(terminal)
    wanted = termios.tcgetattr(terminal)
    if not is_shown:
        wanted[_LOCAL_MODES] = wanted[_LOCAL_MODES] & ~termios.ECHO | termios.ECHONL

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    # A thread that waits here when Ctrl-C ends the program would leave a terminal that shows no input.
    atexit.register(restore)
    try:
        termios.tcsetattr(terminal, termios.TCSAFLUSH, wanted)
        yield
    finally:
        restore()
        atexit.unregister(restore)


def _line(terminal: int) -> str | None:
    poll = select.poll()
    poll.register(terminal, select.POLLIN)
    if not poll.poll(ANSWER_WITHIN_S * 1000):
        os.write(terminal, b"\n")
        return None
    typed = os.read(terminal, MAX_ANSWER_BYTES)
    return typed.decode(errors="replace").rstrip("\r\n") if typed else None


DESK = QuestionDesk(TerminalPrompter())
"""Asks on the terminal until a console replaces that."""
LOGINS = Logins(DESK)
