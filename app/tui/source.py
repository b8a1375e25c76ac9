"""The protocols through which the screen uses a session; the screen uses no other part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from agent.wire.logs import LogLine
    from app.inspect.outside_view import Target
    from app.inventory.program import Again, Program
    from app.preflight.findings import Preflight, Step
    from app.recording.events import Event, EventLog
    from app.recording.history import History
    from app.ssh.questions import Question
    from app.stacks.groups import NodeStacks
    from app.view.nodes import Progress
    from app.view.view import View
    from ddpcore.wire import Fault


class Player(Protocol):
    """Controls a replay; no method blocks."""

    num_rewinds: int
    """Number of jumps back; data collected from the session before the last one is invalid."""

    @property
    def is_behind(self) -> bool:
        """Whether the last view was made before the moment that is due, or wanted, was reached."""

    def pause(self) -> None:
        """Pause, or resume; at the end, restart from the beginning."""

    def change_speed(self, steps: int) -> None:
        """Play faster, or slower, by so many steps."""

    def skip(self, seconds: float) -> None:
        """Move forward, or back, by so many seconds of the recording."""

    def to_next_verdict(self) -> None:
        """Move forward to the next new verdict, and pause there."""


class Control(Protocol):
    """Actions on a job; each returns a clean sentence about what was done, or raises AppError.

    The last action counts: a stop or a kill replaces a restart that still waits for the job's end.
    """

    @property
    def doing(self) -> str:
        """Action in progress, as clean text; empty when there is none."""

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
        """End a job if it still runs, and start its next attempt with as many ranks, or with `num_ranks`.

        Args:
            job_id: The job.
            num_ranks: Number of ranks of the whole job.
            is_immediate: Whether to kill it first.
            without: Nodes to leave out of all that answer; None takes the nodes of the last attempt.
        """


class Starter(Protocol):
    """Starts another program when the last job has ended, or when there is none."""

    @property
    def hosts(self) -> Sequence[str]:
        """Hosts on which it starts the program."""

    @property
    def where(self) -> str:
        """Those hosts as clean text."""

    async def past(self) -> Sequence[Program]:
        """Return the earlier programs, the latest first; secrets may be hidden in them.

        Raises:
            AppError: The host does not answer.
        """

    async def start(self, program: Program) -> str:
        """Start a program and follow it from now on; return a clean sentence about it.

        Raises:
            AppError: A job runs there already, or the host refused; no part of the program runs then.
        """


class Doctor(Protocol):
    """Checks the hosts before a job starts."""

    @property
    def hosts(self) -> Sequence[str]:
        """Hosts that it checks."""

    async def look(self, notify: Callable[[str, Step], None], job: Program | Again | None = None) -> Preflight:
        """Return the findings about the hosts; takes some seconds, a minute at most.

        Args:
            notify: Called with a host and its step, in the event loop.
            job: The program to be started; None checks for any.
        """


class Questions(Protocol):
    """Questions of hosts that cannot be reached without the user's answer; no method but `begin` waits."""

    @property
    def waiting(self) -> Sequence[str]:
        """Hosts that want an answer; empty while the user is asked."""

    @property
    def question(self) -> Question | None:
        """Present question to the user; only after `begin`."""

    async def begin(self) -> None:
        """Connect to the hosts that want an answer, one by one; return when none is left, or the user puts it off."""

    def answer(self, number: int, text: str | None) -> None:
        """Answer a question unless it is over; None puts it off."""


