"""Processes of a job, from the agent's side: the shim, and how a stranger's child ended.

A shim holds a lock on `shim.lock` from before its start to its end, inherited from whoever started it: that the lock is
held shows that the shim lives, to an agent that knows nothing else. A process is taken for the shim only if it has that
file open, looked at after its pidfd was opened; all signals go by the pidfd. So a pid in a record that is a stranger's
by now, or always was, is never signalled.

Everything here is called from the agent's main thread: a shim's parent-death signal is tied to the thread that made it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from agent.errors import SpawnError, log_line
from agent.files import is_locked
from agent.processes import shim
from ddpcore.wire import ENV_LOG_DIR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHIM_PATH = Path(shim.__file__)
SHIM_LOCK = "shim.lock"
LAUNCHER_LOG = "launcher.log"
_NUM_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The soft limit of descriptors with which this process was started, for jobs: select(2) fails above 1024."""
SHIM_GRACE_MARGIN_S = 2.0
"""Seconds after which the shim kills by itself, beyond the agent's own patience."""

_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_BYTES = 64
_PIDFD_INFO_EXIT_CODE_AT = 60


class _RunRecord(msgspec.Struct, frozen=True):
    shim_pid: int
    launcher_pid: int
    shim_started_ticks: int = 0
    """0 here and below in the record of an older shim."""
    launcher_started_ticks: int = 0


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
        poll = select.poll()  # select(2) takes no descriptor above 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def exit_code(self) -> int | None:
        """Return torchrun's exit code, once the shim has ended; None when the shim was killed before."""
        return recorded_exit_code(self._run_dir)

    @property
    def is_killing(self) -> bool:
        """Whether what is below it is to be killed as an orphan is, by this agent."""
        return False

    def close(self) -> None:
        os.close(self.pidfd)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return  # it has ended: what was wanted has come about


class LoneLauncher(ShimProcess):
    """A launcher that has outlived its shim, in the shim's place: what is below it is this agent's to end."""

    def __init__(self, run_dir: Path, pid: int, started_ticks: int) -> None:
        super().__init__(run_dir, pid)
        self._started_ticks = started_ticks
        self._is_killing = False

    def terminate(self) -> None:
        super().terminate()
        shim.signal_frozen(self.pid)

    def kill_tree(self, *, spares_writers: bool = False) -> None:  # noqa: ARG002 - the sweep is told
        """Have the tree killed by the next sweep for leftovers, which finds also what has left it."""
        self._is_killing = True

    @property
    def is_killing(self) -> bool:
        return self._is_killing

    def launcher_pid(self) -> int | None:
        return self.pid

    def exit_code(self) -> int | None:
        """Return its exit code, once it has ended; None where it is not our child and the kernel forgets it."""
        fields = _fields_of(self.pid, self._started_ticks)
        status = int(fields[49]) if fields else exit_status(self.pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        return None if status is None else os.waitstatus_to_exitcode(status)


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
            for name in (shim.RUN_RECORD, shim.EXIT_RECORD):
                shim.reserve_record(str(run_dir), name)
            # Last, since it says that a start was tried: an agent may be killed here.
            lock_fd = _open_private(run_dir / SHIM_LOCK)
            opened.callback(os.close, lock_fd)
            log_fd = _open_private(run_dir / LAUNCHER_LOG, os.O_APPEND)
            opened.callback(os.close, log_fd)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            store_fd = -1 if launcher.store_fd is None else launcher.store_fd
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(SHIM_PATH), str(run_dir), str(grace_s + SHIM_GRACE_MARGIN_S)),
                    *(str(os.getpid() if dies_with_us else 0), str(lock_fd), str(store_fd), str(_NUM_FILES)),
                    str(Path(launcher.workdir).absolute()),
                    *launcher.argv,
                ],
                env=dict(launcher.env),
                cwd="/",  # the launcher enters its own: whoever enters one of a dead disk waits
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
    """Return the living shim of an earlier agent; None if it has ended, or is about to begin.

    A record that is not the living shim's is set aside and written again.
    """
    if not is_shim_alive(run_dir):
        return None
    record = _read_record(run_dir / shim.RUN_RECORD, _RunRecord)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - as in the shim
    for pid in [record.shim_pid, *pids] if record else pids:
        found = _shim_with(run_dir, pid) if is_shim(pid) and _leads_session(pid) else None
        if found:
            if not (record and _fits(record, pid)) and (run_dir / shim.RUN_RECORD).exists():
                _replace_record(run_dir, pid)
            return found
    return None


