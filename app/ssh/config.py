"""Reads how OpenSSH would reach a host: from the output of `ssh -G`, or from ~/.ssh/config without ssh.

`parse_settings` reads the output of `ssh -G`: ~/.ssh/config, applied by its owner.
Source: ssh(1) -G, ssh_config(5); a destination that begins with `-` is an option to ssh (CVE-2023-51385 and before).

`printed_settings` reads a configuration where there is no ssh, as far as it is plain. Keywords that only ssh can follow
are refused, not guessed.
Source: ssh_config(5): the first value counts, but for IdentityFile; `Host` takes patterns, `!` leaves hosts out.

`host_aliases` lists the hosts that ~/.ssh/config names, for the user to choose from. `ssh -G` decides how each one is
reached.
Source: ssh_config(5): keywords in any case, `=` or blanks behind them, quotes around names with blanks, `Include` of
patterns that are relative to ~/.ssh.

`FileState` shows whether a file is unchanged since it was read, so that results for many hosts can be cached.
"""

from __future__ import annotations

import re
import shlex
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
"""Address that only this machine can reach; each machine has its own."""
THIS_MACHINE = "localhost"
"""Reached without SSH; `user@localhost` or `localhost:22` names an sshd of this machine."""
_DESTINATION = re.compile(
    r"(?:(?P<user>[A-Za-z0-9._+-]+)@)?"
    r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?\])"
    r"(?::(?P<port>\d{1,5}))?"
)
AGENT_OF_ENVIRONMENT = "SSH_AUTH_SOCK"
_TOKEN = re.compile(r"%(.)")
METHODS = ("publickey", "keyboard-interactive", "password")
"""Login methods, in the order of ssh."""
DEFAULT_PROMPTS = 3
MAX_PROMPTS = 10
_SAFE_IN_SHELL = re.compile(r"[A-Za-z0-9._:@%+][A-Za-z0-9._:@%+-]*")
"""Values that are safe in a shell command, and are no option there: CVE-2023-51385."""


class Destination(msgspec.Struct, frozen=True):
    """A host as the user names it: an alias of ~/.ssh/config, `user@host`, `user@host:port`."""

    host: str
    user: str = ""
    port: int | None = None

    @property
    def text(self) -> str:
        """The destination as a user writes it."""
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        return (f"{self.user}@" if self.user else "") + host + ("" if self.port is None else f":{self.port}")


class LocalUser(msgspec.Struct, frozen=True):
    """The local user, for `~` and `%` in names of files."""

    user: str
    home: str


class Strictness(Enum):
    """What ~/.ssh/config wants done with an unknown host."""

    REFUSE = "yes"
    ACCEPT_NEW = "accept-new"
    ASK = "ask"


class SshSettings(msgspec.Struct, frozen=True):
    """Settings to reach a host."""

    alias: str
    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...]
    identities_only: bool
    identity_agent: str
    """Socket of ssh-agent; `SSH_AUTH_SOCK` or `$NAME` takes it from a variable, empty is none."""
    proxy_jump: str
    """Hosts to pass through, separated by commas; empty is a direct connection."""
    proxy_command: str
    """Command whose input and output are the connection, run in a shell by `proxy_command_line`; empty for none."""
    hands_over_socket: bool
    """Whether the ProxyCommand passes a socket and ends."""
    host_key_alias: str
    known_hosts_files: tuple[str, ...]
    own_known_hosts_file: str
    """The one of them that new hosts are written to; empty for none."""
    hashes_known_hosts: bool
    strictness: Strictness
    revoked_keys_files: tuple[str, ...]
    """Files of revoked keys, which no host may show."""
    connect_timeout_s: float | None
    methods: tuple[str, ...]
    """Wanted login methods, in order."""
    is_compressed: bool
    num_prompts: int
    """Prompts for a secret until one is right; 0 asks nothing."""
    config_file: str = ""
    """Read instead of ~/.ssh/config; empty for that."""

    @property
    def by_hand(self) -> str:
        """Command of ssh that reaches it in the same way."""
        return shlex.join(["ssh", *(["-F", self.config_file] if self.config_file else []), self.alias])

    @property
    def key_name(self) -> str:
        """Name under which the host's key is known."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == DEFAULT_PORT else f"[{self.hostname}]:{self.port}"


def parse_destination(text: str) -> Destination:
    """Return the destination that a user's text names.

    Raises:
        UsageError: It must not be passed to ssh.
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
        alias: The host as the user typed it.
        printed: One `keyword value` a line; a keyword may come again.
        local_user: For `~` and `%`.

    Raises:
        UsageError: A setting that every ssh prints is missing.
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
        raise UsageError(f"ssh -G prints nothing of how to reach {alias}", "try: ssh -G " + alias)
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
    """Return the hosts of a ProxyJump, in the order of the connection.

    Raises:
        UsageError: One of them is not a host.
    """
    return [parse_destination(hop.strip().removeprefix("ssh://").rstrip("/")) for hop in text.split(",") if hop.strip()]


def proxy_command_line(settings: SshSettings) -> str:
    """Return the shell command for a ProxyCommand: as with ssh, the shell's process becomes the command.

    Raises:
        UsageError: The command is wrong, or a value in it could have a meaning to a shell.
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
"""`no` is read as `ask`: no host is trusted silently."""
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
    """Return what `ssh -G` would print for a destination, as far as `app.ssh.config` reads that.

    Args:
        destination: The host.
        texts: Contents of the configuration's files, in order.
        local_user: The user on this machine.

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
    """Return whether an earlier proxy setting wins; as in ssh, `ProxyJump none` does not count as one."""
    if keyword == "proxycommand":
        return found.get("proxyjump", ["none"]) != ["none"]
    return keyword == "proxyjump" and "proxycommand" in found


def _values(text: str, host: str) -> Iterator[tuple[str, str]]:
    """Yield the keywords and values that apply to a host."""
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
"""Depth of nested includes, as in ssh."""
MAX_ALIASES = 10_000
_LINE = re.compile(r"\s*(?P<keyword>[A-Za-z]+)(?:\s*=\s*|\s+)(?P<rest>.*)")
_WORD = re.compile(r'"([^"]*)"|(\S+)')


def host_aliases(text: str, included: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the names of all hosts in a configuration, each once, in the order of the file.

    Patterns name no host and are left out, and so are names that must not be passed to ssh.

    Args:
        text: Contents of the file.
        included: Returns the contents of the files that match an `Include` pattern.
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
    """Yield each keyword of a configuration, in lower case, and the rest of its line."""
    for line in text.splitlines():
        if match := _LINE.fullmatch(line):
            yield match["keyword"].lower(), match["rest"].rstrip()


def tokens_of_line(rest: str) -> Iterator[str]:
    """Yield the tokens of a line, up to a comment."""
    for quoted, plain in _WORD.findall(rest):
        if plain.startswith("#"):
            return
        yield quoted or plain


def _is_alias(name: str) -> bool:
    try:
        destination = parse_destination(name)
    except UsageError:  # `*`, `?` and `!` make no valid host either
        return False
    return destination.text == name


SETTLED_S = 2.0
"""Seconds after a change during which a file may change again with the same times and size."""


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
    """Return the state of a file; zeros where there is none, or none that can be read."""
    try:
        seen = Path(path).stat()
    except OSError:
        return FileState(path, 0, 0, 0, 0, 0)
    return FileState(path, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
