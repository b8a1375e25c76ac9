"""One string for the shell of another machine, such that a program there gets exactly these arguments.

sshd can only hand a command to the user's login shell as one string. Single quotes mean the same in every POSIX shell,
and in fish as long as no backslash stands before a quote or another backslash.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, NamedTuple

from app.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Finished(NamedTuple):
    """Result of a program on a host."""

    exit_code: int
    stdout: bytes
    error_text: str
    """The last line of its standard error, safe to show."""


def command_line(argv: Sequence[str]) -> str:
    """Return a command for a shell; the program may begin with `~/`, which becomes the shell's HOME.

    Raises:
        UsageError: An argument holds a NUL, which no program can be given.
    """
    program, *arguments = argv
    for text in argv:
        if "\0" in text:
            raise UsageError("an argument holds a NUL character")
    quoted = '"$HOME"' + shlex.quote(program[1:]) if program.startswith("~/") else shlex.quote(program)
    # `exec`: the shell does not stay between sshd and the program, and does not outlive it.
    return " ".join(["exec", quoted, *map(shlex.quote, arguments)])
