"""What else of this machine is in a job's way: directories, disks, shared memory, limits, leftovers of earlier runs."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agent.errors import StateDirError
from agent.processes.leftovers import find_leftovers
from agent.state_dir import SOCKETS, check_private, check_socket_path, is_served
from agent.wire.examination import Health, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from agent.wire.commands import Leftover

MIN_SHM_BYTES = 1 << 30
"""Bytes below which it is small: a DataLoader with workers passes its batches through it; containers often have 64
MiB."""
MIN_DISK_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
"""Limit below which it is low: torch, gloo and a DataLoader with many workers hold hundreds of descriptors a rank."""
MAX_NAMED = 3
MAX_NAMED_CHARS = 120
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at


def machine_rows(directory: Path) -> Iterator[Row]:
    """Yield the rows about the machine; `directory` is the agent's, or where it would be."""
    yield state_directory_row(directory)
    yield _looked_at("agent", lambda: _agent_row(directory))
    yield _looked_at("disk", lambda: _disk_row(directory))
    yield shared_memory_row(SHARED_MEMORY)
    yield _looked_at("leftovers", lambda: leftovers_row(find_leftovers()))
    yield _looked_at("linger", lambda: linger_row(Path("/run/systemd/system"), Path("/var/lib/systemd/linger")))
    yield cgroup_row(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    yield open_files_row(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield locked_memory_row(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], Path("/sys/class/infiniband"))


def _looked_at(name: str, look: Callable[[], Row]) -> Row:
    """Return a row; for one whose look fails, the error."""
    try:
        return look()
    except OSError as error:
        return Row(name, Health.BAD, f"cannot be looked at: {error}", "see why: a job would meet it, too")


def state_directory_row(directory: Path) -> Row:
    """Return whether an agent could live there."""
    try:
        for name in SOCKETS:
            check_socket_path(directory / name)
        if directory.exists():
            check_private(directory)
    except StateDirError as error:
        return Row("state_directory", Health.BAD, str(error), "mend it, or use another one: --dir")
    return Row("state_directory", Health.OK, str(directory))


def _agent_row(directory: Path) -> Row:
    if is_served(directory):
        return Row("agent", Health.OK, "serves")
    return Row("agent", Health.OK, "none serves yet: rankdeck up, or python -P -m agent serve --daemon")


def _disk_row(directory: Path) -> Row:
    place = next(path for path in (directory, *directory.parents) if path.exists())
    return disk_row(place, shutil.disk_usage(place).free)


def disk_row(place: Path, free_bytes: int) -> Row:
    detail = f"{free_bytes >> 20} MiB free at {place}"
    if free_bytes < MIN_DISK_BYTES:
        return Row("disk", Health.WARN, detail, "make room for logs and records")
    return Row("disk", Health.OK, detail)


def shared_memory_row(path: Path) -> Row:
    try:
        size_bytes = shutil.disk_usage(path).total
    except OSError as error:
        return Row("shared_memory", Health.BAD, f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    detail = f"{size_bytes >> 20} MiB at {path}"
    if size_bytes < MIN_SHM_BYTES:
        return Row("shared_memory", Health.WARN, detail, "enlarge it (docker: --shm-size=8g), or train without workers")
    return Row("shared_memory", Health.OK, detail)


def linger_row(systemd: Path, lingering: Path) -> Row:
    """Return whether a logout ends this user's processes: logind does so where KillUserProcesses is set."""
    if not systemd.is_dir():
        return Row("linger", Health.OK, "no systemd here: nothing ends a user's processes at logout")
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container that runs under any number
        return Row("linger", Health.OK, f"user {os.geteuid()} has no name here, and so no session of systemd's to end")
    if os.geteuid() == 0 or (lingering / user).exists():
        return Row("linger", Health.OK, f"{user} lingers")
    todo = f"loginctl enable-linger {user} (else KillUserProcesses=yes ends agent and jobs at logout)"
    return Row("linger", Health.WARN, f"{user} does not linger", todo)


def cgroup_row(root: Path, own: Path) -> Row:
    """Return the cgroup of this process, and whose it is."""
    try:
        line = next((text for text in own.read_text().splitlines() if text.startswith("0::")), "")
    except OSError:
        line = ""
    path = root / line.removeprefix("0::").lstrip("/")
    if not line or not (path / "cgroup.procs").exists():
        return Row("cgroup", Health.OK, "no cgroup v2: job trees are ended process by process")
    owned = "ours to divide" if os.access(path / "cgroup.procs", os.W_OK) else "not delegated to us"
    return Row("cgroup", Health.OK, f"{path}, {owned}")


def open_files_row(soft: int, hard: int) -> Row:
    detail = f"{_limit(soft)} (hard {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return Row("open_files", Health.WARN, detail, "ulimit -n 65536, or LimitNOFILE= in the unit")
    return Row("open_files", Health.OK, detail)


def locked_memory_row(soft: int, infiniband: Path) -> Row:
    """Judge the limit of locked memory: InfiniBand pins what it sends from."""
    if soft == resource.RLIM_INFINITY:
        return Row("locked_memory", Health.OK, _limit(soft))
    detail = f"{soft >> 10} KiB"
    if infiniband.is_dir():
        return Row("locked_memory", Health.WARN, detail, "ulimit -l unlimited (InfiniBand pins memory)")
    return Row("locked_memory", Health.OK, detail)


def leftovers_row(found: Sequence[Leftover]) -> Row:
    if not found:
        return Row("leftovers", Health.OK, "none of earlier runs")
    parts = []
    for item in found[:MAX_NAMED]:
        ports = f", listens on {', '.join(map(str, item.ports))}" if item.ports else ""
        parts.append(f"{item.text[:MAX_NAMED_CHARS]} ({item.size_bytes >> 20} MiB{ports})")
    more = f"; {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    todo = "look at them there with `python -P -m agent leftovers`, and end them with --clean"
    return Row("leftovers", Health.WARN, "; ".join(parts) + more, todo)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
