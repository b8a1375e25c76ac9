"""What /proc tells of the processes that NVML names: ancestors, pids in containers, and how they see the GPUs.

NVML names pids of the machine. In a container they mean other processes, or nobody, unless the driver translates them;
so there a process is only believed to be on a GPU if it holds a device file of the driver open.
"""

from __future__ import annotations

import os

from agent.state.gpu_sample import MAX_ANCESTORS, GpuProcess
from ddpcore.wire import ENV_JOB_ID

_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO."""
_DRIVER_FILES = "/dev/nvidia"
_MAX_ENVIRON_BYTES = 1 << 20
_MAX_VISIBLE_CHARS = 4096


class GpuProcesses:
    """Reads what it needs of a process; a process that is gone, or another user's, is only a pid."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._must_prove = _link(f"{proc}/self/ns/pid") != _INITIAL_PID_NAMESPACE

    def describe(self, pid: int, used_bytes: int | None, mig_uuid: str) -> GpuProcess:
        """Return the process behind a pid of NVML."""
        if self._must_prove and not self._has_driver_open(pid):
            return GpuProcess(pid, used_bytes, mig_uuid)
        environ = self._environ(pid)
        rank = environ.get(b"RANK", b"")
        visible, order = environ.get(b"CUDA_VISIBLE_DEVICES"), environ.get(b"CUDA_DEVICE_ORDER")
        return GpuProcess(
            pid=pid,
            used_bytes=used_bytes,
            mig_uuid=mig_uuid,
            ancestors=self._ancestors(pid),
            inner_pids=self._inner_pids(pid),
            job_id=_text(environ.get(ENV_JOB_ID.encode(), b""), 256),
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

    def _ancestors(self, pid: int) -> list[int]:
        found: list[int] = []
        while len(found) < MAX_ANCESTORS:
            line = self._read(pid, "stat")
            # The name in parentheses may hold anything, closing parentheses and blanks included.
            fields = line[line.rfind(b")") + 1 :].split()
            pid = int(fields[1]) if len(fields) > 1 else 0
            if pid <= 1 or pid in found:
                break
            found.append(pid)
        return found

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
