"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import NamedTuple

_UCRED = struct.Struct("=iII")


class Peer(NamedTuple):
    """The process that connected; one that it hands the connection to goes by its name."""

    pid: int
    """0 when it is of a PID namespace that is not seen from here."""
    uid: int
    process: str
    """What it calls itself, 15 bytes of its own choice: `sshd` for a console over SSH. Empty when it is gone."""


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected. Source: unix(7), SO_PEERCRED; proc_pid_comm(5)."""
    pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        process = Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n").decode(errors="replace")
    except OSError:
        process = ""
    return Peer(pid, uid, process)
