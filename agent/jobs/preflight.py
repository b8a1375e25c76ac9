"""Checks what `Prepare` needs before anything runs: a job that passes here starts on all nodes, not on half of them.

`check_files`, `check_metrics` and `reserve_port` check this node. `resolve`, `refusal_by_network` and `interface_to`
check the route from this node to where a job's store listens: its address, whether the route leads there, over which
interface.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agent.errors import MetricPatternError, StateDirError
from agent.logs.line_metrics import LineMetrics
from agent.machine.host import interface_of
from agent.processes.shim_process import is_shim_alive
from agent.state_dir import check_socket_path
from agent.wire.commands import RefusalReason, Refused
from agent.wire.secret_mask import masked_argv

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.slow_reader import TimedReads
    from agent.wire.jobs import JobSpec

Address = tuple[int, str]
"""Address family and host."""

CONNECT_S = 3.0
"""Two lost SYNs; a console waits ten seconds for the whole answer, and what is prepared later nobody takes back."""
RESOLVE_S = 6.0
"""Seconds for a name: glibc asks the next name server after 5 s. Source: resolv.conf(5), timeout."""


async def resolve(host: str) -> Address | Refused:
    """Return the address that a job's store is to listen on."""
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except TimeoutError:
        why = f"{host} was not resolved in {RESOLVE_S:.0f} s: a name server does not answer this node"
        return Refused(RefusalReason.BAD_ADDRESS, why)
    except (OSError, UnicodeError):
        return Refused(RefusalReason.BAD_ADDRESS, f"{host} is not a name or address that this node knows")
    family, _, _, _, (address, *_) = found[0]
    return family, str(address)


async def refusal_by_network(address: Address, port: int) -> Refused | None:
    """Return why this node cannot connect to a store that listens elsewhere; None if it can.

    The listener sees a connection that sends nothing and ends, which torch's store tolerates.
    """
    host = address[1]
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        why = f"no answer in {CONNECT_S:.0f} s"
    except OSError as error:
        why = error.strerror or str(error)
    else:
        return None
    todo = "let the nodes reach each other on every TCP port, or name another address of the first one: --master-addr"
    return Refused(RefusalReason.UNREACHABLE, f"no way from here to {host} port {port}, the first node: {why}; {todo}")


def local_address(peer: Address) -> str:
    """Return the address from which this node reaches `peer`; nothing is sent. Raises OSError without a route."""
    family, host = peer
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as udp_socket:
        udp_socket.connect((host, 9))
        return str(udp_socket.getsockname()[0])


def interface_to(peer: Address) -> str:
    """Return the interface over which this node reaches `peer`, empty if none has that address; raises OSError."""
    return interface_of(local_address(peer))


LOOK_S = 5.0
"""Seconds for a look at a job's own files: what waits for a network disk without its server waits for ever."""
MIN_FREE_BYTES = 16 * 2**20
"""Bytes for the logs of a job's first minutes."""
STORE_BACKLOG = 4096
"""Connections that may wait before the store begins to answer: one of each other node."""
_MAX_HOLDER_CHARS = 200
UNKNOWN_HOLDER = "a process of another user or container"


async def check_files(spec: JobSpec, reads: TimedReads) -> Refused | None:
    """Return why the job's own files are not fit to run, or do not answer; None if they are."""
    looked_at = [spec.workdir]
    try:
        return await reads.read((spec.workdir, spec.python), lambda: _unfit_file(spec, looked_at.append), LOOK_S)
    except TimeoutError:
        why = f"{looked_at[-1]} does not answer after {LOOK_S:.0f} s: see dmesg there, a disk may have lost its server"
    except OSError as error:
        why = f"{looked_at[-1]} cannot be looked at: {error.strerror}"
    return Refused(RefusalReason.NO_WORKDIR, why)


def _unfit_file(spec: JobSpec, note: Callable[[str], None]) -> Refused | None:
    workdir = Path(spec.workdir)
    if not workdir.is_dir() or not os.access(workdir, os.R_OK | os.X_OK):
        return Refused(
            RefusalReason.NO_WORKDIR, f"{spec.workdir} is not a directory that can be entered: create it there"
        )
    note(spec.python)
    if shutil.which(spec.python) is None:
        return Refused(
            RefusalReason.NO_INTERPRETER, f"{spec.python} is not an executable: name the Python of this node"
        )
    note(spec.workdir)
    script = spec.command[0]
    if not script.startswith("-") and not (workdir / script).is_file():
        return Refused(RefusalReason.NO_SCRIPT, f"{script} is not a file (seen from {spec.workdir})")
    return None


def check_metrics(spec: JobSpec) -> Refused | None:
    """Return why the patterns for figures in lines are of no use; None if they are."""
    try:
        LineMetrics(spec.metrics)
    except MetricPatternError as error:
        return Refused(RefusalReason.MALFORMED, str(error)[:4096])
    return None


