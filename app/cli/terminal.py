"""Asks the user at the terminal, for all logins of this command.

`TerminalPrompter` asks there and nowhere else, one question at a time, and not while a screen is drawn.

`LOGINS` are the logins of this command, whichever hosts they lead to: it has one terminal, and one user. Import this
module where the first host is connected to: it costs paramiko.
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

from app.cli.headless import print_line
from app.ssh.login import Logins
from app.ssh.questions import ANSWER_WITHIN_S, QuestionDesk

if TYPE_CHECKING:
    from collections.abc import Iterator

TERMINAL = "/dev/tty"
"""Also where input and output are turned elsewhere; a program without a terminal has none."""
MAX_ANSWER_BYTES = 4096
"""A terminal gives no more in a line."""
_LOCAL_MODES = 3
"""Where termios has them in its list."""


class TerminalPrompter:
    """Asks on the terminal, as `ssh` does: what is typed is not shown, unless it is no secret, and is kept nowhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def can_ask(self) -> bool:
        """Say whether a person sits there: whose output goes elsewhere, as a script's does, is not asked."""
        return sys.stdin.isatty() and sys.stderr.isatty() and not self._has_screen()

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return what the person types; None when they do not for two minutes, or end it by Ctrl-D."""
        with self._lock, contextlib.suppress(OSError, termios.error), _opened() as terminal:
            if _is_raw(terminal):
                return None
            with _typed_line(terminal, is_shown=is_shown):
                os.write(terminal, text.encode(errors="replace"))
                return _line(terminal)
        return None

    def show(self, text: str) -> None:
        """Say something on standard error, unless a screen is drawn."""
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
    """Say whether somebody reads the terminal key by key: it is theirs then, as it is the console's."""
    return not termios.tcgetattr(terminal)[_LOCAL_MODES] & termios.ICANON


@contextlib.contextmanager
def _typed_line(terminal: int, *, is_shown: bool) -> Iterator[None]:
    """Throw away what was typed before, and hide what is typed now."""
    before = termios.tcgetattr(terminal)
    wanted = termios.tcgetattr(terminal)
    if not is_shown:
        wanted[_LOCAL_MODES] = wanted[_LOCAL_MODES] & ~termios.ECHO | termios.ECHONL

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    # A thread that waits here when the program ends, as Ctrl-C makes it, would leave a terminal that shows nothing.
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
"""Asks on the terminal until a console takes that over."""
LOGINS = Logins(DESK)
