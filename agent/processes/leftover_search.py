"""Finds and cleans what earlier runs have left on this node: processes, their ports, shared memory.

Nothing here is quick: it looks at every process of this user, and is called from a thread of its own.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agent.processes.orphans import SHARED_MEMORY_PREFIXES, ProcessFacts, SharedMemoryFacts, find_orphans, find_unused
from agent.processes.shim import send_signal, stat_fields
from agent.processes.shim_process import is_shim
from agent.wire.replies import Leftover
from agent.wire.secret_mask import masked_argv
from ddpcore.wire import ENV_JOB_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel has it
INIT_NAMES = frozenset({"systemd", "init", "tini", "dumb-init"})
_MAX_TEXT = 500


def find_leftovers() -> list[Leftover]:
    """Return everything of earlier runs that nobody watches over: processes first, then shared memory."""
    return [*_leftover_processes(), *_leftover_shared_memory()]


def chosen(found: list[Leftover], names: list[str]) -> list[Leftover]:
    """Return what is to be cleaned: what is named, or without names all that rankdeck has started."""
    return [item for item in found if item.name in names or (not names and item.is_ours)]


def clean(wanted: list[Leftover]) -> list[Leftover]:
    """Kill processes and remove files, as far as they are still there; return what that was tried on."""
    cleaned = []
    for item in wanted:
        kind, _, rest = item.name.partition(":")
        if kind == "process":
            pid, started_ticks = map(int, rest.split(":"))
            send_signal(pid, started_ticks, signal.SIGKILL)
        else:
            (SHARED_MEMORY / rest).unlink(missing_ok=True)
        cleaned.append(item)
    return cleaned


def _leftover_processes() -> Iterator[Leftover]:
    uid = os.geteuid()
    facts: dict[int, ProcessFacts] = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real == uid and (found := _facts(process)):
                facts[process.pid] = found
        except psutil.Error:
            continue  # gone
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    orphanages = {1, *_substitutes_of_init(facts)}
    for orphan, is_ours in find_orphans(facts, orphanages):
        try:
            process = psutil.Process(orphan.pid)
            yield Leftover(
                name=f"process:{orphan.pid}:{orphan.started_ticks}",
                text=f"pid {orphan.pid}: {' '.join(masked_argv(process.cmdline()))}"[:_MAX_TEXT],
                is_ours=is_ours,
                age_s=max(0.0, now_s - orphan.started_ticks / os.sysconf("SC_CLK_TCK")),
                size_bytes=process.memory_info().rss,
                job_id=orphan.job_id,
                rank=orphan.rank,
                ports=sorted(
                    {
                        connection.laddr.port
                        for connection in process.net_connections("tcp")
                        if connection.status == psutil.CONN_LISTEN
                    }
                ),
            )
        except psutil.Error:
            continue  # gone


def _facts(process: psutil.Process) -> ProcessFacts | None:
    fields = stat_fields(process.pid)
    if not fields or fields[0] in b"ZX":
        return None
    environ = process.environ()
    rank = environ.get("RANK", "")
    return ProcessFacts(
        pid=process.pid,
        parent_pid=int(fields[1]),
        started_ticks=int(fields[19]),
        is_watchful=process.pid == os.getpid() or is_shim(process.pid),
        job_id=environ.get(ENV_JOB_ID, "")[:64],
        rank=int(rank) if rank.isdigit() else None,
    )


def _substitutes_of_init(facts: dict[int, ProcessFacts]) -> Iterator[int]:
    """Return processes that orphans are given to in init's stead, as far as names tell: a user's systemd, for one."""
    for pid in {process.parent_pid for process in facts.values()}:
        try:
            if psutil.Process(pid).name() in INIT_NAMES:
                yield pid
        except psutil.Error:
            continue


def _leftover_shared_memory() -> Iterator[Leftover]:
    uid = os.geteuid()
    sizes: dict[str, tuple[int, float]] = {}
    for path in SHARED_MEMORY.iterdir():
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_uid == uid and path.is_file() and path.name.startswith(SHARED_MEMORY_PREFIXES):
            sizes[path.name] = (status.st_size, status.st_mtime)
    if not sizes:
        return
    used = _names_in_use()
    for file in find_unused([SharedMemoryFacts(name, name in used) for name in sorted(sizes)]):
        size, modified = sizes[file.name]
        yield Leftover(
            name=f"shm:{file.name}",
            text=str(SHARED_MEMORY / file.name),
            is_ours=False,
            age_s=max(0.0, time.time() - modified),  # noqa: TID251 - what a file tells is wall time
            size_bytes=size,
        )


def _names_in_use() -> set[str]:
    """Return the names of files in /dev/shm that a process of this user maps or holds open."""
    used = set()
    prefix = f"{SHARED_MEMORY}/"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            maps = (entry / "maps").read_text(errors="replace")
            links = [str(fd.readlink()) for fd in (entry / "fd").iterdir()]
        except OSError:
            continue  # gone, or another user's
        used |= {line.rpartition(prefix)[2] for line in maps.splitlines() if prefix in line}
        used |= {link.removeprefix(prefix) for link in links if link.startswith(prefix)}
    return used
