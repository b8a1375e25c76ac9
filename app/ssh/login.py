"""Logs into a host by the rules of ~/.ssh/config: over jump hosts or a ProxyCommand, its key verified.

Everything here blocks, within bounds; call it from a thread where an event loop runs.

`Logins` holds what the logins of one command share. `JumpHosts` lends connections to jump hosts: hosts behind the same
one share a connection to it, which ends with the last of them.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from app.errors import AnswerNeededError, AppError, HostUnreachableError, LoginRefusedError
from app.ssh.authentication import authenticate
from app.ssh.config import Destination, SshSettings, parse_destination, parse_jumps
from app.ssh.connection import HostConnection
from app.ssh.first_contact import Introductions
from app.ssh.keys import Keyring
from app.ssh.questions import Nobody
from app.ssh.transport import CHANNEL_ERRORS, Transport, ssh_errors_of
from app.ssh.way import ProxyCommand, dial, known_hosts, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.ssh.questions import Prompter
    from app.ssh.transport import ByteStream

LOGIN_TIMEOUT_S = 10.0
"""Seconds for each of: the host's banner, the key exchange, an answer to an authentication attempt."""
MAX_JUMPS = 8


class Logins:
    """State shared by the logins of one command: the user's answers, unlocked keys, jump hosts.

    Safe to use from several threads in parallel.
    """

    def __init__(self, prompter: Prompter | None = None) -> None:
        """`prompter` asks the user; without one, nobody is asked."""
        prompter = prompter or Nobody()
        self.keyring = Keyring(prompter)
        self.introductions = Introductions(prompter)
        self.jump_hosts = JumpHosts()
        self.refusals: dict[SshSettings, LoginRefusedError] = {}
        """Logins that are refused, by all but their alias; they are left alone, by all hosts behind them too."""

    def forget_refusals(self) -> None:
        """Allow questions that the user has left unanswered to be asked again, and refused keys to be offered again."""
        self.refusals.clear()
        self.keyring.forget_refusals()
        self.introductions.forget_refusals()

    def connect(self, host: str, config_file: str = "", *, asks: bool = True) -> HostConnection:
        """Return a connection to a host.

        Args:
            host: An alias of ~/.ssh/config, user@host, or user@host:port.
            config_file: Read instead of ~/.ssh/config.
            asks: Ask the user where the login needs it; else only earlier answers are used.

        Raises:
            UsageError: That is not a host, or ~/.ssh/config is wrong.
            SessionError: There is no ssh on this machine to read its configuration.
            HostKeyError: The host is unknown, or its key has changed.
            AnswerNeededError: It wants an answer, and nobody can be asked.
            LoginRefusedError: It refuses our keys, or has since `forget_refusals`.
            HostUnreachableError: It cannot be reached.
        """
        return _Journey(self, config_file, asks=asks).to(parse_destination(host), MAX_JUMPS)


class _HungUpError(Exception):
    """The host hung up while a user compared its key; the key is known now, so the next attempt need not wait."""


