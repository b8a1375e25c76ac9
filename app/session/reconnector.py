"""Brings a lost connection to a host back, with growing pauses. Until then the shown figures are old, nothing else.

An agent that ends leaves the connection as it is. So when its reports stop, the agent is looked for, and waited for in
the same way.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import TYPE_CHECKING

from app.errors import (
    AgentUnreachableError,
    AllocationEndedError,
    AnswerNeededError,
    AppError,
    HostKeyError,
    HostUnreachableError,
    IncompatibleAgentError,
    LoginRefusedError,
    NoAgentError,
)
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.text import seconds_text
from app.threads import in_daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.fleet.agent_link import Kept

LOOK_S = 0.25
"""Seconds between two checks of the connection; SSH itself takes seconds to notice a loss."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
LOOK_FOR_AGENT_S = 10.0
"""Seconds between two searches for a silent agent; each starts a process on its node, which may be busy."""
_HOPELESS = (AllocationEndedError, HostKeyError, AnswerNeededError, IncompatibleAgentError, LoginRefusedError)
"""Errors that time does not mend: the host is not tried again, or only when the user asks."""
_UNREACHABLE_KINDS: dict[type[AppError], UnreachableKind] = {
    NoAgentError: UnreachableKind.AGENT,
    AgentUnreachableError: UnreachableKind.ANSWER,
    IncompatibleAgentError: UnreachableKind.FITTING_AGENT,
}
"""What is missing after an error; the first match wins, and without one it is the connection."""


class Trouble(str):
    """A sentence about something that has gone wrong, among those about what was done."""

    __slots__ = ()


