"""Keys and their secrets: keys of ssh-agent, keys of files, and the secrets that a user has typed.

A secret stays in memory (`Keyring`) while the command runs, so that a lost connection can come back without a question;
it is in no file, log, record or error.

`KeyQuery` asks whether a host would accept a key that is still locked: no user types a passphrase needlessly.
Source: RFC 4252, section 7: a request without a signature, and SSH_MSG_USERAUTH_PK_OK.
"""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentKey, AgentSSH
from paramiko.auth_handler import AuthHandler
from paramiko.pkey import UnknownKeyType

from app.ssh.config import state_of
from app.ssh.questions import ANSWER_WITHIN_S
from app.ssh.transport import CHANNEL_ERRORS
from app.ssh.way import agent_socket
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.ssh.config import FileState, SshSettings
    from app.ssh.questions import Prompter
    from app.ssh.transport import Transport

AGENT_TIMEOUT_S = 10.0

Account = tuple[str, str]
"""A user, and the name that the host is known by."""


class KeyLockedError(Exception):
    """A key needs a passphrase, or another one."""


class KeyUnreadableError(Exception):
    """A file holds no usable key; a FIDO key, with which only ssh-agent can sign, is one."""


class Keyring:
    """Keys and secrets, shared by all hosts of one command; each passphrase is asked for once.

    Attributes:
        prompter: Asks the user.
    """

    def __init__(self, prompter: Prompter) -> None:
        self.prompter = prompter
        self._lock = threading.Lock()
        self._unlocked: dict[str, paramiko.PKey] = {}
        self._open: dict[str, tuple[FileState, paramiko.PKey]] = {}
        self._left_locked: set[str] = set()
        self._passwords: dict[Account, str | None] = {}
        self._asked_again: set[Account] = set()

    def key_of(self, file: str) -> paramiko.PKey:
        """Return the key of a file that needs no passphrase, or is unlocked.

        Raises:
            KeyLockedError: It needs one.
            KeyUnreadableError: There is no key.
        """
        if file in self._unlocked:
            return self._unlocked[file]
        state, (known, key) = state_of(file), self._open.get(file, (None, None))
        if key is None or known != state:
            key = _load(file, None)
            if state.is_settled:
                self._open[file] = (state, key)
        return key

    def unlock(self, file: str, host: str, num_prompts: int) -> paramiko.PKey | None:
        """Return the key of a file, once a user has typed its passphrase; None if they have not.

        Args:
            file: Path of the key.
            host: The host that wants it.
            num_prompts: Limit of prompts.
        """
        question = f"Passphrase of the key {clean(file, LINE_LIMIT)} (for {host}): "
        with self._lock:
            if file in self._left_locked:
                return None
            for _ in range(num_prompts if file not in self._unlocked else 0):
                answer = self.prompter.ask(question)
                if not answer:
                    break
                with contextlib.suppress(KeyLockedError, KeyUnreadableError):
                    self._unlocked[file] = _load(file, answer)
                    break
                self.prompter.show("That does not open it.")
            if file not in self._unlocked:
                self._left_locked.add(file)
            return self._unlocked.get(file)

    def forget_refusals(self) -> None:
        """Allow passphrases that were not given to be asked for again."""
        with self._lock:
            self._left_locked.clear()

    def password_of(self, account: Account) -> str | None:
        """Return the password that was accepted before."""
        return self._passwords.get(account)

    def set_password(self, account: Account, password: str | None) -> None:
        """Keep a password that was accepted, or forget it: None."""
        self._passwords[account] = password

    def has_asked_user(self, account: Account) -> bool:
        """Return whether a login has needed a user's answer before, so that keys alone are not enough."""
        return account in self._passwords or account in self._asked_again

    def is_asked_again(self, account: Account) -> bool:
        """Return whether a host wants new answers of a user at each login."""
        return account in self._asked_again

    def set_asked_again(self, account: Account) -> None:
        """Remember that a host has accepted answers that are valid once."""
        self._asked_again.add(account)


