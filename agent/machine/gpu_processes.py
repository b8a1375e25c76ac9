"""What /proc shows of the processes that NVML names: ancestors, pids in containers, and how they see the GPUs.

NVML names pids of the machine. In a container they mean other processes, or nobody, unless the driver translates them;
so there a process is only believed to be on a GPU if it holds a device file of the driver open.
"""

from __future__ import annotations

import os

from agent.node_state.gpu_sample import MAX_ANCESTORS, GpuProcess
from ddpcore.wire import ENV_INBOX, ENV_JOB_ID

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO."""
_DRIVER_FILES = "/dev/nvidia"
_MAX_ENVIRON_BYTES = 1 << 20
_MAX_VISIBLE_CHARS = 4096


class GpuProcesses:
    """Reads what is needed of a process; of one that has ended, or is another user's, only the pid is known.

    `inbox` is the mark of this agent's jobs: another agent may have a job of the same name.
    """

    def __init__(self, inbox: str, proc: str = "/proc") -> None:
        self._inbox = os.fsencode(inbox)
        self._proc = proc
        self._must_prove = _link(f"{proc}/self/ns/pid") != _INITIAL_PID_NAMESPACE

    def describe(self, pid: int, used_bytes: int | None, mig_uuid: str) -> GpuProcess:
        """Return the process behind a pid of NVML."""
        if self._must_prove and not self._has_driver_open(pid):
            return GpuProcess(pid, used_bytes, mig_uuid)
        environ = self._environ(pid)
        is_ours = environ.get(ENV_INBOX.encode()) == self._inbox
        rank = environ.get(b"RANK", b"") if is_ours else b""
        visible, order = environ.get(b"CUDA_VISIBLE_DEVICES"), environ.get(b"CUDA_DEVICE_ORDER")
        name, ancestors = self._name_and_ancestors(pid)
        return GpuProcess(
            pid=pid,
            used_bytes=used_bytes,
            mig_uuid=mig_uuid,
            name=name,
            ancestors=ancestors,
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

    def _name_and_ancestors(self, pid: int) -> tuple[str, list[int]]:
        name, parent = self._stat(pid)
        ancestors: list[int] = []
        while parent > 1 and parent not in ancestors and len(ancestors) < MAX_ANCESTORS:
            ancestors.append(parent)
            _, parent = self._stat(parent)
        return name, ancestors

    def _stat(self, pid: int) -> tuple[str, int]:
        """Return a process's name and its parent; the name may hold anything, parentheses and blanks included."""
        line = self._read(pid, "stat")
        end = line.rfind(b")")
        fields = line[end + 1 :].split()
        return _text(line[line.find(b"(") + 1 : max(0, end)], 64), int(fields[1]) if len(fields) > 1 else 0

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
