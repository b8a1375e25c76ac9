"""Which failure on this node came first, and is not another's consequence.

When a rank fails its peers lose their connections and fail too, and the launcher ends the rest. What a rank says it
died of, and when, tells them apart; across nodes the console does (`app.wording.root_cause`).
"""

from __future__ import annotations

import re
from signal import Signals
from typing import TYPE_CHECKING

import msgspec

from agent.jobs.end_words import last_line_words, launcher_end, worker_end
from agent.logs.failure_text import FailureText
from agent.wire.logs import LAUNCHER_RANK, LOST_PEER, RootCause

if TYPE_CHECKING:
    from agent.jobs.lifecycle import AttemptFailed, LauncherFailed, WorkerExited
    from agent.logs.failure_text import FoundFailure

_LAUNCHER_SAYS = re.compile(r"(?:[\w.]+\.)?(?:ChildFailedError|SignalException)\b")
"""torchrun's own exceptions when a worker has failed, or when it was told to end."""

MAX_END_CHARS = 1024
"""As the wire carries it."""


class Failure(msgspec.Struct, frozen=True):
    """One process that failed."""

    at_s: float
    cause: RootCause
    """With an age of 0."""

    def told(self, now_s: float) -> RootCause:
        """Return the words for a console."""
        return msgspec.structs.replace(self.cause, age_s=max(0.0, now_s - self.at_s))


def failure_of_worker(event: WorkerExited, now_s: float) -> Failure:
    """Return what a rank that failed says of itself."""
    return _failure(event.rank, worker_end(event), event.found, now_s, is_told=event.signal == Signals.SIGTERM)


def failure_of_launcher(event: AttemptFailed | LauncherFailed, now_s: float) -> Failure:
    """Return what a launcher that failed says, or a rank that was over before it was seen."""
    found = event.found
    if found is not None and found.rank != LAUNCHER_RANK:
        return _failure(found.rank, "failed", found, now_s, is_told=False)
    is_told = found is not None and _LAUNCHER_SAYS.match(found.text.exception) is not None
    return _failure(LAUNCHER_RANK, launcher_end(event), found, now_s, is_told=is_told)


def first_of(known: Failure | None, other: Failure) -> Failure:
    """Return the one that the other followed from, as far as can be told."""
    return other if known is None or _order(other) < _order(known) else known


def _order(failure: Failure) -> tuple[bool, bool, float, int]:
    cause = failure.cause
    # A launcher fails because of its ranks, whose ends may be noticed later.
    return (cause.is_consequence, cause.rank == LAUNCHER_RANK, failure.at_s, cause.rank)


def _failure(rank: int, end: str, found: FoundFailure | None, now_s: float, *, is_told: bool) -> Failure:
    text = found.text if found else FailureText()
    failed_s = now_s if found is None or found.failed_s is None else min(now_s, found.failed_s)
    return Failure(
        failed_s,
        RootCause(
            rank=rank,
            end=(end + last_line_words(text))[:MAX_END_CHARS],
            exception=text.exception,
            outer=text.outer,
            where=text.where,
            traceback=text.traceback,
            is_consequence=is_told or LOST_PEER.search(text.exception or text.last_line) is not None,
        ),
    )
