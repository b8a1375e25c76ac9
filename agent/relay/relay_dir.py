"""A relay's own directory, private and of one relay at a time, with the invitation for its agents.

    relay.lock            held (flock) for the relay's life
    invitation.json       what agents are to read; 0600
    reports.sock          the latest reports of all nodes; 0600
    nodes/NAME/control.sock   leads to the command socket of a node's agent: every verb that takes --dir takes this one

`Invitation` is the file by which agents find a relay and are let in: for the user alone, written by each relay when it
starts. It holds the secret half of the key with which all agents of one relay connect. A process that reads it can pose
as any node of this relay and do nothing else: the relay reports nothing to it, and what is asked of it reaches no other
agent.

`listening_place` is the address of this machine on which a relay listens: one that the user names, never all of them.

`expected_nodes` is what a Slurm allocation shows to its programs. Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import stat
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from agent.errors import OperatorError, StateDirError
from agent.files import open_regular
from agent.machine.host import outward_addresses
from agent.state_dir import check_socket_path, default_directory, make_private, take_lock
from agent.transport.command_socket import listen_at
from agent.transport.relay_sockets import KeyPair
from agent.wire.codec import (
    CONTROL_SOCKET,
    REPORTS_SOCKET,
    Port,
    PublicKey,
)
from agent.wire.relay import INVITATION_FILE, NODES_DIR, RELAY_VERSION
from ddpcore.wire import DECODE_ERRORS, Name

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCK_FILE = "relay.lock"
RELAY_DIR = "relay"


def default_relay_directory(environ: Mapping[str, str], hostname: str) -> Path:
    """Return where a relay of this user lives on this host: beside what an agent there has; raises as that."""
    return default_directory(environ, hostname) / RELAY_DIR


class RelayDir:
    """The directory, from `open` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow a planted link
        self._lock_fd = -1

    @property
    def invitation(self) -> Path:
        """What agents are to read."""
        return self.path / INVITATION_FILE

    def open(self) -> None:
        """Make it, lock it, and clear what a killed relay has left.

        Raises:
            StateDirError: It is not safe to use.
            AgentRunningError: Another relay serves there.
        """
        check_socket_path(self.path / NODES_DIR / "n" / CONTROL_SOCKET)
        make_private(self.path)
        in_use = f"another relay serves in {self.path}: end it or use another directory"
        self._lock_fd = take_lock(self.path / LOCK_FILE, in_use)
        self._clear()
        make_private(self.path / NODES_DIR)

    def listen_for(self, node: str) -> socket.socket:
        """Return a listener for whoever wants to speak to a node's agent.

        Raises:
            OSError: It cannot be bound: too many files are open.
            StateDirError: The path is too long, or not ours.
        """
        directory = self.path / NODES_DIR / node
        check_socket_path(directory / CONTROL_SOCKET)
        make_private(directory)
        self.forget(node)
        return listen_at(str(directory / CONTROL_SOCKET))

    def forget(self, node: str) -> None:
        """Let nobody come in for a node that is gone."""
        with contextlib.suppress(OSError):
            (self.path / NODES_DIR / node / CONTROL_SOCKET).unlink(missing_ok=True)

    def remove(self, node: str) -> None:
        """Leave nothing of a node."""
        shutil.rmtree(self.path / NODES_DIR / node, ignore_errors=True)

    def close(self) -> None:
        """Let go of it, and leave nothing of it but the directory."""
        if self._lock_fd < 0:
            return
        self._clear()
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _clear(self) -> None:
        self.invitation.unlink(missing_ok=True)
        (self.path / REPORTS_SOCKET).unlink(missing_ok=True)
        shutil.rmtree(self.path / NODES_DIR, ignore_errors=True)


MAX_INVITATION_BYTES = 4096


