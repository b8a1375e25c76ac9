"""Which file system was full when a rank could not write: by its error, and by looking there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from agent.logs import full_disk
from agent.logs.full_disk import MAX_MOUNTS, SHM, FullDisks, Suspicion, find_full_disk, suspicion
from agent.wire.ends import DiskLimit, FullDisk
from tests.support.filesystems import small_disk
from tests.support.waiting import until

SPACE, QUOTA = DiskLimit.SPACE, DiskLimit.QUOTA
POSITION = "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"


@pytest.mark.parametrize(
    ("error", "signal", "expected"),
    [
        ("OSError: [Errno 28] No space left on device", None, Suspicion(SPACE, "")),
        (
            "OSError: [Errno 28] No space left on device: '/scratch/run 7/a.pt'",
            None,
            Suspicion(SPACE, "/scratch/run 7/a.pt"),
        ),
        ("OSError: [Errno 28] No space left on device: '/tmp/big' -> 'out/b'", None, Suspicion(SPACE, "out/b")),
        ("RuntimeError: write(): fd 3 failed with No space left on device", None, Suspicion(SPACE, "")),
        (
            (
                "safetensors._safetensors_rust.SafetensorError: Error while serializing: I/O error: No space left on "
                "device "
                "(os error 28)"
            ),
            None,
            Suspicion(SPACE, ""),
        ),
        ("OSError: Not enough free space to write 16777216 bytes after offset 128", None, Suspicion(SPACE, "")),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/ada/a.pt'", None, Suspicion(QUOTA, "/home/ada/a.pt")),
        (POSITION, None, Suspicion(None, "")),
        (
            (
                "RuntimeError: [enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file "
                "data/0: "
                "file write failed"
            ),
            None,
            Suspicion(None, ""),
        ),
        ("terminate called after throwing an instance of 'std::ios_base::failure'", None, Suspicion(None, "")),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is", None, Suspicion(None, SHM)),
        ("", 7, Suspicion(None, SHM)),
        ("OSError: [Errno 28] inotify watch limit reached", None, None),
        ("OSError: [Errno 13] Permission denied: '/scratch/a.pt'", None, None),
        ("KeyError: 'labels'", None, None),
        ("", 9, None),
    ],
)
def test_what_an_error_says_of_a_file_system(error: str, signal: int | None, expected: Suspicion | None) -> None:
    assert suspicion(error, signal) == expected


def mounts(tmp_path: Path, *points: Path, options: str = "rw,relatime", kind: str = "ext4") -> str:
    """Write a list of mounts with these points alone."""
    path = tmp_path / "mountinfo"
    lines = (f"36 35 98:0 / {str(point).replace(' ', chr(92) + '040')} {options} - {kind} x rw\n" for point in points)
    path.write_text("".join(lines) + "a line cut short\n")
    return str(path)


def test_a_full_file_system_is_named_by_the_path_in_the_error_or_as_the_only_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "a disk", 2**20) as disk:
        (disk / "fill").write_bytes(b"x" * 2**20)
        full = FullDisk(str(disk), SPACE, 2**20, 0)
        here = mounts(tmp_path, tmp_path, disk)
        assert find_full_disk(Suspicion(SPACE, f"{disk}/run/a.pt"), "", here) == full
        assert find_full_disk(Suspicion(SPACE, "run/a.pt"), str(disk), here) == full
        assert find_full_disk(Suspicion(SPACE, ""), "", here) == full
        assert find_full_disk(Suspicion(None, ""), "/nowhere", here) == full
        assert find_full_disk(Suspicion(SPACE, f"{tmp_path}/a.pt"), "", here) is None
        assert find_full_disk(Suspicion(QUOTA, f"{disk}/a.pt"), "", here) == FullDisk(str(disk), QUOTA)
        assert find_full_disk(Suspicion(QUOTA, ""), "", here) is None
        assert find_full_disk(Suspicion(SPACE, ""), "", mounts(tmp_path, disk, options="ro,relatime")) is None
        assert find_full_disk(Suspicion(SPACE, ""), "", mounts(tmp_path, disk, kind="squashfs")) is None
        (disk / "fill").unlink()
        assert find_full_disk(Suspicion(SPACE, f"{disk}/a.pt"), "", here) is None


def test_a_path_over_a_symbolic_link_is_looked_for_where_it_leads(tmp_path: Path) -> None:
    with small_disk(tmp_path / "nvme0", 2**20) as disk:
        (disk / "fill").write_bytes(b"x" * 2**20)
        (tmp_path / "data").symlink_to(disk)
        here = mounts(tmp_path, Path("/"), disk)
        full = FullDisk(str(disk), SPACE, 2**20, 0)
        assert find_full_disk(Suspicion(SPACE, f"{tmp_path}/data/run/a.pt"), "", here) == full
        assert find_full_disk(Suspicion(SPACE, "a.pt"), f"{tmp_path}/data", here) == full
        assert find_full_disk(Suspicion(QUOTA, f"{tmp_path}/data/a.pt"), "", here) == FullDisk(str(disk), QUOTA)


def test_a_quota_is_not_laid_on_the_root_for_want_of_another_file_system(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", 2**20) as disk:
        root = mounts(tmp_path, Path("/"))
        assert find_full_disk(Suspicion(QUOTA, "/no such directory/a.pt"), "", root) is None
        assert find_full_disk(Suspicion(QUOTA, f"{disk}/a.pt"), "", root) is None
        assert find_full_disk(Suspicion(QUOTA, "/a.pt"), "", root) == FullDisk("/", QUOTA)


def test_a_node_may_have_any_number_of_mounts(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", 2**20) as disk:
        (disk / "fill").write_bytes(b"x" * 2**20)
        full = FullDisk(str(disk), SPACE, 2**20, 0)
        here = mounts(tmp_path, Path("/"), *(tmp_path / f"{number}" for number in range(MAX_MOUNTS)), disk)
        assert find_full_disk(Suspicion(SPACE, f"{disk}/a.pt"), "", here) == full
        assert find_full_disk(Suspicion(SPACE, ""), f"{disk}/run", here) == full
        here = mounts(tmp_path, disk, *(tmp_path / f"{number}" for number in range(MAX_MOUNTS)))
        assert find_full_disk(Suspicion(SPACE, ""), "/elsewhere", here) is None


def test_of_two_that_are_full_the_one_of_the_job_is_named_or_none(tmp_path: Path) -> None:
    with small_disk(tmp_path / "a", 2**20) as one, small_disk(tmp_path / "b", 2**20) as other:
        for disk in (one, other):
            (disk / "fill").write_bytes(b"x" * 2**20)
        here = mounts(tmp_path, tmp_path, one, other)
        assert find_full_disk(Suspicion(SPACE, ""), "/elsewhere", here) is None
        assert find_full_disk(Suspicion(SPACE, ""), f"{other}/run", here) == FullDisk(str(other), SPACE, 2**20, 0)


def test_a_file_system_without_inodes_is_named_as_that(tmp_path: Path) -> None:
    with small_disk(tmp_path / "a", 2**20, num_inodes=4) as disk:
        for number in range(disk.stat().st_nlink, 5):
            (disk / f"{number}").mkdir()
        with pytest.raises(OSError, match="No space left") as raised:
            (disk / "one more").mkdir()
        found = suspicion(f"OSError: {raised.value}", None)
        assert found is not None
        assert find_full_disk(found, "") == FullDisk(str(disk), DiskLimit.INODES, 2**20, 2**20)


def test_ranks_that_fail_together_are_looked_for_once(tmp_path: Path) -> None:
    disks = FullDisks()
    try:
        with small_disk(tmp_path / "a", 2**20) as disk:
            (disk / "fill").write_bytes(b"x" * 2**20)
            error = f"OSError: [Errno 28] No space left on device: '{disk}/a.pt'"
            for rank in (0, 1):
                disks.suspect("train", rank, error, None, "/work")
            disks.suspect("train", 2, "KeyError: 'labels'", None, "/work")
            found = until(disks.take, 20.0, "the full disk")
        assert [(sought.rank, disk_.path) for sought, disk_ in found] == [(0, str(disk)), (1, str(disk))]
        assert disks.take() == []
        disks.suspect("train", 3, f"OSError: [Errno 28] No space left on device: '{tmp_path}/a.pt'", None, "")
        disks.suspect("train", 4, "OSError: [Errno 122] Disk quota exceeded: '/a.pt'", None, "")
        found = until(disks.take, 20.0, "the quota")
        assert [(sought.rank, disk_.limit) for sought, disk_ in found] == [(4, QUOTA)]
    finally:
        disks.close()


def test_a_disk_that_does_not_answer_holds_up_no_look_at_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statvfs, is_over, num_hung = os.statvfs, threading.Event(), 0

    def hang(path: str) -> os.statvfs_result:
        nonlocal num_hung
        if path == str(tmp_path / "dead"):
            num_hung += 1
            is_over.wait(60)
        return statvfs(path)

    monkeypatch.setattr(os, "statvfs", hang)
    monkeypatch.setattr(full_disk, "HUNG_S", 0.1)
    disks = FullDisks()
    try:
        with small_disk(tmp_path / "dead", 2**20) as dead, small_disk(tmp_path / "a", 2**20) as disk:
            (disk / "fill").write_bytes(b"x" * 2**20)
            monkeypatch.setattr(full_disk, "_mounts", lambda _: [str(dead), str(disk)])
            for rank, where in enumerate([f": '{dead}/a.pt'", f": '{disk}/a.pt'", f": '{dead}/b.pt'", ""]):
                disks.suspect("train", rank, f"OSError: [Errno 28] No space left on device{where}", None, "/work")
            for rank in (1, 3):
                ((sought, found),) = until(disks.take, 20.0, "the full disk")
                assert (sought.rank, found.path) == (rank, str(disk))
            assert num_hung == 1
            is_over.set()
            until(lambda: disks._hung[0][0].is_free, 20.0, "it answers again")
            disks.suspect("train", 4, f"OSError: [Errno 28] No space left on device: '{dead}/c.pt'", None, "/work")
            until(lambda: disks.take() or not disks._pending, 20.0, "another look at it")
            assert num_hung == 2
    finally:
        is_over.set()
        disks.close()
