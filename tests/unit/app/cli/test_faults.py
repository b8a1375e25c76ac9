"""Faults as a person asks for them, and the words about them."""

from __future__ import annotations

from typing import Any

import pytest

from app.cli.headless import CAUSES_OF_FAULT
from app.errors import UsageError
from app.view.actions import AT_START, fault_text, make_fault
from ddpcore.wire import Fault, FaultKind


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(FaultKind.FREEZE, 2), "is frozen (SIGSTOP)"),
        (Fault(FaultKind.FREEZE, 2, at_step=40), "will be frozen (SIGSTOP) at step 40"),
        (Fault(FaultKind.SLOW, 2, factor=3.0), "is slowed 3 times"),
        (Fault(FaultKind.SLOW, 2, factor=1.0), "is no longer slowed"),
        (Fault(FaultKind.GIL, 2, duration_s=5.0), "will hold the interpreter's lock for 5 s at its next step"),
        (Fault(FaultKind.LEAVE, 2, at_step=0), "will leave with exit code 0 at step 0"),
    ],
)
def test_what_is_done_is_said_and_when(fault: Fault, words: str) -> None:
    assert fault_text(fault) == words


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_has_words_and_what_a_job_may_start_with_has_a_verdict(kind: FaultKind) -> None:
    assert fault_text(Fault(kind, 0))
    assert (kind in CAUSES_OF_FAULT) is (kind in AT_START)


def test_options_that_are_not_given_take_the_usual_values() -> None:
    assert make_fault(FaultKind.SLOW, 1) == Fault(FaultKind.SLOW, 1)
    assert make_fault(FaultKind.SLOW, 1, factor=1.0).is_healing
    assert make_fault(FaultKind.GIL, 1, at_step=3, duration_s=4.0) == Fault(FaultKind.GIL, 1, 3, duration_s=4.0)


@pytest.mark.parametrize(
    ("kind", "option", "words"),
    [
        (FaultKind.KILL, {"factor": 2.0}, "--factor goes with slow, not with kill"),
        (FaultKind.FREEZE, {"duration_s": 2.0}, "--for goes with gil, not with freeze"),
        (FaultKind.THAW, {"at_step": 2}, "--at-step does not go with thaw"),
    ],
)
def test_an_option_of_another_kind_is_refused(kind: FaultKind, option: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_fault(kind, 1, **option)
