"""Reads how OpenSSH would reach a host: from what `ssh -G` prints, or from ~/.ssh/config without ssh.

`parse_settings` reads what `ssh -G` prints: ~/.ssh/config, applied by its owner.

Source: ssh(1) -G, ssh_config(5); a destination that begins with `-` is an option to ssh (CVE-2023-51385 and before).

`printed_settings` reads a configuration where there is no ssh: what is plain in it. Whatever only ssh can follow is
refused, not guessed.

Source: ssh_config(5): the first value counts, but for IdentityFile; `Host` takes patterns, `!` leaves hosts out.

`host_aliases` lists the hosts that ~/.ssh/config calls by name: what a user may choose from. How one is reached is up
to `ssh -G`.

Source: ssh_config(5): keywords in any case, `=` or blanks behind them, quotes around names with blanks, `Include` of
patterns that are relative to ~/.ssh.

`FileState` shows whether a file is still what it was when it was read: what many hosts need of it is worked out once.
"""

from __future__ import annotations

import re
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from app.errors import UsageError
from app.ssh.known_hosts import matches_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DEFAULT_PORT = 22
LOOPBACK = "127.0.0.1"
"""Where nobody but this machine comes; each has its own."""
THIS_MACHINE = "localhost"
"""Is not gone to by SSH; whoever wants an sshd of this machine writes `user@localhost` or `localhost:22`."""
_DESTINATION = re.compile(
    r"(?:(?P<user>[A-Za-z0-9._+-]+)@)?"
    r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\])"
    r"(?::(?P<port>\d{1,5}))?"
)
AGENT_OF_ENVIRONMENT = "SSH_AUTH_SOCK"
_TOKEN = re.compile(r"%(.)")
METHODS = ("publickey", "keyboard-interactive", "password")
"""Ways to log in, in the order of ssh."""
DEFAULT_PROMPTS = 3
MAX_PROMPTS = 10
_SAFE_IN_SHELL = re.compile(r"[A-Za-z0-9._:@%+][A-Za-z0-9._:@%+-]*")
"""What may stand in a command for a shell, and is no option there: CVE-2023-51385."""


class Destination(msgspec.Struct, frozen=True):
    """Where a person wants to go: an alias of ~/.ssh/config, `user@host`, `user@host:port`."""

    host: str
    user: str = ""
    port: int | None = None

    @property
    def text(self) -> str:
        """The destination as a person writes it."""
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        return (f"{self.user}@" if self.user else "") + host + ("" if self.port is None else f":{self.port}")


class LocalUser(msgspec.Struct, frozen=True):
    """Who sits at the console, for what `~` and `%` stand for in the names of files."""

    user: str
    home: str


class Strictness(Enum):
    """What ~/.ssh/config wants done with a host that is not known."""

    REFUSE = "yes"
    ACCEPT_NEW = "accept-new"
    ASK = "ask"


class SshSettings(msgspec.Struct, frozen=True):
    """How to reach a host."""

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str
    """Socket of ssh-agent, `SSH_AUTH_SOCK` or `$NAME` for the one that a variable names; empty for none."""
    proxy_jump: str
    """Hosts to pass through, separated by commas; empty goes straight."""
    proxy_command: str
    """Runs in a shell, with `proxy_command_line`, and is the connection; empty for none."""
    hands_over_socket: bool
    """The ProxyCommand hands a socket over, and ends."""
    host_key_alias: str
    known_hosts_files: tuple[str, ...]
    own_known_hosts_file: str
    """Of those, where new hosts are written; empty for nowhere."""
    hashes_known_hosts: bool
    strictness: Strictness
    revoked_keys_files: tuple[str, ...]
    """Keys in them are not to be trusted, whichever host shows them."""
    connect_timeout_s: float | None
    methods: tuple[str, ...]
    """Ways to log in that are wanted, the first first."""
    is_compressed: bool
    num_prompts: int
    """How often a person is asked for a secret that turns out to be wrong; 0 asks nobody anything."""

    @property
    def key_name(self) -> str:
        """Under which name the host's key is known."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == DEFAULT_PORT else f"[{self.hostname}]:{self.port}"


def parse_destination(text: str) -> Destination:
    """Return what a person means by a host.

    Raises:
        UsageError: It is nothing that ssh should be given.
    """
    match = _DESTINATION.fullmatch(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or text.startswith("-") or match["host"].startswith("-") or port == 0 or (port or 0) > 65535:
        raise UsageError(
            f"{text!r} is not a host", "name an alias of ~/.ssh/config, or write user@host, or user@host:port"
        )
    return Destination(match["host"].strip("[]"), match["user"] or "", port)


def resolve_argv(destination: Destination, config_file: str = "") -> list[str]:
    """Return the command that prints a destination's settings."""
    argv = ["ssh", "-G"]
    if config_file:
        argv += ["-F", config_file]
    if destination.port is not None:
        argv += ["-p", str(destination.port)]
    if destination.user:
        argv += ["-l", destination.user]
    return [*argv, "--", destination.host]


