"""When a fault strikes, and how slow a slow rank is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from ddpcore.probe.faults import Omission, StepFaults, strike
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


def test_a_program_whose_steps_are_known_from_the_first_is_struck_there_too() -> None:
    faults = StepFaults([fault(1)], rank=2)

    assert [len(faults.due(step, first_step=1)) for step in (2, 3)] == [1, 0]


def test_a_fault_that_arrives_strikes_at_its_step_and_one_that_is_late_at_the_next() -> None:
    faults = StepFaults([], rank=2)
    assert faults.due(7) == []

    for arrived in (fault(9), fault(None), fault(5), fault(8, rank=1)):
        faults.add(arrived)

    assert [len(faults.due(step)) for step in (8, 9, 10)] == [2, 1, 0]


def test_a_fault_that_arrives_before_the_first_step_waits_for_its_own() -> None:
    faults = StepFaults([], rank=2)
    faults.add(fault(2))

    assert [len(faults.due(step)) for step in (1, 2, 3)] == [0, 1, 0]


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
        "import sys; from ddpcore.probe.faults import strike; from ddpcore.wire import Fault, FaultKind;"
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


def test_leaving_is_an_ordinary_end_with_code_0() -> None:
    with pytest.raises(SystemExit) as caught:
        strike(fault(None, FaultKind.LEAVE))

    assert caught.value.code == 0


@pytest.mark.parametrize("kind", [FaultKind.THAW, FaultKind.SLOW])
def test_what_is_not_done_from_within_is_nothing(kind: FaultKind) -> None:
    strike(fault(None, kind))


HOLDS = """
import os, signal, threading, time
from ddpcore.probe.faults import hold_interpreter
signal.signal(signal.SIGUSR1, lambda *_: None)
ticks = []
def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
while not ticks:
    time.sleep(0.001)
print("holds", flush=True)
began_s = time.monotonic()
hold_interpreter(float(os.environ["HOLD_S"]))
ended_s = time.monotonic()
gap_s = max(b - a for a, b in zip(ticks, [*ticks[1:], ended_s]))
print(ended_s - began_s, gap_s)
"""


def test_while_the_interpreter_is_held_no_thread_runs_and_no_handled_signal_ends_it() -> None:
    environment = {**os.environ, "HOLD_S": "0.5"}
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        process.send_signal(signal.SIGUSR1)
        held_s, gap_s = map(float, process.communicate(timeout=30)[0].split())

    assert held_s >= 0.5
    assert gap_s >= 0.45


def test_a_process_whose_interpreter_is_held_still_dies_by_a_signal() -> None:
    environment = {**os.environ, "HOLD_S": "600"}
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        process.terminate()

        assert process.wait(30) == -signal.SIGTERM


def test_an_omission_is_taken_once_by_the_main_thread_alone() -> None:
    omission, taken = Omission(), []
    omission.arm(lambda: taken.append("disarmed"))
    other = threading.Thread(target=lambda: taken.append(str(omission.take())))
    other.start()
    other.join()

    assert (taken, omission.is_armed) == (["False"], True)
    assert [omission.take(), omission.take()] == [True, False]
    assert (taken, omission.is_armed) == (["False", "disarmed"], False)
