"""When a fault strikes, and how slow a slow rank is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ddpcore.probing.faults import StepFaults
from ddpcore.wire import Fault, FaultKind


def fault(at_step: int | None, kind: FaultKind = FaultKind.FREEZE, rank: int = 2) -> Fault:
    return Fault(kind=kind, rank=rank, at_step=at_step)


def test_a_fault_strikes_at_its_step_and_once() -> None:
    faults = StepFaults([fault(3)], rank=2)

    assert [len(faults.due(step)) for step in (1, 2, 3, 3, 4)] == [0, 0, 1, 0, 0]


def test_the_faults_of_other_ranks_do_not_strike() -> None:
    assert StepFaults([fault(3, rank=1)], rank=2).due(3) == []


def test_a_fault_without_a_step_strikes_at_the_first() -> None:
    assert StepFaults([fault(None)], rank=2).due(41) == [fault(None)]


def test_a_program_that_reports_every_tenth_step_is_struck_at_the_next_report() -> None:
    faults = StepFaults([fault(15)], rank=2)

    assert [len(faults.due(step)) for step in (10, 20, 30)] == [0, 1, 0]


def test_a_program_that_resumes_behind_the_step_is_not_struck() -> None:
    faults = StepFaults([fault(10)], rank=2)

    assert [len(faults.due(step)) for step in (1000, 1001)] == [0, 0]


def steps(faults: StepFaults, durations_s: list[float], now_s: float) -> tuple[list[float], float]:
    """Run steps of these lengths; return the pauses, and the time after them."""
    pauses = []
    for duration_s in durations_s:
        now_s += duration_s
        pauses.append(faults.pause_s(now_s))
        now_s += pauses[-1]
        faults.resumed(now_s)
    return pauses, now_s


def test_a_slowed_rank_pauses_for_the_rest_of_its_stretched_median_step() -> None:
    faults = StepFaults([], rank=0)
    faults.resumed(100.0)
    pauses, now_s = steps(faults, [1.0, 2.0, 9.0], 100.0)
    assert pauses == [0.0, 0.0, 0.0]

    faults.slow_factor = 4.0
    pauses, now_s = steps(faults, [0.5, 30.0], now_s)
    assert pauses == [6.0, 6.0]

    faults.slow_factor = 1.0
    pauses, now_s = steps(faults, [2.0], now_s)
    assert pauses == [0.0]


def test_a_rank_slowed_before_its_first_step_takes_that_one_as_its_pace() -> None:
    faults = StepFaults([], rank=0)
    faults.slow_factor = 3.0

    assert faults.pause_s(100.0) == 0.0
    faults.resumed(100.0)
    assert steps(faults, [2.0, 5.0], 100.0)[0] == [4.0, 4.0]


@pytest.mark.parametrize(("kind", "number"), [(FaultKind.KILL, signal.SIGKILL), (FaultKind.FREEZE, signal.SIGSTOP)])
def test_a_strike_is_the_signal_itself(kind: FaultKind, number: signal.Signals) -> None:
    program = (
        "import sys; from ddpcore.probing.faults import strike; from ddpcore.wire import Fault, FaultKind;"
        "strike(Fault(kind=FaultKind(sys.argv[1]), rank=0)); print('went on')"
    )
    with subprocess.Popen([sys.executable, "-c", program, kind], stdout=subprocess.PIPE, text=True) as process:
        if number is signal.SIGSTOP:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WSTOPSIG(status) == number
            process.send_signal(signal.SIGCONT)
            assert process.communicate(timeout=30)[0] == "went on\n"
        else:
            assert process.wait(30) == -number
