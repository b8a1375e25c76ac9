"""What the demo and a host's job have in common: a session over live agents, with texts of its own.

`NewNodeWatch` decides when to report new nodes: those of one `srun` together, instead of each by itself.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.model.new_nodes import NewNodes
from app.session.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from pathlib import Path

    from agent.wire.logs import LogLine
    from app.recording.events import EventLog
    from app.recording.history import History
    from app.session.control import JobControl, JobStarter
    from app.session.hosts import HostDoctor, HostQuestions
    from app.session.options import SessionOptions
    from app.stacks.groups import NodeStacks
    from app.view.nodes import Progress
    from app.view.view import View
    from ddpcore.wire import Fault


class LiveSession:
    """A part of `app.tui.source.ConsoleSource`: the rest is what each kind of session does differently."""

    player = None
    starter: JobStarter | None = None
    questions: HostQuestions | None = None
    doctor: HostDoctor | None = None

    def __init__(
        self,
        directories: Mapping[str, Path],
        options: SessionOptions,
        notices: list[str],
        addresses: Callable[[str], Sequence[str]] = lambda _node: (),
        linked_nodes: Container[str] = (),
    ) -> None:
        """Over agents; `notices` are the first sentences about it, the rest is as for `Session`.

        Raises:
            SessionError: See `Session`.
        """
        self.is_read_only = options.is_read_only
        self.session = Session(directories, options, addresses, linked_nodes)
        """What is seen and done; after `Session.connect`."""
        self.started_at_s = time.monotonic()
        self._notices = notices

    @property
    def control(self) -> JobControl | None:
        return None if self.is_read_only else self.session.control

    @property
    def how_to_begin(self) -> str:
        """The command that brings a job while there is none; nothing where one comes by itself."""
        return ""

    @property
    def starting(self) -> Progress | None:
        return self.session.starting

    @property
    def stall_s(self) -> float:
        return self.session.stall_s

    def view(self) -> View:
        return self.session.view()

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        return self.session.drain_logs()

    def drain_notices(self) -> list[str]:
        notices, self._notices = [*self._notices, *self.session.drain_notices()], []
        for notice in notices:
            self.session.events.add_event(notice, time.monotonic())
        return notices

    @property
    def events(self) -> EventLog:
        return self.session.events

    @property
    def history(self) -> History:
        return self.session.history

    def time_text(self, at_s: float) -> str:
        at = time.time() - (time.monotonic() - at_s)  # noqa: TID251 - for people
        return f"{datetime.fromtimestamp(at):%H:%M:%S}"  # noqa: DTZ006 - and for them in their own zone

    @property
    def evidence_notices(self) -> list[str]:
        return self.session.evidence_notices

    async def inject(self, fault: Fault) -> str:
        """Do harm to a rank; see `Session.inject`.

        Raises:
            UsageError: Only looking is allowed.
        """
        if self.is_read_only:
            raise UsageError("this console only looks on", "open it without --read-only")
        return await self.session.inject(fault)

    async def stacks(self, *, is_native: bool) -> list[NodeStacks]:
        return await self.session.stacks(is_native=is_native)


SETTLE_S = 2.0
"""Without another one, until those that have come are told of; the agents of one `srun` come within a second."""
MAX_WAIT_S = 10.0
"""However many still come."""
MAX_KNOWN = 16_384
"""Names that are known to have been told of: a relay can only be wrong to have more, and it costs a word twice."""


class NewNodeWatch:
    """Each node is told of once, also where it goes and comes again."""

    def __init__(self) -> None:
        self._notified: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._first_s = self._last_s = 0.0

    def news(self, new_nodes: NewNodes, now_s: float) -> NewNodes:
        """Return those of them that are to be told of now."""
        waiting = frozenset(new_nodes.nodes) - self._notified
        if waiting != self._waiting:
            self._first_s = self._first_s if self._waiting else now_s
            self._waiting, self._last_s = waiting, now_s
        if not waiting or (now_s - self._last_s < SETTLE_S and now_s - self._first_s < MAX_WAIT_S):
            return NewNodes()
        self._notified = waiting | (self._notified if len(self._notified) < MAX_KNOWN else frozenset())
        self._waiting = frozenset()
        return new_nodes._replace(nodes=tuple(node for node in new_nodes.nodes if node in waiting))
