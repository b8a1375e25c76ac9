"""Sentences about how processes ended."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.lifecycle import AttemptFailed, LauncherFailed, WorkerExited


def worker_end_words(event: WorkerExited) -> str:
    """Say how a rank ended."""
    if event.signal is not None:
        words = f"rank {event.rank} was killed by {signal_name(event.signal)}"
    else:
        words = f"rank {event.rank} exited with code {event.code}"
    return f"{words}: {event.error}" if event.error else words


def launcher_end_words(event: AttemptFailed | LauncherFailed) -> str:
    """Say how a launcher ended."""
    if event.exit_code is None:
        words = "the shim was killed, and the launcher with it"
    elif event.exit_code < 0:
        words = f"the launcher was killed by {signal_name(-event.exit_code)}"
    else:
        words = f"the launcher exited with code {event.exit_code}"
    return f"{words}: {event.error}" if event.error else words


def signal_name(number: int) -> str:
    """Return a signal's name for people; real-time signals have only numbers."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
