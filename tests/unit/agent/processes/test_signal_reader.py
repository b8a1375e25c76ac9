"""What is made of the kernel's figures of a rank, with files of a made-up machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from agent.processes.cgroups import Cgroup, Throttled, has_quota
from agent.processes.signal_reader import SEARCH_PERIOD_S, SignalReader, cpus_in, numa_nodes_of
from agent.wire.signals import Signal

if TYPE_CHECKING:
    from pathlib import Path

    from agent.node_state.observations import RankSignals

PID = 77
TICKS_HZ = os.sysconf("SC_CLK_TCK")


class Machine:
    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.cgroups.mkdir()
        self.stat(PID)
        self.children()
        self.run_delay(0.0)
        (self.proc / str(PID) / "cgroup").write_text("0::/job/step\n")
        (self.cgroups / "job/step").mkdir(parents=True)

    def stat(
        self, pid: int, state: str = "S", faults: int = 0, ticks: tuple[int, int, int, int] = (0, 0, 0, 0)
    ) -> None:
        here = self.proc / str(pid)
        here.mkdir(parents=True, exist_ok=True)
        fields = [state, *["1", "2", "3", "4", "5", "6", "7", "8"], str(faults), "9", *map(str, ticks), "20", "0"]
        (here / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")

    def children(self, text: str = "") -> None:
        task = self.proc / str(PID) / "task" / str(PID)
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text(text)

    def run_delay(self, delay_s: float, run_ns: int = 5) -> None:
        (self.proc / str(PID) / "schedstat").write_text(f"{run_ns} {int(delay_s * 1e9)} 3\n")

    def v2(self, path: str, quota: str, held: Throttled) -> None:
        here = self.cgroups / path
        here.mkdir(parents=True, exist_ok=True)
        (here / "cpu.max").write_text(f"{quota} 100000\n")
        (here / "cpu.stat").write_text(
            f"usage_usec 5\nnr_periods {held.num_periods}\nnr_throttled {held.num_held}\n"
            f"throttled_usec {int(held.held_s * 1e6)}\n"
        )

    def v1(self, path: str, quota: str, held: Throttled) -> None:
        here = self.cgroups / "cpu" / path
        here.mkdir(parents=True, exist_ok=True)
        (here / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (here / "cpu.stat").write_text(
            f"nr_periods {held.num_periods}\nnr_throttled {held.num_held}\nthrottled_time {int(held.held_s * 1e9)}\n"
        )


class Reader:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.reader = SignalReader(PID, proc=machine.proc, cgroups=machine.cgroups)

    def read(self, now_s: float, known: tuple[int, ...] = ()) -> RankSignals | None:
        line = (self.machine.proc / str(PID) / "stat").read_bytes()
        return self.reader.read(now_s, line[line.rfind(b")") + 2 :].split(), known)

    def values(self, now_s: float, known: tuple[int, ...] = ()) -> dict[Signal, float]:
        found = self.read(now_s, known)
        assert found is not None
        return found.values


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_there_is_one_sample_in_a_second_of_the_clock(machine: Machine) -> None:
    reader = Reader(machine)

    assert [reader.read(now_s) is not None for now_s in (10.1, 10.9, 11.0, 11.3, 11.99, 12.05)] == [
        *(True, False, True, False, False, True),
    ]


def test_the_time_without_a_cpu_is_a_part_of_the_time(machine: Machine) -> None:
    reader = Reader(machine)
    assert Signal.CPU_WAIT not in reader.values(10.0)

    machine.run_delay(0.5)
    assert reader.values(12.0)[Signal.CPU_WAIT] == pytest.approx(0.25)
    machine.run_delay(9.0)
    assert reader.values(13.0)[Signal.CPU_WAIT] == 1.0


@pytest.mark.parametrize("text", [None, "0 0 0\n", "what\n"])
def test_a_kernel_that_does_not_count_waits_leaves_them_out(machine: Machine, text: str | None) -> None:
    path = machine.proc / str(PID) / "schedstat"
    path.unlink() if text is None else path.write_text(text)
    reader = Reader(machine)
    reader.read(10.0)

    assert Signal.CPU_WAIT not in reader.values(11.0)


@pytest.mark.parametrize("is_v2", [True, False])
@pytest.mark.parametrize("limited", ["job/step", "job", ""])
def test_a_quota_of_any_cgroup_above_counts(machine: Machine, limited: str, *, is_v2: bool) -> None:
    write = machine.v2 if is_v2 else machine.v1
    if not is_v2:
        (machine.proc / str(PID) / "cgroup").write_text("4:cpu,cpuacct:/job/step\n1:name=systemd:/\n")
    for path in ("", "job", "job/step"):
        write(path, "20000" if path == limited else ("max" if is_v2 else "-1"), Throttled(100, 100, 10.0))
    reader = Reader(machine)
    assert Signal.CPU_THROTTLED not in reader.values(10.0)

    write(limited, "20000", Throttled(110, 110, 10.75))
    assert reader.values(11.0)[Signal.CPU_THROTTLED] == pytest.approx(0.75)
    # Many threads are held at the same time: it counts in how many periods.
    write(limited, "20000", Throttled(120, 112, 20.0))
    assert reader.values(12.0)[Signal.CPU_THROTTLED] == pytest.approx(0.2)
    write(limited, "20000", Throttled(120, 112, 20.0))
    assert reader.values(13.0)[Signal.CPU_THROTTLED] == 0.0


def test_without_a_quota_nothing_is_held_and_without_a_cgroup_it_is_not_known(machine: Machine) -> None:
    free, unknown = Reader(machine), Reader(machine)
    free.read(10.0)
    (machine.proc / str(PID) / "cgroup").write_text("")
    unknown.read(10.0)

    assert free.values(11.0)[Signal.CPU_THROTTLED] == 0.0
    assert Signal.CPU_THROTTLED not in unknown.values(11.0)
    machine.v2("job", "20000", Throttled(1, 1, 1.0))
    (machine.proc / str(PID) / "cgroup").write_text("0::/job/step\n")
    free.read(11.0 + SEARCH_PERIOD_S)
    machine.v2("job", "20000", Throttled(11, 11, 1.5))
    assert free.values(12.0 + SEARCH_PERIOD_S)[Signal.CPU_THROTTLED] == pytest.approx(0.5)


def test_quotas_that_are_none(tmp_path: Path) -> None:
    for name, text in (("cpu.max", "max 100000"), ("cpu.cfs_quota_us", "-1"), ("cpu.max", "")):
        (tmp_path / name).write_text(text)
        assert not has_quota(Cgroup(tmp_path, tmp_path, is_v2=name == "cpu.max"))
    assert not has_quota(Cgroup(tmp_path, tmp_path / "gone", is_v2=True))


def test_blocked_is_the_part_of_looks_or_that_of_the_child_processes(machine: Machine) -> None:
    reader = Reader(machine)
    reader.read(10.0)
    for now_s, state in ((10.2, "D"), (10.4, "S"), (10.6, "D")):
        machine.stat(PID, state)
        assert reader.read(now_s) is None
    machine.stat(PID, "R")
    assert reader.values(11.0)[Signal.BLOCKED] == pytest.approx(0.5)

    machine.children("80 81 ")
    for pid, state in ((80, "D"), (81, "S"), (82, "D"), (83, "D")):
        machine.stat(pid, state)
    assert reader.values(12.0, (81, 82, 83, 84))[Signal.BLOCKED] == pytest.approx(0.75)
    machine.children()
    assert reader.values(13.0)[Signal.BLOCKED] == 0.0


def test_major_faults_are_those_of_the_tree_since_the_last_look(machine: Machine) -> None:
    machine.stat(PID, faults=1000)
    machine.stat(80, faults=5000)
    reader = Reader(machine)
    assert Signal.MAJOR_FAULTS not in reader.values(10.0)

    machine.stat(PID, faults=1010)
    assert reader.values(12.0, (80,))[Signal.MAJOR_FAULTS] == pytest.approx(5.0)
    machine.stat(80, faults=5100)
    assert reader.values(14.0, (80,))[Signal.MAJOR_FAULTS] == pytest.approx(50.0)
    assert reader.values(15.0)[Signal.MAJOR_FAULTS] == 0.0


def test_the_cpu_time_of_a_tree_has_its_children_and_those_that_have_ended(machine: Machine) -> None:
    machine.stat(PID, ticks=(TICKS_HZ, 2 * TICKS_HZ, 4 * TICKS_HZ, 0))
    machine.stat(80, ticks=(8 * TICKS_HZ, 0, 0, 16 * TICKS_HZ))
    machine.children("80")
    found = Reader(machine).read(10.0)

    assert found is not None
    assert found.tree_cpu_s == pytest.approx(31.0)


def test_a_process_that_goes_while_it_is_read_has_no_sample(machine: Machine) -> None:
    reader = Reader(machine)
    (machine.proc / str(PID) / "cgroup").unlink()

    assert reader.read(10.0) is None


def test_lists_of_cpus_and_their_numa_nodes(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-3,8"), (1, "4-7"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)

    assert cpus_in("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cpus_in("\n") == frozenset()
    assert numa_nodes_of(frozenset({8}), tmp_path) == frozenset({0})
    assert numa_nodes_of(frozenset({2, 5}), tmp_path) == frozenset({0, 1})
    assert numa_nodes_of(frozenset({99}), tmp_path) is None
    assert numa_nodes_of(frozenset({0}), tmp_path / "none") is None
