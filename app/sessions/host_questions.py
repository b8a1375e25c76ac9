"""What hosts want to know that cannot be reached without the person: asked when the person says so, one by one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from app.sessions.hosts import Connections
    from app.ssh.question_desk import Question, QuestionDesk


class HostQuestions:
    """What `app.tui.source.Questions` asks for; in the session's loop."""

    def __init__(self, desk: QuestionDesk, connections: Connections, tell: Callable[[str], None]) -> None:
        """Take the questions from the terminal; `tell` takes what is said beside them."""
        self._desk = desk
        self._connections = connections
        self._tell = tell
        self._is_asking = False
        desk.attend()

    @property
    def waiting(self) -> list[str]:
        """Hosts that want an answer; empty while the person is asked."""
        return [] if self._is_asking else list(self._connections.keepers_that_wait)

    @property
    def question(self) -> Question | None:
        """What the person is asked now."""
        return self._desk.question

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question, unless it is over already; None is not now, for all hosts of this time."""
        self._desk.answer(number, text)

    async def begin(self) -> None:
        """Go to the hosts that want an answer, one after the other; an answer may open others, too.

        One at a time: a host that has asked waits for its answer, and for no other one's.
        """
        if self._is_asking:
            return
        self._is_asking = True
        try:
            self._connections.forget_refusals()
            gone_to: set[str] = set()
            while left := {
                host: keeper for host, keeper in self._connections.keepers_that_wait.items() if host not in gone_to
            }:
                host, keeper = next(iter(left.items()))
                gone_to.add(host)
                self._desk.begin(host)
                try:
                    await keeper.try_now(asks=True)
                finally:
                    is_put_off = self._desk.end()
                for sentence in self._desk.drain_told():
                    self._tell(f"{host}: {sentence}")
                if is_put_off:
                    return
                if not keeper.wants_answer:
                    others = (other for name, other in left.items() if name not in gone_to)
                    await asyncio.gather(*(other.try_now(asks=False) for other in others))
        finally:
            self._is_asking = False

    def close(self) -> None:
        """Ask nothing more, here or elsewhere."""
        self._desk.leave()