def parse_settings(alias: str, printed: str, local_user: LocalUser) -> SshSettings:
    """Return the settings that `ssh -G` printed.

    Args:
        alias: The host as the person calls it.
        printed: One `keyword value` a line; a keyword may come again.
        local_user: For what `~` and `%` stand for.

    Raises:
        UsageError: Something that every ssh prints is missing.
    """
    values: dict[str, list[str]] = {}
    for line in printed.splitlines():
        keyword, _, value = line.partition(" ")
        values.setdefault(keyword.lower(), []).append(value.strip())

    def one(keyword: str) -> str:
        value = values.get(keyword, [""])[0]
        return "" if value.lower() == "none" else value

    hostname, port, user = one("hostname"), one("port"), one("user")
    if not hostname or not port.isdigit() or not user:
        raise UsageError(f"ssh -G says nothing of how to reach {alias}", "try: ssh -G " + alias)
    tokens = {
        "%": "%",
        "d": local_user.home,
        "h": hostname,
        "n": alias,
        "p": port,
        "r": user,
        "u": local_user.user,
    }
    timeout = one("connecttimeout")
    identities = [_file(text, tokens, local_user.home) for text in values.get("identityfile", []) if text != "none"]
    own, others = one("userknownhostsfile").split(), one("globalknownhostsfile").split()
    known = [_file(text, tokens, local_user.home) for text in (*own, *others)]
    return SshSettings(
        alias=alias,
        hostname=hostname.lower(),
        port=int(port),
        user=user,
        identity_files=tuple(identities),
        identities_only=one("identitiesonly") == "yes",
        identity_agent=_file(one("identityagent"), tokens, local_user.home)
        if "identityagent" in values
        else AGENT_OF_ENVIRONMENT,
        proxy_jump=one("proxyjump"),
        proxy_command=one("proxycommand"),
        hands_over_socket=one("proxyusefdpass") == "yes",
        host_key_alias=one("hostkeyalias").lower(),
        known_hosts_files=tuple(known),
        own_known_hosts_file=known[0] if own else "",
        hashes_known_hosts=one("hashknownhosts") == "yes",
        strictness=_STRICTNESS.get(one("stricthostkeychecking"), Strictness.ASK),
        revoked_keys_files=tuple(_file(text, tokens, local_user.home) for text in one("revokedhostkeys").split()),
        connect_timeout_s=float(timeout) if timeout.isdigit() and timeout != "0" else None,
        methods=_methods(one),
        is_compressed=one("compression") == "yes",
        num_prompts=_num_prompts(one),
    )


def parse_jumps(text: str) -> list[Destination]:
    """Return the hosts of a ProxyJump, in the order in which they are passed.

    Raises:
        UsageError: One of them is not a host.
    """
    return [parse_destination(hop.strip().removeprefix("ssh://").rstrip("/")) for hop in text.split(",") if hop.strip()]


def proxy_command_line(settings: SshSettings) -> str:
    """Return what a shell runs for a ProxyCommand: as ssh does, its own process becomes the command.

    Raises:
        UsageError: The command is wrong, or what it is to be told could mean something to a shell.
    """
    tokens = {"h": settings.hostname, "n": settings.alias, "p": str(settings.port), "r": settings.user}

    def expand(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        if match[1] not in tokens:
            raise UsageError(f"{settings.alias}: ProxyCommand has {match[0]}", "ssh knows %h, %n, %p, %r and %% there")
        value = tokens[match[1]]
        if not _SAFE_IN_SHELL.fullmatch(value):
            raise UsageError(f"{settings.alias}: ProxyCommand is not given {match[0]}: {value!r} is no plain name")
        return value

    return "exec " + _TOKEN.sub(expand, settings.proxy_command)


_STRICTNESS = {"true": Strictness.REFUSE, "yes": Strictness.REFUSE, "accept-new": Strictness.ACCEPT_NEW}
"""`no` is taken for `ask`: nobody is trusted in silence."""
_SWITCHES = {
    "publickey": "pubkeyauthentication",
    "keyboard-interactive": "kbdinteractiveauthentication",
    "password": "passwordauthentication",
}


def _methods(one: Callable[[str], str]) -> tuple[str, ...]:
    preferred = one("preferredauthentications")
    wanted = [method.strip() for method in preferred.split(",")] if preferred else METHODS
    return tuple(method for method in wanted if method in METHODS and one(_SWITCHES[method]) not in {"no", "false"})


def _num_prompts(one: Callable[[str], str]) -> int:
    limit = one("numberofpasswordprompts")
    if one("batchmode") == "yes":
        return 0
    return min(int(limit), MAX_PROMPTS) if limit.isdecimal() else DEFAULT_PROMPTS


def _file(text: str, tokens: dict[str, str], home: str) -> str:
    expanded = _TOKEN.sub(lambda match: tokens.get(match[1], match[0]), text.strip('"'))
    return home + expanded[1:] if expanded == "~" or expanded.startswith("~/") else expanded


_NOT_PLAIN = {"include", "match", "canonicalizehostname", "knownhostscommand"}
_OTHER_NAMES = {"challengeresponseauthentication": "kbdinteractiveauthentication"}
_WHOLE_LINES = {"proxycommand"}
_CUMULATIVE = {"identityfile"}
_PLAIN_SWITCHES = {
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
_SWITCH_VALUES = {"true": "yes", "false": "no"}
_DEFAULTS = {
    "identityfile": [f"~/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ecdsa_sk", "ed25519", "ed25519_sk")],
    "port": ["22"],
    "userknownhostsfile": ["~/.ssh/known_hosts ~/.ssh/known_hosts2"],
    "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"],
}