def _load(file: str, passphrase: str | None) -> paramiko.PKey:
    try:
        password = None if passphrase is None else passphrase.encode(errors="replace")
        return paramiko.PKey.from_path(file, password)  # type: ignore[arg-type] # what reads the key wants bytes
    except (paramiko.PasswordRequiredException, TypeError):  # a TypeError is `from_path`'s error for a locked key
        raise KeyLockedError from None
    except (OSError, ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm):
        # Without its cause, whose text could contain a passphrase.
        raise KeyUnreadableError from None


@contextlib.contextmanager
def agent_keys(settings: SshSettings) -> Iterator[list[AgentKey]]:
    """Lend the agent's keys: those that an identity file names, in that order, then others unless IdentitiesOnly.

    A host hangs up after a few keys. Source: sshd_config(5), MaxAuthTries; OpenSSH sshconnect2.c, pubkey_prepare.
    """
    path = agent_socket(settings, os.environ)
    if not path:
        yield []
        return
    agent = _Agent(path)
    try:
        keys = list(agent.get_keys())
        wanted = [public_part(file) for file in settings.identity_files]
        named = [key for part in dict.fromkeys(wanted) for key in keys if public_part_of(key) == part]
        others = [] if settings.identities_only else [key for key in keys if public_part_of(key) not in wanted]
        yield named + others
    finally:
        agent.close()


class _Agent(AgentSSH):
    """The ssh-agent at a socket, where paramiko's own only reads SSH_AUTH_SOCK; without keys if none answers."""

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(ANSWER_WITHIN_S if _signing else AGENT_TIMEOUT_S)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except CHANNEL_ERRORS:
            connection.close()
            return
        connection.settimeout(None)  # a user may have to confirm a signature: the login has a limit of its own

    def close(self) -> None:
        if (connection := self._conn) is not None:  # type: ignore[attr-defined]
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes up a thread that waits for a signature
        self._close()  # type: ignore[attr-defined]

    def _send_message(self, message: object) -> tuple[int, paramiko.Message]:
        if self.get_keys():  # else it asks for these
            _signing.add(self)
        try:
            return super()._send_message(message)  # type: ignore[misc,no-any-return]
        finally:
            _signing.discard(self)


_signing: set[AgentSSH] = set()
"""Agents whose signature is awaited; a user may have to touch a key or confirm, and ssh-agent serves nobody else."""


def is_signing(key: AgentKey) -> bool:
    """Return whether a signature with a key is awaited from ssh-agent."""
    return key.agent in _signing


MAX_KEY_BYTES = 1 << 20
_REQUEST = bytes([50])
_MAGIC = b"openssh-key-v1\0"


class PublicPart(NamedTuple):
    """What is known of a key without its passphrase."""

    kind: str
    blob: bytes


def public_part(identity_file: str) -> PublicPart | None:
    """Return the public part of a key, from the file beside it or from its own; None if neither has it.

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


def public_part_of(key: paramiko.PKey) -> PublicPart:
    """Return what a host sees of a key: its certificate where it has one."""
    if certificate := key.public_blob:
        return PublicPart(certificate.key_type, certificate.key_blob)
    return PublicPart(key.get_name(), key.asbytes())


def _from_public_text(text: bytes) -> PublicPart | None:
    fields = text.split(maxsplit=2)
    if len(fields) < 2 or text.startswith(b"-"):
        return None
    try:
        return PublicPart(fields[0].decode(errors="replace"), base64.b64decode(fields[1], validate=True))
    except ValueError:
        return None


def _from_private_text(text: bytes) -> PublicPart | None:
    """Read the beginning of a private key, which is not encrypted.

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
    """One query to a host; paramiko can only send one with a signature."""

    def __init__(self, transport: Transport, key: PublicPart) -> None:
        super().__init__(transport)
        self._send = transport.send_now
        self._key = key
        self._would_be_taken = False

    def ask(self, user: str, timeout_s: float) -> bool:
        """Return whether the host would accept the key for a user.

        Raises:
            TimeoutError: The host does not answer.
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
        """Take message 60, which means for a key that it would be accepted."""
        self._would_be_taken = True
        if self.auth_event is not None:
            self.auth_event.set()
