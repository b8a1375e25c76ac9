"""The file of a file:// rendezvous, looked at before torch opens it.

Torch's FileStore takes any file for its own: on a text file, one that a killed process has left half-written, or in a
directory that is not there, it waits for minutes with the interpreter's lock held (torch 2.13), and appends to what it
has not understood.

Source: torch/csrc/distributed/c10d/FileStore.cpp (2.13): a log of (length, key, length, value), lengths 4 or 8 bytes of
the machine's order, each operation under flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import time
from pathlib import Path

from ddpcore.errors import ContradictoryLaunchError, StaleRendezvousError

LOCK_PATIENCE_S = 2.0
"""How long a writer may hold the file: it takes microseconds."""

LOCK_POLL_S = 0.01

_KEY_STARTS = (b"/", b"-/", b"refcount/", b"cleanup/")
_LENGTHS = ("=I", "=Q")


def check_rendezvous_file(path: str) -> None:
    """Refuse a file that torch could not use; one that is not there yet is well.

    Raises:
        ContradictoryLaunchError: No such directory, no right to write, or a file that is something else.
        StaleRendezvousError: Half-written.
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
            "all ranks anew"
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
    """Read the file while nobody writes, if that can be had: on some shared file systems it cannot."""
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
