"""SSH, the only file that knows paramiko: connect by the rules of ~/.ssh/config, run a program, reach a Unix socket.

Everything here blocks, within bounds; call it from a thread where an event loop runs. Host keys are always verified
and never learnt. No password is asked for or kept: keys come from the agent or from files.

Source: OpenSSH PROTOCOL, section 2.4 (direct-streamlocal@openssh.com).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.pkey import UnknownKeyType

from app.errors import HostUnreachableError
from app.safe_text import clean
from app.ssh.config import Destination, SshSettings, parse_destination, parse_jumps
from app.ssh.program_channel import finish
from app.ssh.remote_command import command_line
from app.ssh.way import agent_socket, check_key, dial, known_hosts, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from app.ssh.remote_command import Finished

LOGIN_TIMEOUT_S = 10.0
"""For each of: the host's first words, the key exchange, authentication."""
CHANNEL_TIMEOUT_S = 10.0
KEEPALIVE_S = 5
MAX_JUMPS = 8
CHANNEL_ERRORS = (OSError, EOFError, paramiko.SSHException)
"""What a channel may raise once the connection breaks, for those who read and write one."""
END_OF_CONNECTION_S = 1.0
"""A channel hears of a broken connection a moment before the connection calls itself dead."""
_STREAMLOCAL = "direct-streamlocal@openssh.com"
_CHANNEL_OPEN = 90
NO_EXIT_STATUS = -1
"""paramiko's, for a program that a signal has ended, and for one of which nothing more was heard."""
_WEAK = {
    "ciphers": ["3des-cbc", "aes128-cbc", "aes192-cbc", "aes256-cbc"],
    "macs": ["hmac-md5", "hmac-md5-96", "hmac-sha1", "hmac-sha1-96"],
}

# What paramiko logs, it also raises; said twice, and on a screen that somebody else draws, it is in the way.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class ForwardingRefusedError(HostUnreachableError):
    """The host opens no channel to a socket: nobody listens on it, or sshd may not forward."""


class SubsystemRefusedError(HostUnreachableError):
    """The host's sshd has no SFTP, or lets nobody use it."""