def _leads_session(pid: int) -> bool:
    """Return whether a process leads its session: a shim does, the copy of it that becomes its launcher does not."""
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def find_lone_launcher(run_dir: Path) -> LoneLauncher | None:
    """Return the launcher that lives on where its shim was killed; None if there is none."""
    record = _read_record(run_dir / shim.RUN_RECORD, _RunRecord)
    if record is None or not is_launcher(run_dir, record.launcher_pid):
        return None
    with contextlib.suppress(OSError, OverflowError):
        found = LoneLauncher(run_dir, record.launcher_pid, record.launcher_started_ticks)
        # Looked at after the pidfd was opened, the lock too: whoever is between fork and exec may be a shim.
        if is_launcher(run_dir, found.pid) and not is_shim_alive(run_dir) and not found.has_ended():
            return found
        found.close()
    return None


def is_launcher(run_dir: Path, pid: int) -> bool:
    """Return whether a process is the launcher of a record: by its pid, its start time, and the place it was given."""
    record = _read_record(run_dir / shim.RUN_RECORD, _RunRecord)
    if record is None or record.launcher_pid != pid or not _fields_of(pid, record.launcher_started_ticks):
        return False
    environ = environ_of(pid)  # there is none while it is being executed
    return not environ or environ.get(ENV_LOG_DIR.encode()) == os.fsencode(run_dir)


def environ_of(pid: int) -> dict[bytes, bytes]:
    """Return a process's environment; empty if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - a path object for each process is waste
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def _shim_with(run_dir: Path, pid: int) -> ShimProcess | None:
    """Return a process, held, if it is the one that holds the lock of this place."""
    lock = run_dir / SHIM_LOCK
    with contextlib.suppress(OSError):
        found = ShimProcess(run_dir, pid)
        with contextlib.suppress(OSError):
            if any(lock.samefile(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.readlink().name == SHIM_LOCK):
                return found
        found.close()
    return None


def _replace_record(run_dir: Path, shim_pid: int) -> None:
    path = run_dir / shim.RUN_RECORD
    aside = path.with_suffix(".damaged")
    log_line(f"{path} is not of the shim that runs there, pid {shim_pid}: it is now {aside.name}")
    below = shim.descendants(shim_pid)
    with contextlib.suppress(OSError, IndexError, ValueError):  # the disk is full, or the launcher has just ended
        path.rename(aside)
        launcher_pid = min(below, key=lambda pid: (below[pid], pid))  # the oldest: all others come of it
        shim.write_record(str(run_dir), shim.RUN_RECORD, shim.run_record(shim_pid, launcher_pid).encode())


def _fits(record: _RunRecord, shim_pid: int) -> bool:
    """Return whether a record is of this shim, and its launcher is that one's child, or has ended."""
    started_ticks, launcher = record.shim_started_ticks, shim.stat_fields(record.launcher_pid)
    is_of_shim = record.shim_pid == shim_pid and (not started_ticks or bool(_fields_of(shim_pid, started_ticks)))
    return is_of_shim and (not launcher or int(launcher[1]) == shim_pid)


def _fields_of(pid: int, started_ticks: int) -> list[bytes]:
    """Return a process's fields as `shim.stat_fields` does; none if its pid is another's by now."""
    fields = shim.stat_fields(pid)
    return fields if fields and int(fields[19]) == started_ticks else []


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
