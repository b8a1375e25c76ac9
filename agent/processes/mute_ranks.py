"""Ranks of another launcher's job that no probe reports: found among what its launcher has started, and why.

Where another rank of the launcher reports, they have the variable that names that one, and another number in it. Where
none does, a process is a rank as a probe would have it: by torchrun's variables once it has loaded torch, by those of
other launchers once it has opened its process group, which torch's threads show.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, NamedTuple

from agent.processes import shim
from agent.processes.foreign_launcher import ancestors, is_prepared
from agent.processes.shim_process import environ_of
from ddpcore.launchers import Meeting, is_named_by_torchrun, job_name, launched_rank
from ddpcore.wire import ENV_INBOX
from ddpcore.wire_launch import RANK_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

IMPORT_S = 60.0
"""Seconds that a rank may take to import torch, which loads the probe, unless its process shows that it never will."""
_AUTOLOAD = b"TORCH_DEVICE_BACKEND_AUTOLOAD"
_KEEPS_OUT = b"IE"
"""Options of Python that ignore PYTHONPATH. Source: python(1)."""
_WITH_VALUE, _MODULE, _CODE = b"XW", ord("m"), ord("c")
"""Options of Python behind which a value stands, and those behind which the program does."""
_GROUP_THREADS = (b"pt_gloo", b"pt_nccl")
"""Beginnings of the names of a process group's threads. Source: torch 2.13, measured; 2.4 and older name none."""
_TICKS_HZ = os.sysconf("SC_CLK_TCK")


class MuteRank(NamedTuple):
    """A rank without a probe, as it would report itself."""

    job_id: str
    attempt: int
    world_size: int
    rank: int
    local_rank: int
    pid: int
    why: str


class _Python(NamedTuple):
    """A Python process below a launcher."""

    pid: int
    age_s: float
    environ: dict[bytes, bytes]

    @property
    def has_torch(self) -> bool:
        return b"/libtorch_cpu" in _read(self.pid, "maps")

    @property
    def has_group(self) -> bool:
        try:
            threads = os.listdir(f"/proc/{self.pid}/task")  # noqa: PTH208 - for each process
        except OSError:
            return False
        return any(_read(self.pid, f"task/{thread}/comm").startswith(_GROUP_THREADS) for thread in threads)

    @property
    def why_mute(self) -> str:
        """Reason why it loads no probe; empty while it may."""
        if found := why_mute(_arguments(self.pid), self.environ):
            return found
        if self.age_s < IMPORT_S:
            return ""
        return "torch older than 2.5, or a Python without rankdeck" if self.has_torch else "torch not imported"


def mute_ranks(launcher_pid: int, reporting_pid: int, known: Container[int]) -> dict[int, tuple[int, str]]:
    """Return pid and reason of each rank below a launcher that is not known, by its first Python process.

    Args:
        launcher_pid: The launcher.
        reporting_pid: A rank whose probe reports.
        known: Ranks that are left out.
    """
    environ = environ_of(reporting_pid)
    name = next((name.encode() for name in RANK_VARIABLES if environ.get(name.encode(), b"").isdigit()), b"")
    found: dict[int, tuple[int, str]] = {}
    for process in _pythons(launcher_pid) if name else ():
        text = process.environ.get(name, b"")
        if text.isdigit() and int(text) not in known and int(text) not in found and (why := process.why_mute):
            found[int(text)] = process.pid, why
    return found


def unreported_ranks(launcher_pid: int, reporting: Container[int]) -> list[MuteRank]:
    """Return the ranks of a launcher that show what they are, itself included, and load no probe.

    Args:
        launcher_pid: What `rankdeck exec` has become.
        reporting: Processes whose probes report.
    """
    ranks = _ranks_of(launcher_pid)
    found: dict[tuple[str, int], list[MuteRank]] = {}
    for pid, process in ranks.items():
        environ = _text(process.environ)
        if pid in reporting or ENV_INBOX in environ or not (why := process.why_mute):  # an agent's own ranks have that
            continue
        placed = launched_rank(environ)
        if placed is None and any(name in environ for name in RANK_VARIABLES[:-1]):  # a batch script has Slurm's
            placed = launched_rank(environ, Meeting(world_size=len(ranks)))
        if placed is None:
            continue
        parent = int(b"".join(shim.stat_fields(pid)[1:2]) or b"0")
        job_id = job_name(environ, _program(_arguments(pid))[1], parent)
        where = (placed.world_size, placed.rank, placed.local_rank)
        found.setdefault((job_id, placed.rank), []).append(MuteRank(job_id, placed.restart_count, *where, pid, why))
    # Several of one number have it from their launcher's own: mp.spawn in a Slurm step.
    return [same[0] for same in found.values() if len(same) == 1]


def has_ranks(launcher_pid: int) -> bool:
    """Return whether a process, or what it has started, shows that it is a rank; with a probe or without one."""
    return bool(_ranks_of(launcher_pid))


def _ranks_of(launcher_pid: int) -> dict[int, _Python]:
    """Return what shows that it is a rank, by pid, without the processes that ranks have started."""
    ranks: dict[int, _Python] = {}
    for process in _pythons(launcher_pid):
        is_rank = process.has_torch if is_named_by_torchrun(_text(process.environ)) else process.has_group
        if is_rank and not any(pid in ranks for pid in ancestors(process.pid)):
            ranks[process.pid] = process
    return ranks


def why_mute(arguments: list[bytes], environ: dict[bytes, bytes]) -> str:
    """Return why a Python process with this command line and environment loads no probe, empty if it might."""
    if option := _program(arguments)[0]:
        return f"python -{option}"
    if (value := environ.get(_AUTOLOAD, b"1")) != b"1":
        return f"{_AUTOLOAD.decode()}={value[:16].decode(errors='replace')} keeps it out"
    return "" if is_prepared(environ) else "its PYTHONPATH lacks rankdeck's launch plug-in"


def _pythons(launcher_pid: int) -> Iterator[_Python]:
    """Yield a launcher and what it has started, as far as it is Python, in the order in which they have begun."""
    started = shim.descendants(launcher_pid)
    if fields := shim.stat_fields(launcher_pid):
        started[launcher_pid] = int(fields[19])
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for pid in sorted(started, key=lambda pid: (started[pid], pid)):
        if _is_python(pid):
            yield _Python(pid, now_s - started[pid] / _TICKS_HZ, environ_of(pid))


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))  # noqa: PTH115, PTH119 - for each process
    except OSError:
        return False


def _arguments(pid: int) -> list[bytes]:
    return _read(pid, "cmdline").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    """Return the content of a file of a process; empty if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - a path object for each process is waste
            return file.read()
    except OSError:
        return b""


def _text(environ: dict[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}


def _program(arguments: list[bytes]) -> tuple[str, str]:
    """Return the option in a command line that ignores PYTHONPATH, empty if none does, and the program."""
    option, rest = "", iter(arguments[1:])
    for word in rest:
        if not word.startswith(b"-") or word in {b"-", b"--"}:
            return option, os.fsdecode(word)
        for at, letter in enumerate(word[1:], 1) if not word.startswith(b"--") else ():
            if letter in _KEEPS_OUT:
                option = option or chr(letter)
            elif letter == _CODE:
                return option, "-c"
            elif letter == _MODULE:
                return option, os.fsdecode(word[at + 1 :] or next(rest, b"")).rpartition(".")[2]
            elif letter in _WITH_VALUE:
                if at == len(word) - 1:
                    next(rest, None)
                break
    return option, ""