class SshConnection:
    """A host that has let us in."""

    def __init__(self, host: str, transport: _Transport, via: SshConnection | None) -> None:
        self.host = host
        self._transport = transport
        self._via = via

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost or closed."""
        return self._transport.is_active()

    def run(self, argv: Sequence[str], timeout_s: float, given: bytes = b"") -> Finished:
        """Run a program to its end, with `given` on its standard input.

        Raises:
            HostUnreachableError: It did not end in time, or the connection broke.
        """
        deadline_s = time.monotonic() + timeout_s
        with _words_of(self.host), contextlib.closing(self._open_session()) as channel:
            _execute(channel, argv, timeout_s)
            done = finish(channel, (self.host, argv[0]), given, deadline_s, CHANNEL_ERRORS)
            if done.exit_code == NO_EXIT_STATUS:
                self._transport.join(END_OF_CONNECTION_S)
                if not self.is_alive:
                    raise HostUnreachableError(self.host, f"the connection broke while {argv[0]} ran there")
            return done

    def open_process(self, argv: Sequence[str]) -> paramiko.Channel:
        """Start a program; the channel is its standard input and output.

        Raises:
            HostUnreachableError: The host would not.
        """
        with _words_of(self.host), contextlib.ExitStack() as undo:
            channel = self._open_session()
            undo.callback(channel.close)
            _execute(channel, argv, CHANNEL_TIMEOUT_S)
            undo.pop_all()
            return channel

    def send_file(self, near: Path, far: str) -> None:
        """Copy a file into one of the host, over SFTP; it takes as long as it gets on.

        Raises:
            SubsystemRefusedError: The host has no SFTP.
            HostUnreachableError: The file cannot be written there, or the connection broke.
        """
        with _words_of(self.host), contextlib.closing(self._open_session()) as channel:
            try:
                _within(channel, CHANNEL_TIMEOUT_S, lambda: channel.invoke_subsystem("sftp"))
                channel.settimeout(CHANNEL_TIMEOUT_S)
                client = paramiko.SFTPClient(channel)
            except (paramiko.SSHException, paramiko.SFTPError, EOFError) as error:
                self._transport.join(END_OF_CONNECTION_S)
                if not self.is_alive:
                    raise
                raise SubsystemRefusedError(self.host, "it has no SFTP") from error
            try:
                client.put(str(near), far)
            except TimeoutError:
                raise
            except OSError as error:
                raise HostUnreachableError(self.host, f"{clean(far)} cannot be written there: {error}") from error

    def open_socket(self, path: str) -> paramiko.Channel:
        """Connect to a Unix socket of the host.

        Raises:
            ForwardingRefusedError: The host would not.
            HostUnreachableError: The connection broke.
        """
        with _words_of(self.host):
            try:
                return self._transport.open_streamlocal(path)
            except paramiko.ChannelException as error:
                raise ForwardingRefusedError(self.host, f"no channel to {path}: {error.text}") from error

    def open_tcp(self, hostname: str, port: int) -> paramiko.Channel:
        """Connect to a port that this host can reach, as a jump host does.

        Raises:
            HostUnreachableError: The host would not.
        """
        with _words_of(self.host):
            return self._transport.open_channel(
                "direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=CHANNEL_TIMEOUT_S
            )

    def close(self) -> None:
        """End the connection, and those that it leads through."""
        with contextlib.ExitStack() as parts:
            if self._via:
                parts.callback(self._via.close)
            self._transport.close()
            self._transport.join(CHANNEL_TIMEOUT_S)

    def _open_session(self) -> paramiko.Channel:
        return self._transport.open_session(timeout=CHANNEL_TIMEOUT_S)


def connect(host: str, config_file: str = "") -> SshConnection:
    """Return a connection to a host.

    Args:
        host: An alias of ~/.ssh/config, user@host, or user@host:port.
        config_file: Read instead of ~/.ssh/config.

    Raises:
        UsageError: That is not a host.
        SessionError: There is no ssh on this machine to read its configuration.
        HostKeyError: The host is not known, or not who it was.
        HostUnreachableError: It cannot be reached, or does not let us in.
    """
    return _connect(parse_destination(host), config_file, None, MAX_JUMPS)


def _connect(destination: Destination, config_file: str, via: SshConnection | None, jumps_left: int) -> SshConnection:
    settings = resolve(destination, config_file)
    hops = [] if via else parse_jumps(settings.proxy_jump)
    if hops and not jumps_left:
        raise HostUnreachableError(settings.alias, f"ProxyJump leads over more than {MAX_JUMPS} hosts")
    with contextlib.ExitStack() as undo:
        for hop in hops:
            via = _connect(hop, config_file, via, jumps_left - 1)
            undo.pop_all()  # a connection closes those that it leads through
            undo.callback(via.close)
        connection = _log_in(settings, via)
        undo.pop_all()
    return connection


def _log_in(settings: SshSettings, via: SshConnection | None) -> SshConnection:
    host = settings.alias
    if settings.proxy_command and via is None:
        raise HostUnreachableError(host, "ProxyCommand is not supported", "use ProxyJump in ~/.ssh/config")
    known = known_hosts(settings)
    with contextlib.ExitStack() as undo, _words_of(host):
        stream = via.open_tcp(settings.hostname, settings.port) if via else dial(settings)
        undo.callback(stream.close)
        transport = _Transport(stream, _WEAK)
        undo.callback(transport.close)
        transport.banner_timeout = transport.auth_timeout = transport.handshake_timeout = LOGIN_TIMEOUT_S
        _prefer(transport, known.kinds(settings.key_name))
        transport.start_client(timeout=LOGIN_TIMEOUT_S)
        key = transport.get_remote_server_key()
        check_key(settings, known, key.get_name(), key.asbytes())
        _authenticate(transport, settings)
        transport.set_keepalive(KEEPALIVE_S)
        undo.pop_all()
    return SshConnection(host, transport, via)


def _prefer(transport: paramiko.Transport, kinds: Sequence[str]) -> None:
    """Ask for a key of a kind that is known of the host: any other would look like a change."""
    options = transport.get_security_options()
    wanted = {algorithm for kind in kinds for algorithm in _signature_algorithms(kind)}
    options.key_types = sorted(options.key_types, key=lambda algorithm: algorithm not in wanted)


def _signature_algorithms(kind: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,)


def _authenticate(transport: paramiko.Transport, settings: SshSettings) -> None:
    """Offer keys until one is taken.

    Raises:
        HostUnreachableError: None is.
    """
    tried, locked = [], []
    with _agent_keys(settings) as keys:
        for key in keys:
            tried.append(f"{key.get_name()} of ssh-agent")
            if _is_taken(transport, settings.user, key):
                return
    for file in settings.identity_files:
        if not Path(file).exists():
            continue
        try:
            loaded = paramiko.PKey.from_path(file)
        except (paramiko.PasswordRequiredException, TypeError):  # a TypeError is what `from_path` says of a locked key
            locked.append(file)
            continue
        except (OSError, ValueError, paramiko.SSHException, UnknownKeyType, UnsupportedAlgorithm):
            continue  # a FIDO key is of the last kind: only ssh-agent can sign with it
        tried.append(file)
        if _is_taken(transport, settings.user, loaded):
            return
    hint = f"ssh-add {locked[0]}" if locked else f"put one of your public keys there: ssh-copy-id {settings.alias}"
    offered = f"takes none of our keys ({', '.join(tried)})" if tried else "was offered no key"
    raise HostUnreachableError(settings.alias, f"{settings.user}@{settings.hostname} {offered}", hint)


def _is_taken(transport: paramiko.Transport, user: str, key: paramiko.PKey) -> bool:
    try:
        return not transport.auth_publickey(user, key)  # what else is wanted, such as a second factor, we do not have
    except paramiko.AuthenticationException as error:
        if "timeout" in str(error).lower():
            raise TimeoutError from error  # paramiko has no kind of its own for it; nobody has refused the key
        if not transport.is_active():
            raise  # too many keys were tried: the next one would not be heard
        return False


@contextlib.contextmanager
def _agent_keys(settings: SshSettings) -> Iterator[list[paramiko.PKey]]:
    """Lend the agent's keys; with IdentitiesOnly, those whose public part lies beside an identity file."""
    path = agent_socket(settings, os.environ)
    if not path:
        yield []
        return
    agent = _Agent(path)
    try:
        keys: list[paramiko.PKey] = list(agent.get_keys())
        if settings.identities_only:
            wanted = {_public_part(file) for file in settings.identity_files}
            keys = [key for key in keys if f"{key.get_name()} {key.get_base64()}" in wanted]
        yield keys
    finally:
        agent.close()


