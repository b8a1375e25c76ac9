"""Who is at the other end of a Unix socket, as the kernel says."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_UCRED = struct.Struct("=iII")
_ROAD = b"\0rankdeck-road "
_MAX_ADDRESS_BYTES = 107
"""Of `sun_path`, its closing zero aside. Source: unix(7)."""


class Peer(NamedTuple):
    """The process that connected; one that it hands the connection to goes by its name."""

    pid: int
    """0 when it is of a PID namespace that is not seen from here."""
    uid: int
    process: str
    """What it calls itself, 15 bytes of its own choice: `sshd` for a console over SSH. Empty when it is gone."""
    road: str = ""
    """By which it has come, and for whom, where this process itself has connected for somebody: see `road_address`."""


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected. Source: unix(7), SO_PEERCRED; proc_pid_comm(5)."""
    pid, uid, _gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        process = Path(f"/proc/{pid}/comm").read_bytes().removesuffix(b"\n").decode(errors="replace")
    except OSError:
        process = ""
    return Peer(pid, uid, process, _road_of(connection) if pid == os.getpid() else "")


def road_address(road: str) -> bytes:
    """Return an address that a socket of this process binds before it connects to this process: it says for whom.

    It is one of the abstract kind, which leaves no file, and no other process can borrow it: only of our own process
    is it believed.
    """
    head = _ROAD + secrets.token_hex(8).encode() + b" "
    return head + road.encode()[: _MAX_ADDRESS_BYTES - len(head)]


def _road_of(connection: socket.socket) -> str:
    address = connection.getpeername()
    if not isinstance(address, bytes) or not address.startswith(_ROAD):
        return ""
    return address.removeprefix(_ROAD).partition(b" ")[2].decode(errors="replace")
