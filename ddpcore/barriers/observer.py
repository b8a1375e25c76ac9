"""Observes the other ranks through what they leave in the store, and through the kernel where they share a machine.

`Observer` joins both sources. `process_state` reads Linux's /proc: whether another rank of this machine is running,
stopped, or gone. Where /proc gives no answer, the state is `UNKNOWN`, never a guess.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.barriers.arrivals import gone_key, heartbeat_key
from ddpcore.barriers.rank_status import ProcessState, RankHeartbeat, Sighting, decode_heartbeat, silence_s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch._C._distributed_c10d import Store

MAX_BASE_AGE_S = 600.0
"""Greatest age in seconds of a first look: two machines' clocks drift apart, by 50 ppm at the worst."""


class Observer:
    """What this rank has seen of the others; any thread may look, each through a store connection of its own.

    `session` is the number of this process's group in this store: heartbeats of earlier groups do not count.
    """

    def __init__(self, machine: str, session: int = 1) -> None:
        self._machine = machine
        self._session = session
        self._first: dict[int, tuple[float, RankHeartbeat]] = {}
        self._lock = threading.Lock()

    def look(self, store: Store, ranks: Iterable[int], now_s: float) -> dict[int, Sighting]:
        """Return sightings of some ranks: two or three round trips each."""
        return {rank: self.look_at(store, rank, now_s) for rank in ranks}

    def look_at(self, store: Store, rank: int, now_s: float) -> Sighting:
        heartbeat = self._read(store, rank)
        if heartbeat is None:
            return Sighting()
        process = self._process(store, rank, heartbeat)
        if process is ProcessState.GONE and not heartbeat.has_left:
            # It may have said goodbye between the two looks.
            heartbeat = self._read(store, rank) or heartbeat
        return Sighting(heartbeat, process, self._silence_s(rank, heartbeat, now_s))

    def _read(self, store: Store, rank: int) -> RankHeartbeat | None:
        key = heartbeat_key(rank)
        heartbeat = decode_heartbeat(store.get(key)) if store.check([key]) else None
        return heartbeat if heartbeat is not None and heartbeat.session >= self._session else None

    def _process(self, store: Store, rank: int, heartbeat: RankHeartbeat) -> ProcessState:
        if heartbeat.machine and heartbeat.machine == self._machine:
            return process_state(heartbeat.pid, heartbeat.started_ticks)
        return ProcessState.GONE if store.check([gone_key(rank)]) else ProcessState.UNKNOWN

    def _silence_s(self, rank: int, heartbeat: RankHeartbeat, now_s: float) -> float | None:
        with self._lock:
            first = self._first.get(rank)
            has_moved = first is not None and heartbeat.uptime_s != first[1].uptime_s
            if first is None or (has_moved and now_s - first[0] > MAX_BASE_AGE_S):
                self._first[rank] = (now_s, heartbeat)
                return None
        return silence_s(first, heartbeat, now_s)


_STATE = 0
_START_TIME = 19
"""Fields of /proc/PID/stat after the command, proc_pid_stat(5): the third and the 22nd of all."""


def this_machine() -> str:
    """Return a name that two processes share if they see the same process numbers; empty where /proc hides it."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started_ticks(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks; 0 is unknown."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else 0


def ticks_now() -> int:
    """Return the time in the kernel's ticks, to compare with a process's start."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def process_state(pid: int, started: int) -> ProcessState:
    """Return the state of a process of this machine; `started` excludes others with its pid, 0 is not known."""
    if not started:
        return ProcessState.UNKNOWN
    fields = _stat(pid)
    if fields is None or int(fields[_START_TIME]) != started or fields[_STATE] in "ZX":
        return ProcessState.GONE
    return ProcessState.STOPPED if fields[_STATE] in "Tt" else ProcessState.RUNNING


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the command, which may hold anything; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()
