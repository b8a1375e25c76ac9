"""Looks at the ranks of hosts from outside: runs `app.inspect.on_host` there, with py-spy where it is needed.

A host without py-spy gets this machine's for as long as the looks last: one static binary, checked by its digest there.
Everything blocks, within bounds.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
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
from app.ssh.remote_command import TOO_OLD, python_command
from app.text import LINE_LIMIT, clean, clean_name, nodes_text
from app.threads import run_parallel
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.fleet.agent_link import AgentLink
    from app.ssh.io_thread import ByteChannel

Seen = TypeVar("Seen", bound=msgspec.Struct)

BEGIN_S = 60.0
"""Seconds for a Python to start there and to find the ranks, on a busy machine."""
SLOWEST_BYTES_HZ = 50_000
MAX_SEEN_BYTES = 1 << 26
OLDEST = (3, 9)
"""Python of what runs on a host."""
LOOK_PERIOD_S = 1.5
"""Seconds between two looks of `HostLooks`: rows older than two seconds are shown as old."""
_BEGIN = b"eJ"
"""First characters of a line of `on_host.show`: zlib's header."""
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
    there, binary = _spy_there(link, spy)
    seen = _seen_by(link, there, num_looks, period_s, binary)
    on_gpus = [rank for rank in seen.ranks if rank.uses_gpu]
    if not on_gpus:
        return seen
    asked = [str(rank.pid) for rank in on_gpus if asks_nccl and rank.rank == 0]
    argv = (sources.getsource(gpus_on_host), str(min(rank.age_s for rank in on_gpus)), *asked)
    try:
        gpus = _decoded(link.host, last_line(link, *argv), GpusSeen)
    except HostUnreachableError as error:
        unseen = SmiSeen("", str(error)[:MAX_TROUBLE])
        gpus = GpusSeen(unseen, unseen)
    return msgspec.structs.replace(seen, gpus=gpus)


class HostLooks:
    """Looks at a host again and again, by one process there; `run` blocks a thread, `close` ends it from another."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link
        self._channel: ByteChannel | None = None
        self._is_closed = False

    def run(self, take: Callable[[HostSeen], object]) -> None:
        """Call `take` with what each look has shown, until closed.

        Raises:
            HostUnreachableError: As `look_at_host`.
            SessionError: As `own_py_spy`.
        """
        host = self._link.host
        there, binary = _spy_there(self._link, own_py_spy())
        command, source = python_command(sources.getsource(on_host), there, "2", str(LOOK_PERIOD_S), "again")
        with contextlib.closing(self._link.open_python(["-I", *command])) as channel:
            self._channel = channel
            if self._is_closed:
                return
            try:
                channel.sendall(source + binary)
                channel.shutdown_write()
                for line in _lines_of(channel):
                    take(_decoded(host, line, HostSeen))
            except (OSError, EOFError) as error:
                if not self._is_closed:
                    raise HostUnreachableError(host, f"its looks broke off: {clean(str(error))}") from error
        if not self._is_closed:
            look_at_host(self._link, own_py_spy(), 1, 0.0)  # it names what is wrong there, if that goes on
            raise HostUnreachableError(host, f"{clean(self._link.python)} there looks no longer")

    def close(self) -> None:
        """End the looks; what runs there ends with its next one. Safe to call twice."""
        self._is_closed = True
        if self._channel is not None:
            with contextlib.suppress(OSError, EOFError):
                self._channel.close()


def _lines_of(channel: ByteChannel) -> Iterator[bytes]:
    """Yield the lines of `on_host.show`, without those that a login shell prints before."""
    buffer = bytearray()
    while piece := channel.recv(1 << 16):
        buffer += piece
        if len(buffer) > MAX_SEEN_BYTES:
            raise OSError("a line is too long")
        *lines, rest = buffer.split(b"\n")
        buffer = bytearray(rest)
        yield from (bytes(line) for line in lines if line.startswith(_BEGIN))


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
    return f"{what} of other launchers, {ranks} on {nodes_text(names)}"


def _seen_by(link: AgentLink, there: str, num_looks: int, period_s: float, binary: bytes = b"") -> HostSeen:
    """Return what a host shows; `there` and `binary` are the arguments and the input of `on_host.spy_of`."""
    arguments = (sources.getsource(on_host), there, str(num_looks), str(period_s))
    timeout_s = BEGIN_S + num_looks * (period_s + BEGIN_S) + len(binary) / SLOWEST_BYTES_HZ
    return _decoded(link.host, last_line(link, *arguments, given=binary, timeout_s=timeout_s), HostSeen)


def _decoded(host: str, line: bytes | str, kind: type[Seen]) -> Seen:
    """Return what a line of `on_host.show`, or of `gpus_on_host`, holds."""
    try:
        unpacked = zlib.decompressobj().decompress(base64.b64decode(line, validate=True), MAX_SEEN_BYTES)
        return msgspec.json.decode(unpacked, type=kind)
    except (*DECODE_ERRORS, binascii.Error, zlib.error) as error:
        raise HostUnreachableError(host, f"its Python answers something else: {clean(str(error))}") from error


def _spy_there(link: AgentLink, spy: str) -> tuple[str, bytes]:
    """Return the arguments of `_seen_by` for a host; see `_spy_for`."""
    return (spy, b"") if link.host == THIS_MACHINE else _spy_for(link, spy)


def _spy_for(link: AgentLink, spy: str) -> tuple[str, bytes]:
    """Return the host's py-spy, or the digest of this machine's, and that one's bytes."""
    system, _, rest = last_line(link, _FIND_SPY.format(sources.getsource(py_spy_here))).partition(" ")
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


def last_line(link: AgentLink, program: str, *arguments: str, given: bytes = b"", timeout_s: float = BEGIN_S) -> str:
    """Return the last line that a program prints there; -I: no module of the directory that a login begins in."""
    command, source = python_command(program, *arguments, oldest=OLDEST)
    done = link.run_python(["-I", *command], timeout_s, source + given)
    if done.exit_code and TOO_OLD in done.error_text:
        version = clean_name(done.error_text.partition(TOO_OLD)[2])
        detail = f"its {clean(link.python)} is {version}, and inspect needs {'.'.join(map(str, OLDEST))} or newer"
        raise HostUnreachableError(link.host, detail, "name a newer one: --python")
    if done.exit_code:
        raise HostUnreachableError(
            link.host, f"its {clean(link.python)} ends with an error: {clean(done.error_text, LINE_LIMIT)}"
        )
    return done.stdout.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
