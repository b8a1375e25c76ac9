"""The connection to a host's SSH port: ssh's settings for it, its known key, and TCP or a ProxyCommand.

`resolve` asks ssh for the settings, `check_key` compares the key, `dial` opens the TCP connection.

`ProxyCommand` is a program of the user's own ~/.ssh/config whose input and output are the connection.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import select
import shlex
import signal
import socket
import subprocess
import threading
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from app.errors import HostKeyError, HostUnreachableError, SessionError, UsageError
from app.ssh.config import (
    AGENT_OF_ENVIRONMENT,
    Destination,
    LocalUser,
    SshSettings,
    Strictness,
    parse_settings,
    printed_settings,
    proxy_command_line,
    resolve_argv,
    state_of,
)
from app.ssh.known_hosts import Entry, KnownHosts, Verdict, fingerprint, parse, parse_revoked
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from app.ssh.config import FileState

CONNECT_TIMEOUT_S = 10.0
"""Seconds unless ~/.ssh/config has a ConnectTimeout."""
RESOLVE_TIMEOUT_S = 10.0
OWN_CONFIGS = ("~/.ssh/config", "/etc/ssh/ssh_config")
"""Files that ssh reads by default."""
UNACKNOWLEDGED_MS = 10_000
"""Milliseconds without acknowledgement after which a connection is dead; SSH's keepalives alone never notice."""


def resolve(destination: Destination, config_file: str = "") -> SshSettings:
    """Ask ssh how it would reach a host; without ssh, read what is plain in the configuration.

    Raises:
        SessionError: There is no ssh, and only that could read the configuration.
        UsageError: ssh refuses the configuration.
        HostUnreachableError: ssh does not answer in time.
    """
    argv = resolve_argv(destination, config_file)
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",  # names of files need not be UTF-8
            timeout=RESOLVE_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return parse_settings(destination.text, _printed_without_ssh(destination, config_file), _local_user())
    except OSError as error:
        raise SessionError(f"ssh cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise HostUnreachableError(
            destination.text, "ssh -G does not end", "look at Match exec in ~/.ssh/config"
        ) from error
    if done.returncode:
        raise UsageError(
            f"{destination.text}: ssh -G fails: {clean(done.stderr.strip(), LINE_LIMIT)}",
            f"try: ssh -G {destination.text}",
        )
    settings = parse_settings(destination.text, done.stdout, _local_user())
    return msgspec.structs.replace(settings, config_file=config_file)


def moved_home_hint() -> str:
    """Return that ssh reads its configuration elsewhere than in `HOME`; empty where that is the user's home."""
    home = Path(_local_user().home)
    if os.environ.get("HOME", str(home)) == str(home):
        return ""
    return f"; ssh reads {clean(str(home))}/.ssh/config, whatever HOME is: RANKDECK_SSH_CONFIG names another file"


def _local_user() -> LocalUser:
    # As in ssh, HOME is ignored.
    return LocalUser(getpass.getuser(), pwd.getpwuid(os.getuid()).pw_dir)


def _printed_without_ssh(destination: Destination, config_file: str) -> str:
    files = (config_file,) if config_file else OWN_CONFIGS
    try:
        texts = [_config_text(file, must_exist=bool(config_file)) for file in files]
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}") from error
    try:
        return printed_settings(destination, texts, _local_user())
    except ValueError as error:
        message = f"ssh is not installed, and {' or '.join(files)} has {error}, which only ssh can follow"
        raise SessionError(message, "install the OpenSSH client") from error


def _config_text(file: str, *, must_exist: bool) -> str:
    path = Path(file).expanduser()
    return path.read_text(encoding="utf-8", errors="surrogateescape") if must_exist or path.exists() else ""


def known_hosts(settings: SshSettings) -> KnownHosts:
    """Return the entries of the user's known_hosts files; missing files have none.

    Raises:
        HostKeyError: The revoked keys cannot be read: as in ssh, no host is trusted then.
    """
    files = tuple(state_of(file) for file in settings.known_hosts_files)
    revoked = tuple(state_of(file) for file in settings.revoked_keys_files)
    is_settled = all(file.is_settled for file in (*files, *revoked))
    try:
        return _read_once(files, revoked) if is_settled else _read(files, revoked)
    except _UnknownRevocationsError as error:
        hint = "mend the file, or take RevokedHostKeys out of ~/.ssh/config"
        raise HostKeyError(settings.alias, f"{error}; nothing was sent", hint) from error


class _UnknownRevocationsError(Exception):
    """A RevokedHostKeys file cannot be read."""


def _read(files: tuple[FileState, ...], revoked: tuple[FileState, ...]) -> KnownHosts:
    return KnownHosts(_entries(files, revoked))


_read_once = lru_cache(maxsize=4)(_read)
"""A thousand hosts share one file of a thousand lines."""


def _entries(files: tuple[FileState, ...], revoked: tuple[FileState, ...]) -> Iterator[Entry]:
    for file, *_ in files:
        with contextlib.suppress(OSError):
            yield from parse(Path(file).read_text(encoding="utf-8", errors="replace"), file)
    for file, *_ in revoked:
        try:
            yield from parse_revoked(Path(file).read_text(encoding="utf-8", errors="replace"), file)
        except (OSError, ValueError) as error:
            why = error.strerror or "it cannot be read" if isinstance(error, OSError) else str(error)
            raise _UnknownRevocationsError(f"RevokedHostKeys {clean(file, LINE_LIMIT)}: {why}") from error