class _Journey:
    """One login with its jump hosts; used in one thread."""

    def __init__(self, logins: Logins, config_file: str, *, asks: bool) -> None:
        self._logins = logins
        self._config_file = config_file
        self._asks = asks
        self._begun: list[WayThere] = []

    def to(self, destination: Destination, jumps_left: int) -> HostConnection:
        """Return a connection to a host, over its jump hosts."""
        settings = resolve(destination, self._config_file)
        hops = parse_jumps(settings.proxy_jump)
        if len(hops) > jumps_left:
            raise HostUnreachableError(settings.alias, f"ProxyJump leads over more than {MAX_JUMPS} hosts")
        return self._log_in(settings, self._over(hops, jumps_left - len(hops)) if hops else None)

    def _over(self, hops: Sequence[Destination], jumps_left: int) -> Loan:
        """Return the last of some jump hosts.

        The first is reached as ~/.ssh/config has it, each other one over that before.
        """
        *before, last = hops
        way = (self._config_file, *(hop.text for hop in hops))
        if way in self._begun:
            raise HostUnreachableError(last.text, "ProxyJump leads to the host itself", "look at ~/.ssh/config")

        def connect() -> HostConnection:
            if not before:
                return self.to(last, jumps_left)
            return self._log_in(resolve(last, self._config_file), self._over(before, jumps_left))

        self._begun.append(way)
        try:
            return self._logins.jump_hosts.borrow(way, connect)
        finally:
            self._begun.remove(way)

    def _log_in(self, settings: SshSettings, via: Loan | None) -> HostConnection:
        """Return a connection; its end, or a failure here, gives the jump host back."""
        with contextlib.ExitStack() as undo:
            if via:
                undo.callback(via.give_back)
            keyring, account = self._logins.keyring, (settings.user, settings.key_name)
            if not self._asks and keyring.is_asked_again(account):
                detail = f"{settings.user}@{settings.hostname} wants a new answer at each login"
                raise AnswerNeededError(settings.alias, detail, "leave, and come in again")
            if (refused := self._logins.refusals.get(_without_alias(settings))) is not None:
                raise refused.with_traceback(None)
            try:
                transport, end_of_way = self._reach(settings, via)
            except _HungUpError:
                transport, end_of_way = self._reach_again(settings, via)
            undo.callback(end_of_way)
            return HostConnection(settings.alias, transport, undo.pop_all().close)

    def _reach_again(self, settings: SshSettings, via: Loan | None) -> tuple[Transport, Callable[[], None]]:
        try:
            return self._reach(settings, via)
        except _HungUpError as error:
            hint = f"try: {settings.by_hand}"
            raise HostUnreachableError(settings.alias, "it hangs up before anybody can log in", hint) from error

    def _reach(self, settings: SshSettings, via: Loan | None) -> tuple[Transport, Callable[[], None]]:
        """Return the transport, and a function that ends its ProxyCommand, if any."""
        with contextlib.ExitStack() as undo:
            proxy = ProxyCommand(settings) if settings.proxy_command and not via else None
            if proxy:
                undo.callback(proxy.end)
            with ssh_errors_of(settings.alias):
                stream: ByteStream
                if via:
                    stream = via.connection.open_tcp(settings.hostname, settings.port)
                else:
                    stream = proxy.stream if proxy else dial(settings)
                transport = self._enter(settings, stream, proxy)
            return transport, undo.pop_all().close

    def _enter(self, settings: SshSettings, stream: ByteStream, proxy: ProxyCommand | None) -> Transport:
        """Return the transport once the host's key is verified and the login has succeeded."""
        logins = self._logins
        with contextlib.ExitStack() as undo:
            undo.callback(stream.close)
            known = known_hosts(settings)
            transport = Transport(stream)
            undo.callback(transport.close)
            banner_timeout_s = max(LOGIN_TIMEOUT_S, settings.connect_timeout_s or 0.0) if proxy else LOGIN_TIMEOUT_S
            transport.banner_timeout = banner_timeout_s
            transport.auth_timeout = transport.handshake_timeout = LOGIN_TIMEOUT_S
            transport.prefer(known.kinds(settings.key_name))
            if settings.is_compressed:
                transport.compress()
            try:
                transport.start_client(timeout=banner_timeout_s)
            except CHANNEL_ERRORS as error:
                if proxy and (ended := proxy.error()):
                    raise ended from error
                raise
            key = transport.get_remote_server_key()
            logins.introductions.check_key(settings, known, key.get_name(), key.asbytes(), asks=self._asks)
            if not transport.is_active():
                raise _HungUpError
            try:
                authenticate(transport, settings, logins.keyring, asks=self._asks)
            except LoginRefusedError as error:
                logins.refusals[_without_alias(settings)] = error
                raise
            transport.watch()
            undo.pop_all()
        return transport


def _without_alias(settings: SshSettings) -> SshSettings:
    return msgspec.structs.replace(settings, alias="")


def connect(host: str, config_file: str = "") -> HostConnection:
    """Return a connection to a host without any question; see `Logins.connect`."""
    return Logins().connect(host, config_file)


WAIT_S = 300.0
"""Seconds for another thread to reach a jump host; a user may be asked for a secret while it does."""

WayThere = tuple[str, ...]
"""The configuration file, and the hosts of the connection, the jump host last."""


class Loan(NamedTuple):
    """A shared connection."""

    connection: HostConnection
    give_back: Callable[[], None]
    """Called once, instead of closing it."""


class JumpHosts:
    """Lends connections to jump hosts, to several threads in parallel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[WayThere, _Shared] = {}

    def borrow(self, way: WayThere, connect: Callable[[], HostConnection]) -> Loan:
        """Return the connection to a jump host; blocks while another thread makes it.

        Args:
            way: The configuration and the hosts that lead there.
            connect: Makes the connection, where there is no live one.

        Raises:
            AppError: `connect` has raised it, here or in the thread that was waited for.
        """
        with self._lock:
            shared = self._shared.get(way)
            is_mine = shared is None or shared.is_lost
            if shared is None or shared.is_lost:
                shared = self._shared[way] = _Shared()
            shared.num_loans += 1
        if is_mine:
            self._make(way, shared, connect)
        try:
            connection = shared.made.result(WAIT_S)
        except TimeoutError as error:
            raise HostUnreachableError(way[-1], "another connection to it is still being made") from error
        return Loan(connection, lambda: self._give_back(way, shared))

    def _make(self, way: WayThere, shared: _Shared, connect: Callable[[], HostConnection]) -> None:
        failure: AppError = HostUnreachableError(way[-1], "it was given up")
        try:
            shared.made.set_result(connect())
        except AppError as error:
            failure = error
        finally:
            if not shared.made.done():
                with self._lock:
                    self._forget(way, shared)
                # All waiting threads get the same error: each would wait as long again for another attempt.
                shared.made.set_exception(failure)

    def _give_back(self, way: WayThere, shared: _Shared) -> None:
        with self._lock:
            shared.num_loans -= 1
            is_last = shared.num_loans == 0
            if is_last:
                self._forget(way, shared)
        if is_last:
            shared.made.result().close()

    def _forget(self, way: WayThere, shared: _Shared) -> None:
        if self._shared.get(way) is shared:
            del self._shared[way]


class _Shared:
    """One connection, perhaps still to be made."""

    def __init__(self) -> None:
        self.made: Future[HostConnection] = Future()
        self.num_loans = 0

    @property
    def is_lost(self) -> bool:
        """True once it was made and has broken."""
        return self.made.done() and not self.made.result().is_alive
