"""A configuration of ssh, read without ssh: what is plain in it. Whatever only ssh can follow is refused, not guessed.

Source: ssh_config(5): the first value counts, but for IdentityFile; `Host` takes patterns, `!` leaves hosts out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.ssh.aliases import config_lines, words_of_line
from app.ssh.known_hosts import matches_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from app.ssh.config import Destination, Person

_NOT_PLAIN = {"include", "match", "canonicalizehostname", "knownhostscommand"}
_OTHER_NAMES = {"challengeresponseauthentication": "kbdinteractiveauthentication"}
_WHOLE_LINES = {"proxycommand"}
_CUMULATIVE = {"identityfile"}
_SWITCHES = {
    "batchmode",
    "compression",
    "hashknownhosts",
    "identitiesonly",
    "kbdinteractiveauthentication",
    "passwordauthentication",
    "proxyusefdpass",
    "pubkeyauthentication",
    "stricthostkeychecking",
}
_SWITCH_WORDS = {"true": "yes", "false": "no"}
_DEFAULTS = {
    "identityfile": [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")],
    "port": ["22"],
    "userknownhostsfile": ["~/.ssh/known_hosts ~/.ssh/known_hosts2"],
    "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"],
}


def printed_settings(destination: Destination, texts: Iterable[str], person: Person) -> str:
    """Return what `ssh -G` would print of a destination, as far as `app.ssh.config` reads that.

    Args:
        destination: Where to.
        texts: Of the configuration's files, the first first.
        person: Who goes there.

    Raises:
        ValueError: Only ssh can follow a keyword, which is named.
    """
    found: dict[str, list[str]] = {}
    if destination.user:
        found["user"] = [destination.user]
    if destination.port is not None:
        found["port"] = [str(destination.port)]
    for text in texts:
        for keyword, value in _values(text, destination.host):
            if keyword in _CUMULATIVE:
                so_far = found.setdefault(keyword, [])
                so_far += [] if value in so_far else [value]
            elif not _is_outdone(keyword, found):
                found.setdefault(keyword, [value])
    name = found.get("hostname", ["%h"])[0]
    found["hostname"] = [name.replace("%h", destination.host).replace("%%", "%")]
    settings = {"user": [person.user], **_DEFAULTS, **found}
    return "".join(f"{keyword} {value}\n" for keyword, values in settings.items() for value in values)


def _is_outdone(keyword: str, found: dict[str, list[str]]) -> bool:
    """Say whether another way to the host came first; as ssh has it, a jump that is switched off is no way."""
    if keyword == "proxycommand":
        return found.get("proxyjump", ["none"]) != ["none"]
    return keyword == "proxyjump" and "proxycommand" in found


def _values(text: str, host: str) -> Iterator[tuple[str, str]]:
    """Yield keywords and values that are meant for a host."""
    is_meant = True
    for keyword, rest in config_lines(text):
        words = list(words_of_line(rest))
        if keyword in _NOT_PLAIN and words not in (["no"], ["none"]):
            raise ValueError(keyword)
        if keyword == "host":
            is_meant = matches_any(words, host)
        elif is_meant:
            plain = _OTHER_NAMES.get(keyword, keyword)
            value = rest if plain in _WHOLE_LINES else " ".join(words)
            yield plain, _SWITCH_WORDS.get(value.lower(), value.lower()) if plain in _SWITCHES else value
