"""What /proc shows of the processes that NVML names: ancestors, pids in containers, and how they see the GPUs.

NVML names pids of the machine. In a container they mean other processes, or nobody, unless the driver translates them;
so there a process is only believed to be on a GPU if it holds a device file of the driver open.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

from agent.node_state.gpu_sample import MAX_ANCESTORS, GpuProcess
from ddpcore.wire import ENV_INBOX, ENV_JOB_ID

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO."""
_DRIVER_FILES = "/dev/nvidia"
_MAX_ENVIRON_BYTES = 1 << 20
_MAX_VISIBLE_CHARS = 4096


class _Stat(NamedTuple):
    """A process's name, parent and time of start in clock ticks; the time is 0 where it is not known."""

    name: str
    parent: int
    start: int


class GpuProcesses:
    """Reads what is needed of a process; of one that has ended, or is another user's, only the pid is known.

    `inbox` is the mark of this agent's jobs: another agent may have a job of the same name. An environment is read once
    while NVML names its process in each sample: a program that starts another one in its place loses the GPU.
    """

    def __init__(self, inbox: str, proc: str = "/proc") -> None:
        self._inbox = os.fsencode(inbox)
        self._proc = proc
        self._must_prove = _link(f"{proc}/self/ns/pid") != _INITIAL_PID_NAMESPACE
        self._stats: dict[int, _Stat] = {}
        """What has been read in this sample: ranks share their ancestors."""
        self._known: dict[tuple[int, int], GpuProcess] = {}
        """Processes of the sample before, by pid and time of start."""
        self._seen: dict[tuple[int, int], GpuProcess] = {}

    def begin_sample(self) -> None:
        """Forget what is true at one moment, and who was not named since the last call."""
        self._stats.clear()
        self._known, self._seen = self._seen, {}

    def describe(self, pid: int, used_bytes: int | None, mig_uuid: str) -> GpuProcess:
        """Return the process behind a pid of NVML."""
        if self._must_prove and not self._has_driver_open(pid):
            return GpuProcess(pid, used_bytes, mig_uuid)
        stat = self._stat(pid)
        key = (pid, stat.start)
        facts = (self._known.get(key) or self._seen.get(key)) if stat.start else None
        if facts is None:
            facts = self._lasting_facts(pid)
        if stat.start:
            self._seen[key] = facts
        return msgspec.structs.replace(
            facts,
            used_bytes=used_bytes,
            mig_uuid=mig_uuid,
            ancestors=self._ancestors(stat),
            name=stat.name,
        )

    def _lasting_facts(self, pid: int) -> GpuProcess:
        environ = self._environ(pid)
        is_ours = environ.get(ENV_INBOX.encode()) == self._inbox
        rank = environ.get(b"RANK", b"") if is_ours else b""
        visible, order = environ.get(b"CUDA_VISIBLE_DEVICES"), environ.get(b"CUDA_DEVICE_ORDER")
        return GpuProcess(
            pid=pid,
            inner_pids=self._inner_pids(pid),
            job_id=_text(environ.get(ENV_JOB_ID.encode(), b""), 256) if is_ours else "",
            rank=int(rank) if rank.isdigit() and len(rank) < 10 else None,
            visible_devices=None if visible is None else _text(visible, _MAX_VISIBLE_CHARS),
            device_order=None if order is None else _text(order, 64),
        )

    def _has_driver_open(self, pid: int) -> bool:
        directory = f"{self._proc}/{pid}/fd"
        try:
            names = os.listdir(directory)  # noqa: PTH208 - pathlib costs a megabyte here
        except OSError:
            return False
        return any(_link(f"{directory}/{name}").startswith(_DRIVER_FILES) for name in names)

    def _environ(self, pid: int) -> dict[bytes, bytes]:
        entries = self._read(pid, "environ").split(b"\0")
        return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)

    def _ancestors(self, stat: _Stat) -> list[int]:
        found: list[int] = []
        while stat.parent > 1 and stat.parent not in found and len(found) < MAX_ANCESTORS:
            found.append(stat.parent)
            stat = self._stat(stat.parent)
        return found

    def _stat(self, pid: int) -> _Stat:
        """Source: proc_pid_stat(5). The name may hold anything, parentheses and blanks included."""
        known = self._stats.get(pid)
        if known is None:
            line = self._read(pid, "stat")
            end = line.rfind(b")")
            fields = line[end + 1 :].split()
            parent, start = (int(fields[at]) if len(fields) > at else 0 for at in (1, 19))
            known = self._stats[pid] = _Stat(_text(line[line.find(b"(") + 1 : max(0, end)], 64), parent, start)
        return known

    def _inner_pids(self, pid: int) -> list[int]:
        """Source: proc_pid_status(5), NSpid: the pid in each namespace, outermost first."""
        for line in self._read(pid, "status").splitlines():
            if line.startswith(b"NSpid:"):
                return [int(number) for number in line.split()[2:]][:MAX_ANCESTORS]
        return []

    def _read(self, pid: int, name: str) -> bytes:
        try:
            with open(f"{self._proc}/{pid}/{name}", "rb") as file:  # noqa: PTH123 - as above
                return file.read(_MAX_ENVIRON_BYTES)
        except OSError:
            return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - as above
    except OSError:
        return ""


def _text(value: bytes, limit: int) -> str:
    return value.decode(errors="replace")[:limit]
