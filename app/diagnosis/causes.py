"""Severity of a row, state of a rank, cause of a verdict. Pure."""

from __future__ import annotations

from enum import StrEnum


class Severity(StrEnum):
    """How urgent a row is: a colour, a glyph and a text in the views, never colour alone."""

    OK = "ok"
    QUIET = "quiet"
    """Not an event: starting, ended well, no data yet."""
    WARNING = "warning"
    CRITICAL = "critical"


class RankState(StrEnum):
    """State of a rank."""

    STARTING = "starting"
    """Its process is not there yet, has not imported torch, or has not opened its process group."""
    UNPROBED = "unprobed"
    """Its process runs, and nothing in it reports here: it is watched from outside, or not at all."""
    RUNNING = "running"
    SLOW = "slow"
    """It runs, and makes every step longer, by a verdict."""
    WAITING = "waiting"
    """It has called a collective that is not complete."""
    MISSING = "missing"
    """Others have waited for a second or longer in a collective that it has not called."""
    FROZEN = "frozen"
    SILENT = "silent"
    """Its process lives and it does not report."""
    EXITED = "exited"
    """Its process ended before its job did, or badly."""
    DONE = "done"
    """Its process ended with code 0."""
    STOPPED = "stopped"
    """Its process was ended after its job was stopped."""
    ENDED = "ended"
    """Its process is gone, and how it ended is not known."""
    LOST = "lost"
    """Its node does not report, or its job is over there and how the rank ended is not known."""


class Cause(StrEnum):
    """Why ranks wait, or why a job ended."""

    STRAGGLER = "straggler"
    FROZEN = "frozen"
    EXITED = "exited"
    OOM = "oom"
    SILENT = "silent"
    NODE_LOST = "node_lost"
    NOT_JOINED = "not_joined"
    MISMATCH = "mismatch"
    FEWER_CALLS = "fewer_calls"
    TRANSPORT = "transport"
    STANDSTILL = "standstill"
    """No rank makes a step, and none waits for another."""
    NOT_EXITING = "not_exiting"
    """The program is done, and something keeps the process from ending."""
    INPUT_BOUND = "input_bound"
    MEMORY_GROWTH = "memory_growth"
    """No fault yet: its memory grows towards a limit that is ten minutes away or less."""
    CHECKPOINTING = "checkpointing"
    """No fault: others wait for a checkpoint, or for an evaluation, that takes its usual time."""
    EVALUATING = "evaluating"


IMMOBILE = frozenset({Cause.FROZEN, Cause.SILENT})
"""Causes that a rank may recover from, and be in no call then."""
CAUSE_ORDER = {
    cause: place
    for place, cause in enumerate(
        (
            Cause.NODE_LOST,
            Cause.OOM,
            Cause.EXITED,
            Cause.FEWER_CALLS,
            Cause.FROZEN,
            Cause.MISMATCH,
            Cause.SILENT,
            Cause.NOT_JOINED,
            Cause.TRANSPORT,
            Cause.MEMORY_GROWTH,
            Cause.STRAGGLER,
            Cause.STANDSTILL,
            Cause.NOT_EXITING,
            Cause.INPUT_BOUND,
            Cause.CHECKPOINTING,
            Cause.EVALUATING,
        )
    )
}
"""Rank of each cause: of two equally severe verdicts, the one whose cause explains more comes first."""
