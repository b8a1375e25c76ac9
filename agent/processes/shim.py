"""torchrun's parent: a process that does nothing but see to it that the tree below it ends, whole, and how.

It leads its own session, adopts every orphan below it (subreaper), passes SIGTERM on to torchrun, and after torchrun's
end kills whatever is left. Only a checkpoint's writer may finish first: it outlives its trainer for that. How torchrun
ended goes to `exit.json`, written at once or not at all. In private mode the agent's death ends it, and its own death
torchrun. Else torchrun outlives it, and the agent does what is left to do (`shim_process.LoneLauncher`).

SIGTERM, SIGINT, SIGHUP: torchrun gets SIGTERM and everything frozen is continued; one that comes more than a second
later, or `grace_s`, kills.
SIGUSR1: the whole tree is killed at once. SIGUSR2: all of it but a checkpoint's writer.

It runs as a file, with `python -I -S`, and imports next to nothing: there is one for each job, for as long as the job.
The job's environment passes through it untouched (`-I` ignores PYTHONPATH and its kin).
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import sys
import time

RUN_RECORD = "run.json"
"""Pid and start time of this process and of torchrun, once that has been forked: see `run_record`."""
EXIT_RECORD = "exit.json"
"""`{"exit_code": ..., "num_killed": ...}`; a negative exit code is a signal."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERMINATE = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_AWAITED = frozenset({signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, *_TERMINATE})
_RESERVED_BYTES = 256
_EXEC_S = 10.0
"""Seconds that the launcher may take to be executed, as from a slow network disk, before it is watched nevertheless."""
_SAME_WISH_S = 1.0
"""Seconds from the first SIGTERM in which others are the same wish: with proctrack/linuxproc Slurm sends two to every
process of a job that it preempts (Slurm 22.05, seen)."""
_THAW_EVERY_S = 0.2
_MAX_PAUSE_S = 0.1
WRITER_NAME = b"(rankdeck-writer)"
"""Kernel's name of `ddpcore/checkpoint/writer.py`."""
WRITER_PATIENCE_S = 20.0
"""Seconds that such a process has after torchrun's end."""

_libc = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(number: int) -> None:
    """Have the kernel send this process a signal when the thread that made it ends.

    Source: prctl(2), PR_SET_PDEATHSIG.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Have orphans among this process's descendants reparented to it.

    Source: prctl(2), PR_SET_CHILD_SUBREAPER.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root_pid: int, without: frozenset[int] = frozenset()) -> dict[int, int]:
    """Return the live descendants of a process, start time in ticks by pid, without the subtrees below `without`."""
    children: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib costs a megabyte here
        if name.isdigit() and (fields := stat_fields(int(name))):
            pid = int(name)
            children.setdefault(int(fields[1]), []).append(pid)
            # A zombie is over, unless its other threads outlive the first.
            if fields[0] not in b"ZX" or int(fields[17]) > 1:
                started[pid] = int(fields[19])
    found: dict[int, int] = {}
    waiting = [root_pid]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid not in without:
                waiting.append(pid)
                if pid in started:
                    found[pid] = started[pid]
    return found


def send_signal(pid: int, started_ticks: int, number: int) -> None:
    """Signal a process, unless it is gone or its pid is another's by now."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        fields = stat_fields(pid)
        if fields and int(fields[19]) == started_ticks:
            signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, PermissionError):
        return  # gone, or it changed its user: no longer ours to end
    finally:
        os.close(pidfd)


def signal_frozen(root_pid: int) -> None:
    """Continue every stopped descendant."""
    for pid, started_ticks in descendants(root_pid).items():
        fields = stat_fields(pid)
        if fields and fields[0] == b"T":
            send_signal(pid, started_ticks, signal.SIGCONT)


def run_record(shim_pid: int, launcher_pid: int) -> str:
    """Return the record that identifies these two processes, while both are there."""
    shim_ticks, launcher_ticks = (int(stat_fields(pid)[19]) for pid in (shim_pid, launcher_pid))
    return (
        f'{{"shim_pid": {shim_pid}, "shim_started_ticks": {shim_ticks}, '
        f'"launcher_pid": {launcher_pid}, "launcher_started_ticks": {launcher_ticks}}}\n'
    )


def write_record(directory: str, name: str, data: bytes) -> None:
    """Write a small file so that readers see all of it or none, also after a crash of the machine.

    What `reserve_record` has reserved is written over, so that this works on a full disk too.
    """
    path = f"{directory}/{name}"
    _write_over(f"{path}.tmp", data)
    os.replace(f"{path}.tmp", path)  # noqa: PTH105 - as above


def reserve_record(directory: str, name: str) -> None:
    """Reserve the room for a small file that must be written later, however full the disk is then."""
    _write_over(f"{directory}/{name}.tmp", b" " * _RESERVED_BYTES)


def _write_over(path: str, data: bytes) -> None:
    # Not blocking: a pipe that a rank has planted is not waited for.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, len(data))
        os.fsync(fd)
    finally:
        os.close(fd)


