"""Each cause that slows a rank, brought about for real, beside the same process without it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.processes import signal_reader
from agent.wire.signals import Signal
from tests.support.signal_programs import BUSY, FAULTS, SLEEPS, VFORK_C, Watched, python, running

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = min(os.sched_getaffinity(0))
QUOTA_US, QUOTA_PERIOD_US = 2_000, 100_000
"""Microseconds; little, since a busy machine gives a process no more than that either."""


@pytest.fixture(autouse=True)
def short_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_reader, "PERIOD_S", 0.25)


def test_a_process_that_shares_its_cpu_waits_for_it_and_one_that_sleeps_beside_them_does_not() -> None:
    on_one = {CPU}
    with python(BUSY, cpus=on_one) as pid, python(BUSY, cpus=on_one), python(SLEEPS, cpus=on_one) as sleeper:
        waits, sleeps = Watched(pid), Watched(sleeper)
        assert waits.most(Signal.CPU_WAIT, 4) > 0.3
        assert sleeps.most(Signal.CPU_WAIT, 2) < waits.most(Signal.CPU_WAIT, 2)


def test_a_process_bound_to_one_cpu_has_one_and_another_has_all() -> None:
    with python(SLEEPS, cpus={CPU}) as bound, python(SLEEPS) as free:
        assert Watched(bound).values()[Signal.CPUS_ALLOWED] == 1.0
        assert Watched(free).values()[Signal.CPUS_ALLOWED] == len(os.sched_getaffinity(0))


@contextlib.contextmanager
def quota_group() -> Iterator[Path]:
    """Make a cgroup with a quota and one inside; yield the one inside."""
    root = Path("/sys/fs/cgroup")
    is_v2 = (root / "cgroup.controllers").exists()
    group = (root if is_v2 else root / "cpu") / f"rankdeck-test-{os.getpid()}"
    inside = group / "inside"
    try:
        inside.mkdir(parents=True)
        if is_v2:
            (group / "cpu.max").write_text(f"{QUOTA_US} {QUOTA_PERIOD_US}")
        else:
            (group / "cpu.cfs_quota_us").write_text(f"{QUOTA_US}")
    except OSError as error:
        for made in (inside, group):
            if made.exists():
                made.rmdir()
        pytest.skip(f"no cgroup with a CPU quota can be made here: {error}")
    try:
        yield inside
    finally:
        inside.rmdir()
        group.rmdir()


def test_a_quota_above_holds_a_busy_process_and_not_one_outside() -> None:
    with quota_group() as group, python(BUSY) as held, python(BUSY) as free:
        (group / "cgroup.procs").write_text(str(held))
        inside, outside = Watched(held), Watched(free)
        assert inside.most(Signal.CPU_THROTTLED) > 0.3
        assert outside.most(Signal.CPU_THROTTLED) == 0.0


def test_a_process_in_uninterruptible_sleep_is_blocked_and_one_that_sleeps_is_not(tmp_path: Path) -> None:
    source, program = tmp_path / "vfork.c", tmp_path / "vfork"
    source.write_text(VFORK_C)
    try:
        subprocess.run(["cc", "-o", program, source], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no C compiler: {error}")
    # A process whose child is blocked is as blocked as its children are.
    parent = f"import subprocess\nsubprocess.run([{str(program)!r}])"
    with running(str(program)) as pid, python(parent) as pid_of_parent, python(SLEEPS) as sleeper:
        assert Watched(pid).has(Signal.BLOCKED, 1.0)
        assert Watched(pid_of_parent).has(Signal.BLOCKED, 0.5)
        assert Watched(sleeper).most(Signal.BLOCKED) == 0.0


def test_pages_that_come_from_a_disk_are_major_faults_and_those_in_memory_are_not(tmp_path: Path) -> None:
    with python(FAULTS, str(tmp_path / "evicted"), "evicts") as from_disk:
        if Watched(from_disk).most(Signal.MAJOR_FAULTS) == 0.0:
            kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True)
            pytest.skip(f"files on {kind.stdout.strip()} are not evicted from memory")
        assert Watched(from_disk).has(Signal.MAJOR_FAULTS, 50.0)
    with python(FAULTS, str(tmp_path / "kept"), "keeps") as from_memory:
        Watched(from_memory).has(Signal.MAJOR_FAULTS, 0.0, num=1)  # the program itself is loaded
        assert Watched(from_memory).most(Signal.MAJOR_FAULTS) < 5.0


def test_the_cpu_time_of_children_that_come_and_go_is_the_ranks() -> None:
    text = f"import subprocess, sys\nwhile True: subprocess.run([{sys.executable!r}, '-S', '-c', 'sum(range(10**6))'])"
    with python(text) as pid:
        watched = Watched(pid)
        first = watched.tree_cpu_s()
        own_s = sum(os.sysconf("SC_CLK_TCK") ** -1 * int(part) for part in _stat(pid)[11:13])
        assert watched.tree_cpu_s() > first
        assert watched.tree_cpu_s() > own_s


def _stat(pid: int) -> list[bytes]:
    line = Path(f"/proc/{pid}/stat").read_bytes()
    return line[line.rfind(b")") + 2 :].split()
