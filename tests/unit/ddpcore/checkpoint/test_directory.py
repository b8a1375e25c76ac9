"""What a directory of checkpoints may hold besides: leftovers of the dead, work of the living, what is not ours."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddpcore.checkpoint import directory
from ddpcore.checkpoint.catalog import list_checkpoints
from ddpcore.checkpoint.directory import RunLock, collect_leftovers, make_directory
from ddpcore.errors import CheckpointDirectoryError

HOLD = """
import sys
from pathlib import Path
from ddpcore.checkpoint.directory import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def make(path: Path) -> Path:
    path.mkdir()
    (path / "lock").touch()
    (path / "rank-00000.safetensors.part").write_bytes(b"half")
    return path


def test_leftovers_of_dead_runs_are_deleted_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path / ".tmp-step_00000001-dead.1")
    make(tmp_path / ".del-step_00000002-0a")
    for name in ("step_00000003", ".tmp-mine", ".del-mine"):
        make(tmp_path / name)

    collect_leftovers(tmp_path, 1.0)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".del-mine", ".tmp-mine", "step_00000003"]


@pytest.mark.timeout(20)
def test_leftovers_that_are_no_directories_hold_nobody_up(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for prefix in (".tmp-", ".del-"):
        os.mkfifo(tmp_path / f"{prefix}step_00000010-pipe")
        (tmp_path / f"{prefix}step_00000010-link").symlink_to(kept)
        (tmp_path / f"{prefix}step_00000010-file").touch()

    collect_leftovers(tmp_path, 1.0)

    assert list(tmp_path.iterdir()) == [kept]


def test_a_checkpoint_that_a_writer_is_at_is_waited_for(tmp_path: Path) -> None:
    at_work = make(tmp_path / ".tmp-step_00000001-dead.1")
    fd = os.open(at_work / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with ThreadPoolExecutor(1) as threads:
        collecting = threads.submit(collect_leftovers, tmp_path, 30.0)
        with pytest.raises(TimeoutError):
            collecting.result(timeout=0.2)
        # The writer publishes, and ends.
        at_work.rename(tmp_path / "step_00000001")
        os.close(fd)
        collecting.result(timeout=10)

    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_writer_that_takes_too_long_loses_its_work(tmp_path: Path) -> None:
    at_work = make(tmp_path / ".tmp-step_00000001-dead.1")
    fd = os.open(at_work / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)

    collect_leftovers(tmp_path, 0.1)

    assert list(tmp_path.iterdir()) == []
    os.close(fd)


def test_the_lock_is_another_process_s_until_that_one_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "LOCK_PATIENCE_S", 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(CheckpointDirectoryError, match=f"is in use by another run, process {holder.pid} on "):
            RunLock(tmp_path)
        (tmp_path / ".run.lock").write_text("garbage")
        with pytest.raises(
            CheckpointDirectoryError, match="which has not written its name: end that one, or give this"
        ):
            RunLock(tmp_path)
        holder.kill()

    lock = RunLock(tmp_path)
    assert json.loads((tmp_path / ".run.lock").read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()


def other_process_enters(root: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", HOLD, str(root)], input="", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "held\n" or "is in use by another run" in done.stderr, done.stderr
    return done.stdout == "held\n"


def test_the_lock_is_kept_when_the_program_copies_or_reads_its_directory(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    lock = RunLock(tmp_path / "checkpoints")
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    (tmp_path / "checkpoints" / ".run.lock").read_text()

    assert not other_process_enters(tmp_path / "checkpoints")
    with pytest.raises(CheckpointDirectoryError, match="by another Checkpointer of this very process"):
        RunLock(tmp_path / "checkpoints")
    lock.release()
    assert other_process_enters(tmp_path / "checkpoints")


def test_a_forked_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    forking = HOLD.replace('print("held"', 'import os\nif os.fork(): print("held"')
    with subprocess.Popen(
        [sys.executable, "-c", forking, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()
        holder.wait()
        RunLock(tmp_path).release()


@pytest.mark.parametrize("what", ["link", "dangling link", "pipe", "directory", "socket"])
def test_a_lock_that_is_no_file_is_refused_and_what_it_leads_to_is_untouched(tmp_path: Path, what: str) -> None:
    precious, lock = tmp_path / "precious", tmp_path / ".run.lock"
    precious.write_text("a year's work")
    match what:
        case "link":
            lock.symlink_to(precious)
        case "dangling link":
            lock.symlink_to(tmp_path / "nowhere")
        case "pipe":
            os.mkfifo(lock)
        case "directory":
            lock.mkdir()
        case _:
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(tmp_path):
                server.bind(lock.name)

    with pytest.raises(
        CheckpointDirectoryError, match=r"\.run\.lock keeps other runs out and has to be a regular file"
    ):
        RunLock(tmp_path)
    assert precious.read_text() == "a year's work"
    assert not (tmp_path / "nowhere").exists()


def test_a_lock_that_is_another_name_of_a_file_leaves_that_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("a year's work")
    os.link(tmp_path / "precious", tmp_path / ".run.lock")

    RunLock(tmp_path).release()

    assert (tmp_path / "precious").read_text() == "a year's work"


def test_markers_of_ranks_that_died_looking_are_deleted_an_hour_later(tmp_path: Path) -> None:
    for name, age_s in ((".seen-old-0", 4000), (".seen-new-0", 10)):
        (tmp_path / name).touch()
        now = (tmp_path / name).stat().st_mtime
        os.utime(tmp_path / name, (now - age_s, now - age_s))

    make_directory(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == [".seen-new-0"]


def test_a_directory_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDirectoryError, match="No such file or directory; give a directory"):
        list_checkpoints(tmp_path / "gone")
    with pytest.raises(CheckpointDirectoryError):
        collect_leftovers(tmp_path / "gone", 0.1)
    with pytest.raises(CheckpointDirectoryError):
        RunLock(tmp_path / "gone")


def test_a_marker_that_is_no_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "COMMITTED").write_bytes(b"\xff\xfe")

    assert list_checkpoints(tmp_path) == ([], {"step_00000001": "its COMMITTED is damaged: it is no commit marker"})


def test_what_another_rank_takes_away_while_it_is_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Path.glob

    def with_one_that_is_gone(self: Path, pattern: str) -> list[Path]:
        return [*found(self, pattern), self / f"{directory.SEEN}gone"]

    monkeypatch.setattr(Path, "glob", with_one_that_is_gone)
    make_directory(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []
