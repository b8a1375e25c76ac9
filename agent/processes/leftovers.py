"""Finds and kills processes of jobs that nobody watches any more, and cleans what earlier runs have left.

`Leftovers` and `sweep` are for this agent's jobs: processes are found by descent and by environment. An orphan of a
killed shim is reparented to the agent that started the shim, or to a foreign process if that agent is gone too. But
launcher, ranks and what they start carry the agent's inbox and the job's id in their environment. What lives below a
shim is never touched, whatever this agent knows of it; nor what is of a job whose launcher has outlived its shim.

`find_leftovers` and `clean` are for what earlier runs have left on this node: processes, their ports, shared memory.
Nothing in them is quick: they look at every process of this user, and are called from a thread of their own.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agent.processes import shim
from agent.processes.orphans import SHARED_MEMORY_PREFIXES, ProcessFacts, SharedMemoryFacts, find_orphans, find_unused
from agent.processes.shim import send_signal, stat_fields
from agent.processes.shim_process import environ_of, is_launcher, is_shim
from agent.wire.commands import Leftover
from agent.wire.secret_mask import masked_argv
from ddpcore.wire import ENV_INBOX, ENV_JOB_ID, ENV_LOG_DIR
from ddpcore.wire_launch import ENV_EXEC_PID

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from collections.abc import Set as AbstractSet

ANYBODYS = ""
"""Key in the place of a job's id, for a process below this agent without a job's mark."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
"""Seconds between looks at a process that does not die: it sits in a driver, or belongs to another user by now."""


class Leftovers:
    """Leftovers that are to be killed, and which of them are still there."""

    def __init__(self, inbox_path: str) -> None:
        """It has to be made before this process has children of its own."""
        self._inbox_path = inbox_path
        # Below init, or below a shell that became this agent, live others: there only marks count.
        self._owns_all_below = os.getpid() != 1 and not shim.descendants(os.getpid())
        self._suspects: set[str] = set()
        """Jobs that may have left something, until a sweep finds nothing of theirs."""
        self._pause_s = FIRST_PAUSE_S
        self._due_at_s = float("-inf")
        self._writers_until_s: dict[str, float] = {}

    def suspect(self, job_id: str, writers_until_s: float = float("-inf")) -> None:
        """Look for leftovers of a job from the next sweep on; its checkpoint's writer has until then to finish."""
        self._writers_until_s[job_id] = writers_until_s
        self._suspects.add(job_id)
        self._pause_s, self._due_at_s = FIRST_PAUSE_S, float("-inf")

    def may_have(self, job_id: str) -> bool:
        """Return whether something of a job may still live beside or after its shim."""
        return job_id in self._suspects or ANYBODYS in self._suspects

    @property
    def is_clean(self) -> bool:
        return not self._suspects

    def sweep(self, own_pids: AbstractSet[int], kept_jobs: AbstractSet[str], now_s: float, *, owns_all: bool) -> None:
        """Kill leftovers, if it is time to look and there is reason to.

        `own_pids` are shims and samplers of this agent, `kept_jobs` run. Without `owns_all` some of them have no shim:
        then what has no mark may be theirs.
        """
        if not self._suspects or now_s < self._due_at_s:
            return
        self._writers_until_s = {job: until_s for job, until_s in self._writers_until_s.items() if now_s < until_s}
        found = sweep(
            self._inbox_path,
            own_pids,
            kept_jobs,
            owns_all_below=self._owns_all_below and owns_all,
            writing_jobs=self._writers_until_s.keys(),
        )
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s) if found == self._suspects else FIRST_PAUSE_S
        self._suspects, self._due_at_s = found, now_s + self._pause_s