class _Shim:
    """Launcher of this process, and what is below it."""

    def __init__(self, run_dir: str, grace_s: float) -> None:
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._launcher_pid = 0
        self._status: int | None = None
        """The launcher's wait status, once it has ended."""
        self._kill_at_s: float | None = None
        """Time of SIGKILL, once the launcher has been asked to end."""
        self._same_until_s = 0.0
        """Time from which another SIGTERM is another wish."""
        self._num_killed = 0

    def run(self, argv: list[str], workdir: str, store_fd: int, num_files: int, *, is_private: bool) -> int:
        """Fork the launcher, watch it to its end, and return this process's exit code."""
        self._launcher_pid = _fork_launcher(argv, workdir, num_files, dies_with_us=is_private)
        if store_fd >= 0:
            os.close(store_fd)
        try:
            write_record(self._run_dir, RUN_RECORD, run_record(os.getpid(), self._launcher_pid).encode())
            while self._status is None:
                self._await()
            self._kill_all(WRITER_PATIENCE_S)
        finally:
            self._kill_all()
        assert self._status is not None
        exit_code = os.waitstatus_to_exitcode(self._status)
        text = f'{{"exit_code": {exit_code}, "num_killed": {self._num_killed}}}\n'
        write_record(self._run_dir, EXIT_RECORD, text.encode())
        return 0

    def _await(self) -> None:
        if self._kill_at_s is None:
            number = signal.sigwaitinfo(_AWAITED).si_signo
        else:
            info = signal.sigtimedwait(_AWAITED, _THAW_EVERY_S)
            number = info.si_signo if info else 0
            signal_frozen(os.getpid())
        self._reap()
        if self._status is not None:
            return
        now_s = time.monotonic()
        is_asked = self._kill_at_s is not None
        is_second = is_asked and number in _TERMINATE and now_s >= self._same_until_s
        is_overdue = self._kill_at_s is not None and now_s >= self._kill_at_s
        if number == signal.SIGUSR1 or is_second:
            self._kill_all()
        elif number == signal.SIGUSR2 or is_overdue:
            self._kill_all(WRITER_PATIENCE_S)
        elif number in _TERMINATE and not is_asked:
            self._kill_at_s, self._same_until_s = now_s + self._grace_s, now_s + _SAME_WISH_S
            # Not reaped yet, so the pid is still its own.
            os.kill(self._launcher_pid, signal.SIGTERM)
            signal_frozen(os.getpid())

    def _kill_all(self, writers_may_take_s: float = 0.0) -> None:
        """Kill until no child is left: whatever lives below has a child of this process above it, or is one.

        A walk that finds none would prove nothing: what is forked during it may not be in it.
        """
        spare_until_s = time.monotonic() + writers_may_take_s
        pause_s = 0.001
        while self._reap():
            spares = time.monotonic() < spare_until_s
            for pid, started_ticks in descendants(os.getpid()).items():
                if not (spares and is_writer(pid)):
                    send_signal(pid, started_ticks, signal.SIGKILL)
                    self._num_killed += 1
            info = signal.sigtimedwait({signal.SIGUSR1, *_TERMINATE}, pause_s)
            if info is not None and (info.si_signo == signal.SIGUSR1 or time.monotonic() >= self._same_until_s):
                spare_until_s = 0.0
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)

    def _reap(self) -> bool:
        """Collect every child that has ended, and return whether there are others.

        A subreaper that reaps nothing fills the process table.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._launcher_pid:
                self._status = status


def is_writer(pid: int) -> bool:
    """Return whether a process writes a checkpoint."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - as above
            return b" " + WRITER_NAME + b" " in file.read(64)
    except OSError:
        return False


def _fork_launcher(argv: list[str], workdir: str, num_files: int, *, dies_with_us: bool) -> int:
    """Fork the launcher, and return when it is no longer a copy of this process, which has the lock and the name."""
    shim_pid = os.getpid()
    executed_fd, its_fd = os.pipe()  # closed by exec
    pid = os.fork()
    if pid:
        os.close(its_fd)
        select.select([executed_fd], [], [], _EXEC_S)
        os.close(executed_fd)
        return pid
    if dies_with_us:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != shim_pid:
            os._exit(127)  # the shim died before the kernel knew whom to tell
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    # Python ignores these two for itself; programs expect the default.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    what = workdir
    try:
        os.chdir(workdir)
        what = argv[0]
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is the point
    except OSError as error:
        os.write(2, f"{what}: {error.strerror}\n".encode(errors="replace"))
    os._exit(127)


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (state) on; empty when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - as above
            line = file.read()
    except OSError:
        return []
    # The name in parentheses may hold anything, closing parentheses and blanks included.
    return line[line.rindex(b")") + 2 :].split()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(arguments: list[str]) -> int:
    """Run as `shim.py RUN_DIR GRACE_S AGENT_PID LOCK_FD STORE_FD NUM_FILES WORKDIR ARGV...`.

    An AGENT_PID of 0 means to outlive the agent, a STORE_FD of -1 that there is none. LOCK_FD is held and never used.
    NUM_FILES is the job's soft limit of descriptors.
    """
    run_dir, grace_s, agent_pid, lock_fd, store_fd, num_files, workdir, *argv = arguments
    os.set_inheritable(int(lock_fd), False)  # noqa: FBT003 - whoever holds it is taken for this process
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    become_subreaper()
    if int(agent_pid):
        set_parent_death_signal(signal.SIGUSR1)
        if os.getppid() != int(agent_pid):
            return 1  # the agent died before the kernel knew whom to tell
    return _Shim(run_dir, float(grace_s)).run(argv, workdir, int(store_fd), int(num_files), is_private=agent_pid != "0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
