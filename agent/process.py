"""Processes of a job, from the agent's side: the shim, signals to workers, and how a stranger's child ended.

Everything here is called from the agent's main thread: a shim's parent-death signal is tied to the thread that made it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from agent import shim
from agent.errors import SpawnError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHIM_PATH = Path(shim.__file__)
LAUNCHER_LOG = "launcher.log"
SHIM_GRACE_MARGIN_S = 2.0
"""The shim kills by itself this long after the agent should have told it to."""

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
    """A shim that this agent has started."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path) -> None:
        self._process = process
        self._run_dir = run_dir
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        """Readable when the shim has ended."""

    def terminate(self) -> None:
        """Ask the tree to end."""
        self._signal(signal.SIGTERM)

    def kill_tree(self) -> None:
        """End the tree at once."""
        self._signal(signal.SIGUSR1)
        self._signal(signal.SIGCONT)

    def launcher_pid(self) -> int | None:
        """Return torchrun's pid; None until the shim has forked it."""
        record = _read_record(self._run_dir / shim.RUN_RECORD, _RunRecord)
        return record.launcher_pid if record else None

    def has_ended(self) -> bool:
        """Return whether the shim is gone, and collect it if so."""
        return self._process.poll() is not None

    def exit_code(self) -> int | None:
        """Return how torchrun ended, once the shim has; None when the shim was killed before it could tell."""
        record = _read_record(self._run_dir / shim.EXIT_RECORD, _ExitRecord)
        return record.exit_code if record else None

    def close(self) -> None:
        """Let go of an ended shim."""
        os.close(self.pidfd)

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return  # it has ended: what was wanted has come about


class Invocation(msgspec.Struct, frozen=True):
    """What the shim is to run."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """Whole: nothing is added."""
    workdir: str
    store_fd: int | None = None
    """A descriptor that is inherited under the same number."""


def spawn_shim(launcher: Invocation, *, run_dir: Path, grace_s: float, dies_with_us: bool) -> ShimProcess:
    """Start a shim with a launcher below it.

    Args:
        launcher: torchrun, as it is to be run.
        run_dir: Where the shim keeps its records and `launcher.log` goes.
        grace_s: See `agent.shim`.
        dies_with_us: The tree ends when this process does.

    Raises:
        SpawnError: The kernel would not.
    """
    shim_argv = [
        *(sys.executable, "-I", "-S", str(SHIM_PATH), str(run_dir), str(grace_s + SHIM_GRACE_MARGIN_S)),
        *(str(os.getpid() if dies_with_us else 0), str(-1 if launcher.store_fd is None else launcher.store_fd)),
    ]
    try:
        log_flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        log_fd = os.open(run_dir / LAUNCHER_LOG, log_flags, 0o600)
        try:
            process = subprocess.Popen(
                [*shim_argv, *launcher.argv],
                env=dict(launcher.env),
                cwd=launcher.workdir,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                start_new_session=True,
                pass_fds=() if launcher.store_fd is None else (launcher.store_fd,),
            )
        finally:
            os.close(log_fd)
        return ShimProcess(process, run_dir)
    except (OSError, ValueError) as error:
        raise SpawnError(f"cannot start the launcher: {error}") from error


def exit_status(pidfd: int) -> int | None:
    """Return the wait status of an ended and reaped process that is not our child; None where the kernel cannot tell.

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


def sweep_leftovers(shims: frozenset[int]) -> bool:
    """Kill what a killed shim has left to this process, its subreaper; return whether there was anything.

    Args:
        shims: Pids of those that still live: their subtrees are well cared for.
    """
    found = shim.descendants(os.getpid(), shims)
    for pid, started_ticks in found.items():
        shim.send_signal(pid, started_ticks, signal.SIGKILL)
    while ended := _next_ended_child():
        if ended in shims:
            break  # whoever started it collects it
        os.waitpid(ended, 0)
    return bool(found)


def _next_ended_child() -> int:
    """Return the pid of a child that has ended and is not collected yet, 0 if there is none."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_pid if ended else 0


def _read_record(path: Path, kind: type[_RecordT]) -> _RecordT | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
