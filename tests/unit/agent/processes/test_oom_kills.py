from __future__ import annotations

from pathlib import Path

import pytest

from agent.processes.memory_reader import RECENT_S, OomKills


class Kernel:
    """A /proc/vmstat to write to."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "vmstat"
        self.has_killed(0)

    def has_killed(self, num_processes: int) -> None:
        self.path.write_text(f"nr_free_pages 12\noom_kill {num_processes}\noom_kill_x 77\n")


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_kills_of_the_last_seconds_are_counted(kernel: Kernel) -> None:
    kernel.has_killed(4)
    kills = OomKills(kernel.path)
    kills.look(100.0)
    assert kills.recent(100.5) == 0

    kernel.has_killed(6)

    assert kills.recent(100.6) == 2
    kills.look(101.2)
    assert kills.recent(101.3) == 2
    for second in range(102, 110):
        kills.look(float(second))
    assert kills.recent(109.0 + RECENT_S / 2) == 0


def test_without_a_look_before_nothing_is_known(kernel: Kernel) -> None:
    kernel.has_killed(9)
    assert OomKills(kernel.path).recent(5.0) == 0


def test_an_old_look_is_not_compared_with(kernel: Kernel) -> None:
    kills = OomKills(kernel.path)
    kills.look(100.0)
    kernel.has_killed(3)
    assert kills.recent(500.0) == 0


def test_a_kernel_that_does_not_tell_is_taken_for_one_that_killed_nobody(tmp_path: Path) -> None:
    kills = OomKills(tmp_path / "missing")
    kills.look(1.0)
    assert kills.recent(1.5) == 0


def test_this_machine_tells() -> None:
    assert "oom_kill " in Path("/proc/vmstat").read_text()
    kills = OomKills()
    kills.look(1.0)
    assert kills.recent(1.0) >= 0