def sweep(
    inbox_path: str,
    own_pids: AbstractSet[int],
    kept_jobs: AbstractSet[str] = frozenset(),
    *,
    owns_all_below: bool,
    writing_jobs: AbstractSet[str] = frozenset(),
) -> set[str]:
    """Kill leftovers, all but those of `kept_jobs` and the checkpoint's writers of `writing_jobs`; return their jobs.

    `inbox_path` is the mark of this agent's jobs. With `owns_all_below` all that lives below this process is an orphan
    of its jobs, marked or not.
    """
    below = shim.descendants(os.getpid(), frozenset(own_pids)) if owns_all_below else {}
    found = {pid: (started_ticks, ANYBODYS) for pid, started_ticks in below.items()} | _marked(inbox_path, own_pids)
    found = {pid: one for pid, one in found.items() if one[1] not in kept_jobs}
    for pid, (started_ticks, job_id) in found.items():
        if not (job_id in writing_jobs and shim.is_writer(pid)):
            shim.send_signal(pid, started_ticks, signal.SIGKILL)
    while ended := _next_ended_child():
        if ended in own_pids:
            break  # whoever started it collects it
        os.waitpid(ended, 0)
    return {job_id for _, job_id in found.values()}


def _marked(inbox_path: str, own_pids: AbstractSet[int]) -> dict[int, tuple[int, str]]:
    """Return start time in ticks and job id by pid, of processes with our mark and no shim above them."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a path object for each process is waste
        if not name.isdigit():
            continue
        pid = int(name)
        fields = shim.stat_fields(pid)
        if not fields or fields[0] in b"ZX":
            continue
        environ = environ_of(pid)
        if environ.get(ENV_INBOX.encode()) == os.fsencode(inbox_path) and not _is_below_a_shim(pid, own_pids):
            found[pid] = (int(fields[19]), environ.get(ENV_JOB_ID.encode(), b"").decode(errors="replace"))
    return found


def _is_below_a_shim(pid: int, own_pids: AbstractSet[int]) -> bool:
    """Return whether a process is a shim or has one above it."""
    while pid > 1:
        if pid in own_pids or is_shim(pid):
            return True
        fields = shim.stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return False


def _next_ended_child() -> int:
    """Return the pid of a child that has ended and is not collected yet, 0 if there is none."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_pid if ended else 0


SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the kernel has it
INIT_NAMES = frozenset({"systemd", "init", "tini", "dumb-init"})
_MAX_TEXT = 500


def find_leftovers(watched: Collection[int] = ()) -> list[Leftover]:
    """Return all leftovers of earlier runs: processes first, then shared memory; none of `watched` and below them."""
    return [*_leftover_processes(watched), *_leftover_shared_memory()]


def chosen(found: list[Leftover], names: list[str]) -> list[Leftover]:
    """Return the leftovers that are named, or without names all that rankdeck has started."""
    return [item for item in found if item.name in names or (not names and item.is_ours)]


def clean(wanted: list[Leftover]) -> list[Leftover]:
    """Kill processes and remove files, as far as they are still there; return those."""
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


def _leftover_processes(watched: Collection[int]) -> Iterator[Leftover]:
    uid = os.geteuid()
    facts: dict[int, ProcessFacts] = {}
    for process in psutil.process_iter():
        try:
            if process.uids().real == uid and (found := _facts(process, watched)):
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


def _facts(process: psutil.Process, watched: Collection[int]) -> ProcessFacts | None:
    fields = stat_fields(process.pid)
    if not fields or fields[0] in b"ZX":
        return None
    environ = process.environ()
    rank = environ.get("RANK", "")
    return ProcessFacts(
        pid=process.pid,
        parent_pid=int(fields[1]),
        started_ticks=int(fields[19]),
        is_watchful=process.pid in {os.getpid(), *watched}
        or environ.get(ENV_EXEC_PID) == str(process.pid)
        or is_shim(process.pid)
        or is_launcher(Path(environ.get(ENV_LOG_DIR, "/")), process.pid),
        # `rankdeck exec` and `env` name a job too, in whole shells; an agent's inbox has only what it has launched.
        job_id=environ.get(ENV_JOB_ID, "")[:64] if ENV_INBOX in environ else "",
        rank=int(rank) if rank.isdigit() else None,
    )


def _substitutes_of_init(facts: dict[int, ProcessFacts]) -> Iterator[int]:
    """Return processes that adopt orphans instead of init, as their names show: a user's systemd, for one."""
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
