"""What `Prepare` checks before anything runs: what is refused here would be a cluster that starts by half."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agent.errors import MetricPatternError, StateDirError
from agent.jobs.network_path import refusal_by_network, resolve
from agent.logs.line_metrics import LineMetrics
from agent.state_dir import check_socket_path
from agent.wire.replies import RefusalReason, Refused
from agent.wire.secret_mask import masked_argv

if TYPE_CHECKING:
    from agent.jobs.network_path import Address
    from agent.wire.jobs import JobSpec

MIN_FREE_BYTES = 16 * 2**20
"""For the logs of a job's first minutes."""
STORE_BACKLOG = 4096
"""Each other node has knocked before the store begins to answer."""
_MAX_HOLDER_CHARS = 200
UNKNOWN_HOLDER = "a process of another user or container"


def check_files(spec: JobSpec) -> Refused | None:
    """Return why the job's own files are not fit to run; None if they are."""
    workdir = Path(spec.workdir)
    if not workdir.is_dir() or not os.access(workdir, os.R_OK | os.X_OK):
        return Refused(
            RefusalReason.NO_WORKDIR, f"{spec.workdir} is not a directory that can be entered: create it here"
        )
    if shutil.which(spec.python) is None:
        return Refused(
            RefusalReason.NO_INTERPRETER, f"{spec.python} is not an executable: name the Python of this node"
        )
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
        return Refused(RefusalReason.JOB_EXISTS, f"{path} exists already: choose a higher attempt, or another job id")
    except OSError as error:
        return Refused(RefusalReason.NO_SPACE, f"cannot make {path}: {error.strerror}")
    if free_bytes < MIN_FREE_BYTES:
        path.rmdir()
        return Refused(
            RefusalReason.NO_SPACE,
            f"{free_bytes >> 20} MiB are free at {path}, logs want {MIN_FREE_BYTES >> 20}: make room",
        )
    return None


async def find_store(spec: JobSpec) -> Address | Refused:
    """Return the address of a job's store; on every node but the first, once it was seen to listen there."""
    address = await resolve(spec.master_addr)
    if isinstance(address, Refused) or not spec.node_rank or not spec.master_port:
        return address
    return await refusal_by_network(address, spec.master_port) or address


def reserve(job_dir: Path, last_rank: int, address: Address | None, port: int) -> socket.socket | Refused | None:
    """Make the directory of one attempt and take its port; return what holds the port, or why nothing was reserved.

    Args:
        job_dir: Must not exist yet.
        last_rank: Of this node.
        address: Where the job's store is to listen, None if that is another node's.
        port: 0 is a free one.
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
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(STORE_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


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

    Args:
        port: Its number.
        if_free: What to return where nobody is seen to listen.
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