def _public_part(identity_file: str) -> str:
    """Return the kind and key beside a private key; empty if there is none."""
    try:
        return " ".join(Path(f"{identity_file}.pub").read_text(encoding="utf-8").split()[:2])
    except (OSError, UnicodeDecodeError):
        return ""


class _Agent(AgentSSH):
    """The ssh-agent at a socket, which paramiko's own takes from SSH_AUTH_SOCK alone; without keys if none answers."""

    def __init__(self, path: str) -> None:
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(LOGIN_TIMEOUT_S)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except CHANNEL_ERRORS:
            connection.close()
            return
        connection.settimeout(None)  # a person may have to confirm a signature: the login has a limit of its own

    def close(self) -> None:
        self._close()  # type: ignore[attr-defined]


class _Transport(paramiko.Transport):
    """A transport that can open one more kind of channel: to a Unix socket of the host."""

    def open_streamlocal(self, path: str) -> paramiko.Channel:
        """Return a channel to a socket.

        Raises:
            ChannelException: The host would not.
        """
        with self._streamlocal_lock:
            self._streamlocal_path = path
            return self.open_channel(_STREAMLOCAL, timeout=CHANNEL_TIMEOUT_S)

    def __init__(self, stream: socket.socket | paramiko.Channel, disabled_algorithms: dict[str, list[str]]) -> None:
        self._streamlocal_lock = threading.Lock()
        self._streamlocal_path = ""
        super().__init__(stream, disabled_algorithms=disabled_algorithms)
        self.daemon = True

    def _send_user_message(self, data: paramiko.Message) -> None:
        """Complete the message that opens such a channel: paramiko knows what to add for its own kinds only."""
        if data.asbytes().startswith(_STREAMLOCAL_OPENING):
            data.add_string(self._streamlocal_path)
            data.add_string("")
            data.add_int(0)
        super()._send_user_message(data)  # type: ignore[misc]


_STREAMLOCAL_OPENING = bytes([_CHANNEL_OPEN]) + len(_STREAMLOCAL).to_bytes(4, "big") + _STREAMLOCAL.encode()


def _execute(channel: paramiko.Channel, argv: Sequence[str], timeout_s: float) -> None:
    """Ask for a program; see `_within`."""
    _within(channel, timeout_s, lambda: channel.exec_command(_encoded(argv)))


def _within(channel: paramiko.Channel, timeout_s: float, ask: Callable[[], None]) -> None:
    """Ask a channel for something; paramiko would wait for the answer for ever.

    Raises:
        TimeoutError: No answer came.
    """
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        channel.close()  # wakes whoever waits for the answer

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        ask()
    except paramiko.SSHException as error:
        if is_late.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
        timer.join(CHANNEL_TIMEOUT_S)
    if is_late.is_set():
        raise TimeoutError


def _encoded(argv: Sequence[str]) -> bytes:
    """Return a command as bytes: an argument that is not UTF-8 arrives as it was given."""
    return os.fsencode(command_line(argv))


@contextlib.contextmanager
def _words_of(host: str) -> Iterator[None]:
    """Turn what paramiko and the network raise into an error that names the host."""
    try:
        yield
    except TimeoutError as error:
        raise HostUnreachableError(host, "it does not answer in time", "it may hang, or the network is cut") from error
    except paramiko.AuthenticationException as error:
        raise HostUnreachableError(host, f"it does not let us in: {clean(str(error))}", f"try: ssh {host}") from error
    except paramiko.ChannelException as error:
        raise HostUnreachableError(host, f"it opens no channel: {clean(error.text)}") from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        said = clean(str(error)) or type(error).__name__
        raise HostUnreachableError(host, f"SSH failed: {said}", f"try: ssh {host}") from error
