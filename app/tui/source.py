"""What the screen needs from a session: the only door between the console's face and the rest of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.wire.logs import LogLine
    from app.inventory.program import Again, Program
    from app.preflight.findings import Preflight, Step
    from app.recording.events import EventLog
    from app.recording.history import History
    from app.ssh.questions import Question
    from app.stacks.groups import NodeStacks
    from app.view.nodes import Progress
    from app.view.view import View
    from ddpcore.wire import Fault


class Player(Protocol):
    """What plays a recording; nothing of it waits."""

    num_rewinds: int
    """How often it has gone back: what was gathered from the session until then is void."""

    def pause(self) -> None:
        """Stand still, or go on; at the end, begin anew."""

    def change_speed(self, steps: int) -> None:
        """Play faster, or slower, by so many notches."""

    def skip(self, seconds: float) -> None:
        """Go on, or back, by so many seconds of the recording."""

    def to_next_verdict(self) -> None:
        """Go on to where something new is said, and stand still there."""


class Control(Protocol):
    """What can be done to a job; each returns a clean sentence about what was done, and raises AppError if it was not.

    The newest wish counts: a stop or a kill takes the place of a restart that still waits for the job's end.
    """

    @property
    def doing(self) -> str:
        """What is under way, in a few clean words; empty while nothing is."""

    async def stop(self, job_id: str, *, is_agreed: bool) -> str:
        """End a job in an orderly way: after a step and a checkpoint where its ranks can, else by SIGTERM."""

    async def kill(self, job_id: str) -> str:
        """End every process of a job."""

    async def restart(
        self,
        job_id: str,
        num_ranks: int | None = None,
        *,
        is_immediate: bool = False,
        without: Collection[str] | None = None,
    ) -> str:
        """End a job if it still runs, and begin its next attempt with as many ranks, or with `num_ranks`.

        Args:
            job_id: Which.
            num_ranks: Of the whole job.
            is_immediate: Kill it first.
            without: On the nodes that answer but for these, whichever made up the last attempt; None is those that did.
        """


class Starter(Protocol):
    """What starts another program where the last job has ended, or where there is none."""

    @property
    def hosts(self) -> Sequence[str]:
        """Where it starts it."""

    @property
    def where(self) -> str:
        """Where that is, in a few clean words."""

    async def past(self) -> Sequence[Program]:
        """Return what was started before, the newest first; what looks like a secret may be hidden in it.

        Raises:
            AppError: The host does not answer.
        """

    async def start(self, program: Program) -> str:
        """Start it, and follow it from now on; return a clean sentence that says so.

        Raises:
            AppError: A job runs there already, or the host refused; nothing of the program runs then.
        """


class Doctor(Protocol):
    """What looks at the hosts before a job does."""

    @property
    def hosts(self) -> Sequence[str]:
        """Which it looks at."""

    async def look(self, notify: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        """Return what is to be said of the hosts; takes some seconds, a minute at most.

        Args:
            notify: Takes a host and how far it is, in the loop.
            job: What is to be started there; None is whatever comes.
        """


class Questions(Protocol):
    """What hosts want to know of the person that cannot be reached without an answer; nothing of it waits."""

    @property
    def waiting(self) -> Sequence[str]:
        """Hosts that want an answer; empty while the person is asked."""

    @property
    def question(self) -> Question | None:
        """What the person is asked now; only after `begin`."""

    async def begin(self) -> None:
        """Go to the hosts that want an answer, one after the other; returns when none is left, or not now was said."""

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question, unless it is over already; None is not now."""


class ConsoleSource(Protocol):
    """A session as the screen sees it.

    `view`, the two drains and the properties are called from the frame loop, several times a second: they return at
    once. The coroutines run on the same event loop, beside the frames.
    """

    @property
    def title(self) -> str:
        """What this session is, in a few clean words: `rankdeck demo`."""

    @property
    def player(self) -> Player | None:
        """What plays the recording that is shown; None for what is live."""

    @property
    def control(self) -> Control | None:
        """What acts on the job; None where only looking is allowed, which takes the action off keys and palette."""

    @property
    def starter(self) -> Starter | None:
        """What starts another program; None where none can be started from here."""

    @property
    def doctor(self) -> Doctor | None:
        """What looks at the hosts; None of a recording."""

    @property
    def questions(self) -> Questions | None:
        """What hosts want to know; None where nobody may be asked: in a replay, on a page, where one only looks on."""

    @property
    def starting(self) -> Progress | None:
        """How far the start, or restart, of a job has come that is under way; None while none is."""

    @property
    def how_to_begin(self) -> str:
        """The command that brings a job while there is none, clean; empty where one comes by itself."""

    @property
    def can_inject(self) -> bool:
        """True when faults may be injected; False takes the action off the keys, the footer and the palette."""

    @property
    def leaving(self) -> str:
        """What happens when the person leaves, in a few clean words: `the job goes on`."""

    @property
    def stall_s(self) -> float:
        """From here a wait is a stall: the full length of the bars of waits."""

    def view(self) -> View:
        """Return the rows of now.

        Raises:
            AppError: The session cannot go on; the console ends and keeps the error for its caller.
        """

    def drain_logs(self) -> Sequence[tuple[str, LogLine]]:
        """Return the (node, line) pairs that have come since the last call, in order of arrival; not yet cleaned."""

    def drain_notices(self) -> Sequence[str]:
        """Return clean sentences about what the session did since the last call, oldest first."""

    @property
    def events(self) -> EventLog:
        """What has happened until now."""

    @property
    def history(self) -> History:
        """How the figures of the job went until now."""

    def time_text(self, at_s: float) -> str:
        """Return when an event was, in a few clean characters: by the clock, or by the place in a recording."""

    async def inject(self, fault: Fault) -> str:
        """Do harm to a rank; return a sentence that says what was done.

        Raises:
            AppError: It was not done, and why.
        """

    async def stacks(self, *, is_native: bool) -> Sequence[NodeStacks]:
        """Return the stacks of the job that is shown, by node; takes seconds where a rank is stuck.

        Args:
            is_native: With the frames of C and C++; stops each rank for up to half a second.

        Raises:
            AppError: There is no job, or no node has stacks of it.
        """

    async def close(self) -> None:
        """End what the session holds; called once, when the person quits."""
