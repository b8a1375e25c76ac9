"""The directory of a run's checkpoints: its names, its lock, what dead runs have left in it. Needs no torch.

step_00000100      a checkpoint; step_00000100.2 is the second of this step, where the first was still there
.tmp-step_...      one being written; its writers hold a shared lock on the file `lock` in it
.del-step_...      one being deleted
.run.lock          locked by the run that may write here
.seen-...          how the ranks find out who shares this directory
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
import struct
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpcore.errors import CheckpointDirectoryError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MANIFEST = "manifest.json"
LOCK = "lock"
TEMPORARY = ".tmp-"
DELETED = ".del-"
SEEN = ".seen-"
RUN_LOCK = ".run.lock"

LOCK_PATIENCE_S = 3.0
"""Seconds that a run which has just ended may take to release the lock."""

SEEN_LIFE_S = 3600.0
POLL_S = 0.05

_NAME = re.compile(r"step_([0-9]{8,19})(?:\.([0-9]{1,9}))?", re.ASCII)

_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""A `struct flock`."""

_held: dict[str, int] = {}
"""Descriptors of this process's locks, by their paths."""


def checkpoint_name(step: int, existing: Sequence[str] = ()) -> str:
    """Return a name for a checkpoint of this step that none of the existing ones has."""
    name, number = f"step_{step:08d}", 1
    while name in existing:
        number += 1
        name = f"step_{step:08d}.{number}"
    return name


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name, or None if it is not one."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found and name.split(".", maxsplit=1)[0] == f"step_{int(found[1]):08d}" else None


def make_directory(root: Path) -> None:
    """Make the directory; raise CheckpointDirectoryError if checkpoints cannot be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        trial = root / f"{SEEN}{secrets.token_hex(8)}"
        trial.touch()
        now = trial.stat().st_mtime
        trial.unlink(missing_ok=True)
        for left in root.glob(f"{SEEN}*"):
            # By the file system's own clock. Others may be opening this directory now: what is theirs goes by itself.
            with contextlib.suppress(FileNotFoundError):
                if now - left.stat().st_mtime > SEEN_LIFE_S:
                    left.unlink()
    except OSError as error:
        raise directory_error(root, error) from error


def directory_error(root: Path, error: OSError) -> CheckpointDirectoryError:
    """Return the error of a directory that cannot be used."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        why = "it, or a part of its path, is a file"
    else:
        why = error.strerror or str(error)
    return CheckpointDirectoryError(
        f"checkpoints cannot be kept in {root}: {why}; give a directory that can be written"
    )


class RunLock:
    """Held by the one run that may write into a directory; the kernel releases it when the process ends.

    It is a lock of the open file, not of the process: that one would be lost as soon as the program closes any other
    descriptor of the file, as by copying the directory. Forked children close theirs immediately: a data loader's
    worker that outlives its trainer must not keep the directory.

    Source: fcntl(2), "Open file description locks". They exclude the locks of processes that earlier versions take.

    Raises CheckpointDirectoryError: another run holds it, named with its host and process, or the lock is no file.
    """

    def __init__(self, root: Path) -> None:
        self._path = str(root.resolve() / RUN_LOCK)
        if self._path in _held:
            raise CheckpointDirectoryError(
                f"{root} is in use by another Checkpointer of this very process: close that one first"
            )
        self._fd = _open_lock(root, self._path)
        deadline_s = time.monotonic() + LOCK_PATIENCE_S
        while not self._try():
            if time.monotonic() > deadline_s:
                holder = self._holder()
                os.close(self._fd)
                raise CheckpointDirectoryError(
                    f"{root} is in use by another run, {holder}: end that one, or give this one a directory of its own"
                )
            time.sleep(POLL_S)
        _held[self._path] = self._fd
        if os.fstat(self._fd).st_nlink > 1:
            # It has another name, and may be somebody else's file.
            return
        who = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(who).encode(), 0)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if _held.pop(self._path, None) is not None:
            os.close(self._fd)

    def _try(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            # A file system without locks: then nobody is kept out.
            return True
        return True

    def _holder(self) -> str:
        try:
            who = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {int(who['pid'])} on {who['host']} since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "which has not written its name"


def _open_lock(root: Path, path: str) -> int:
    """Return a descriptor of the lock's file, made if missing; it must be a regular file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_lock(path) from error
        raise directory_error(root, error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _no_lock(path)
    return fd


def _no_lock(path: str) -> CheckpointDirectoryError:
    return CheckpointDirectoryError(
        f"{path} keeps other runs out and has to be a regular file: move away what is there"
    )


def _close_in_child() -> None:
    for fd in _held.values():
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def collect_leftovers(root: Path, patience_s: float) -> None:
    """Delete what dead runs have left; the caller holds the run's lock.

    Writers outlive a killed trainer and finish their checkpoint: they have `patience_s` for it. What is not published
    by then is renamed, which excludes their own rename.
    """
    deadline_s = time.monotonic() + patience_s
    for entry in _entries(root):
        if entry.name.startswith(f"{TEMPORARY}step_"):
            while _is_being_written(root / entry.name) and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
            discard(root / entry.name)
        elif entry.name.startswith(f"{DELETED}step_"):
            _remove(root / entry.name)


def discard(path: Path) -> None:
    """Delete a checkpoint, whole or not: it is renamed first, so that no half of it is ever taken for one."""
    doomed = path.with_name(f"{DELETED}{path.name.removeprefix(TEMPORARY)}-{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    """Delete a directory with all that is in it, or whatever else has its name: rmtree would wait at a pipe."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise directory_error(root, error) from error


def _is_being_written(path: Path) -> bool:
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
