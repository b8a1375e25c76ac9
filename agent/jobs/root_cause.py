"""Finds which failure on this node came first and is not another's consequence, and puts ends of processes into text.

When a rank fails its peers lose their connections and fail too, and the launcher ends the rest. What a rank reports
that it died of, and when, distinguishes them (`first_of`); across nodes the console does (`app.view.headline`).

`worker_end` and `launcher_end` are the sentences about how processes ended.
"""

from __future__ import annotations

import re
from signal import Signals
from typing import TYPE_CHECKING

import msgspec

from agent.logs.traceback_text import FailureText
from agent.wire.logs import INTERRUPTED, LAUNCHER_RANK, LOST_PEER, RootCause, rank_with_problem

if TYPE_CHECKING:
    from agent.jobs.lifecycle import AttemptFailed, LauncherFailed, WorkerExited
    from agent.logs.traceback_text import FoundFailure


def worker_end_text(event: WorkerExited) -> str:
    return f"rank {event.rank} {worker_end(event)}{_because(event.found)}"


def worker_end(event: WorkerExited) -> str:
    if event.signal is not None:
        return f"was killed by {signal_name(event.signal)}"
    return "ended, and its exit code is not known" if event.code is None else f"exited with code {event.code}"


def launcher_end_text(event: AttemptFailed | LauncherFailed) -> str:
    return launcher_end(event) + _because(event.found)


def launcher_end(event: AttemptFailed | LauncherFailed) -> str:
    if event.exit_code is None:
        return "the shim, rankdeck's process above the launcher, was killed, and the launcher with it"
    if event.exit_code < 0:
        return f"the launcher was killed by {signal_name(-event.exit_code)}"
    return f"the launcher exited with code {event.exit_code}"


REBOOT_S = 60.0
"""Seconds after SIGKILL from which state D is taken to last."""


def killed_text(killed_for_s: float, undying: str) -> str:
    """Return since when SIGKILL has not ended all, and what is waited for: `undying` is that of `Ticked`."""
    end = "; the node may need a reboot" if undying and killed_for_s >= REBOOT_S else ""
    return f"SIGKILL, sent {killed_for_s:.0f} s ago; {undying or 'waiting for what is left'}{end}"


def signal_name(number: int) -> str:
    """Return a signal's name; real-time signals have only numbers."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _because(found: FoundFailure | None) -> str:
    if found is None:
        return ""
    return f": {found.text.exception}" if found.text.exception else last_line_text(found.text)


def last_line_text(text: FailureText) -> str:
    """Return the last line of a rank without an exception, as the end of a sentence."""
    return f"; its last line: {text.last_line}" if text.last_line else ""


_LAUNCHER_ERROR = re.compile(r"(?:[\w.]+\.)?ChildFailedError\b")
"""torchrun's own exception when a worker has failed."""
_GOT_SIGNAL = re.compile(r"(?:[\w.]+\.)?SignalException\b")
"""torchrun's own exception when a signal ended it. Source: torch/distributed/elastic/multiprocessing/api.py, torch
2.13."""
ENDING_SIGNALS = frozenset({Signals.SIGTERM, Signals.SIGINT, Signals.SIGKILL})
"""Signals by which a launcher's end, or an agent, ends the ranks."""
TOGETHER_S = 1.5
"""Ranks that a signal ends within this of their launcher's end from outside have ended with it. Those that SIGKILL ends
later than this after another's failure are ended by the launcher or by the agent."""

LAUNCHER_NEWS_S = 1.0
"""Seconds within which the end of a killed launcher is known, which takes its ranks with it: they are seen first."""

PASSED_ON_S = 35.0
"""Seconds that a launcher which is ended from outside leaves its ranks: it gives them 30 s."""
MAX_END_CHARS = 1024
"""Longest text that the wire carries."""