class ConsoleSource(Protocol):
    """A session as the screen uses it.

    The frame loop calls `view`, the two drains and the properties several times a second: they return immediately. The
    coroutines run on the same event loop, beside the frames.
    """

    @property
    def title(self) -> str:
        """Command of this session, as clean text: `rankdeck demo`."""

    @property
    def player(self) -> Player | None:
        """Control of the replay; None in a live session."""

    @property
    def control(self) -> Control | None:
        """Actions on the job; None in a read-only session, which has no keys or palette entries for them."""

    @property
    def starter(self) -> Starter | None:
        """Start of another program; None where none can be started from here."""

    @property
    def doctor(self) -> Doctor | None:
        """Check of the hosts; None in a replay."""

    @property
    def questions(self) -> Questions | None:
        """Questions of the hosts; None where nobody may be asked: in a replay, on a page, in a read-only session."""

    @property
    def outside(self) -> Outside | None:
        """Jobs that rankdeck did not start; None where no host can be looked at: in a replay, behind a relay."""

    @property
    def starting(self) -> Progress | None:
        """Progress of a start or restart of a job; None while none is in progress."""

    @property
    def how_to_begin(self) -> str:
        """Command that starts a job while there is none, clean; empty when a job comes by itself."""

    @property
    def reading(self) -> str:
        """Line about what is being read of the time before the session, clean; empty when nothing is."""

    @property
    def can_inject(self) -> bool:
        """Whether faults may be injected; False removes the action from keys, footer and palette."""

    @property
    def reads_loss(self) -> bool:
        """Whether patterns find the loss in what the shown job prints; False while that is not known."""

    @property
    def leaving(self) -> str:
        """What happens when the user leaves, as clean text: `the job goes on`."""

    @property
    def stall_s(self) -> float:
        """Seconds after which a wait is a stall: the full length of the bars of waits."""

    def view(self) -> View:
        """Return the current rows.

        Raises:
            AppError: The session cannot go on; the console ends and keeps the error for its caller.
        """

    def drain_logs(self) -> Sequence[tuple[str, LogLine]]:
        """Return the (node, line) pairs since the last call, in order of arrival; not yet cleaned."""

    def drain_notices(self) -> Sequence[str]:
        """Return clean sentences about the session since the last call, the oldest first."""

    @property
    def events(self) -> EventLog:
        """Events until now."""

    @property
    def history(self) -> History:
        """History of the job's figures until now."""

    def time_text(self, event: Event) -> str:
        """Return the time of an event as clean text: the clock time, or the position in a recording."""

    async def inject(self, fault: Fault) -> str:
        """Inject a fault into a rank; return a sentence about it.

        Raises:
            AppError: It was refused or failed.
        """

    async def stacks(self, *, is_native: bool) -> Sequence[NodeStacks]:
        """Return the stacks of the shown job, by node; takes seconds when a rank is stuck.

        Args:
            is_native: Whether to add the frames of C and C++; this stops each rank for up to half a second.

        Raises:
            AppError: There is no job, or no node has stacks of it.
        """

    async def close(self) -> None:
        """Release what the session holds; called once, when the user quits."""


class Outside(ConsoleSource, Protocol):
    """Jobs that rankdeck did not start, seen from outside: shown in the place of the source that has them."""

    @property
    def offer(self) -> str:
        """Such jobs, as clean text: `a job of other launchers, 4 ranks on gpu1`; empty where none is known."""

    @property
    def is_shown(self) -> bool:
        """Whether one is shown now."""

    @property
    def leads_back(self) -> bool:
        """Whether a source of its own is behind it; False where such jobs are all that is shown."""

    @property
    def own_view(self) -> View | None:
        """Rows of the source that has these jobs, behind the one that is shown; None before the first."""

    @property
    def can_signal(self) -> bool:
        """False in a read-only session."""

    def turn(self) -> bool:
        """Go on to the first such job, or to the next; return whether there is one. Does not wait."""

    def leave(self) -> None:
        """Show none any more."""

    def targets(self) -> Sequence[Target]:
        """Return the processes of the shown job that a signal may be sent to, by rank."""

    async def send(self, targets: Sequence[Target], number: int) -> str:
        """Send a signal to processes, each only if it is the one that was seen; return a clean sentence about it.

        Raises:
            AppError: It did not reach all that are left of them.
        """
