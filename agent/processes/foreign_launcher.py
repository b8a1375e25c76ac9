"""Launchers that are not ours: found above a rank, watched by a pidfd, ended with what they have started.

`rankdeck exec` leaves its pid in the environment, and is the launcher from then on. Without it the launcher is
torchrun, which starts its ranks itself, else the rank's highest ancestor that was started with the launch plug-in on
its PYTHONPATH, below any shell: one whose environment `eval "$(rankdeck env)"` has prepared lives on when its job ends.

A launcher may have several jobs, as a sweep does. One of them then ends without it, by `lowest_launchers`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import TYPE_CHECKING

from agent.processes import shim
from agent.processes.shim_process import environ_of, exit_status
from ddpcore.wire_launch import ENV_EXEC_PID, EXEC_SUFFIX, LAUNCH_PLUGIN_DIR

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

_PLUGIN = os.fsencode("/".join(LAUNCH_PLUGIN_DIR.parts[-2:]))
_SHELLS = frozenset({b"bash", b"dash", b"fish", b"ksh", b"sh", b"tcsh", b"zsh"})
_OF_TORCHRUN = b"TORCHELASTIC_RUN_ID"
_PARENT, _STARTED, _EXIT_CODE = 1, 19, 49
"""Indices behind the name in /proc/PID/stat. Source: proc_pid_stat(5)."""


class Launcher:
    """A launcher that runs, held until `close`."""

    def __init__(self, pid: int) -> None:
        """Hold a process.

        Raises:
            OSError: It is gone.
        """
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._started_ticks = b"".join(shim.stat_fields(pid)[_STARTED : _STARTED + 1])

    @property
    def identity(self) -> tuple[int, bytes]:
        """Its pid and start time, which no other process shares."""
        return self.pid, self._started_ticks

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    @property
    def exit_code(self) -> int | None:
        """Its exit code once it has ended, where the kernel shows it to us; negative is a signal."""
        fields = shim.stat_fields(self.pid)
        if fields and fields[0] == b"Z" and fields[_STARTED] == self._started_ticks and len(fields) > _EXIT_CODE:
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))  # nobody has collected it yet
        status = exit_status(self._pidfd)
        return None if status is None else os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        """Ask it to end: by SIGTERM to its process group if it leads one, as a terminal's Ctrl-C is sent."""
        if not self.is_running:
            return
        try:
            if os.getpgid(self.pid) == self.pid != os.getpgrp():
                os.killpg(self.pid, signal.SIGTERM)
            else:
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        except OSError:
            return  # it ends just now

    def kill_tree(self) -> None:
        """Kill it and what it has started."""
        if not self.is_running:
            return
        below = shim.descendants(self.pid)
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError:
            return
        for pid, started_ticks in below.items():
            shim.send_signal(pid, started_ticks, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._pidfd)


def marked_launchers(directory: Path) -> set[int]:
    """Return the pids that `rankdeck exec` has left in a directory, and remove the marks of those that are gone."""
    found = set()
    for path in directory.glob(f"*-*{EXEC_SUFFIX}"):
        pid, _, started_ticks = path.stem.partition("-")
        if pid.isdigit() and shim.stat_fields(int(pid))[_STARTED : _STARTED + 1] == [started_ticks.encode()]:
            found.add(int(pid))
        else:
            with contextlib.suppress(OSError):  # on a full or read-only disk it stays
                path.unlink()
    return found


def launcher_pid_of(rank_pid: int) -> int:
    """Return the pid of the launcher of a rank, which may be the rank itself."""
    environ = environ_of(rank_pid)
    line = [rank_pid, *ancestors(rank_pid)]
    exec_pid = environ.get(ENV_EXEC_PID.encode(), b"")
    if exec_pid.isdigit() and int(exec_pid) in line:
        return int(exec_pid)
    found = rank_pid
    for pid in line[1:]:
        if _name_of(pid) in _SHELLS or not is_prepared(environ_of(pid)):
            break
        found = pid
        if _OF_TORCHRUN in environ:
            break
    return found


def lowest_launchers(launcher_pid: int, ranks: Collection[int], others: Collection[int]) -> set[int]:
    """Return what ends one job of a launcher that has several: pids of processes that end with what they have started.

    The lowest process below the launcher, or itself, that has started all ranks and none of the others; else the ranks.

    Args:
        launcher_pid: The launcher.
        ranks: Processes of the job's ranks that run.
        others: Those of other jobs. What a rank has started is its own.
    """
    lines = {pid: [pid, *ancestors(pid)] for pid in {*ranks, *others}}
    shared = {pid for other in others if not set(lines[other]) & set(ranks) for pid in lines[other]}
    own = []
    for rank in ranks:
        line = lines[rank]
        line = line[: line.index(launcher_pid) + 1 if launcher_pid in line else 1]
        own.append(line[1:] if _OF_TORCHRUN in environ_of(rank) and len(line) > 1 else line)
    lowest = next((pid for pid in own[0] if all(pid in line for line in own)), None) if own else None
    return set(ranks) if lowest is None or lowest in shared else {lowest}


def ancestors(pid: int) -> Iterator[int]:
    """Yield the pids above a process, its parent first."""
    while fields := shim.stat_fields(pid):
        pid = int(fields[_PARENT])
        if pid <= 1:
            return
        yield pid


def is_prepared(environ: dict[bytes, bytes]) -> bool:
    """Return whether a process of this environment loads the launch plug-in."""
    return any(path.endswith(_PLUGIN) for path in environ.get(b"PYTHONPATH", b"").split(b":"))


def _name_of(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123 - a path object for each process is waste
            return file.read().strip()
    except OSError:
        return b""
