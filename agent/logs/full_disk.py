"""Which file system was full, or over its quota, when a rank failed to write.

An error names the path, or the call alone: `OSError: [Errno 28] No space left on device`. torch's and C++'s messages
name neither (`unexpected pos 576 vs 534`). Where a path is missing, a file system counts that is full just then; where
several are, none is named. `suspicion` reads the error; `find_full_disk` looks, and may hang where a server is gone.

Source: `torch.save`, `torch.distributed.checkpoint`, numpy, safetensors, shutil on a full tmpfs, seen with torch 2.13.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from signal import SIGBUS
from typing import TYPE_CHECKING, NamedTuple

from agent.slow_reader import SlowReader
from agent.wire.ends import DiskLimit, FullDisk

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

SHM = "/dev/shm"  # noqa: S108 - where torch and glibc put shared memory
_NO_SPACE = re.compile(r"No space left on device|StorageFull|Not enough free space to write")
_NO_QUOTA = re.compile(r"Disk quota exceeded|QuotaExceeded")
_FAILED_WRITE = re.compile(
    r"inline_container\.cc:\d+\] \. (?:unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing)"
    r"|\bios(?:_base::failure|tream error)\b|basic_ios::clear"
)
"""Messages of a write that failed, the reason not given."""
_BUS_ERROR = re.compile(r"killed by signal: Bus error|insufficient shared memory")
_PATH = re.compile(r"'(?P<path>/?[^'\n]+)'\"?$")
"""The last path behind a message: of two, it is the one that is written."""
_UNESCAPED = re.compile(r"\\(\d{3})")
_SKIPPED_TYPES = frozenset(
    {
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "fusectl"),
        *("hugetlbfs", "iso9660", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "squashfs", "sysfs"),
        "tracefs",
    }
)
MAX_MOUNTS = 256
"""File systems that are looked at where the error names no path; of more, only the one that the job runs in."""
NEARLY = 0.05
"""Free part from which a write that failed for want of space was too large, not one byte too much."""
NONE_BYTES = 2**20
STALE_S = 60.0
MAX_PENDING = 64
HUNG_S = 10.0
"""Seconds after which a look is made again, past the file system that has not answered it."""
MAX_HUNG = 4
"""File systems that may keep a thread each."""


class Suspicion(NamedTuple):
    """The file system that a rank has written to, as far as its error shows it."""

    limit: DiskLimit | None
    """None where the reason is not given: only a file system that is full now explains it."""
    path: str
    """Empty where it is not given."""


class Sought(NamedTuple):
    """A look that is due."""

    job_id: str
    rank: int
    suspicion: Suspicion
    workdir: str


class Looking:
    """A look under way.

    Attributes:
        dead: File systems that do not answer, and are left out; of the root, paths.
        at: Where it is.
    """

    def __init__(self, dead: Collection[str] = ()) -> None:
        self.dead = dead
        self.at = ""

    def may_enter(self, path: str, mounts: list[str]) -> bool:
        """Note that a path is looked at next; return whether it may be."""
        mount = _mount_of(path, mounts)
        self.at = path if mount in {"", "/"} else mount
        return self.at not in self.dead


def suspicion(error: str, signal: int | None) -> Suspicion | None:
    """Return which file system may have been full when a rank failed; None where its end speaks of something else."""
    if signal == SIGBUS or _BUS_ERROR.search(error):
        return Suspicion(None, SHM)
    found = _PATH.search(error.strip())
    path = found["path"] if found else ""
    if _NO_QUOTA.search(error):
        return Suspicion(DiskLimit.QUOTA, path)
    if _NO_SPACE.search(error):
        return Suspicion(DiskLimit.SPACE, path)
    return Suspicion(None, "") if _FAILED_WRITE.search(error) else None


def find_full_disk(
    sought: Suspicion, workdir: str, mountinfo: str = "/proc/self/mountinfo", looking: Looking | None = None
) -> FullDisk | None:
    """Return the file system that a rank could not write to; None where none is known to be full. Blocks.

    Args:
        sought: What its error shows.
        workdir: Directory from which a relative path begins; empty where it is not known.
        mountinfo: The list of mounted file systems.
        looking: Where the look is, for who waits for it.
    """
    looking = looking or Looking()
    path = os.path.join(workdir, sought.path) if sought.path else ""  # noqa: PTH118 - no file of ours
    if not looking.may_enter(path, list(_mounts(mountinfo))):
        return None
    path = _real(path)
    # Looking there first mounts what is mounted on demand.
    mounts = list(_mounts(mountinfo))
    mount = _mount_of(path, mounts)
    if sought.limit is DiskLimit.QUOTA:
        is_known = bool(mount) and (mount != "/" or _is_on_root(path))
        return FullDisk(mount, DiskLimit.QUOTA) if is_known else None
    if mount:
        return _full(mount, NEARLY if sought.limit else 0.0) if looking.may_enter(mount, mounts) else None
    workdir = _real(workdir) if looking.may_enter(workdir, mounts) else ""
    mounts = list(_mounts(mountinfo))
    here = _mount_of(workdir, mounts)
    looked_at = mounts if len(mounts) <= MAX_MOUNTS else [here] if here else []
    full = [disk for one in looked_at if looking.may_enter(one, mounts) and (disk := _full(one, 0.0))]
    named = [disk for disk in full if disk.path == here] or full
    return named[0] if len(named) == 1 else None


class FullDisks:
    """Looks for the file systems on which ranks could not write, one at a time; lives on the event loop's thread."""

    def __init__(self) -> None:
        self._reader = self._new_reader()
        self._hung: list[tuple[SlowReader[FullDisk | None], str]] = []
        """Readers that hang, and at which file system."""
        self._pending: list[Sought] = []
        self._asked: Sought | None = None
        self._asked_s, self._looking = 0.0, Looking()

    def suspect(self, job_id: str, rank: int, error: str, signal: int | None, workdir: str) -> None:
        """Have a look made for a rank that has failed, if its error speaks of a file system."""
        found = suspicion(error, signal)
        if found is not None and len(self._pending) < MAX_PENDING:
            self._pending.append(Sought(job_id, rank, found, workdir))

    def take(self) -> list[tuple[Sought, FullDisk]]:
        """Return what has been found since; called now and then."""
        if self._asked is None and self._pending:
            self._hung = [one for one in self._hung if not one[0].is_free]
            first, looking = self._pending[0], Looking({at for _, at in self._hung})
            if self._reader.ask(first, lambda: find_full_disk(first.suspicion, first.workdir, looking=looking)):
                self._asked, self._asked_s, self._looking = first, time.monotonic(), looking
        if self._asked is None:
            return []
        if not self._reader.is_free:
            if time.monotonic() - self._asked_s > HUNG_S and len(self._hung) < MAX_HUNG:
                self._reader.close()
                self._hung.append((self._reader, self._looking.at))
                self._reader, self._asked = self._new_reader(), None
            return []
        asked, self._asked = self._asked, None
        found = self._reader.last(asked)
        self._reader.forget(asked)
        # Ranks that save together fail together, and of one reason.
        alike = [one for one in self._pending if one[2:] == asked[2:]]
        self._pending = [one for one in self._pending if one[2:] != asked[2:]]
        return [] if found is None else [(one, found) for one in alike]

    def close(self) -> None:
        self._reader.close()

    @staticmethod
    def _new_reader() -> SlowReader[FullDisk | None]:
        return SlowReader("rankdeck-disks", stale_s=STALE_S)


