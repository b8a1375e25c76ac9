"""Jump hosts of one command: hosts behind the same one share a connection to it, which ends with the last of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from app.errors import AppError, HostUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.ssh.connection import SshConnection

WAIT_S = 300.0
"""For another thread to reach a jump host; a person may be asked for a secret meanwhile."""

WayThere = tuple[str, ...]
"""The configuration that is read, and the hosts that are passed, the jump host last."""


class Loan(NamedTuple):
    """A connection that others use, too."""

    connection: SshConnection
    give_back: Callable[[], None]
    """To be called once, instead of closing it."""


class JumpHosts:
    """Lends connections to jump hosts, to several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[WayThere, _Shared] = {}

    def borrow(self, way: WayThere, connect: Callable[[], SshConnection]) -> Loan:
        """Return the connection of a way; blocks while another thread makes it.

        Args:
            way: Where it leads.
            connect: Makes it, where there is none that lives.

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

    def _make(self, way: WayThere, shared: _Shared, connect: Callable[[], SshConnection]) -> None:
        failure: AppError = HostUnreachableError(way[-1], "it was given up")
        try:
            shared.made.set_result(connect())
        except AppError as error:
            failure = error
        finally:
            if not shared.made.done():
                with self._lock:
                    self._forget(way, shared)
                # Whoever waits gets the same answer: each of them would wait as long again for another.
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
        self.made: Future[SshConnection] = Future()
        self.num_loans = 0

    @property
    def is_lost(self) -> bool:
        """True once it was made and has broken."""
        return self.made.done() and not self.made.result().is_alive