def printed_settings(destination: Destination, texts: Iterable[str], local_user: LocalUser) -> str:
    """Return what `ssh -G` would print of a destination, as far as `app.ssh.config` reads that.

    Args:
        destination: Where to.
        texts: Of the configuration's files, the first first.
        local_user: Who goes there.

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
    settings = {"user": [local_user.user], **_DEFAULTS, **found}
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
        line_tokens = list(tokens_of_line(rest))
        if keyword in _NOT_PLAIN and line_tokens not in (["no"], ["none"]):
            raise ValueError(keyword)
        if keyword == "host":
            is_meant = matches_any(line_tokens, host)
        elif is_meant:
            plain = _OTHER_NAMES.get(keyword, keyword)
            value = rest if plain in _WHOLE_LINES else " ".join(line_tokens)
            yield plain, _SWITCH_VALUES.get(value.lower(), value.lower()) if plain in _PLAIN_SWITCHES else value


MAX_DEPTH = 16
"""Of files that include others, as in ssh."""
MAX_ALIASES = 10_000
_LINE = re.compile(r"\s*(?P<keyword>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<rest>.*)")
_WORD = re.compile(r'"([^"]*)"|(\S+)')


def host_aliases(text: str, included: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the names of all hosts in a configuration, each once, in the order of the file.

    Patterns name no host and are left out, and so is what ssh should not be given.

    Args:
        text: Of the file.
        included: Returns the texts of the files that an `Include` pattern stands for.
    """
    found: dict[str, None] = {}
    for name in _names(text, included, MAX_DEPTH):
        if len(found) == MAX_ALIASES:
            break
        if _is_alias(name):
            found.setdefault(name)
    return list(found)


def _names(text: str, included: Callable[[str], Iterable[str]], depth_left: int) -> Iterator[str]:
    for keyword, rest in config_lines(text):
        if keyword not in {"host", "include"}:
            continue
        line_tokens = list(tokens_of_line(rest))
        if keyword == "host":
            yield from line_tokens
        elif depth_left:
            for pattern in line_tokens:
                for other in included(pattern):
                    yield from _names(other, included, depth_left - 1)


def config_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield each keyword of a configuration, in small letters, and what follows it in its line."""
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            yield match["keyword"].lower(), match["rest"].rstrip()


def tokens_of_line(rest: str) -> Iterator[str]:
    """Yield the words of a line, up to a comment."""
    for quoted, plain in _WORD.findall(rest):
        if plain.startswith("#"):
            return
        yield quoted or plain


def _is_alias(name: str) -> bool:
    try:
        destination = parse_destination(name)
    except UsageError:  # `*`, `?` and `!` are in no host's name either
        return False
    return destination.text == name


SETTLED_S = 2.0
"""A file that was changed less long ago may change again without its times and its size telling."""


class FileState(NamedTuple):
    """What changes with a file's contents."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @property
    def is_settled(self) -> bool:
        """True when a later change will show."""
        return self.inode == 0 or time.time_ns() - self.changed_ns > SETTLED_S * 1e9


def state_of(path: str) -> FileState:
    """Return how a file is now; zeros where there is none, or none that can be looked at."""
    try:
        seen = Path(path).stat()
    except OSError:
        return FileState(path, 0, 0, 0, 0, 0)
    return FileState(path, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
