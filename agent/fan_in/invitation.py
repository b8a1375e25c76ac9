"""The file by which agents find a relay and are let in: for the user alone, written anew by each relay.

It holds the secret half of the key that all agents of one relay knock with. Who can read it may call himself any node
of this relay; nothing else: he is told nothing, and what is asked of him reaches no other agent.
"""

from __future__ import annotations

import os
import secrets
import stat
from typing import TYPE_CHECKING

import msgspec

from agent.errors import StateDirError
from agent.regular_file import open_regular
from agent.roads.curve import KeyPair
from agent.wire.fan_in import RELAY_VERSION
from agent.wire.fields import Port, PublicKey  # noqa: TC001 - msgspec looks at the annotations
from ddpcore.wire import DECODE_ERRORS, Name

if TYPE_CHECKING:
    from pathlib import Path

MAX_INVITATION_BYTES = 4096


class Invitation(msgspec.Struct, frozen=True):
    """Where a relay listens, and what it is to be shown."""

    address: Name
    port: Port
    relay_key: PublicKey
    node_key: PublicKey
    node_secret: PublicKey
    relay: Name
    """Of its process."""
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
