"""Processes of a job, from the agent's side: the shim, and how a stranger's child ended.

A shim holds a lock on `shim.lock` from before its start to its end, inherited from whoever started it: that the lock is
held shows that the shim lives, to an agent that knows nothing else, and no pid can be mistaken for another's.

Everything here is called from the agent's main thread: a shim's parent-death signal is tied to the thread that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from agent.errors import SpawnError
from agent.files import is_locked
from agent.processes import shim

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHIM_PATH = Path(shim.__file__)
SHIM_LOCK = "shim.lock"
LAUNCHER_LOG = "launcher.log"
SHIM_GRACE_MARGIN_S = 2.0
"""Seconds after which the shim kills by itself, beyond the agent's own patience."""

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_BYTES = 64
_PIDFD_INFO_EXIT_CODE_AT = 60


class _RunRecord(msgspec.Struct, frozen=True):
    shim_pid: int
    launcher_pid: int


class _ExitRecord(msgspec.Struct, frozen=True):
    exit_code: int
    num_killed: int


_RecordT = TypeVar("_RecordT", _RunRecord, _ExitRecord)


class ShimProcess:
    """A shim that lives, or has lived: started by this agent, or found by it."""

    def __init__(self, run_dir: Path, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        """`process` is collected at its end, if it is a child of ours. Raises ProcessLookupError if there is none."""
        self._run_dir = run_dir
        self._process = process
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        """Readable when the shim has ended."""

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill_tree(self, *, spares_writers: bool = False) -> None:
        """Kill the tree, or all of it but a checkpoint's writer, which has its own time."""
        self._signal(signal.SIGUSR2 if spares_writers else signal.SIGUSR1)
        self._signal(signal.SIGCONT)

    def launcher_pid(self) -> int | None:
        """Return torchrun's pid; None until the shim has forked it."""
        record = _read_record(self._run_dir / shim.RUN_RECORD, _RunRecord)
        return record.launcher_pid if record else None

    def has_ended(self) -> bool:
        """Return whether the shim is gone, and collect it if so."""
        if self._process is not None:
            return self._process.poll() is not None
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def exit_code(self) -> int | None:
        """Return torchrun's exit code, once the shim has ended; None when the shim was killed before."""
        return recorded_exit_code(self._run_dir)

    def close(self) -> None:
        os.close(self.pidfd)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return  # it has ended: what was wanted has come about


class Invocation(msgspec.Struct, frozen=True):
    argv: Sequence[str]
    env: Mapping[str, str]
    """The whole environment: nothing is added."""
    workdir: str
    store_fd: int | None = None
    """A descriptor that is inherited under the same number."""


def spawn_shim(launcher: Invocation, *, run_dir: Path, grace_s: float, dies_with_us: bool) -> ShimProcess:
    """Start a shim with a launcher, torchrun, below it; its records and `launcher.log` are in `run_dir`.

    With `dies_with_us` the tree ends when this process does. Raises SpawnError.
    """
    with contextlib.ExitStack() as opened:
        try:
            lock_fd = _open_private(run_dir / SHIM_LOCK)
            opened.callback(os.close, lock_fd)
            log_fd = _open_private(run_dir / LAUNCHER_LOG, os.O_APPEND)
            opened.callback(os.close, log_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            store_fd = -1 if launcher.store_fd is None else launcher.store_fd
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(SHIM_PATH), str(run_dir), str(grace_s + SHIM_GRACE_MARGIN_S)),
                    *(str(os.getpid() if dies_with_us else 0), str(lock_fd), str(store_fd)),
                    *launcher.argv,
                ],
                env=dict(launcher.env),
                cwd=launcher.workdir,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,
                pass_fds=(lock_fd,) if launcher.store_fd is None else (lock_fd, store_fd),
            )
            try:
                return ShimProcess(run_dir, process.pid, process)
            except OSError:
                process.kill()  # it cannot be watched over
                process.wait()
                raise
        except (OSError, ValueError) as error:
            (run_dir / SHIM_LOCK).unlink(missing_ok=True)
            raise SpawnError(f"cannot start the launcher: {error}") from error


def is_shim(pid: int) -> bool:
    """Return whether a process is a shim, also another agent's: only that ends what is below it."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    paths = [Path(os.fsdecode(word)).parts for word in argv[1:5]]
    return any(parts[-1:] == (SHIM_PATH.name,) and "agent" in parts[-3:-1] for parts in paths)


def find_shim(run_dir: Path) -> ShimProcess | None:
    """Return the living shim of an earlier agent; None if it has ended, or has not written its record yet."""
    record = _read_record(run_dir / shim.RUN_RECORD, _RunRecord)
    if record is None or not is_shim_alive(run_dir):
        return None
    with contextlib.suppress(ProcessLookupError):
        found = ShimProcess(run_dir, record.shim_pid)
        # Held after the pidfd was opened: the pid was the shim's own then.
        if is_shim_alive(run_dir):
            return found
        found.close()
    return None


def is_shim_alive(run_dir: Path) -> bool:
    """Return whether a shim holds its lock there."""
    return is_locked(run_dir / SHIM_LOCK)


def has_been_started(run_dir: Path) -> bool:
    """Return whether a start of a shim was tried there."""
    return (run_dir / SHIM_LOCK).exists()


def recorded_exit_code(run_dir: Path) -> int | None:
    """Return how a launcher ended by its shim's record; None if there is none."""
    record = _read_record(run_dir / shim.EXIT_RECORD, _ExitRecord)
    return record.exit_code if record else None


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of an ended and reaped process that is not our child; None where the kernel has lost it.

    Source: include/uapi/linux/pidfd.h, PIDFD_GET_INFO with PIDFD_INFO_EXIT, since Linux 6.15.
    """
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("=Q", info, 0)
    if not mask & _PIDFD_INFO_EXIT:
        return None
    (status,) = struct.unpack_from("=i", info, _PIDFD_INFO_EXIT_CODE_AT)
    return int(status)


def _open_private(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)


def _read_record(path: Path, kind: type[_RecordT]) -> _RecordT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
