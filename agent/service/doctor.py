"""`agent doctor`: looks at this node before a job does. Changes nothing, needs no agent, imports no torch."""

from __future__ import annotations

import os
import platform
import pwd
import resource
import shutil
import socket
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from agent.errors import StateDirError
from agent.state_dir import check_private, check_socket_path, is_served
from agent.wire.fields import CONTROL_SOCKET, INBOX_SOCKET, TELEMETRY_SOCKET

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_TORCH = (2, 8)
MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 1 << 30
"""A DataLoader with workers passes its batches through it; containers often have 64 MiB."""
MIN_DISK_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
"""torch, gloo and a DataLoader with many workers hold hundreds of descriptors a rank."""
INTERPRETER_TIMEOUT_S = 20.0
_ASK_INTERPRETER = (
    "import sys, importlib.metadata as m\n"
    "try: torch = m.version('torch')\n"
    "except m.PackageNotFoundError: torch = ''\n"
    "print('.'.join(map(str, sys.version_info[:3])), torch)"
)


class Status(StrEnum):
    """How something is."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class Row(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    todo: str = ""
    """What to do about it; empty when it is well."""


class Examination(msgspec.Struct, frozen=True):
    """All of them."""

    schema: int
    rows: list[Row]


def examine(directory: Path, python: str) -> Examination:
    """Look at everything.

    Args:
        directory: The agent's, or where it would be.
        python: Interpreter of the jobs.
    """
    rows = [_agent_python(), *_job_python(python), _state_directory(directory), _agent(directory)]
    rows += [_disk(directory), _shared_memory(Path("/dev/shm")), _port(), *_network()]  # noqa: S108 - looked at
    rows += [_linger(Path("/run/systemd/system"), Path("/var/lib/systemd/linger"))]
    rows += [_cgroup(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")), _open_files(), _locked_memory()]
    return Examination(schema=1, rows=rows)


def _agent_python() -> Row:
    return Row("agent_python", Status.OK, f"Python {platform.python_version()}")


def _job_python(python: str) -> Iterable[Row]:
    """Ask the jobs' interpreter for its version and torch's, without importing torch."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK_INTERPRETER],
            capture_output=True,
            text=True,
            timeout=INTERPRETER_TIMEOUT_S,
            check=True,
        )
        version, _, torch = done.stdout.strip().partition(" ")
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
        yield Row("job_python", Status.BAD, f"{python} does not run: {error}", "name the Python of the jobs: --python")
        return
    is_old = _numbers(version) < MIN_PYTHON
    yield (
        Row("job_python", Status.WARN, f"Python {version}", "use 3.11 or newer")
        if is_old
        else Row("job_python", Status.OK, f"Python {version}")
    )
    if not torch:
        yield Row("torch", Status.BAD, f"{python} has no torch", f"{python} -m pip install torch")
    elif _numbers(torch) < MIN_TORCH:
        yield Row("torch", Status.WARN, torch, "2.8 or newer lets the console see collectives")
    else:
        yield Row("torch", Status.OK, torch)


def _state_directory(directory: Path) -> Row:
    try:
        for name in (CONTROL_SOCKET, INBOX_SOCKET, TELEMETRY_SOCKET):
            check_socket_path(directory / name)
        if directory.exists():
            check_private(directory)
    except StateDirError as error:
        return Row("state_directory", Status.BAD, str(error), "mend it, or use another one: --dir")
    return Row("state_directory", Status.OK, str(directory))


def _agent(directory: Path) -> Row:
    if is_served(directory):
        return Row("agent", Status.OK, "serves")
    return Row("agent", Status.WARN, "no agent serves", "python -P -m agent serve --daemon")


def _disk(directory: Path) -> Row:
    place = next(path for path in (directory, *directory.parents) if path.exists())
    free_bytes = shutil.disk_usage(place).free
    detail = f"{free_bytes >> 20} MiB free at {place}"
    if free_bytes < MIN_DISK_BYTES:
        return Row("disk", Status.WARN, detail, "make room for logs and records")
    return Row("disk", Status.OK, detail)


