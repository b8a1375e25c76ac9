"""What is to be done when a console wants one rank harmed, or why it is not done."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING, assert_never

from agent.jobs.lifecycle import SignalWorker, SlowWorker
from agent.wire.replies import RefusalReason, Refused
from ddpcore.wire import FaultKind

if TYPE_CHECKING:
    from agent.jobs.job_memory import WorkerMemory
    from agent.jobs.lifecycle import FaultReceived


def refusal_of_fault(fault: FaultReceived, ranks: range, worker: WorkerMemory | None) -> Refused | None:
    """Return why a fault of a running job is refused; None if it can be injected.

    Args:
        fault: What is wanted.
        ranks: Global ranks of this node.
        worker: The rank's process, None while it has not been seen.
    """
    if fault.rank not in ranks:
        return Refused(
            RefusalReason.UNKNOWN_RANK,
            f"rank {fault.rank} is not here: this node has ranks {ranks[0]} to {ranks[-1]}",
        )
    if worker is None:
        return Refused(RefusalReason.WRONG_STATE, f"rank {fault.rank} has not started yet: try again in a moment")
    if worker.has_exited:
        return Refused(RefusalReason.WRONG_STATE, f"rank {fault.rank} has exited")
    return None


def fault_effect(fault: FaultReceived, request_id: int) -> SignalWorker | SlowWorker:
    """Return what injects a fault that is not refused; `request_id` is for the rank's probe."""
    match fault.kind:
        case FaultKind.FREEZE:
            return SignalWorker(fault.rank, Signals.SIGSTOP)
        case FaultKind.THAW:
            return SignalWorker(fault.rank, Signals.SIGCONT)
        case FaultKind.KILL:
            return SignalWorker(fault.rank, Signals.SIGKILL)
        case FaultKind.SLOW:
            return SlowWorker(fault.rank, request_id, fault.factor)
    assert_never(fault.kind)
