"""A program that is asked something and given so much time: what it starts itself ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

END_S = 1.0
"""For what was killed to be gone; a process that hangs in the kernel is left behind."""


class Output(NamedTuple):
    """What a program said."""

    exit_code: int | None
    """None when it was out of time."""
    stdout: bytes
    last_error: str
    """The last line of its standard error."""


def ask_program(argv: Sequence[str], timeout_s: float, *, cwd: str, environ: Mapping[str, str]) -> Output:
    """Run a program without input to its end, or kill it with all of its session.

    Raises:
        OSError: It cannot be started.
    """
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with contextlib.ExitStack() as streams:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                streams.callback(stream.close)
        exit_code: int | None = None
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
            exit_code = process.returncode
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                stdout, stderr = process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired as error:
                stdout, stderr = error.stdout or b"", error.stderr or b""
                process.returncode = process.returncode or 0  # an abandoned child is no resource that we forgot
    lines = stderr.decode(errors="replace").strip().splitlines() or [""]
    return Output(exit_code, stdout, lines[-1])
