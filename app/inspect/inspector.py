"""Looks at the ranks of hosts from outside: runs `app.inspect.on_host` there, with py-spy where it is needed.

A host without py-spy gets this machine's for as long as the looks last: one static binary, checked by its digest there.
Everything blocks, within bounds.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import inspect as sources
import platform
import shutil
import site
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from app.errors import HostUnreachableError, SessionError
from app.inspect import gpus_on_host, on_host
from app.inspect.seen import MAX_TROUBLE, GpusSeen, HostSeen, SmiSeen, jobs_of
from app.ssh.config import THIS_MACHINE
from app.text import LINE_LIMIT, clean, clean_name, nodes_text
from app.threads import run_parallel
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.fleet.agent_link import AgentLink

Seen = TypeVar("Seen", bound=msgspec.Struct)

BEGIN_S = 60.0
"""Seconds for a Python to start there and to find the ranks, on a busy machine."""
SLOWEST_BYTES_HZ = 50_000
MAX_SEEN_BYTES = 1 << 26
_RUN = "import sys; exec(compile(sys.argv.pop(1), 'rankdeck inspect', 'exec'))"
_FIND_SPY = """import platform, shutil, site, sys

{}
print(platform.system(), platform.machine(), py_spy_here())
"""


def own_py_spy() -> str:
    """Return the path of this machine's py-spy.

    Raises:
        SessionError: There is none.
    """
    path = py_spy_here()
    if not path:
        raise SessionError("py-spy is not installed, which reads the stacks", "pip install py-spy")
    return path


def py_spy_here() -> str:
    """Return the path of py-spy where it runs, here or there; empty where there is none.

    It is looked for where this Python, pip's --target and --user, and PATH have their programs.
    """
    of_pip = [f"{one}/bin" for one in (*sys.path, site.getuserbase()) if one]
    places = ":".join([sys.executable.rpartition("/")[0], *of_pip])
    return shutil.which("py-spy", path=places) or shutil.which("py-spy") or ""


def look_at_host(link: AgentLink, spy: str, num_looks: int, period_s: float, *, asks_nccl: bool = False) -> HostSeen:
    """Return what a connected host shows of its ranks and their GPUs.

    Args:
        link: The host.
        spy: This machine's py-spy.
        num_looks: How often to look.
        period_s: Seconds between two looks.
        asks_nccl: Whether to ask NCCL's RAS, by a job's rank 0: it answers for all ranks, on all hosts.

    Raises:
        HostUnreachableError: The connection broke, the host's Python does not run or answers something else, or
            there is no py-spy for it.
    """
    there, binary = (spy, b"") if link.host == THIS_MACHINE else _spy_for(link, spy)
    seen = _seen_by(link, there, num_looks, period_s, binary)
    on_gpus = [rank for rank in seen.ranks if rank.uses_gpu]
    if not on_gpus:
        return seen
    asked = [str(rank.pid) for rank in on_gpus if asks_nccl and rank.rank == 0]
    argv = (sources.getsource(gpus_on_host), str(min(rank.age_s for rank in on_gpus)), *asked)
    try:
        gpus = _answer(link, argv, BEGIN_S, GpusSeen)
    except HostUnreachableError as error:
        unseen = SmiSeen("", str(error)[:MAX_TROUBLE])
        gpus = GpusSeen(unseen, unseen)
    return msgspec.structs.replace(seen, gpus=gpus)


def offer(links: Sequence[AgentLink]) -> str:
    """Return a sentence on training that runs on connected hosts, whoever launched it; empty where none is found.

    Without stacks, pools of spawned workers look like ranks of torch.multiprocessing.spawn: neither is counted.
    """
    answers = run_parallel([link for link in links if link.runs_programs], lambda link: _seen_by(link, "", 1, 0.0))
    hosts = [link.host for link in links if link.runs_programs]
    seen = [(host, answer) for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, HostSeen)]
    jobs = [job for job in jobs_of(seen) if job.how != "spawn"]
    if not jobs:
        return ""
    names = list(dict.fromkeys(rank.host for job in jobs for rank in job.ranks))
    num_ranks = sum(len(job.ranks) for job in jobs)
    what = "a job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    return f"{what} of other launchers, {ranks} on {nodes_text(names)}: rankdeck inspect"


def _seen_by(link: AgentLink, there: str, num_looks: int, period_s: float, binary: bytes = b"") -> HostSeen:
    """Return what a host shows; `there` and `binary` are the arguments and the input of `on_host.spy_of`."""
    arguments = (sources.getsource(on_host), there, str(num_looks), str(period_s))
    timeout_s = BEGIN_S + num_looks * (period_s + BEGIN_S) + len(binary) / SLOWEST_BYTES_HZ
    return _answer(link, arguments, timeout_s, HostSeen, binary)


def _answer(link: AgentLink, arguments: Sequence[str], timeout_s: float, kind: type[Seen], given: bytes = b"") -> Seen:
    """Return what a program of ours answers there: `arguments` are its text and its own arguments."""
    answer = _line(link, _RUN, *arguments, given=given, timeout_s=timeout_s)
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(answer, validate=True), MAX_SEEN_BYTES)
        return msgspec.json.decode(unpacked, type=kind)
    except (*DECODE_ERRORS, binascii.Error, zlib.error) as error:
        raise HostUnreachableError(link.host, f"its Python answers something else: {clean(str(error))}") from error


def _spy_for(link: AgentLink, spy: str) -> tuple[str, bytes]:
    """Return the host's py-spy, or the digest of this machine's, and that one's bytes."""
    system, _, rest = _line(link, _FIND_SPY.format(sources.getsource(py_spy_here))).partition(" ")
    machine, _, there = rest.partition(" ")
    if there:
        return there, b""
    if (system, machine) != (platform.system(), platform.machine()):
        raise HostUnreachableError(
            link.host,
            f"this machine's py-spy does not run on {clean_name(machine)} under {clean_name(system)}",
            f"on {link.host}: pip install py-spy",
        )
    binary = Path(spy).read_bytes()
    return on_host.DIGEST + hashlib.sha256(binary).hexdigest(), binary


def _line(link: AgentLink, program: str, *arguments: str, given: bytes = b"", timeout_s: float = BEGIN_S) -> str:
    """Return the last line that a program prints there; -I: no module of the directory that a login begins in."""
    done = link.run_python(["-I", "-c", program, *arguments], timeout_s, given)
    if done.exit_code:
        raise HostUnreachableError(
            link.host, f"{clean(link.python)} cannot look at its ranks: {clean(done.error_text, LINE_LIMIT)}"
        )
    return done.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
