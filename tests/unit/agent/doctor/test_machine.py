"""What the doctor says of a machine that is unlike most."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import pytest

from agent.doctor.machine import (
    MIN_DISK_BYTES,
    cgroup_row,
    disk_row,
    leftovers_row,
    linger_row,
    locked_memory_row,
    machine_rows,
    open_files_row,
    shared_memory_row,
    state_directory_row,
)
from agent.processes import leftovers
from agent.wire.commands import Leftover
from agent.wire.examination import Health

if TYPE_CHECKING:
    from pathlib import Path


def test_a_user_without_a_name_is_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 3_999_999_999)

    row = linger_row(tmp_path, tmp_path)

    assert row.status is Health.OK
    assert "has no name here" in row.detail


def test_whose_processes_end_at_logout_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert linger_row(tmp_path, tmp_path).status is Health.OK, "root lingers"
    monkeypatch.setattr(os, "geteuid", lambda: 1)

    row = linger_row(tmp_path, tmp_path)

    assert (row.status, "loginctl enable-linger" in row.todo) == (Health.WARN, True)
    assert linger_row(tmp_path / "none", tmp_path).status is Health.OK


@pytest.mark.parametrize(
    ("soft", "status"),
    [(1024, Health.WARN), (4096, Health.OK), (resource.RLIM_INFINITY, Health.OK)],
)
def test_few_open_files_are_told(soft: int, status: Health) -> None:
    assert open_files_row(soft, resource.RLIM_INFINITY).status is status


def test_locked_memory_counts_where_there_is_infiniband(tmp_path: Path) -> None:
    assert locked_memory_row(65_536, tmp_path / "none").status is Health.OK
    assert locked_memory_row(resource.RLIM_INFINITY, tmp_path).status is Health.OK
    row = locked_memory_row(65_536, tmp_path)
    assert (row.status, row.detail) == (Health.WARN, "64 KiB")


def test_shared_memory_that_is_missing_is_bad(tmp_path: Path) -> None:
    assert shared_memory_row(tmp_path / "none").status is Health.BAD


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    assert disk_row(tmp_path, MIN_DISK_BYTES - 1).status is Health.WARN
    assert disk_row(tmp_path, MIN_DISK_BYTES).status is Health.OK


def test_a_directory_that_is_not_ours_alone_is_bad(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    row = state_directory_row(tmp_path)
    assert (row.status, "chmod 0700" in row.detail) == (Health.BAD, True)
    assert state_directory_row(tmp_path / "none").status is Health.OK


def test_what_cannot_be_looked_at_hides_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "none")

    rows = {row.name: row for row in machine_rows(tmp_path / "a/b")}

    assert (rows["leftovers"].status, "none" in rows["leftovers"].detail) == (Health.BAD, True)
    assert {"state_directory", "agent", "disk", "shared_memory", "linger", "cgroup", "open_files"} <= set(rows)


def test_whose_group_we_are_in_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("12:cpu:/old\n0::/user.slice\n")
    assert "no cgroup v2" in cgroup_row(tmp_path, own).detail
    assert "no cgroup v2" in cgroup_row(tmp_path, tmp_path / "none").detail
    (tmp_path / "user.slice").mkdir()
    (tmp_path / "user.slice/cgroup.procs").write_text("")
    assert cgroup_row(tmp_path, own).detail.endswith("ours to divide")


def test_leftovers_are_named_and_counted() -> None:
    assert leftovers_row([]).status is Health.OK
    found = [
        Leftover(f"process:{pid}:1", f"pid {pid}: train.py", True, 5.0, 3 << 20, ports=[29500]) for pid in range(5)
    ]

    row = leftovers_row(found)

    assert row.status is Health.WARN
    assert row.detail.startswith("pid 0: train.py (3 MiB, listens on 29500); pid 1")
    assert row.detail.endswith("; 2 more")
