"""Which fault is carried out how, and which is refused."""

from __future__ import annotations

from signal import Signals

import pytest

from agent.jobs.fault_order import fault_effect, refusal_of_fault
from agent.jobs.lifecycle import AskProbe, FaultReceived, SeenWorker, SignalWorker
from agent.wire.commands import RefusalReason
from ddpcore.wire import Fault, FaultKind, SlowDown, StrikeAt
from tests.support.jobs import make_spec

RANKS = range(2, 4)
HEALING = [Fault(FaultKind.THAW, 3), Fault(FaultKind.SLOW, 3, factor=1.0)]


@pytest.mark.parametrize(
    ("kind", "number"),
    [(FaultKind.FREEZE, Signals.SIGSTOP), (FaultKind.THAW, Signals.SIGCONT), (FaultKind.KILL, Signals.SIGKILL)],
)
def test_signals_act_at_once(kind: FaultKind, number: Signals) -> None:
    assert fault_effect(Fault(kind, 3), 1) == SignalWorker(3, number)


@pytest.mark.parametrize("factor", [4.0, 1.0])
def test_slowness_is_asked_of_the_probe_at_once(factor: float) -> None:
    assert fault_effect(Fault(FaultKind.SLOW, 3, factor=factor), 5) == AskProbe(3, SlowDown(5, factor))


@pytest.mark.parametrize("kind", [FaultKind.GIL, FaultKind.SKIP_BARRIER, FaultKind.MISMATCH, FaultKind.OOM, "leave"])
def test_what_only_the_main_thread_can_do_is_the_probe_s_at_the_next_step(kind: str) -> None:
    fault = Fault(FaultKind(kind), 3)
    assert fault_effect(fault, 6) == AskProbe(3, StrikeAt(6, fault))


@pytest.mark.parametrize("kind", FaultKind)
def test_whatever_waits_for_a_step_is_the_probe_s(kind: FaultKind) -> None:
    fault = Fault(kind, 2, at_step=7)
    assert fault_effect(fault, 1) == AskProbe(2, StrikeAt(1, fault))


def test_a_job_that_does_not_allow_faults_says_how_to_allow_them() -> None:
    for kind in set(FaultKind) - {FaultKind.THAW}:
        refused = refusal_of_fault(FaultReceived(Fault(kind, 3)), make_spec(allow_faults=False), RANKS, SeenWorker())
        assert refused is not None
        assert refused.reason is RefusalReason.NOT_PERMITTED
        assert refused.message.startswith("job train does not allow faults: ")
        assert "--allow-faults" in refused.message


@pytest.mark.parametrize("fault", HEALING, ids=["thaw", "unslow"])
def test_undoing_harm_is_never_forbidden(fault: Fault) -> None:
    assert refusal_of_fault(FaultReceived(fault), make_spec(allow_faults=False), RANKS, SeenWorker()) is None


@pytest.mark.parametrize(
    ("fault", "step", "reason", "words"),
    [
        (Fault(FaultKind.FREEZE, 3, at_step=9), 9, RefusalReason.WRONG_STATE, "rank 3 has done step 9 already"),
        (Fault(FaultKind.LEAVE, 3, at_step=9), 40, RefusalReason.WRONG_STATE, "rank 3 has done step 40 already"),
        (Fault(FaultKind.THAW, 3, at_step=9), None, RefusalReason.MALFORMED, "thaw it without one"),
        (Fault(FaultKind.GIL, 3), None, RefusalReason.WRONG_STATE, "rank 3 has reported no step yet"),
        (Fault(FaultKind.OOM, 3), None, RefusalReason.WRONG_STATE, "only freeze, thaw and kill act without steps"),
    ],
)
def test_a_step_that_cannot_come_is_refused(fault: Fault, step: int | None, reason: RefusalReason, words: str) -> None:
    refused = refusal_of_fault(FaultReceived(fault, step), make_spec(), RANKS, SeenWorker())
    assert refused is not None
    assert refused.reason is reason
    assert words in refused.message


@pytest.mark.parametrize("step", [None, 0, 8])
def test_a_step_that_may_come_is_taken(step: int | None) -> None:
    fault = Fault(FaultKind.FREEZE, 3, at_step=9)
    assert refusal_of_fault(FaultReceived(fault, step), make_spec(), RANKS, SeenWorker()) is None


@pytest.mark.parametrize("kind", [FaultKind.FREEZE, FaultKind.THAW, FaultKind.KILL, FaultKind.SLOW])
def test_what_acts_at_once_or_lasts_needs_no_step_yet(kind: FaultKind) -> None:
    assert refusal_of_fault(FaultReceived(Fault(kind, 3), None), make_spec(), RANKS, SeenWorker()) is None
