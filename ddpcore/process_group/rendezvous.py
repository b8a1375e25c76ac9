"""Connects this rank to the store in which all ranks meet: torch's own rendezvous, bounded, with errors that give why.

`open_store` opens the store for a world of -1: rank 0 then does not wait in it for a number of clients, of whom it
could only report how many there were. The join check (`ddpcore.process_group.join_check`) waits, and knows who.

`check_rendezvous_file` looks at the file of a file:// rendezvous before torch opens it. Torch's FileStore takes any
file for its own: on a text file, one that a killed process has left half-written, or in a directory that is not there,
it waits for minutes with the interpreter's lock held (torch 2.13), and appends to what it has not understood.

Source: torch/csrc/distributed/c10d/FileStore.cpp (2.13): a log of (length, key, length, value), lengths 4 or 8 bytes of
the machine's order, each operation under flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.rendezvous import rendezvous

from ddpcore.errors import ContradictoryLaunchError, MasterUnreachableError, PortInUseError, StaleRendezvousError
from ddpcore.process_group.machine import is_own, port_holder, trouble_with
from ddpcore.process_group.rendezvous_spec import Scheme

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from ddpcore.process_group.rendezvous_spec import RendezvousSpec

CONNECT_SLACK_S = 1.0
"""Seconds beyond the time-out, for torch's own error to come first."""

_own_stores: dict[tuple[str, int], Store] = {}
"""Stores that this process hosts, for as long as it lives: another rank may still look into one, and a group that is
opened at the same place again finds the same store on all ranks."""


def open_store(spec: RendezvousSpec, timeout_s: float) -> Store:
    """Return the store; blocks until it is reached, at most `timeout_s` and a second or two to find out why not.

    Raises ContradictoryLaunchError or StaleRendezvousError for a rendezvous file that is none or half-written,
    PortInUseError if another process listens on rank 0's port, MasterUnreachableError.
    """
    if spec.scheme is Scheme.FILE:
        check_rendezvous_file(spec.path)
    attempt = _Attempt(spec.url, timeout_s)
    attempt.start()
    attempt.join(timeout_s + CONNECT_SLACK_S)
    if attempt.store is None:
        raise _unreachable(spec, timeout_s, attempt.error)
    if spec.hosts_store:
        _own_stores.setdefault((spec.master_addr, spec.master_port), attempt.store)
    return attempt.store


class _Attempt(threading.Thread):
    """Torch's rendezvous in a thread: connected to something that is no store, it waits for ever (torch 2.13)."""

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(name="rankdeck-rendezvous", daemon=True)
        self._url = url
        self._timeout = timedelta(seconds=timeout_s)
        self.store: Store | None = None
        self.error: RuntimeError | ValueError | None = None

    def run(self) -> None:
        """Keep the store or the error."""
        try:
            self.store, _, _ = next(rendezvous(self._url, timeout=self._timeout))
        except (RuntimeError, ValueError) as error:
            self.error = error


def _unreachable(spec: RendezvousSpec, timeout_s: float, error: Exception | None) -> Exception:
    host, port = spec.master_addr, spec.master_port
    message = str(error).partition("\n")[0] if error is not None else ""
    if spec.scheme is Scheme.FILE:
        return MasterUnreachableError(f"{spec.where} cannot be opened: {message or f'no answer in {timeout_s:g} s'}")
    if spec.hosts_store and "EADDRINUSE" in message:
        holder = port_holder(port) or "a process that cannot be seen from here"
        return PortInUseError(
            f"rank 0 cannot listen on port {port} of {socket.gethostname()}, where {holder} listens: end that, or "
            "give all ranks another port"
        )
    trouble = trouble_with(host, port)
    if spec.hosts_store:
        if not is_own(host):
            trouble = f"{trouble}. {host} is not an address of {socket.gethostname()}, where rank 0 runs"
        who = "rank 0 cannot reach its own store"
    else:
        who = f"rank {spec.rank} on {socket.gethostname()} has not reached {_host_of(spec)}"
    return MasterUnreachableError(
        f"{who} at {spec.where} in {timeout_s:g} s: {trouble}. Start rank 0 on the host that {_origin_text(spec)}, and "
        f"see how it is doing{f' (torch: {message})' if message else ''}"
    )


def _host_of(spec: RendezvousSpec) -> str:
    return "torchrun's store" if spec.has_agent_store else "rank 0's store"


def _origin_text(spec: RendezvousSpec) -> str:
    if spec.is_by_slurm:
        return "Slurm's step lists first (MASTER_ADDR and MASTER_PORT name another)"
    return "init_method names" if spec.scheme is Scheme.TCP else "MASTER_ADDR and MASTER_PORT name"


LOCK_PATIENCE_S = 2.0
"""Seconds that a writer may hold the file: it takes microseconds."""

LOCK_POLL_S = 0.01

_KEY_STARTS = (b"/", b"-/", b"refcount/", b"cleanup/")
_LENGTHS = ("=I", "=Q")


def check_rendezvous_file(path: str) -> None:
    """Raise for a file that torch could not use; a file that does not exist yet is right.

    ContradictoryLaunchError: no such directory, no right to write, or a file that is something else.
    StaleRendezvousError: half-written.
    """
    directory = Path(path).parent
    if not directory.is_dir():
        raise ContradictoryLaunchError(
            f"file://{path}: there is no directory {directory} here: make it, on a file system that all ranks share"
        )
    try:
        status = Path(path).stat()
    except FileNotFoundError:
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ContradictoryLaunchError(
                f"file://{path}: {directory} is not writable: choose another directory that all ranks share"
            ) from None
        return
    except OSError as error:
        raise ContradictoryLaunchError(f"file://{path}: {error.strerror}: choose another path") from None
    if not stat.S_ISREG(status.st_mode):
        raise ContradictoryLaunchError(f"file://{path} is no file: name one that need not exist yet")
    if not os.access(path, os.R_OK | os.W_OK):
        raise ContradictoryLaunchError(
            f"file://{path} exists and is not writable: it is another user's; choose another path"
        )
    _check_content(path, _read(path))


def _check_content(path: str, content: bytes) -> None:
    results = [_read_log(content, length) for length in _LENGTHS]
    if None in results:
        return
    if any(results):
        raise StaleRendezvousError(
            f"file://{path} was left half-written by a process that has been killed: remove it (rm {path}) and start "
            "all ranks again"
        )
    raise ContradictoryLaunchError(
        f"file://{path} exists and is no rendezvous file: name one that need not exist yet, nothing else may be in it"
    )


def _read_log(content: bytes, length_format: str) -> bool | None:
    """Return None if this is a whole log, else whether it is the beginning of one."""
    size = struct.calcsize(length_format)
    position, num_keys = 0, 0
    while position < len(content):
        for is_key in (True, False):
            if position + size > len(content):
                return not is_key or num_keys > 0 or len(content) < size
            (length,) = struct.unpack_from(length_format, content, position)
            position += size
            text = content[position : position + length]
            is_cut = len(text) < length
            if is_key and not any(text.startswith(one) or (is_cut and one.startswith(text)) for one in _KEY_STARTS):
                return False
            if is_cut:
                return True
            position += length
        num_keys += 1
    return None


def _read(path: str) -> bytes:
    """Read the file under a lock, if that can be had: on some shared file systems it cannot."""
    with Path(path).open("rb") as file:
        deadline_s = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    break
                time.sleep(LOCK_POLL_S)
            except OSError:
                break
            else:
                break
        content = file.read()
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
    return content
