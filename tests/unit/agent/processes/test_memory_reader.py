from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agent.processes.memory_reader import PERIOD_S, SEARCH_PERIOD_S, MemoryReader
from agent.wire.machine import LimitKind

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
PID = 77
STATUS = "Name:\tpython\nVmSize:\t  204800 kB\nVmRSS:\t  102400 kB\nVmData:\t  51200 kB\nVmSwap:\t  1024 kB\n"
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max data size             {data}            unlimited            bytes
Max address space         {space}            unlimited            bytes
"""


class Machine:
    def __init__(self, root: Path) -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.cgroups.mkdir()
        self.process(PID, rss_pages=25600, shared_pages=0)
        self.limits()

    def process(self, pid: int, rss_pages: int, shared_pages: int, children: str = "") -> None:
        here = self.proc / str(pid)
        (here / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        (here / "task" / str(pid) / "children").write_text(children)
        (here / "status").write_text(STATUS)
        (here / "statm").write_text(f"50000 {rss_pages} {shared_pages} 1 0 9 0\n")
        (here / "cgroup").write_text("0::/\n")

    def limits(self, data: object = "unlimited", space: object = "unlimited") -> None:
        (self.proc / str(PID) / "limits").write_text(LIMITS.format(data=data, space=space))

    def v2(self, path: str, limit: object, used: int, cache: int = 0) -> None:
        here = self.cgroups / path
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.max").write_text(f"{limit}\n")
        (here / "memory.current").write_text(f"{used}\n")
        (here / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file {cache}\nslab 1\n")

    def v1(self, path: str, limit: int, used: int) -> None:
        here = self.cgroups / "memory" / path
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (here / "memory.usage_in_bytes").write_text(f"{used}\n")
        (here / "memory.stat").write_text("cache 9\ntotal_inactive_file 10\ntotal_active_file 20\n")

    def reader(self) -> MemoryReader:
        return MemoryReader(PID, proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_memory_of_child_processes_counts_without_what_they_share(machine: Machine) -> None:
    machine.process(PID, 0, 0, children="80 ")
    machine.process(80, rss_pages=1000, shared_pages=300, children="81")
    machine.process(81, rss_pages=50, shared_pages=50)
    found = machine.reader().read(0.0)
    assert found is not None
    page = os.sysconf("SC_PAGE_SIZE")
    assert found.tree_bytes == 101 * MIB + 700 * page
    assert found.limits == []


def test_the_limits_of_all_cgroups_above_count_without_page_cache_the_nearest_first(machine: Machine) -> None:
    (machine.proc / str(PID) / "cgroup").write_text("0::/job/step\n")
    machine.v2("job", 1000 * MIB, 900 * MIB, cache=100 * MIB)
    machine.v2("job/step", 800 * MIB, 700 * MIB)
    machine.v2("", "max", 5000 * MIB)
    found = machine.reader().read(0.0)
    assert found is not None
    assert [(limit.report.limit_bytes, limit.report.used_bytes) for limit in found.limits] == [
        (800 * MIB, 700 * MIB),
        (1000 * MIB, 700 * MIB),
    ]
    assert len({limit.key for limit in found.limits}) == 2


def test_version_1_of_cgroups_is_read_too_and_its_unlimited_is_no_limit(machine: Machine) -> None:
    (machine.proc / str(PID) / "cgroup").write_text("4:memory:/box/a\n0::/\n")
    machine.v1("", 2**63 - 4096, 10)
    machine.v1("box/a", 500 * MIB, 100 * MIB)
    found = machine.reader().read(0.0)
    assert found is not None
    assert [limit.report.limit_bytes for limit in found.limits] == [500 * MIB]
    assert found.limits[0].report.used_bytes == 100 * MIB - 30


@pytest.mark.parametrize("path", ["/docker/0123", "/../outside"])
def test_in_a_container_that_sees_its_own_part_only_the_root_is_its_cgroup(machine: Machine, path: str) -> None:
    (machine.proc / str(PID) / "cgroup").write_text(f"4:memory:{path}\n")
    machine.v1("", 500 * MIB, 100 * MIB)
    found = machine.reader().read(0.0)
    assert found is not None
    assert [limit.report.limit_bytes for limit in found.limits] == [500 * MIB]


def test_limits_of_the_process_itself_are_used_as_the_kernel_counts_them(machine: Machine) -> None:
    machine.limits(data=60 * MIB, space=300 * MIB)
    found = machine.reader().read(0.0)
    assert found is not None
    told = [(limit.report.kind, limit.report.limit_bytes, limit.report.used_bytes) for limit in found.limits]
    assert told == [
        (LimitKind.DATA, 60 * MIB, 50 * MIB),
        (LimitKind.ADDRESS_SPACE, 300 * MIB, 200 * MIB),
    ]


def test_a_process_that_is_gone_holds_nothing_and_new_limits_are_seen_in_time(machine: Machine) -> None:
    reader = machine.reader()
    assert reader.read(0.0) is not None
    machine.limits(space=300 * MIB)
    found = reader.read(SEARCH_PERIOD_S)
    assert found is not None
    assert len(found.limits) == 1
    (machine.proc / str(PID) / "status").unlink()
    assert reader.read(SEARCH_PERIOD_S + PERIOD_S) is None


def test_a_process_that_is_moved_counts_in_its_new_cgroup_and_one_that_ends_in_its_last(machine: Machine) -> None:
    machine.v2("job", 10 * MIB, 3 * MIB)
    machine.v2("other", 20 * MIB, 3 * MIB)
    cgroup, status = machine.proc / str(PID) / "cgroup", machine.proc / str(PID) / "status"
    cgroup.write_text("0::/job\n")
    reader = machine.reader()

    def limits(now_s: float) -> list[int]:
        found = reader.read(now_s)
        assert found is not None
        return [limit.report.limit_bytes for limit in found.limits]

    assert limits(0.0) == [10 * MIB]
    cgroup.write_text("0::/other\n")
    assert limits(PERIOD_S) == [20 * MIB]
    cgroup.write_text("0::/\n")
    status.write_text("Name:\tpython\nState:\tZ (zombie)\n")
    assert limits(2 * PERIOD_S) == [20 * MIB]


def test_nonsense_in_these_files_is_no_error(machine: Machine) -> None:
    (machine.proc / str(PID) / "cgroup").write_text("0::/job\n")
    machine.v2("job", "many", 3)
    machine.v2("", 10 * MIB, 3)
    (machine.cgroups / "memory.stat").write_text("inactive_file\n")
    assert machine.reader().read(0.0) is not None
    (machine.proc / str(PID) / "status").write_text("VmRSS: none\n")
    assert machine.reader().read(SEARCH_PERIOD_S) is None


def test_a_real_process_with_a_limit_is_seen_with_its_child() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    limit_bytes = 4 * 2**30
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),  # noqa: PLW1509
    )
    try:
        found = None
        while found is None or not found.limits:
            found = MemoryReader(child.pid).read(0.0)
            found = None if found is None or found.tree_bytes < MIB else found  # it is not yet what it will be
        spaces = [limit.report for limit in found.limits if limit.report.kind is LimitKind.ADDRESS_SPACE]
        assert [limit.limit_bytes for limit in spaces] == [limit_bytes]
        assert MIB < found.tree_bytes < 2**30
    finally:
        child.communicate(b"\n")
