"""The way to a host's SSH port: what ssh says of it, what is known of its key, and the TCP connection."""

from __future__ import annotations

import contextlib
import getpass
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import HostUnreachableError, SessionError
from app.known_hosts import Entry, KnownHosts, parse
from app.safe_text import LINE_LIMIT, clean
from app.ssh_config import Destination, Person, SshSettings, parse_settings, resolve_argv

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONNECT_TIMEOUT_S = 10.0
"""Unless ~/.ssh/config has a ConnectTimeout."""
RESOLVE_TIMEOUT_S = 10.0
UNACKNOWLEDGED_MS = 10_000
"""A connection whose packets are not acknowledged for so long is dead; SSH's keepalives alone never notice."""


def resolve(destination: Destination, config_file: str = "") -> SshSettings:
    """Ask ssh how it would reach a host.

    Raises:
        SessionError: There is no ssh.
        HostUnreachableError: ssh refuses the configuration.
    """
    argv = resolve_argv(destination, config_file)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=RESOLVE_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise SessionError("ssh is not installed", "install the OpenSSH client: it reads ~/.ssh/config") from error
    except subprocess.TimeoutExpired as error:
        raise HostUnreachableError(
            destination.text, "ssh -G does not end", "look at Match exec in ~/.ssh/config"
        ) from error
    if done.returncode:
        raise HostUnreachableError(destination.text, f"ssh -G fails: {clean(done.stderr.strip(), LINE_LIMIT)}")
    person = Person(getpass.getuser(), str(Path.home()))
    return parse_settings(destination.text, done.stdout, person)


def known_hosts(files: Sequence[str]) -> KnownHosts:
    """Return what some files know of hosts; those that are not there know nothing."""
    return KnownHosts(_entries(files))


def _entries(files: Sequence[str]) -> Iterator[Entry]:
    for file in files:
        with contextlib.suppress(OSError):
            yield from parse(Path(file).read_text(encoding="utf-8", errors="replace"), file)


def dial(settings: SshSettings) -> socket.socket:
    """Return a TCP connection to a host; paramiko's own lacks TCP_NODELAY: a command would take 48 ms, not 0.3.

    Raises:
        HostUnreachableError: It does not answer, refuses, or there is no way to it.
    """
    where = f"{settings.hostname} port {settings.port}"
    timeout_s = settings.connect_timeout_s or CONNECT_TIMEOUT_S
    try:
        stream = socket.create_connection((settings.hostname, settings.port), timeout_s)
    except TimeoutError as error:
        hint = "is it up, and does a firewall let SSH through?"
        raise HostUnreachableError(settings.alias, f"{where} does not answer in {timeout_s:g} s", hint) from error
    except ConnectionRefusedError as error:
        raise HostUnreachableError(settings.alias, f"{where} refuses connections", "is sshd running there?") from error
    except OSError as error:
        hint = f"try: ssh {settings.alias}"
        raise HostUnreachableError(settings.alias, f"cannot connect to {where}: {error.strerror}", hint) from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
    return stream
