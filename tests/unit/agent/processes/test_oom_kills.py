"""Whether the kernel has killed for want of memory: in the whole machine, and in a rank's own cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.processes.cgroups import Cgroup
from agent.processes.oom_kills import RECENT_S, CgroupKills, Killing, OomKills
from agent.wire.ends import EndFacts, Sender
from agent.wire.machine import LimitKind, LimitReport


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


class Cgroups:
    """The cgroup file systems of a machine, to write to."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def v2(self, path: str, *, kills: int = 0, own: int = 0) -> Cgroup:
        here = self.root / path
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.events").write_text(f"low 0\nhigh 0\nmax 77\noom 9\noom_kill {kills}\noom_group_kill 0\n")
        (here / "memory.events.local").write_text(f"low 0\nhigh 0\nmax 5\noom {own}\noom_kill 3\n")
        return Cgroup(self.root, here, is_v2=True)

    def v1(self, path: str, *, kills: int = 0, own: int = 0) -> Cgroup:
        here = self.root / path
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (here / "memory.failcnt").write_text(f"{own}\n")
        return Cgroup(self.root, here, is_v2=False)


LIMIT = LimitReport(LimitKind.CGROUP, 8 * 2**30, 7 * 2**30)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_cgroup_whose_limit_was_reached_is_known(tmp_path: Path, version: str) -> None:
    cgroups, kills = Cgroups(tmp_path), CgroupKills()
    write = getattr(cgroups, version)
    leaf, job = write("job_12/step_0", kills=1), write("job_12", own=4)
    kills.follow([leaf, job], [leaf, job])
    limits = {leaf.key: LIMIT, job.key: LIMIT}
    kills.look(10.0)
    assert kills.killing(10.5, limits) == Killing(0, EndFacts())

    write("job_12/step_0", kills=3)
    write("job_12", own=9)

    expected = Killing(2, EndFacts(memory_limit=LIMIT, cgroup="/job_12"))
    assert kills.killing(10.6, limits) == expected
    kills.look(11.0)
    assert kills.killing(11.1, limits) == expected
    assert kills.killing(500.0, limits) is None


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_kill_at_no_limit_of_its_cgroups_names_none(tmp_path: Path, version: str) -> None:
    cgroups, kills = Cgroups(tmp_path), CgroupKills()
    write = getattr(cgroups, version)
    leaf = write("job_12")
    kills.follow([leaf], [leaf])
    kills.look(10.0)
    write("job_12", kills=1)

    assert kills.killing(10.6, {leaf.key: LIMIT}) == Killing(1, EndFacts())


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_limit_that_was_reached_without_a_kill_is_no_end(tmp_path: Path, version: str) -> None:
    cgroups, kills = Cgroups(tmp_path), CgroupKills()
    write = getattr(cgroups, version)
    leaf = write("job_12")
    kills.follow([leaf], [leaf])
    kills.look(10.0)
    write("job_12", own=50)

    assert kills.killing(10.6, {leaf.key: LIMIT}) == Killing(0, EndFacts())


def test_a_cgroup_that_does_not_tell_leaves_it_open(tmp_path: Path) -> None:
    kills = CgroupKills()
    root = Cgroup(tmp_path, tmp_path, is_v2=True)
    kills.look(9.0)
    kills.follow([root], [])
    kills.look(10.0)
    assert kills.killing(10.1, {}) is None
    (tmp_path / "memory.events").write_text("oom_kill many\n")
    assert kills.killing(10.1, {}) is None


def test_the_counts_of_another_cgroup_are_not_compared_with(tmp_path: Path) -> None:
    cgroups, kills = Cgroups(tmp_path), CgroupKills()
    kills.follow([cgroups.v2("a", kills=1)], [])
    kills.look(10.0)
    kills.follow([cgroups.v2("b", kills=7)], [])
    assert kills.killing(10.1, {}) is None


def test_oomd_leaves_its_mark(tmp_path: Path) -> None:
    cgroups, kills = Cgroups(tmp_path), CgroupKills()
    leaf, above = cgroups.v2("user.slice/run.scope"), cgroups.v2("user.slice")
    try:
        os.setxattr(above.path, "user.oomd_ooms", b"2")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error}")
    kills.follow([leaf, above], [])
    kills.look(10.0)
    assert kills.killing(10.1, {}) == Killing(0, EndFacts())

    os.setxattr(above.path, "user.oomd_ooms", b"3")

    assert kills.killing(10.2, {}) == Killing(0, EndFacts(cgroup="/user.slice", sender=Sender.OOMD))
