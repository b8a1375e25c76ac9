"""Whether a host would take a key that is still locked: nobody types a passphrase for nothing.

Source: RFC 4252, section 7: a request without a signature, and SSH_MSG_USERAUTH_PK_OK.
"""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import paramiko
from paramiko.auth_handler import AuthHandler

if TYPE_CHECKING:
    from app.ssh.transport import Transport

MAX_KEY_BYTES = 1 << 20
_REQUEST = bytes([50])
_MAGIC = b"openssh-key-v1\0"


class PublicPart(NamedTuple):
    """What is known of a key without its passphrase."""

    kind: str
    blob: bytes


def public_part(identity_file: str) -> PublicPart | None:
    """Return the public part of a key, from the file beside it or from its own; None if neither tells.

    Args:
        identity_file: A private key, or a public one whose private half only ssh-agent has.
    """
    for file in (f"{identity_file}.pub", identity_file):
        try:
            with Path(file).open("rb") as key:
                text = key.read(MAX_KEY_BYTES)
        except OSError:
            continue
        if part := _from_public_text(text) or _from_private_text(text):
            return part
    return None


def _from_public_text(text: bytes) -> PublicPart | None:
    fields = text.split(maxsplit=2)
    if len(fields) < 2 or text.startswith(b"-"):
        return None
    try:
        return PublicPart(fields[0].decode(errors="replace"), base64.b64decode(fields[1], validate=True))
    except ValueError:
        return None


def _from_private_text(text: bytes) -> PublicPart | None:
    """Read the beginning of a private key, which no passphrase hides.

    Source: OpenSSH PROTOCOL.key: cipher, its key's derivation and options, how many keys, the public part.
    """
    try:
        whole = base64.b64decode(b"".join(line for line in text.splitlines() if not line.startswith(b"-")))
    except ValueError:
        return None
    if not whole.startswith(_MAGIC):
        return None
    fields = paramiko.Message(whole.removeprefix(_MAGIC))
    for _ in range(3):
        fields.get_binary()
    fields.get_int()
    blob = fields.get_binary()
    kind = paramiko.Message(blob).get_binary()
    return PublicPart(kind.decode(errors="replace"), blob) if kind else None


class KeyQuery(AuthHandler):
    """One question to a host; paramiko knows only how to ask with a signature."""

    def __init__(self, transport: Transport, key: PublicPart) -> None:
        super().__init__(transport)
        self._send = transport.send_now
        self._key = key
        self._would_be_taken = False

    def ask(self, user: str, timeout_s: float) -> bool:
        """Return whether the key would let a user in.

        Raises:
            TimeoutError: The host does not say.
        """
        answered = threading.Event()
        with self.transport.lock:
            self.transport.auth_handler = self
            self.auth_event = answered
            self.auth_method = "publickey"
            self.username = user
            self._request_auth()  # type: ignore[attr-defined]
        if not answered.wait(timeout_s):
            raise TimeoutError
        return self._would_be_taken

    def _parse_service_accept(self, _: paramiko.Message) -> None:
        algorithm = "rsa-sha2-512" if self._key.kind == "ssh-rsa" else self._key.kind
        request = paramiko.Message()
        request.add_byte(_REQUEST)
        for text in (self.username or "", "ssh-connection", "publickey"):
            request.add_string(text)
        request.add_boolean(b=False)
        request.add_string(algorithm)
        request.add_string(self._key.blob)
        self._send(request)

    def _parse_userauth_info_request(self, _: paramiko.Message) -> None:
        """Take message 60, which says of a key that it would be taken."""
        self._would_be_taken = True
        if self.auth_event is not None:
            self.auth_event.set()
