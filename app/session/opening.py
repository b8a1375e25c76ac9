"""What the console shows before its session is there: how far each host is, and what hosts ask the user.

`Opening` is a session of hosts that nobody has reached yet. A thread reaches them; then another session takes over.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.preflight.findings import HostStep, Step
from app.session.hosts import HostQuestions, Hosts
from app.session.options import SessionOptions
from app.session.session import Session
from app.text import nodes_text
from app.threads import in_daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.errors import AppError
    from app.fleet.agent_link import AgentLink, LinkGroup
    from app.session.remote_session import RemoteSession
    from app.ssh.questions import QuestionDesk


class OpeningProgress:
    """How far each host is; threads write it, frames read it.

    Attributes:
        nodes: The hosts.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.nodes = list(hosts)
        self._steps: dict[str, HostStep | Step] = dict.fromkeys(hosts, HostStep.CONNECTING)

    def stage(self, node: str) -> HostStep | Step:
        """Return how far a host is."""
        return self._steps[node]

    def move(self, node: str, step: HostStep | Step) -> None:
        """Take how far a host is."""
        self._steps[node] = step

    def connect(self, group: LinkGroup, then: Callable[[AgentLink], object]) -> dict[str, AppError]:
        """Connect to hosts, call `then` on each, and keep count of it; return the errors of those where that fails."""

        def do_and_count(link: AgentLink) -> None:
            self.move(link.host, HostStep.ASKING_AGENT)
            then(link)
            self.move(link.host, HostStep.READY)

        answers = group.connect(do_and_count, lambda host: self.move(host, HostStep.FAILED))
        return {host: error for host, error in answers if error is not None}

    @property
    def text(self) -> str:
        """A short line: `going to 4 hosts: 3 of 4 done, waiting for h2`."""
        steps = self._steps
        is_doctor = any(isinstance(step, Step) for step in steps.values())
        done = [node for node, step in steps.items() if step in (HostStep.READY, Step.DONE)]
        over = (*done, *(node for node, step in steps.items() if step in (HostStep.FAILED, Step.FAILED)))
        left = nodes_text([node for node in steps if node not in over])
        hosts = self.nodes[0] if len(steps) == 1 else f"{len(steps)} hosts"
        what = f"rankdeck doctor looks at {hosts}" if is_doctor else f"going to {hosts}"
        if len(steps) == 1:
            return what
        return f"{what}: {len(done)} of {len(steps)} done{f', waiting for {left}' if left else ''}"


class OpeningQuestions(HostQuestions):
    """What hosts, called by one name together, ask while they are reached: nothing has to be begun."""

    def __init__(self, desk: QuestionDesk, hosts: str) -> None:
        self._desk = desk
        self._is_question_open = True
        desk.attend()
        desk.begin(hosts)


class Opening(Session):
    """A session of hosts that nobody has reached yet."""

    title = "rankdeck"
    watched_job = ""
    can_inject = False
    outside = None
    leaving = "nothing was started"

    def __init__(
        self,
        hosts: Sequence[str],
        link: Callable[[], QuestionDesk | None],
        reach: Callable[[OpeningProgress], Hosts],
        make: Callable[[Hosts], RemoteSession],
    ) -> None:
        """Take what leads to a session.

        Args:
            hosts: Their names.
            link: Makes the near end of each connection; returns where questions come in, None where nobody is asked.
            reach: Goes to the hosts; blocks.
            make: Makes the session over them.
        """
        super().__init__(dict.fromkeys(hosts, Path()), SessionOptions(is_read_only=True))
        self._progress = OpeningProgress(hosts)
        self._link, self._reach, self._make = link, reach, make
        self._desk: QuestionDesk | None = None
        self.is_left = False
        """Whether the user has left before the hosts were reached; what becomes of them then is of no interest."""

    @property
    def starting(self) -> OpeningProgress:
        return self._progress

    async def start(self) -> None:
        """Do nothing: `opened` returns what is to be started."""

    async def opened(self) -> RemoteSession:
        """Reach the hosts, and return the session over them.

        Raises:
            AppError: They cannot be reached, or are not fit for the job.
        """
        self._desk = self._link()
        if self._desk is not None:
            self.questions = OpeningQuestions(self._desk, nodes_text(self._progress.nodes))
        hosts = await in_daemon_thread(lambda: self._reach(self._progress))
        session = self._make(hosts)
        if self._desk is not None:
            self._desk.end()
            session.take_notices(self._desk.drain_notes())
        return session

    def farewell(self) -> str:
        """Return nothing: nothing goes on."""
        return ""

    async def close(self) -> None:
        """Ask nothing more."""
        self.is_left = True
        if self._desk is not None:
            self._desk.leave()
