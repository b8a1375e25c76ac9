"""What ends an agent from outside: signals, and the death of the console that it belongs to."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

from agent.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Callable


def watch_signals(end_soon: Callable[[], None], *, outlives_terminal: bool = False) -> None:
    """Call `end_soon` on SIGTERM, SIGINT and SIGHUP; with `outlives_terminal`, or under nohup, SIGHUP is ignored."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end_soon)
    if outlives_terminal:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, end_soon)


def watch_slurm(on_notice: Callable[[], None]) -> None:
    """Call `on_notice` on the signals by which Slurm ends a step, in place of what else they do.

    SIGTERM comes at `scancel`, preemption and the time limit, SIGUSR1 before it where `--signal=USR1@60` asks for it,
    SIGINT from srun's terminal. With proctrack/linuxproc one notice may come twice.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        loop.add_signal_handler(number, on_notice)


def watch_console(end_soon: Callable[[], None]) -> None:
    """Call `end_soon` when the pipe on standard input is closed at its other end; raise OperatorError for no pipe."""
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()

    def read() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            end_soon()

    try:
        loop.add_reader(fd, read)
    except PermissionError:
        raise OperatorError("it ends with who has started it: standard input must be a pipe from there") from None
