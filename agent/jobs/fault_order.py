"""What is to be done when a console wants one rank harmed, or why it is not done."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING

from agent.jobs.lifecycle import AskProbe, SignalWorker
from agent.wire.commands import RefusalReason, Refused
from ddpcore.wire import FaultKind, SlowDown, StrikeAt

if TYPE_CHECKING:
    from agent.jobs.lifecycle import FaultReceived, SeenWorker
    from agent.wire.jobs import JobSpec
    from ddpcore.wire import Fault

HOW_TO_ALLOW = "start it with `rankdeck run --allow-faults`, or with allow_faults in its spec"

_SIGNALS = {
    FaultKind.FREEZE: Signals.SIGSTOP,
    FaultKind.THAW: Signals.SIGCONT,
    FaultKind.KILL: Signals.SIGKILL,
}


def refusal_of_fault(received: FaultReceived, spec: JobSpec, ranks: range, worker: SeenWorker | None) -> Refused | None:
    """Return why a fault of a running job is refused, or None. Undoing harm needs no permission.

    `worker` is None while the rank's process has not been seen.
    """
    fault = received.fault
    if not spec.allow_faults and not fault.is_healing:
        return Refused(RefusalReason.NOT_PERMITTED, f"job {spec.job_id} does not allow faults: {HOW_TO_ALLOW}")
    if fault.rank not in ranks:
        return Refused(
            RefusalReason.UNKNOWN_RANK,
            f"rank {fault.rank} is not here: this node has ranks {ranks[0]} to {ranks[-1]}",
        )
    if worker is None:
        return Refused(RefusalReason.WRONG_STATE, f"rank {fault.rank} has not started yet: try again in a moment")
    if worker.has_exited:
        return Refused(RefusalReason.WRONG_STATE, f"rank {fault.rank} has exited")
    return _refusal_of_step(fault, received.step)


def _refusal_of_step(fault: Fault, step: int | None) -> Refused | None:
    if fault.at_step is None:
        if step is None and not _is_immediate(fault):
            return Refused(
                RefusalReason.WRONG_STATE,
                f"rank {fault.rank} has reported no step yet, and only freeze, thaw and kill act without steps",
            )
        return None
    if fault.kind is FaultKind.THAW:
        return Refused(RefusalReason.MALFORMED, "a frozen rank comes to no step: thaw it without one")
    if step is not None and step >= fault.at_step:
        return Refused(
            RefusalReason.WRONG_STATE,
            f"rank {fault.rank} has done step {step} already: name a step after it, or none to strike soon",
        )
    return None


def fault_effect(fault: Fault, request_id: int) -> SignalWorker | AskProbe:
    """Return what injects a fault that is not refused; `request_id` is for the rank's probe.

    Signals act immediately. The probe does what waits for a step, or what only the rank's own main thread can do.
    """
    if not _is_immediate(fault):
        return AskProbe(fault.rank, StrikeAt(request_id, fault))
    if fault.kind is FaultKind.SLOW:
        return AskProbe(fault.rank, SlowDown(request_id, fault.factor))
    return SignalWorker(fault.rank, _SIGNALS[fault.kind])


def _is_immediate(fault: Fault) -> bool:
    return fault.at_step is None and (fault.kind in _SIGNALS or fault.kind is FaultKind.SLOW)