def check_key(settings: SshSettings, known: KnownHosts, kind: str, key: bytes) -> None:
    """Return if a host is known by the key that it shows.

    Raises:
        HostKeyError: It is not.
    """
    name = settings.key_name
    shown = f"{kind} {fingerprint(key)}"
    match known.judge(name, kind, key):
        case Verdict.KNOWN:
            return
        case Verdict.UNKNOWN:
            hint = f"if its administrator confirms that, accept it once by: ssh {settings.alias} true"
            if known.has_authority(name):
                hint = "host certificates are not supported: add the plain key to known_hosts"
            unknown = HostKeyError(settings.alias, f"{name} is not a known host; it shows the key {shown}", hint)
            unknown.is_answerable = (
                settings.strictness is Strictness.ASK and settings.num_prompts > 0 and not known.has_authority(name)
            )
            raise unknown
        case Verdict.CHANGED:
            places = [entry.place for entry in known.about(name) if not entry.mark]
            file = shlex.quote(places[0].rpartition(":")[0])
            message = (
                f"THE HOST KEY OF {name} HAS CHANGED: it shows {shown}, another one is in {', '.join(places)}; "
                "either the host was set up again, or somebody stands between; nothing was sent"
            )
            hint = f"ask its administrator; only if the new key is right: ssh-keygen -R {shlex.quote(name)} -f {file}"
            raise HostKeyError(settings.alias, message, hint)
        case Verdict.REVOKED:
            raise HostKeyError(
                settings.alias, f"THE KEY OF {name} IS REVOKED: {shown}; nothing was sent", "the host needs a new key"
            )


def agent_socket(settings: SshSettings, environ: Mapping[str, str]) -> str:
    """Return the socket of ssh-agent; empty for none."""
    content = settings.identity_agent
    if content == AGENT_OF_ENVIRONMENT:
        return environ.get(AGENT_OF_ENVIRONMENT, "")
    return environ.get(content[1:].strip("{}"), "") if content.startswith("$") else content


def dial(settings: SshSettings) -> socket.socket:
    """Return a TCP connection to a host; paramiko's own has no TCP_NODELAY: a command would take 48 ms, not 0.3.

    Raises:
        HostUnreachableError: It does not answer, refuses, or there is no route to it.
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
    except UnicodeError as error:  # an empty label, or one of more than 63 characters
        raise HostUnreachableError(
            settings.alias,
            f"{clean(settings.hostname)} is not a name of a host",
            "see HostName in the SSH configuration, and DNS",
        ) from error
    except OSError as error:
        hint = f"try: {settings.by_hand}"
        if isinstance(error, socket.gaierror) and not settings.config_file:
            hint += moved_home_hint()
        raise HostUnreachableError(settings.alias, f"cannot connect to {where}: {error.strerror}", hint) from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
    return stream


END_S = 1.0
"""Seconds for the program to end when asked to, and for its last output."""


class ProxyCommand:
    """The program, in a session of its own: it gets no key that is pressed here, and asks nothing on this terminal.

    Attributes:
        stream: Connection to the host; its user closes it.
    """

    def __init__(self, settings: SshSettings) -> None:
        """Start it, in the user's own shell as ssh does.

        Raises:
            UsageError: See `proxy_command_line`.
            HostUnreachableError: There is no such shell, or the kind of command is not supported.
        """
        self._host = settings.alias
        if settings.hands_over_socket:
            raise HostUnreachableError(
                self._host, "ProxyUseFdpass is not supported", "use ProxyJump, or a ProxyCommand without it"
            )
        line = proxy_command_line(settings)
        self.stream, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", line],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self.stream.close()
            detail = f"ProxyCommand cannot be run by {error.filename}: {error.strerror}"
            raise HostUnreachableError(self._host, detail, "look at SHELL") from error
        finally:
            theirs.close()
        assert self._process.stderr
        self._error_output = bytearray()
        self._stderr_reader = threading.Thread(
            target=_read_last,
            args=(self._process.stderr, self._error_output),
            name="rankdeck-proxy-command",
            daemon=True,
        )
        self._stderr_reader.start()

    def error(self) -> HostUnreachableError | None:
        """Return an error with the program's last output, after waiting `END_S` for its end; None if it still runs."""
        _wait_without_collecting(self._process.pid, END_S)
        # WNOWAIT: an uncollected process keeps its pid, so that its group can be ended.
        how = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if how is None:
            return None
        self._stderr_reader.join(END_S)
        lines = self._error_output.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
        is_code = how.si_code == os.CLD_EXITED
        end = f"exit code {how.si_status}" if is_code else signal.Signals(how.si_status).name
        detail = f"ProxyCommand has ended ({end}): {clean(lines[-1], LINE_LIMIT)}"
        return HostUnreachableError(self._host, detail, f"it is asked for nothing here; try: ssh {self._host}")

    def end(self) -> None:
        """End the program and what it has started; safe to call twice."""
        if self._process.returncode is not None:
            return
        self.stream.close()
        pid = self._process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGHUP)
        _wait_without_collecting(pid, END_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # it, if it still runs, and whatever it has left
        self._process.wait()
        self._stderr_reader.join(END_S)


def _wait_without_collecting(pid: int, timeout_s: float) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(descriptor)


def _read_last(errors: IO[bytes], content: bytearray) -> None:
    """Read to the end, and keep the last `LINE_LIMIT` bytes."""
    with errors:
        while chunk := os.read(errors.fileno(), 65_536):
            content += chunk
            del content[:-LINE_LIMIT]
