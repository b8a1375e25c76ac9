"""Faults as a person asks for them, and what is said of them."""

from __future__ import annotations

import re
from difflib import get_close_matches

from app.errors import UsageError
from ddpcore.wire import DEFAULT_HOLD_S, DEFAULT_SLOW_FACTOR, Fault, FaultKind

DEFAULT_FAULT_STEP = 10
AT_START = tuple(kind for kind in FaultKind if kind is not FaultKind.THAW)
"""What a job can be started with."""
SIGNALS = frozenset({FaultKind.FREEZE, FaultKind.THAW, FaultKind.KILL})
"""What acts at once, unless it is to wait for a step; so does `SLOW`."""

_FAULT = re.compile(r"(?P<kind>[a-z-]+):(?P<rank>\d{1,5})(?:@(?P<step>\d{1,9}))?")


def parse_fault(text: str) -> Fault:
    """Return the fault in `KIND:RANK@STEP`.

    Raises:
        UsageError: The text is not of that form, or the kind is not known.
    """
    kinds = ", ".join(AT_START)
    match = _FAULT.fullmatch(text)
    if match is None:
        raise UsageError(f"--fault {text!r} is not KIND:RANK@STEP", f"for example freeze:2@10; KIND is one of {kinds}")
    kind = match["kind"]
    if kind not in AT_START:
        close = get_close_matches(kind, AT_START, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"--fault {text!r}: there is no fault {kind!r}", f"{hint}KIND is one of {kinds}")
    step = DEFAULT_FAULT_STEP if match["step"] is None else int(match["step"])
    return Fault(kind=FaultKind(kind), rank=int(match["rank"]), at_step=step)


def make_fault(
    kind: FaultKind, rank: int, at_step: int | None = None, factor: float | None = None, duration_s: float | None = None
) -> Fault:
    """Return a fault from options, where None is one that was not given.

    Raises:
        UsageError: An option does not go with the kind.
    """
    if factor is not None and kind is not FaultKind.SLOW:
        raise UsageError(f"--factor goes with slow, not with {kind}")
    if duration_s is not None and kind is not FaultKind.GIL:
        raise UsageError(f"--for goes with gil, not with {kind}")
    if at_step is not None and kind is FaultKind.THAW:
        raise UsageError("--at-step does not go with thaw: a frozen rank comes to no step")
    return Fault(
        kind=kind,
        rank=rank,
        at_step=at_step,
        factor=DEFAULT_SLOW_FACTOR if factor is None else factor,
        duration_s=DEFAULT_HOLD_S if duration_s is None else duration_s,
    )


def told(fault: Fault) -> str:
    """Return what a rank has been made to do, or will do: `is frozen (SIGSTOP)`, `will leave with exit code 0 ...`."""
    acts_at_once = fault.at_step is None and (fault.kind in SIGNALS or fault.kind is FaultKind.SLOW)
    when = "" if acts_at_once else f" at step {fault.at_step}" if fault.at_step is not None else " at its next step"
    is_ = "is" if acts_at_once else "will be"
    done = {
        FaultKind.FREEZE: f"{is_} frozen (SIGSTOP)",
        FaultKind.THAW: f"{is_} thawed (SIGCONT)",
        FaultKind.KILL: f"{is_} killed (SIGKILL)",
        FaultKind.SLOW: f"{is_} slowed {fault.factor:g} times" if fault.factor > 1 else f"{is_} no longer slowed",
        FaultKind.GIL: f"will hold the interpreter's lock for {fault.duration_s:g} s",
        FaultKind.SKIP_BARRIER: "will leave out a barrier or collective",
        FaultKind.MISMATCH: "will call a collective that the others do not call",
        FaultKind.OOM: "will run out of memory",
        FaultKind.LEAVE: "will leave with exit code 0",
    }[fault.kind]
    return f"{done}{when}"