def _shared_memory(path: Path) -> Row:
    try:
        size_bytes = shutil.disk_usage(path).total
    except OSError as error:
        return Row("shared_memory", Status.BAD, f"{path}: {error.strerror}", f"mount a tmpfs at {path}")
    detail = f"{size_bytes >> 20} MiB at {path}"
    if size_bytes < MIN_SHM_BYTES:
        return Row("shared_memory", Status.WARN, detail, "enlarge it (docker: --shm-size=8g), or train without workers")
    return Row("shared_memory", Status.OK, detail)


def _port() -> Row:
    """Bind a port on loopback, as a job's store does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            port = listener.getsockname()[1]
    except OSError as error:
        return Row(
            "ports", Status.BAD, f"cannot listen on 127.0.0.1: {error.strerror}", "bring up lo: ip link set lo up"
        )
    return Row("ports", Status.OK, f"can listen on loopback (tried port {port})")


def _network() -> Iterable[Row]:
    addresses = {
        name: [address.address for address in found if address.family == socket.AF_INET]
        for name, found in psutil.net_if_addrs().items()
    }
    stats = psutil.net_if_stats()
    outward = sorted(name for name, found in addresses.items() if found and name != "lo" and stats[name].isup)
    if not outward:
        yield Row("interfaces", Status.WARN, "no interface but lo is up", "jobs over several nodes need one")
    else:
        yield Row("interfaces", Status.OK, ", ".join(f"{name} {addresses[name][0]}" for name in outward))
    hostname = socket.gethostname()
    try:
        resolved = socket.gethostbyname(hostname)
    except OSError:
        yield Row("hostname", Status.WARN, f"{hostname} has no address", f"add {hostname} to /etc/hosts")
        return
    if resolved.startswith("127.") and outward:
        todo = f"give it {addresses[outward[0]][0]} in /etc/hosts; rankdeck's own jobs name addresses and do without"
        yield Row("hostname", Status.WARN, f"{hostname} is {resolved}", todo)
    else:
        yield Row("hostname", Status.OK, f"{hostname} is {resolved}")


def _linger(systemd: Path, lingering: Path) -> Row:
    """Say whether a logout ends this user's processes: logind does so where KillUserProcesses is set."""
    if not systemd.is_dir():
        return Row("linger", Status.OK, "no systemd here: nothing ends a user's processes at logout")
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container that runs under any number
        return Row("linger", Status.OK, f"user {os.geteuid()} has no name here, and so no session of systemd's to end")
    if os.geteuid() == 0 or (lingering / user).exists():
        return Row("linger", Status.OK, f"{user} lingers")
    todo = f"loginctl enable-linger {user} (else KillUserProcesses=yes ends agent and jobs at logout)"
    return Row("linger", Status.WARN, f"{user} does not linger", todo)


def _cgroup(root: Path, own: Path) -> Row:
    try:
        line = next((text for text in own.read_text().splitlines() if text.startswith("0::")), "")
    except OSError:
        line = ""
    path = root / line.removeprefix("0::").lstrip("/")
    if not line or not (path / "cgroup.procs").exists():
        return Row("cgroup", Status.OK, "no cgroup v2: job trees are ended process by process")
    owned = "ours to divide" if os.access(path / "cgroup.procs", os.W_OK) else "not delegated to us"
    return Row("cgroup", Status.OK, f"{path}, {owned}")


def _open_files() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_limit(soft)} (hard {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return Row("open_files", Status.WARN, detail, "ulimit -n 65536, or LimitNOFILE= in the unit")
    return Row("open_files", Status.OK, detail)


def _locked_memory() -> Row:
    """InfiniBand pins what it sends from."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = _limit(soft if soft == resource.RLIM_INFINITY else soft >> 10) + " KiB" * (soft != resource.RLIM_INFINITY)
    if soft != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        return Row("locked_memory", Status.WARN, detail, "ulimit -l unlimited (InfiniBand pins memory)")
    return Row("locked_memory", Status.OK, detail)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: `2.13.0+cpu` is (2, 13)."""
    parts = version.split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in parts)
