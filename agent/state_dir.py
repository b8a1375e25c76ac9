"""The agent's own directory: ours alone, served by one agent at a time.

agent.lock      held (flock) for the agent's life; its pid
agent.log       a daemon's output; agent.log.1 before that
audit.jsonl     what was done here, by whom; audit.jsonl.1 before that
holder.json     the latest claim on control
*.sock          reports, control, inbox; 0600
history/        reports of the past
jobs/ID         job.json, the job's record
gpu-sampler.log the GPU sampler's output
jobs/ID/ATTEMPT shim.lock, run.json, exit.json, launcher.log, rank logs, the probes' sockets;
                ranks.msgpack, what its ranks did last
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.errors import AgentRunningError, StateDirError
from agent.files import is_locked, try_lock
from agent.processes.shim import write_record
from agent.transport.control_lease import Holder
from agent.wire.codec import CONTROL_SOCKET, REPORTS_SOCKET
from ddpcore.wire_launch import INBOX_SOCKET, SLURM_INFIX, agent_directories

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT_SLURM_DIRS = 8
LOCK_FILE = "agent.lock"
MAX_PID_BYTES = 20
HOLDER_FILE = "holder.json"
RECORD_NAME = "job.json"
RANKS_NAME = "ranks.msgpack"
MAX_SOCKET_PATH_BYTES = 107
"""Bytes of `sun_path`, its closing zero aside. Source: unix(7)."""

LOCK_PATIENCE_S = 0.5
"""Seconds to wait for the lock: a process that only looks whether an agent serves holds it for some microseconds."""
_OF_CONSOLES = frozenset({"work"})
"""Names that a console puts into the directory of a private agent."""
SOCKETS = (REPORTS_SOCKET, CONTROL_SOCKET, INBOX_SOCKET)


def check_socket_path(path: Path) -> str:
    """Return a socket's path as text; raise StateDirError if it is too long for the kernel."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise StateDirError(
            f"the socket path {path} has {length} bytes, the kernel takes {MAX_SOCKET_PATH_BYTES}: "
            "use a shorter directory"
        )
    return str(path)