def _full(mount: str, nearly: float) -> FullDisk | None:
    """Return a file system that is full, or of which less than a part is free; None of another one."""
    try:
        disk = os.statvfs(mount)
    except OSError:
        return None
    total_bytes, free_bytes = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    if not total_bytes:
        return None
    if disk.f_files and not disk.f_favail:
        return FullDisk(mount, DiskLimit.INODES, total_bytes, free_bytes)
    is_full = free_bytes < min(NONE_BYTES, total_bytes / 100) or free_bytes < nearly * total_bytes
    return FullDisk(mount, DiskLimit.SPACE, total_bytes, free_bytes) if is_full else None


def _mounts(mountinfo: str) -> Iterator[str]:
    """Yield where file systems are mounted that can be written. Source: proc_pid_mountinfo(5)."""
    for line in Path(mountinfo).read_text(errors="replace").splitlines():
        head, _, tail = line.partition(" - ")
        fields, options = head.split(), tail.split()
        if len(fields) < 6 or not options or options[0] in _SKIPPED_TYPES or "ro" in fields[5].split(","):
            continue
        yield _UNESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4])


def _real(path: str) -> str:
    """Return a path without symbolic links, as far as it exists; empty for one that is not absolute."""
    return os.path.realpath(path) if path.startswith("/") else ""


def _is_on_root(path: str) -> bool:
    """Return whether the directory of a path is there and on the root file system, as no list of mounts proves."""
    try:
        return os.stat(os.path.dirname(path)).st_dev == os.stat("/").st_dev  # noqa: PTH116, PTH120 - as above
    except OSError:
        return False


def _mount_of(path: str, mounts: list[str]) -> str:
    """Return the mount of a real path, which need not exist any more; empty where it is on none that can be written."""
    above = [mount for mount in mounts if mount in ("/", path) or path.startswith(f"{mount}/")] if path else []
    return max(above, key=len, default="")