def check_kept(path: Path) -> Refused | None:
    """Return why an attempt may not have this directory: a later one of its job's name is kept beside it, or None."""
    is_later = any(int(kept.name) > int(path.name) for kept in _kept_in(path.parent))
    return _kept_attempt(path) if is_later else None


def _kept_in(directory: Path) -> list[Path]:
    """Return the directories of the attempts that are kept of a job's name."""
    try:
        return [one for one in directory.iterdir() if one.name.isascii() and one.name.isdigit()]
    except OSError:
        return []  # whoever makes one there says why it cannot be


def make_job_dir(path: Path, last_rank: int) -> Refused | None:
    """Make the directory of one attempt, 0700; return why not, or None."""
    try:
        check_socket_path(path / f"rank-{last_rank}.sock")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        free_bytes = shutil.disk_usage(path).free
    except StateDirError as error:
        return Refused(RefusalReason.MALFORMED, f"the job id is too long for this agent: {error}")
    except FileExistsError:
        return _kept_attempt(path)
    except OSError as error:
        return Refused(RefusalReason.NO_SPACE, f"cannot make {path}: {error.strerror}")
    if free_bytes < MIN_FREE_BYTES:
        path.rmdir()
        return Refused(
            RefusalReason.NO_SPACE,
            f"{free_bytes >> 20} MiB are free at {path}, logs want {MIN_FREE_BYTES >> 20}: make room",
        )
    return None


def _kept_attempt(path: Path) -> Refused:
    """Return the refusal of an attempt that has a directory: with the one after them all, unless one still runs."""
    kept = _kept_in(path.parent)
    latest = max(kept, key=lambda one: int(one.name))
    if any(map(is_shim_alive, kept)):
        text = f"{latest} exists, and an attempt unknown to this agent still runs: end it, or choose another job id"
        return Refused(RefusalReason.JOB_EXISTS, text)
    free = 1 + int(latest.name)
    return Refused(RefusalReason.JOB_EXISTS, f"{latest} exists already: choose attempt {free}, or another job id", free)


async def find_store(spec: JobSpec) -> Address | Refused:
    """Return the address of a job's store; on every node but the first, once it was seen to listen there."""
    address = await resolve(spec.master_addr)
    if isinstance(address, Refused) or not spec.node_rank or not spec.master_port:
        return address
    return await refusal_by_network(address, spec.master_port) or address


def reserve(job_dir: Path, last_rank: int, address: Address | None, port: int) -> socket.socket | Refused | None:
    """Make the directory of one attempt and take its port; return what holds the port, or why nothing was reserved.

    `last_rank` is this node's. `address` is where the job's store is to listen, None if that is another node's; `port`
    0 is a free one.
    """
    port_holder = reserve_port(address, port) if address else None
    if isinstance(port_holder, Refused):
        return port_holder
    if refused := make_job_dir(job_dir, last_rank):
        if port_holder:
            port_holder.close()
        return refused
    return port_holder


def reserve_port(address: Address, port: int) -> socket.socket | Refused:
    """Return a socket that listens on `port` (0: a free one) for the job's store, or why there is none.

    Torch binds every interface when it binds by itself; this socket is bound to one address, and nobody can take the
    port between the check and the start.
    """
    try:
        return _listen_at(address, port)
    except OSError as error:
        return _no_port(error, address[1], port)


def _listen_at(address: Address, port: int) -> socket.socket:
    family, host = address
    server_socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind((host, port))
        server_socket.listen(STORE_BACKLOG)
    except OSError:
        server_socket.close()
        raise
    return server_socket


def _no_port(error: OSError, host: str, port: int) -> Refused:
    match error.errno:
        case errno.EADDRINUSE:
            message = f"port {port} of {host} is taken by {holder_of(port)}: end it, or let the agent choose a port"
            return Refused(RefusalReason.PORT_TAKEN, message)
        case errno.EACCES:
            return Refused(
                RefusalReason.NOT_PERMITTED, f"port {port} needs more rights than this agent has: use one above 1023"
            )
        case _:
            message = f"cannot listen on {host}: {error.strerror}: give an address of the first node"
            return Refused(RefusalReason.BAD_ADDRESS, message)


def holder_of(port: int, if_free: str = UNKNOWN_HOLDER) -> str:
    """Return the process that listens on a port, as far as this user may know.

    It takes long where many processes run: each of them is looked through.
    """
    found = if_free
    try:
        for connection in psutil.net_connections("tcp"):
            is_on_port = connection.laddr and connection.laddr.port == port
            if connection.status != psutil.CONN_LISTEN or not is_on_port:
                continue
            if connection.pid:
                command = " ".join(" ".join(masked_argv(psutil.Process(connection.pid).cmdline())).split())
                return f"pid {connection.pid} ({command[:_MAX_HOLDER_CHARS]})"
            found = UNKNOWN_HOLDER
    except (psutil.Error, OSError):
        return "a process that cannot be looked at"
    return found
