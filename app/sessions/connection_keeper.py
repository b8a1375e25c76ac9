"""Brings a lost connection to a host back, with pauses that grow: until then what is shown is old, and nothing else."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from app.daemon_thread import in_daemon_thread
from app.errors import AnswerNeededError, AppError, HostKeyError, IncompatibleAgentError
from app.words import seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.ssh.agent_link import Kept

LOOK_S = 0.25
"""Between two looks at whether the connection stands; SSH itself takes seconds to notice."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 15.0
_HOPELESS = (HostKeyError, AnswerNeededError, IncompatibleAgentError)
"""Time mends none of them: a host that is not who it was, or wants an answer of a person, is not tried again."""


class ConnectionKeeper:
    """Watches one host's connection, in a task of the session's loop.

    Attributes:
        trouble: Why there is no connection, in words; empty while there is one.
        failure: What ended the attempts: patience has, or the host is not who it was, or wants a person. None while
            there is hope.
    """

    def __init__(
        self, link: Kept, tell: Callable[[str], None], patience_s: float, absence: AppError | None = None
    ) -> None:
        """Of a host that is connected, or is not so far.

        Args:
            link: The way there.
            tell: Takes a sentence about each change.
            patience_s: How long to try to come back.
            absence: Why there has been no connection yet; None where there is one.
        """
        self.trouble = "" if absence is None else str(absence)
        self.failure: AppError | None = absence if isinstance(absence, _HOPELESS) else None
        self._link = link
        self._tell = tell
        self._patience_s = patience_s

    async def run(self) -> None:
        """Keep the connection until there is no hope; cancel it to leave."""
        while self.failure is None:
            if self._link.is_alive and not self.trouble:
                await asyncio.sleep(LOOK_S)
            else:
                await self._bring_back()

    async def _bring_back(self) -> None:
        host, loop = self._link.host, asyncio.get_running_loop()
        lost_at_s, pause_s = loop.time(), FIRST_PAUSE_S
        if not self.trouble:
            self.trouble = "the connection is lost"
            self._tell(f"{host}: the connection is lost; it is tried again, the job goes on meanwhile")
        while True:
            error = await self._try()
            away_s = loop.time() - lost_at_s
            if error is None:
                self.trouble = ""
                self._tell(f"{host}: the connection is back after {seconds_text(away_s)}")
                return
            if str(error) != self.trouble:
                self.trouble = str(error)
                self._tell(self.trouble)
            if isinstance(error, _HOPELESS) or away_s >= self._patience_s:
                self.failure = error
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try(self) -> AppError | None:
        """Return why there is still no connection; None if there is one."""
        try:
            await in_daemon_thread(self._link.reconnect)
        except AppError as error:
            return error
        return None
