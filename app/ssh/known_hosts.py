"""Checks a host's key against OpenSSH's known_hosts, read by our own rules.

paramiko's reader gives up the whole file for one line that it does not know, and knows neither patterns nor marks. A
line that we cannot read is left out; the others stand.

Source: sshd(8), SSH_KNOWN_HOSTS FILE FORMAT; ssh_config(5), RevokedHostKeys; PROTOCOL.krl.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from enum import Enum
from fnmatch import translate
from functools import lru_cache
from re import Pattern
from re import compile as compile_pattern
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

MARKS = ("@revoked", "@cert-authority")
_HASH_MAGIC = "|1|"
_KRL_MAGIC = "SSHKRL\n"
_SPECIAL = frozenset("*?!|")
"""Characters in the names of an entry that has to be compared with each host."""


class Verdict(Enum):
    """Result of checking a key that a host showed."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    """No entry for this host."""
    CHANGED = "changed"
    """Another key is known for this host."""
    REVOKED = "revoked"
    """The key is marked as revoked."""


class Entry(msgspec.Struct, frozen=True):
    """One line."""

    mark: str
    names: str
    """Patterns separated by commas, or one hashed name."""
    kind: str
    """`ssh-ed25519` and the like."""
    key: bytes
    place: str
    """`FILE:LINE`, for users."""


def parse(text: str, file: str) -> list[Entry]:
    """Return the entries of a known_hosts file."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        mark = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) < 3 or fields[0].startswith("#") or (mark and mark not in MARKS):
            continue
        try:
            key = base64.b64decode(fields[2], validate=True)
        except (binascii.Error, ValueError):
            continue
        entries.append(Entry(mark, fields[0], fields[1], key, f"{file}:{number}"))
    return entries


def parse_revoked(text: str, file: str) -> list[Entry]:
    """Return the keys of a RevokedHostKeys file, each revoked for every host.

    Raises:
        ValueError: It is a binary list, or a line is no key: as in ssh, no host is trusted then.
    """
    if text.startswith(_KRL_MAGIC):
        raise ValueError("it is a key revocation list (ssh-keygen -k), which is not supported: list the keys as text")
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        try:
            key = base64.b64decode(fields[1], validate=True)
        except (IndexError, ValueError):
            raise ValueError(f"line {number} is not a public key") from None
        entries.append(Entry("@revoked", "*", fields[0], key, f"{file}:{number}"))
    return entries


class KnownHosts:
    """All entries of the known_hosts and revocation files."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = list(entries)
        self._about: dict[str, list[Entry]] = {}
        self._named: dict[str, list[int]] = {}
        """Indices of entries by each of their plain names."""
        self._described: list[int] = []
        """Indices of entries with patterns or a hashed name."""
        for place, entry in enumerate(self._entries):
            if _SPECIAL.isdisjoint(entry.names):
                for name in set(entry.names.lower().split(",")):
                    self._named.setdefault(name, []).append(place)
            else:
                self._described.append(place)

    def judge(self, name: str, kind: str, key: bytes) -> Verdict:
        """Return the verdict on a key.

        Args:
            name: The host, `[host]:port` when the port is not 22, or its HostKeyAlias.
            kind: Kind of the key that the host showed.
            key: That key, as bytes of the SSH protocol.
        """
        about = self.about(name)
        if any(entry.mark == "@revoked" and entry.key == key for entry in about):
            return Verdict.REVOKED
        plain = [entry for entry in about if not entry.mark]
        if any((entry.kind, entry.key) == (kind, key) for entry in plain):
            return Verdict.KNOWN
        return Verdict.CHANGED if plain else Verdict.UNKNOWN

    def kinds(self, name: str) -> list[str]:
        """Return the known kinds of keys of a host, from which it is asked for one."""
        return list(dict.fromkeys(entry.kind for entry in self.about(name) if not entry.mark))

    def has_authority(self, name: str) -> bool:
        """Return whether a host is certified by an authority, whose certificates are not supported."""
        return any(entry.mark == "@cert-authority" for entry in self.about(name))

    def other_places(self, kind: str, key: bytes) -> list[str]:
        """Return the places where a key is written, under whichever names."""
        return [entry.place for entry in self._entries if not entry.mark and (entry.kind, entry.key) == (kind, key)]

    def about(self, name: str) -> list[Entry]:
        """Return the entries for a host, cached: a thousand hashed names take 10 ms."""
        name = name.lower()
        if name not in self._about:
            described = (place for place in self._described if _matches(self._entries[place].names, name))
            places = sorted([*self._named.get(name, ()), *described])
            self._about[name] = [self._entries[place] for place in places]
        return self._about[name]


def entry_line(name: str, kind: str, key: bytes, salt: bytes | None) -> str:
    """Return the line that ssh would write for a host, without a newline.

    Args:
        name: As for `KnownHosts.judge`.
        kind: Kind of the key.
        key: As bytes of the SSH protocol.
        salt: Twenty random bytes that hash the name; None writes it plainly.
    """
    if salt is not None:
        parts = (salt, _name_digest(salt, name))
        name = _HASH_MAGIC + "|".join(base64.b64encode(part).decode() for part in parts)
    return f"{name} {kind} {base64.b64encode(key).decode()}"


def kind_text(kind: str) -> str:
    """Return ssh's display name for a kind of key: `ED25519` for `ssh-ed25519`."""
    return kind.removeprefix("ssh-").split("-")[0].upper()


def fingerprint(key: bytes) -> str:
    """Return a key's fingerprint as OpenSSH prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("=")


def _matches(names: str, name: str) -> bool:
    if names.startswith(_HASH_MAGIC):
        return _matches_hash(names, name)
    return matches_any(names.lower().split(","), name)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether a name matches one of ssh's patterns, and none with `!` in front."""
    is_matched = False
    for pattern in patterns:
        if _pattern(pattern.removeprefix("!")).match(name):
            if pattern.startswith("!"):
                return False
            is_matched = True
    return is_matched


def _matches_hash(names: str, name: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in names.removeprefix(_HASH_MAGIC).split("|"))
    except ValueError:
        return False
    return hmac.compare_digest(_name_digest(salt, name), digest)


def _name_digest(salt: bytes, name: str) -> bytes:
    return hmac.digest(salt, name.encode(), "sha1")


@lru_cache(maxsize=4096)
def _pattern(pattern: str) -> Pattern[str]:
    """Return a compiled pattern of ssh: only `*` and `?` are special, `[host]:port` is literal."""
    return compile_pattern(translate(pattern.replace("[", "[[]")))