class Reconnector:
    """Watches one host's connection, in a task of the session's loop.

    Attributes:
        unreachable_reason: What is missing at present, a connection or an agent, and why; None while both are there.
        error: Error of the last attempt; None while the connection and the agent are there.
        failure: Error that ended the attempts: `patience_s` is over, the host has another key, wants an answer, or
            refuses our keys. None until then.
    """

    def __init__(
        self,
        link: Kept,
        notify: Callable[[str], None],
        patience_s: float,
        unreachable_reason: AppError | None = None,
        is_unheard: Callable[[], bool] = lambda: False,
        *,
        may_ask: bool = False,
    ) -> None:
        """Set up for a host that is connected, or is not so far.

        Args:
            link: Connection to the host.
            notify: Takes a sentence about each change.
            patience_s: Seconds for which a lost connection is tried again.
            unreachable_reason: Why there has been no connection yet; None where there is one.
            is_unheard: Returns whether the agent's reports have stopped, though there is a connection.
            may_ask: Whether a user can be asked, by `try_now`: then a host that wants an answer waits for it.
        """
        self._link = link
        self._may_ask = may_ask
        self.unreachable_reason = (
            None if unreachable_reason is None else self._unreachable_reason_of(unreachable_reason)
        )
        self.failure: AppError | None = unreachable_reason if isinstance(unreachable_reason, _HOPELESS) else None
        self.error = unreachable_reason
        self._notify = notify
        self._patience_s = patience_s
        self._is_unheard = is_unheard
        self._looked_at_s = float("-inf")
        """When the agent was last looked for."""
        self._wanted: asyncio.Future[None] | None = None
        """Done once the attempt that a caller awaits is over."""
        self._asks = False
        self._wake = asyncio.Event()
        self._is_over = False

    @property
    def host(self) -> str:
        """Name of the host."""
        return self._link.host

    @property
    def wants_answer(self) -> bool:
        """Whether there is no connection, and the host is tried when a user who can be asked wants it."""
        return self._is_asked_here(self.error) or (self._may_ask and isinstance(self.error, LoginRefusedError))

    async def try_now(self, *, asks: bool) -> None:
        """Make the next attempt immediately; return when it is over, or none follows. Only one caller may wait.

        Args:
            asks: Ask the user where the login needs it.
        """
        if self._is_over:
            return
        self._wanted = asyncio.get_running_loop().create_future()
        self._asks = asks
        self._wake.set()
        await self._wanted

    async def run(self) -> None:
        """Keep the connection until the attempts end; cancel it to stop."""
        try:
            while self.failure is None or self.wants_answer:
                if self._link.is_alive and self.unreachable_reason is None:
                    self._settle()
                    await self._look_for_agent()
                    await asyncio.sleep(LOOK_S)
                else:
                    await self._bring_back()
        finally:
            self._is_over = True
            self._settle()

    async def _look_for_agent(self) -> None:
        """Find out why an agent's reports have stopped, unless that was done just now."""
        now_s = asyncio.get_running_loop().time()
        if not self._is_unheard() or now_s < self._looked_at_s + LOOK_FOR_AGENT_S:
            return
        self._looked_at_s = now_s
        error = await self._try(self._link.find)
        if error is not None and self._link.is_alive:
            self.unreachable_reason = self._unreachable_reason_of(error)
            self._notify(Trouble(f"{self._error_text(error)}; looking for it again"))

    async def _bring_back(self) -> None:
        host, loop = self._link.host, asyncio.get_running_loop()
        lost_at_s, pause_s = loop.time(), FIRST_PAUSE_S
        was_forwarded = self._link.is_forwarded
        if self.unreachable_reason is None:
            self.unreachable_reason = UnreachableReason("the connection is lost")
            self._notify(Trouble(f"{host}: the connection is lost; reconnecting, and no job ends by that"))
        if self.failure is not None:
            await self._wake.wait()
        while True:
            error = await self._reconnect()
            away_s = loop.time() - lost_at_s
            if error is None:
                is_connection = self.unreachable_reason.unreachable_kind is UnreachableKind.CONNECTION
                # How long an agent was away its reports show: they stopped before it was looked for.
                what = f"connection is back after {seconds_text(away_s)}" if is_connection else "agent is back"
                self.unreachable_reason, self.failure, self.error = None, None, None
                self._notify(f"{host}: the {what}")
                if was_forwarded and not self._link.is_forwarded:
                    self._notify(no_forwarding_notice(host))
                return
            if (unreachable_reason := self._unreachable_reason_of(error)) != self.unreachable_reason:
                self.unreachable_reason = unreachable_reason
                self._notify(Trouble(self._error_text(error)))
            self.error = error
            is_hopeless = isinstance(error, _HOPELESS) or away_s >= self._patience_s
            self.failure = error if is_hopeless else None
            if not self._wake.is_set():  # else the attempt that a caller awaits is still to come
                self._settle()
            if is_hopeless and not self.wants_answer:
                return
            await self._pause(math.inf if is_hopeless else pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _pause(self, pause_s: float) -> None:
        """Wait until an attempt is wanted, the pause is over, or an agent whose reports had stopped reports again."""
        loop, was_unheard = asyncio.get_running_loop(), self._is_unheard()
        end_s = loop.time() + pause_s
        while (left_s := end_s - loop.time()) > 0 and not (was_unheard and not self._is_unheard()):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), min(left_s, LOOK_S))
                return

    async def _reconnect(self) -> AppError | None:
        """Try to connect; return the error, or None if there is a connection."""
        asks, self._asks = self._asks, False
        self._wake.clear()
        return await self._try(lambda: self._link.reconnect(asks=asks))

    async def _try(self, do: Callable[[], object]) -> AppError | None:
        """Run a blocking function in a thread; return its error, or None."""
        try:
            await in_daemon_thread(do)
        except AppError as error:
            return error
        return None

    def _error_text(self, error: AppError) -> str:
        """Return the text of an error, with its hint unless the user is asked here."""
        return str(error) if self._is_asked_here(error) else error.whole

    def _unreachable_reason_of(self, error: AppError) -> UnreachableReason:
        return unreachable_reason_of(error, self.host, has_hint=not self._is_asked_here(error))

    def _is_asked_here(self, error: AppError | None) -> bool:
        return self._may_ask and isinstance(error, HostUnreachableError) and error.is_answerable

    def _settle(self) -> None:
        """Release the caller that awaits an attempt."""
        wanted, self._wanted = self._wanted, None
        self._wake.clear()
        self._asks = False
        if wanted is not None and not wanted.done():
            wanted.set_result(None)


def no_forwarding_notice(host: str) -> str:
    return f"sshd of {host} forwards no sockets: going through `agent proxy`"


def unreachable_reason_of(error: AppError, host: str, *, has_hint: bool = True) -> UnreachableReason:
    """Return what is missing on the connection to a host, by the error met there."""
    unreachable_kind = next(
        (unreachable_kind for kind, unreachable_kind in _UNREACHABLE_KINDS.items() if isinstance(error, kind)),
        UnreachableKind.CONNECTION,
    )
    return UnreachableReason(error.whole_of(host) if has_hint else error.text_for(host), unreachable_kind)
