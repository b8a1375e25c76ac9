"""Observes workers from outside: which processes they are, in what state, how big, and how they end.

A frozen rank sends nothing, so its state must come from the kernel. `WorkerSampler` holds each worker by a pidfd, which
is readable when it ends, and by its open /proc/PID/stat, which stays that process's even if the pid is used again: one
small read gives state, memory, CPU time and, while the process is a zombie, its exit status.

`kernel_facts` returns what the kernel shows of a process that cannot report itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.node_state.observations import WorkerEnded, WorkerSampled, WorkerSeen
from agent.processes import shim
from agent.processes.memory_reader import MemoryReader
from agent.processes.shim_process import exit_status
from agent.processes.signal_reader import SignalReader
from agent.slow_reader import SlowReader
from agent.wire.reports import ExitReport, ProcessState
from agent.wire.stacks import MAX_KERNEL_FRAMES, KernelFacts
from ddpcore.wire import ENV_JOB_ID

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 2048
PSS_PERIOD_S = 5.0
"""Seconds between looks at the shared memory of a worker, one worker at a time. A look walks all its pages: 20 to 40 ms
a GB on a busy machine, during which mapping memory may have to wait."""
PSS_TIME_FRAC = 0.005
"""Part of a worker's time that such looks may take: a large one is looked at more rarely."""
PSS_STALE_S = 600.0
"""Least age in seconds of a figure that is dropped; for a worker that is looked at more rarely, twice its pause."""
TRACED_S = 2.0
"""Seconds after which a traced process is in a debugger."""
_STATES = {
    b"T": ProcessState.FROZEN,
    b"D": ProcessState.BLOCKED,
}
# Indices behind the name, counted from the state. Source: proc_pid_stat(5), fields 3, 14, 15, 24 and 52.
_STATE, _UTIME, _STIME, _RSS, _EXIT_CODE = 0, 11, 12, 21, 49


def worker_ended(job_id: str, rank: int, code: int | None) -> WorkerEnded:
    """Return that a worker has ended with an exit code: negative is a signal, None is unknown."""
    is_signal = code is not None and code < 0
    return WorkerEnded(job_id, rank, ExitReport(None if is_signal else code, -code if is_signal and code else None))


class _Watched(msgspec.Struct):
    """One job's search for its workers."""

    launcher_pid: Callable[[], int | None]
    ranks: range
    workers: dict[int, _Worker] = {}


