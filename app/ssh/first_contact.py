"""The first contact with a host: the user compares its fingerprint, as with ssh, and the host is known from then on.

A changed or revoked key is never asked about.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import HostKeyError
from app.ssh.config import SshSettings, Strictness
from app.ssh.known_hosts import KnownHosts, Verdict, entry_line, fingerprint, kind_text
from app.ssh.way import check_key, known_hosts
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from app.ssh.questions import Prompter

MAX_QUESTIONS = 3
SALT_BYTES = 20
"""Bytes of a salt, as in ssh: the length of the hash."""
_FINGERPRINT = "SHA256:"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._:%-]+|\[[A-Za-z0-9._:%-]+\]:\d+")
"""A single name without patterns."""

HostKey = tuple[str, str, bytes]
"""The name that a host is known by, the kind of its key, and the key."""


class Introductions:
    """First contacts of one command: each host is asked about once, whichever threads connect to it."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._lock = threading.Lock()
        self._answers: dict[HostKey, bool] = {}

    def check_key(self, settings: SshSettings, known: KnownHosts, kind: str, key: bytes, *, asks: bool) -> None:
        """Return if a host is known by the key that it shows, or becomes known now; nothing is sent to it before.

        Raises:
            HostKeyError: It is not.
        """
        name = settings.key_name
        if known.judge(name, kind, key) is Verdict.UNKNOWN and not known.has_authority(name):
            with self._lock:
                known = known_hosts(settings)  # another thread may have asked by then
                if known.judge(name, kind, key) is Verdict.UNKNOWN and self._is_accepted(
                    settings, known, kind, key, asks=asks
                ):
                    return
        check_key(settings, known, kind, key)

    def forget_refusals(self) -> None:
        """Allow hosts that were not accepted to be asked about again."""
        with self._lock:
            self._answers = {host_key: True for host_key, is_accepted in self._answers.items() if is_accepted}

    def _is_accepted(self, settings: SshSettings, known: KnownHosts, kind: str, key: bytes, *, asks: bool) -> bool:
        host_key = (settings.key_name, kind, key)
        if host_key in self._answers:
            return self._answers[host_key]
        if settings.strictness is Strictness.REFUSE:
            return False
        if settings.strictness is Strictness.ASK:
            if not asks or not settings.num_prompts or not self._prompter.can_ask():
                return False
            self._answers[host_key] = False
            if not self._ask(settings, known, kind, key):
                return False
        self._answers[host_key] = True
        self._prompter.show(_added(settings, kind, key))
        return True

    def _ask(self, settings: SshSettings, known: KnownHosts, kind: str, key: bytes) -> bool:
        shown = fingerprint(key)
        elsewhere = known.other_places(kind, key)
        where = clean(", ".join(elsewhere), LINE_LIMIT)
        name, alias = settings.key_name, settings.alias
        text = (
            f"The authenticity of host {alias if alias == name else f'{alias} ({name})'} can't be established.\n"
            f"{kind_text(kind)} key fingerprint is {shown}\n"
            + (f"This key is known by other names: {where}\n" if elsewhere else "No other host is known by this key.\n")
            + "Are you sure you want to continue connecting (yes/no/[fingerprint])? "
        )
        for _ in range(MAX_QUESTIONS):
            answer = self._prompter.ask(text, is_shown=True)
            if answer is None:
                return False
            answer = answer.strip()
            if answer in {"yes", shown}:
                return True
            if answer == "no":
                return False
            if answer.startswith(_FINGERPRINT):
                message = (
                    f"{settings.key_name} shows the key {shown}, not the one that was typed: "
                    "somebody may stand between; nothing was sent"
                )
                raise HostKeyError(settings.alias, message, "ask its administrator for the fingerprint")
            text = "Please type 'yes', 'no' or the fingerprint: "
        return False


def _added(settings: SshSettings, kind: str, key: bytes) -> str:
    """Add a host to known_hosts; return the text to show."""
    name, file = settings.key_name, settings.own_known_hosts_file
    if not file:
        return f"{name} is taken for known this once: UserKnownHostsFile is none."
    try:
        append_entry(Path(file), entry_line(name, kind, key, _salt(settings)))
    except OSError as error:
        return f"{name} is taken for known this once: {clean(file, LINE_LIMIT)} cannot be written: {error.strerror}"
    return f"{name} ({kind_text(kind)} {fingerprint(key)}) is added to {clean(file, LINE_LIMIT)}"


def _salt(settings: SshSettings) -> bytes | None:
    """Return a salt to hash the name with: as configured, and where the plain name could match other hosts."""
    hides = settings.hashes_known_hosts or not _PLAIN_NAME.fullmatch(settings.key_name)
    return secrets.token_bytes(SALT_BYTES) if hides else None


def append_entry(file: Path, line: str) -> None:
    """Append a line to a file of known hosts in one write; a missing file or directory is made for its owner only.

    Raises:
        OSError: It cannot be written.
    """
    if not file.parent.exists():
        file.parent.mkdir(mode=0o700)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        is_line_open = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        entry = ("\n" if is_line_open else "") + line + "\n"
        os.write(descriptor, entry.encode())
    finally:
        os.close(descriptor)