class Invitation(msgspec.Struct, frozen=True):
    """Where a relay listens, and what it is to be shown."""

    address: Name
    port: Port
    relay_key: PublicKey
    node_key: PublicKey
    node_secret: PublicKey
    relay: Name
    """Random name of its process."""
    version: int = RELAY_VERSION

    @property
    def key(self) -> KeyPair:
        """What an agent knocks with."""
        return KeyPair(self.node_key, self.node_secret.encode())

    def __repr__(self) -> str:
        return f"Invitation({self.address} port {self.port})"


def write_invitation(path: Path, invitation: Invitation) -> None:
    """Write it, in the place of an older one: whoever reads finds one of them, whole.

    Raises:
        OSError: It cannot be written.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            os.write(fd, msgspec.json.encode(invitation) + b"\n")
            os.fsync(fd)
        finally:
            os.close(fd)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def read_invitation(path: Path) -> Invitation | None:
    """Return what is written there; None while nothing is.

    Raises:
        StateDirError: It is not ours alone, or nothing that a relay writes.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateDirError(f"the invitation {path} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise StateDirError(f"the invitation {path} belongs to user {found.st_uid}, this is user {os.geteuid()}")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise StateDirError(f"the invitation {path} has mode {mode:04o}, so others have it: start the relay again")
        written = os.read(fd, MAX_INVITATION_BYTES)
    finally:
        os.close(fd)
    try:
        invitation = msgspec.json.decode(written, type=Invitation)
    except DECODE_ERRORS as error:
        raise StateDirError(f"{path} is no invitation of a relay: {error}") from error
    if invitation.version != RELAY_VERSION:
        raise StateDirError(
            f"the relay of {path} speaks version {invitation.version}, this agent {RELAY_VERSION}: "
            "install the same rankdeck on both"
        )
    return invitation


_PLACE = re.compile(r"(?:\[(?P<bracketed>[^\]]*)\]|(?P<plain>[^:\[\]]*))(?::(?P<port>[0-9]{1,5}))?")
MAX_PORT = 65_535


def listening_place(text: str) -> tuple[str, int]:
    """Return the address and the port, 0 for a free one, that `INTERFACE_OR_ADDRESS[:PORT]` means here.

    Raises:
        OperatorError: It means nothing here, or all addresses.
    """
    try:
        place, port = str(IPv6Address(text)), ""
    except ValueError:
        match = _PLACE.fullmatch(text)
        if match is None or int(match["port"] or 0) > MAX_PORT:
            raise OperatorError(f"--listen {text!r} is no INTERFACE_OR_ADDRESS[:PORT]") from None
        place, port = match["bracketed"] or match["plain"] or "", match["port"] or ""
    own = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
    try:
        parsed = ip_address(place)
    except ValueError:
        return _of_interface(place), int(port or 0)
    if parsed.is_unspecified:
        raise OperatorError(f"--listen {place} would be every network of this machine: {_what_there_is()}")
    if str(parsed) not in own and not parsed.is_loopback:
        raise OperatorError(f"--listen {place}: this machine has no such address: {_what_there_is()}")
    return str(parsed), int(port or 0)


def _of_interface(name: str) -> str:
    families = (socket.AF_INET, socket.AF_INET6)
    of_name = psutil.net_if_addrs().get(name, [])
    found = sorted((address.family, address.address) for address in of_name if address.family in families)
    fit = [address for _, address in found if not ip_address(address).is_link_local]
    if not fit:
        raise OperatorError(f"--listen {name}: no such interface with an address here: {_what_there_is()}")
    return fit[0]


def _what_there_is() -> str:
    there = [f"{one.interface} ({one.address})" for one in outward_addresses()]
    return f"name one of {', '.join(there)}" if there else "it has none that others could reach"


NUM_NODES_VARIABLE = "SLURM_JOB_NUM_NODES"
MAX_NUMBER = 10**6


def expected_nodes(environ: Mapping[str, str]) -> int:
    """Return of how many nodes an allocation is; 0 where there is none."""
    text = environ.get(NUM_NODES_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() and int(text) <= MAX_NUMBER else 0