class _Worker:
    """A worker's process, held by two descriptors."""

    def __init__(self, pid: int, pidfd: int, stat_fd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.stat_fd = stat_fd
        self.has_ended = False
        self.memory = MemoryReader(pid)
        self.signals = SignalReader(pid)
        self._traced_since_s: float | None = None
        self.pss_asked_s = float("-inf")
        self.pss_cost_s = 0.0
        """Duration in seconds of the last look at its shared memory, also a failed one; the reader's thread writes
        it."""

    def state(self, letter: bytes, now_s: float) -> ProcessState:
        """Return the state for a kernel's letter: a process traced for a moment, as by py-spy, is not frozen."""
        if letter != b"t":
            self._traced_since_s = None
            return _STATES.get(letter, ProcessState.RUNNING)
        if self._traced_since_s is None:
            self._traced_since_s = now_s
        return ProcessState.FROZEN if now_s - self._traced_since_s >= TRACED_S else ProcessState.RUNNING

    def close(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            os.close(self.pidfd)
            os.close(self.stat_fd)


class WorkerSampler:
    """Finds and samples the workers of all jobs; lives on the event loop's thread."""

    def __init__(self, on_end: Callable[[WorkerEnded], None]) -> None:
        """`on_end` is called from the event loop, once for each worker that was found."""
        self._on_end = on_end
        self._jobs: dict[str, _Watched] = {}
        self._pss: SlowReader[int] = SlowReader("rankdeck-pss", stale_s=PSS_STALE_S)

    def watch(self, job_id: str, ranks: range, launcher_pid: Callable[[], int | None]) -> None:
        """Start to look for the workers of a job; `launcher_pid` returns torchrun's pid, None while it is unknown."""
        self.forget(job_id)
        self._jobs[job_id] = _Watched(launcher_pid, ranks)

    def hold(self, job_id: str, rank: int, pid: int) -> bool:
        """Watch the process of a rank that is known otherwise, in the place of another; return whether it is there."""
        watched = self._jobs.setdefault(job_id, _Watched(lambda: None, range(0)))
        before = watched.workers.pop(rank, None)
        if before is not None:
            self._close(before)
        return self._hold(job_id, watched, pid, lambda: rank) is not None

    def forget(self, job_id: str) -> None:
        watched = self._jobs.pop(job_id, None)
        for worker in watched.workers.values() if watched else ():
            self._close(worker)

    def is_searching(self, job_id: str) -> bool:
        """Return whether workers of a job have not been seen yet."""
        watched = self._jobs.get(job_id)
        return watched is not None and len(watched.workers) < len(watched.ranks)

    def discover(self, job_id: str) -> list[WorkerSeen]:
        """Look for workers that have not been seen yet."""
        watched = self._jobs[job_id]
        launcher_pid = watched.launcher_pid()
        if launcher_pid is None:
            return []
        known = {worker.pid for worker in watched.workers.values()}
        found = []
        for pid in _children(launcher_pid):
            if pid in known:
                continue
            rank = self._adopt(job_id, watched, pid)
            if rank is not None:
                found.append(WorkerSeen(job_id, rank, pid))
        return found

    def sample(self, job_id: str) -> list[WorkerSampled]:
        """Return the kernel's figures of each worker that has not ended."""
        watched = self._jobs.get(job_id)
        if watched is None:
            return []
        samples = []
        now_s = time.monotonic()
        for rank, worker in watched.workers.items():
            fields = [] if worker.has_ended else _read_stat(worker.stat_fd)
            if not fields or fields[_STATE] in b"ZX":
                continue  # its end is reported by the pidfd
            samples.append(
                WorkerSampled(
                    job_id=job_id,
                    rank=rank,
                    process=worker.state(fields[_STATE], now_s),
                    rss_bytes=int(fields[_RSS]) * _PAGE_BYTES,
                    cpu_s=(int(fields[_UTIME]) + int(fields[_STIME])) * _TICK_S,
                    pss_bytes=self._pss_of(worker, now_s),
                    memory=worker.memory.read(now_s),
                    signals=worker.signals.read(now_s, fields, worker.memory.children),
                )
            )
        return samples

    def pids(self, job_id: str) -> dict[int, int]:
        """Return the process of each rank that has been seen and has not ended."""
        watched = self._jobs.get(job_id)
        workers = watched.workers if watched else {}
        return {rank: worker.pid for rank, worker in workers.items() if not worker.has_ended}

    def seen(self, job_id: str) -> set[int]:
        """Return the ranks whose processes have been seen, whether they have ended or not."""
        watched = self._jobs.get(job_id)
        return set(watched.workers) if watched else set()

    def send_signal(self, job_id: str, rank: int, number: signal.Signals) -> bool:
        """Send a signal to a worker; return whether it was still there."""
        watched = self._jobs.get(job_id)
        worker = watched.workers.get(rank) if watched else None
        if worker is None or worker.has_ended:
            return False
        try:
            signal.pidfd_send_signal(worker.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        for job_id in list(self._jobs):
            self.forget(job_id)
        self._pss.close()

    def _pss_of(self, worker: _Worker, now_s: float) -> int | None:
        """Return a worker's last PSS, and start a new read when that is due and none is running."""
        period_s = max(PSS_PERIOD_S, worker.pss_cost_s / PSS_TIME_FRAC)
        if now_s - worker.pss_asked_s >= period_s and self._pss.ask(worker.pid, partial(_weigh, worker)):
            worker.pss_asked_s = now_s
        return self._pss.last(worker.pid, max(PSS_STALE_S, 2 * period_s))

    def _adopt(self, job_id: str, watched: _Watched, pid: int) -> int | None:
        """Hold a child of the launcher if it is a worker that is not known yet; return its rank."""

        def rank() -> int | None:
            found = _rank_of(pid, job_id)
            return found if found in watched.ranks else None

        return self._hold(job_id, watched, pid, rank)

    def _hold(self, job_id: str, watched: _Watched, pid: int, find_rank: Callable[[], int | None]) -> int | None:
        """Hold a process if it is a rank that is not held yet; return its rank."""
        pidfd = stat_fd = -1
        try:
            # First the descriptors, then the look: what is seen is the process that is held.
            pidfd = os.pidfd_open(pid)
            stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            rank = find_rank()
        except OSError:
            rank = None
        if rank is None or rank in watched.workers:
            for fd in (pidfd, stat_fd):
                if fd >= 0:
                    os.close(fd)
            return None
        worker = watched.workers[rank] = _Worker(pid, pidfd, stat_fd)
        asyncio.get_running_loop().add_reader(pidfd, self._ended, job_id, rank, worker)
        return rank

    def _ended(self, job_id: str, rank: int, worker: _Worker) -> None:
        fields = _read_stat(worker.stat_fd)
        is_zombie = bool(fields) and fields[_STATE] in b"ZX" and len(fields) > _EXIT_CODE
        status = int(fields[_EXIT_CODE]) if is_zombie else exit_status(worker.pidfd)
        self._close(worker)
        code = os.waitstatus_to_exitcode(status) if status is not None else None
        killing = worker.memory.killing(time.monotonic()) if code != 0 else None
        ended = worker_ended(job_id, rank, code)
        if killing is not None:
            exit_ = msgspec.structs.replace(ended.exit, oom_kills=killing.num, facts=killing.facts)
            ended = msgspec.structs.replace(ended, exit=exit_, cgroup_kills=killing.num)
        self._on_end(ended)

    def _close(self, worker: _Worker) -> None:
        if not worker.has_ended:
            asyncio.get_running_loop().remove_reader(worker.pidfd)
            worker.close()
            self._pss.forget(worker.pid)


def _children(pid: int) -> list[int]:
    """Return the pids of a process's children, forked by any of its threads."""
    found: list[int] = []
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            found += map(int, Path(task.path, "children").read_bytes().split())
    except OSError:
        return found  # it ends just now
    return found


def _rank_of(pid: int, job_id: str) -> int | None:
    """Return the rank in a process's environment; None before it has been exec'ed, or if it is of another job."""
    environ = dict(
        entry.split(b"=", 1) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in entry
    )
    rank = environ.get(b"RANK", b"")
    return int(rank) if rank.isdigit() and environ.get(ENV_JOB_ID.encode()) == job_id.encode() else None


def _weigh(worker: _Worker) -> int:
    """Return a worker's PSS in bytes, and note how long that took; runs on the reader's thread."""
    began_s = time.monotonic()
    try:
        return _read_pss(worker.pid)
    finally:
        worker.pss_cost_s = time.monotonic() - began_s


def _read_pss(pid: int) -> int:
    """Return a process's PSS in bytes. Source: proc_pid_smaps(5), smaps_rollup."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)  # a process without memory is ending


def _read_stat(fd: int) -> list[bytes]:
    """Return the fields behind the name; empty when the process has been collected."""
    try:
        line = os.pread(fd, _STAT_BYTES, 0)
    except ProcessLookupError:
        return []
    return line[line.rfind(b")") + 2 :].split()


_MAX_BYTES = 8192
_MAX_CHARS = 256
STOPPED_LOOKS, STOPPED_PAUSE_S = 5, 0.1
"""Looks, and the pause between them, for which a tracer that only looks may hold a process."""


def kernel_facts(pid: int) -> KernelFacts | None:
    """Return what /proc shows of a process, as far as this user may read it; None when it has ended."""
    fields = shim.stat_fields(pid)
    if not fields or fields[0] in b"ZX":
        return None
    wchan = _read(pid, "wchan").strip()
    number = _read(pid, "syscall").partition(" ")[0]
    # "[<0>] futex_wait_queue+0x60/0x90": the address is hidden, the offset says nothing to people.
    frames = [line.partition("] ")[2].partition("+")[0] for line in _read(pid, "stack").splitlines()]
    return KernelFacts(
        state=fields[0].decode("ascii", "replace"),
        wchan="" if wchan == "0" else wchan[:_MAX_CHARS],
        syscall=int(number) if number.isascii() and number.isdigit() else None,
        stack=[frame[:_MAX_CHARS] for frame in frames if frame][:MAX_KERNEL_FRAMES],
    )


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, or by a debugger that does more than look: state T, or t."""
    for _ in range(STOPPED_LOOKS):
        letter = b"".join(shim.stat_fields(pid)[:1])
        if letter != b"t":
            return letter == b"T"
        time.sleep(STOPPED_PAUSE_S)
    return True


def has_uninterruptible_thread(pid: int) -> bool:
    """Return whether a thread of a process is in uninterruptible sleep: state D."""
    try:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return any(shim.stat_fields(thread)[:1] == [b"D"] for thread in threads)


def _read(pid: int, name: str) -> str:
    """Return a small file of a process; empty where this user may not read it, or the process is gone."""
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
