"""What is odd about the process that a probe is in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddpcore.probe.process_facts import (
    FIRST_PERIOD_S,
    GROUPLESS_STEPS,
    Surroundings,
    stands_in_launcher,
    variable_anomalies,
)
from ddpcore.wire import Anomaly
from tests.support.waiting import until

JOIN = "/lib/python3.11/multiprocessing/process.py"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, []),
        ({"TORCH_FR_BUFFER_SIZE": "64", "TORCH_DISTRIBUTED_DEBUG": "INFO"}, []),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, [Anomaly.RECORDER_OFF]),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, [Anomaly.RECORDER_OFF]),
        ({"TORCH_FR_BUFFER_SIZE": "64", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, []),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, [Anomaly.DEBUG_DETAIL]),
    ],
)
def test_variables_that_blind_or_slow_are_recognised(environ: dict[str, str], expected: list[Anomaly]) -> None:
    assert variable_anomalies(environ) == expected


def test_a_main_thread_that_waits_for_ranks_of_its_own_is_recognised() -> None:
    assert stands_in_launcher([("/lib/selectors.py", 1, "select"), ("/x/torch/multiprocessing/spawn.py", 9, "join")])
    assert stands_in_launcher([("/x/torch/distributed/run.py", 9, "run")])
    assert not stands_in_launcher([("/home/me/torch_spawn.py", 9, "main")])
    assert not stands_in_launcher([("/x/torch/multiprocessing/spawn.py", 9, "_wrap"), ("/home/me/train.py", 9, "main")])


def test_a_main_thread_that_joins_processes_of_its_own_before_any_group_is_recognised() -> None:
    stack = [("/lib/python3.11/multiprocessing/popen_fork.py", 27, "poll"), (JOIN, 149, "join"), ("/own.py", 3, "main")]

    assert Surroundings(1).look(0.0, lambda: stack, has_process_group=False) == (Anomaly.OWN_RANKS,)
    assert Surroundings(1).look(0.0, lambda: stack, has_process_group=True) == ()


@pytest.mark.parametrize(
    "file", ["torch/distributed/launcher/api.py", "nvidia_resiliency_ext/fault_tolerance/launcher.py"]
)
def test_a_main_thread_in_a_launcher_that_the_program_calls_is_recognised(file: str) -> None:
    assert stands_in_launcher([("/lib/selectors.py", 1, "select"), (f"/site-packages/{file}", 9, "launch")])


def test_variables_count_once_torch_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    surroundings = Surroundings(2)

    assert surroundings.look(0.0, list, has_process_group=False) == ()
    assert surroundings.look(0.1, list, has_process_group=True) == (Anomaly.DEBUG_DETAIL,)


@pytest.mark.parametrize(
    ("num_steps", "has_process_group", "world_size", "is_alone"),
    [
        (GROUPLESS_STEPS, False, 2, True),
        (GROUPLESS_STEPS - 1, False, 2, False),
        (99, True, 2, False),
        (99, False, 1, False),
    ],
)
def test_a_rank_that_trains_on_its_own_is_recognised(
    num_steps: int, *, has_process_group: bool, world_size: int, is_alone: bool
) -> None:
    looked = Surroundings(world_size).look(0.0, list, has_process_group=has_process_group, num_steps=num_steps)

    assert (Anomaly.GROUPLESS in looked) == is_alone


def test_a_rank_that_has_closed_its_process_group_has_not_trained_alone() -> None:
    surroundings = Surroundings(2)
    surroundings.look(0.0, list, has_process_group=True, num_steps=50)

    assert Anomaly.GROUPLESS not in surroundings.look(1.0, list, has_process_group=False, num_steps=51)


def test_a_launcher_among_the_children_is_found_at_the_next_look() -> None:
    surroundings = Surroundings(2)
    assert surroundings.look(0.0, list, has_process_group=False) == ()
    # Its name is enough: what it is called as is all that there is to see.
    command = [sys.executable, "-c", "input()", "-m", "torch.distributed.run"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert surroundings.look(FIRST_PERIOD_S - 1, list, has_process_group=False) == ()
        until(
            lambda: Surroundings(2).look(0.0, list, has_process_group=False) == (Anomaly.OWN_RANKS,),
            30,
            "the child is seen",
        )
        assert surroundings.look(FIRST_PERIOD_S + 1, list, has_process_group=False) == (Anomaly.OWN_RANKS,)
        child.communicate(b"\n")


def test_a_process_that_never_had_a_child_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr("os.waitid", wait)
    monkeypatch.setattr("ddpcore.probe.process_facts.Path", None)

    assert Surroundings(2).look(0.0, list, has_process_group=False) == ()


def test_a_look_at_the_children_leaves_their_end_to_the_program() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()
        for second in range(100):
            Surroundings(2).look(float(second), list, has_process_group=False)
        assert child.wait(10) == 3


def test_looks_grow_rare_and_begin_anew_with_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[float] = []
    surroundings = Surroundings(2)
    now_s = 0.0

    def look(_: object) -> bool:
        looked.append(now_s)
        return False

    monkeypatch.setattr("ddpcore.probe.process_facts.stands_in_launcher", look)
    for second in range(100):
        now_s = float(second)
        surroundings.look(now_s, list, has_process_group=second >= 5)

    assert looked == [0, 2, 5, 7, 11, 19, 35, 67, 99]
