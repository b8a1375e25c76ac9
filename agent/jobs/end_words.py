"""Sentences about how processes ended."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.jobs.lifecycle import AttemptFailed, LauncherFailed, WorkerExited
    from agent.logs.failure_text import FailureText, FoundFailure


def worker_end_words(event: WorkerExited) -> str:
    """Say how a rank ended, and of what."""
    return f"rank {event.rank} {worker_end(event)}{_because(event.found)}"


def worker_end(event: WorkerExited) -> str:
    """Say how a rank's process ended."""
    if event.signal is not None:
        return f"was killed by {signal_name(event.signal)}"
    return f"exited with code {event.code}"


def launcher_end_words(event: AttemptFailed | LauncherFailed) -> str:
    """Say how a launcher ended, and of what."""
    return launcher_end(event) + _because(event.found)


def launcher_end(event: AttemptFailed | LauncherFailed) -> str:
    """Say how a launcher's process ended."""
    if event.exit_code is None:
        return "the shim, rankdeck's process above the launcher, was killed, and the launcher with it"
    if event.exit_code < 0:
        return f"the launcher was killed by {signal_name(-event.exit_code)}"
    return f"the launcher exited with code {event.exit_code}"


def signal_name(number: int) -> str:
    """Return a signal's name for people; real-time signals have only numbers."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _because(found: FoundFailure | None) -> str:
    if found is None:
        return ""
    return f": {found.text.exception}" if found.text.exception else last_line_words(found.text)


def last_line_words(text: FailureText) -> str:
    """Return what a rank without an exception wrote last, as the end of a sentence."""
    return f"; its last line: {text.last_line}" if text.last_line else ""
