"""One string for the shell of another machine, such that a program there gets exactly these arguments.

sshd can only hand a command to the user's login shell as one string. Single quotes mean the same in every POSIX shell,
and in fish as long as no backslash stands before a quote or another backslash. In csh and tcsh they end with the line,
and `!` calls up its history within them; csh takes no word of 8 KiB: `python_command` sends a source by standard input.
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
    quoted = '"$HOME"' + _quoted(program[1:]) if program.startswith("~/") else _quoted(program)
    # `exec`: the shell does not stay between sshd and the program, and does not outlive it.
    return " ".join(["exec", quoted, *map(_quoted, arguments)])


def _quoted(text: str) -> str:
    return shlex.quote(text).replace("!", r"'\!'")


def python_command(source: str, *arguments: str, oldest: tuple[int, ...] = ()) -> tuple[list[str], bytes]:
    """Return the arguments that have a Python run a source, and what its standard input has to begin with.

    Nothing is imported from the directory that a login begins in; Python's own option for it came with 3.11. A Python
    that is not of the `oldest` version prints `TOO_OLD` and its own as an error.
    """
    data = source.encode()
    return ["-c", _RUN.format(oldest, TOO_OLD, len(data)), *arguments], data


TOO_OLD = "too old: Python "


_RUN = (
    "import sys; sys.version_info < {} and sys.exit('{}%d.%d' % sys.version_info[:2]); "
    "sys.path[:] = filter(None, sys.path); "
    "exec(compile(getattr(sys.stdin, 'buffer', sys.stdin).read({}), 'rankdeck', 'exec'))"
)
"""A Python 2 runs it, too, and names the source's first error of syntax."""