class Failure(msgspec.Struct, frozen=True):
    """One process that failed."""

    at_s: float
    cause: RootCause
    """The cause as the wire carries it, with an age of 0."""
    is_launcher_ended: bool = False
    """The launcher was ended from outside, which ends its ranks."""
    together_s: float = TOGETHER_S
    """Seconds before a launcher's end in which its end may have ended its ranks."""
    is_bare_signal: bool = False
    """A signal by which launchers and agents end ranks, and no exception before it but SIGINT's own."""

    def as_root_cause(self, now_s: float, *, is_running: bool = False) -> RootCause | None:
        """Return it with its age; None while the launcher `is_running`, as far as known, and may have been killed."""
        if is_running and self.is_bare_signal and now_s - self.at_s < LAUNCHER_NEWS_S:
            return None
        return msgspec.structs.replace(self.cause, age_s=max(0.0, now_s - self.at_s))


def failure_of_worker(event: WorkerExited, now_s: float, known: Failure | None = None) -> Failure:
    """Return the failure of a rank; `known` is the failure known before."""
    is_late = known is not None and now_s - known.at_s > TOGETHER_S
    is_requested = event.signal in (Signals.SIGTERM, Signals.SIGINT) or (event.signal == Signals.SIGKILL and is_late)
    failure = _failure(event.rank, worker_end(event), event.found, now_s, is_requested=is_requested)
    raised = (event.found.text.exception, event.found.text.outer) if event.found else ()
    is_interrupted = event.signal == Signals.SIGINT and any(one.startswith(INTERRUPTED) for one in raised)
    is_bare = event.signal in ENDING_SIGNALS and (is_interrupted or not event.found)
    return msgspec.structs.replace(failure, is_bare_signal=is_bare)


def failure_of_launcher(event: AttemptFailed | LauncherFailed, now_s: float) -> Failure:
    """Return the failure of a launcher, or of a rank that ended before it was seen."""
    found = event.found
    if found is not None and found.rank != LAUNCHER_RANK:
        return _failure(found.rank, "failed", found, now_s, is_requested=False)
    is_requested = found is not None and _LAUNCHER_ERROR.match(found.text.exception) is not None
    failure = _failure(LAUNCHER_RANK, launcher_end(event), found, now_s, is_requested=is_requested)
    got_signal = found is not None and _GOT_SIGNAL.match(found.text.exception) is not None
    was_killed = event.exit_code is None or event.exit_code < 0
    together_s = PASSED_ON_S if got_signal else TOGETHER_S
    return msgspec.structs.replace(failure, is_launcher_ended=got_signal or was_killed, together_s=together_s)


def first_of(known: Failure | None, other: Failure) -> Failure:
    """Return the failure that the other followed from, as far as this node knows."""
    if known is None:
        return other
    for launcher, rank in ((known, other), (other, known)):
        if launcher.is_launcher_ended and rank.is_bare_signal and rank.at_s >= launcher.at_s - launcher.together_s:
            return launcher
    return other if _order(other) < _order(known) else known


def _order(failure: Failure) -> tuple[bool, bool, float, int]:
    cause = failure.cause
    # A launcher fails because of its ranks, whose ends may be noticed later.
    return (cause.is_consequence, cause.rank == LAUNCHER_RANK, failure.at_s, cause.rank)


def _failure(rank: int, end: str, found: FoundFailure | None, now_s: float, *, is_requested: bool) -> Failure:
    text = found.text if found else FailureText()
    has_lost_peer = LOST_PEER.search(text.exception or text.last_line) is not None
    failed_s = now_s if found is None or found.failed_s is None else min(now_s, found.failed_s)
    return Failure(
        failed_s,
        RootCause(
            rank=rank,
            end=(end + last_line_text(text))[:MAX_END_CHARS],
            exception=text.exception,
            outer=text.outer,
            where=text.where,
            traceback=text.traceback,
            is_consequence=is_requested or rank_with_problem(text.exception) not in (None, rank) or has_lost_peer,
        ),
    )