def check_private(path: Path) -> None:
    """Raise StateDirError unless a directory is real, ours, and closed to everybody else."""
    try:
        found = path.lstat()
    except OSError as error:
        raise StateDirError(f"cannot use {path}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise StateDirError(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise StateDirError(f"{path} belongs to user {found.st_uid}, this is user {os.geteuid()}")
    if found.st_mode & 0o077:
        raise StateDirError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: run chmod 0700 {path}")


def make_private(path: Path) -> None:
    """Make a missing directory for us alone, with those above it; raise StateDirError if it is not safe to use."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise StateDirError(f"cannot make {path}: {error.strerror}") from error
    check_private(path)


def take_lock(path: Path, in_use: str) -> int:
    """Lock a directory, and return the descriptor that holds the lock.

    Raises StateDirError if it cannot be written, AgentRunningError with the message `in_use` if it is locked.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StateDirError(f"cannot write {path}: {error.strerror}") from error
    deadline_s = time.monotonic() + LOCK_PATIENCE_S
    while not try_lock(fd):
        if time.monotonic() > deadline_s:
            os.close(fd)
            raise AgentRunningError(in_use)
        time.sleep(0.01)
    return fd


def default_directory(environ: Mapping[str, str], hostname: str) -> Path:
    """Return where an agent of this user lives on this host, by the rule of `ddpcore.wire_launch`.

    Its sockets lie there too, not in $XDG_RUNTIME_DIR: logind removes that at logout unless the user lingers, and an
    SSH session without PAM has none. Source: pam_systemd(8).

    Raises StateDirError if there is no such place, or its name is too long for a socket.
    """
    if not hostname or hostname.startswith(".") or "/" in hostname:
        raise StateDirError(f"the host name {hostname!r} is not fit for a directory: give --dir")
    directories = agent_directories(environ, hostname)
    if not directories:
        raise StateDirError("neither XDG_STATE_HOME nor HOME is an absolute path: give --dir")
    for name in SOCKETS:
        check_socket_path(directories[0] / name)
    return directories[0]


def remove_old_slurm_dirs(own: Path) -> None:
    """Remove what agents of this host's earlier Slurm jobs have left, but for the latest `KEPT_SLURM_DIRS`.

    Args:
        own: Directory of this agent; nothing happens unless it is one of a Slurm job.
    """
    host, infix, _ = own.name.rpartition(SLURM_INFIX)
    if not infix:
        return
    with contextlib.suppress(OSError):
        found = [path for path in own.parent.iterdir() if path.name.startswith(host + infix) and path != own]
        found = [path for path in found if path.is_dir() and not path.is_symlink() and not is_served(path)]
        found.sort(key=lambda path: path.stat().st_mtime)
        for path in found[:-KEPT_SLURM_DIRS]:
            shutil.rmtree(path, ignore_errors=True)


def is_served(directory: Path) -> bool:
    """Return whether an agent holds a directory, whether it answers already or not."""
    return is_locked(directory / LOCK_FILE)


def holder_of(directory: Path) -> int | None:
    """Return the pid of the agent that holds a directory; None where none does, or it has not written its pid."""
    if not is_served(directory):
        return None
    try:
        text = (directory / LOCK_FILE).read_bytes()[:MAX_PID_BYTES]
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class StateDir:
    """An agent's directory, from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a planted link
        self._lock_fd = -1

    def prepare(self) -> None:
        """Make the directory if it is missing, with those above it; raise StateDirError if it is not safe to use."""
        for name in SOCKETS:
            check_socket_path(self.path / name)
        make_private(self.path)

    def open(self, *, is_private: bool = False) -> None:
        """Prepare the directory, lock it, and clear what a killed agent left.

        A private one is removed when it is closed, so nothing may be there before. Raises StateDirError if it is not
        safe to use, AgentRunningError if another agent serves it.
        """
        self.prepare()
        if is_private and (found := [path.name for path in self.path.iterdir() if path.name not in _OF_CONSOLES]):
            raise StateDirError(
                f"a private agent removes its directory as it ends, and {self.path} holds {found[0]}: give an empty one"
            )
        self._lock()
        self._remove_sockets()

    def socket_path(self, name: str) -> str:
        """Return the path of one of the agent's sockets."""
        return check_socket_path(self.path / name)

    @property
    def jobs_dir(self) -> Path:
        """Directory with one for each job; it need not exist."""
        return self.path / "jobs"

    def read_holder(self) -> Holder:
        """Return the latest claim of control here; nobody's if there is none that can be read."""
        try:
            return msgspec.json.decode((self.path / HOLDER_FILE).read_bytes(), type=Holder)
        except (OSError, msgspec.DecodeError):
            return Holder()

    def write_holder(self, holder: Holder) -> None:
        """Write the holder of control for later agents; raise OSError."""
        write_record(str(self.path), HOLDER_FILE, msgspec.json.encode(holder))

    def job_dir(self, job_id: str, attempt: int) -> Path:
        return self.jobs_dir / job_id / str(attempt)

    def remove_attempt(self, job_id: str, attempt: int) -> None:
        """Remove the files of one attempt; the job's record stays."""
        shutil.rmtree(self.job_dir(job_id, attempt), ignore_errors=True)

    def remove_job_dir(self, job_id: str, attempt: int) -> None:
        """Remove a job's record and one of its attempts, and the job's own directory with its last attempt."""
        directory = self.job_dir(job_id, attempt)
        shutil.rmtree(directory, ignore_errors=True)
        (directory.parent / RECORD_NAME).unlink(missing_ok=True)
        try:
            directory.parent.rmdir()
        except OSError:
            return  # other attempts are kept

    def close(self, *, remove_all: bool) -> None:
        """Release the directory; with `remove_all`, leave nothing of it."""
        if self._lock_fd < 0:
            return
        if remove_all:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self._remove_sockets()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _lock(self) -> None:
        self._lock_fd = take_lock(
            self.path / LOCK_FILE, f"another agent serves {self.path}: shut it down or use another directory"
        )
        text = str(os.getpid()).encode()
        try:
            # Over the last agent's: on a full disk whoever is to stop a job may still start.
            os.pwrite(self._lock_fd, text, 0)
            os.ftruncate(self._lock_fd, len(text))
        except OSError as error:
            raise StateDirError(f"cannot write {self.path / LOCK_FILE}: {error.strerror}: make room") from error

    def _remove_sockets(self) -> None:
        for name in SOCKETS:
            (self.path / name).unlink(missing_ok=True)
