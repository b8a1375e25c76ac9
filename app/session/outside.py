"""Jobs that rankdeck did not start, in the console: looked at from outside for as long as one is shown.

`OutsideSession` takes the place of another session while a job is shown, and gives it back. That one goes on behind it.
A thread a host looks, one more thread compares what they have seen: the frame loop only reads the latest `Picture`.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from app.diagnosis.causes import Severity
from app.errors import AppError, UsageError
from app.inspect.following import Following, job_now
from app.inspect.inspector import HostLooks
from app.inspect.outside_reports import distinction
from app.inspect.outside_view import NothingSeen, OutsideView, Picture, cluster_of
from app.inspect.signals import send_signal
from app.model.unreachable_reason import UnreachableReason
from app.recording.events import EventLog
from app.recording.history import History
from app.session.audit import AuditedAction
from app.session.session import Session, wall_offset_s
from app.text import LINE_LIMIT, clean, nodes_text
from app.threads import in_daemon_thread
from app.view.rows import Headline

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from agent.wire.logs import LogLine
    from app.fleet.agent_link import AgentLink
    from app.inspect.outside_view import Target
    from app.inspect.seen import HostSeen
    from app.recording.events import Event
    from app.session.hosts import HostDoctor, HostQuestions
    from app.session.options import SessionOptions
    from app.stacks.groups import NodeStacks
    from app.view.nodes import Progress
    from app.view.view import View
    from ddpcore.wire import Fault

AGAIN_S = 5.0
"""Seconds until a host is looked at again that could not be looked at."""
COMPARE_S = 0.3
"""Least seconds between two comparisons; each host's look asks for one."""
COMPARE_PAUSE = 5.0
"""Times as long as a comparison took is waited before the next: one of 1,024 ranks takes 0.2 s."""


class OutsideSession:
    """A session on the jobs of other launchers; it implements `app.tui.source.ConsoleSource` and `Outside`.

    Attributes:
        offer: Sentence on jobs that may be shown, empty while none is known of.
        is_shown: Whether it has taken the place of the other session.
        own_view: Rows of the other session, since one is shown.
        can_signal: False in a read-only session.
        leads_back: Whether the other session can be shown again.
    """

    player = None
    control = None
    starter = None
    can_inject = False
    leads_back = True
    how_to_begin = reading = ""
    reads_loss = False
    leaving = "nothing is done to what runs"

    def __init__(
        self,
        before: Session,
        title: str,
        links: Sequence[AgentLink],
        own_pids: Callable[[], Mapping[str, Collection[int]]],
        make_looks: Callable[[AgentLink], HostLooks] = HostLooks,
    ) -> None:
        """Stand behind another session.

        Args:
            before: The other session; its audit log takes the signals that are sent.
            title: See `ConsoleSource`.
            links: Hosts that run programs.
            own_pids: Returns the pids of the ranks that agents report, by host: their jobs are not shown here.
            make_looks: Makes what looks at a host.
        """
        self.offer = ""
        self.is_shown = False
        self.own_view: View | None = None
        self.can_signal = not before.is_read_only
        self.title = title
        self._hosts = [link.host for link in links]
        self._before, self._links, self._own_pids, self._make_looks = before, links, own_pids, make_looks
        self._begin()

    def _begin(self) -> None:
        self.events, self.history = EventLog(wall_offset_s), History()
        self._following = Following()
        self._seen_s: dict[str, float] = {}
        """When each host was last looked at."""
        self._away: dict[str, UnreachableReason] = {}
        self._number = 0
        """Place of the job that is to be shown, among those that were seen when it was chosen."""
        self._num_jobs = 0
        self._unseen: list[str] = []
        """Sentences on what the hosts could not show."""
        self._picture: Picture | None = None
        self._lock = threading.Lock()
        self._is_new = threading.Event()
        self._is_over = threading.Event()
        self._looking: list[HostLooks] = []

    @property
    def outside(self) -> OutsideSession:
        """Itself: the way on to the next job, and back."""
        return self

    def turn(self) -> bool:
        """Go on to the first job, or to the next; return whether there is one, or may be."""
        if not self.is_shown:
            self._begin()
            self.is_shown = True
            for link in self._links:
                threading.Thread(
                    target=partial(self._look, link, self._is_over, self._looking), name="rankdeck-outside", daemon=True
                ).start()
            threading.Thread(
                target=partial(self._compare, self._is_over, self._is_new), name="rankdeck-outside", daemon=True
            ).start()
            return True
        if self._number + 1 >= self._num_jobs:
            self.leave()
            return False
        with self._lock:
            self._number, self._picture = self._number + 1, None
            self.events = EventLog(wall_offset_s)
        self._is_new.set()
        return True

    def leave(self) -> None:
        """Look no longer; safe to call twice."""
        self.is_shown = False
        self._is_over.set()
        self._is_new.set()
        for one in list(self._looking):  # closing waits for an end
            threading.Thread(target=one.close, name="rankdeck-outside", daemon=True).start()

    def _look(self, link: AgentLink, is_over: threading.Event, looking: list[HostLooks]) -> None:
        """Look at a host until this is over; runs in a thread."""
        while not is_over.is_set():
            one = self._make_looks(link)
            looking.append(one)
            if is_over.is_set():
                return
            try:
                self._reach(link)
                one.run(partial(self._take, is_over, link.host))
            except AppError as error:
                self._lose(is_over, link.host, UnreachableReason(error.whole_of(link.host)))
            looking.remove(one)
            is_over.wait(AGAIN_S)

    def _reach(self, link: AgentLink) -> None:
        """Do nothing: the other session keeps the connections."""

    def _take(self, is_over: threading.Event, host: str, seen: HostSeen) -> None:
        with self._lock:
            if not is_over.is_set():
                self._following.put(host, seen)
                self._seen_s[host] = time.monotonic()
                self._away.pop(host, None)
                self._is_new.set()

    def _lose(self, is_over: threading.Event, host: str, reason: UnreachableReason) -> None:
        with self._lock:
            if not is_over.is_set():
                self._away[host] = reason
                self._is_new.set()

    def _compare(self, is_over: threading.Event, is_new: threading.Event) -> None:
        """Make a picture of what is new until this is over; runs in a thread."""
        while True:
            is_new.wait()
            is_new.clear()
            if is_over.is_set():
                return
            began_s = time.monotonic()
            own_pids = self._own_pids()
            with self._lock:
                jobs, number, before = self._following.jobs(own_pids), self._number, self._picture
                seen_s, away = dict(self._seen_s), dict(self._away)
                self._unseen = self._following.unseen_lines()
            if before is not None or jobs:
                job = job_now(before.job, jobs) if before is not None else jobs[min(number, len(jobs) - 1)]
                place = f"job {min(number + 1, len(jobs))} of {len(jobs)}" if len(jobs) > 1 else ""
                place = ": ".join(filter(None, (place, distinction(job, jobs))))
                picture = Picture(job, self._hosts, seen_s, away, place, self._unseen)
                with self._lock:
                    if number == self._number and not is_over.is_set():
                        self._picture, self._num_jobs = picture, len(jobs)
            is_over.wait(max(COMPARE_S, COMPARE_PAUSE * (time.monotonic() - began_s)))

    @property
    def stall_s(self) -> float:
        return self._before.stall_s

    @property
    def starting(self) -> Progress | None:
        return self._before.starting

    @property
    def doctor(self) -> HostDoctor | None:
        return self._before.doctor

    @property
    def questions(self) -> HostQuestions | None:
        return self._before.questions

    def view(self) -> View:
        """Return the rows of the latest picture; the other session goes on.

        Raises:
            AppError: As the other session.
        """
        self.own_view = self._before.view()
        now_s, picture = time.monotonic(), self._picture
        view = self._no_job(now_s) if picture is None else OutsideView(picture, now_s)
        self.events.observe(view)
        return view

    def _no_job(self, now_s: float) -> NothingSeen:
        hosts = self._hosts
        where, away = nodes_text(hosts), dict(self._away)
        if len(away) == len(hosts):
            why = clean("; ".join(f"{host}: {away[host].why}" for host in hosts), LINE_LIMIT)
            headline = Headline(Severity.WARNING, why)
        elif len(self._seen_s) + len(away) < len(hosts):
            headline = Headline(Severity.QUIET, f"looking for training that rankdeck did not start on {where}")
        else:
            found = f"no training that rankdeck did not start is seen on {where}"
            headline = Headline(Severity.QUIET, clean("; ".join([found, *self._unseen]), LINE_LIMIT))
        return NothingSeen(cluster_of(hosts, away), now_s, headline)

    def drain_logs(self) -> list[tuple[str, LogLine]]:
        """Return the lines of the other session: they are shown when it is."""
        return self._before.drain_logs()

    def drain_notices(self) -> list[str]:
        """Return the sentences of the other session."""
        return self._before.drain_notices()

    def time_text(self, event: Event) -> str:
        return self._before.time_text(event)

    async def inject(self, fault: Fault) -> str:
        """Refuse.

        Raises:
            UsageError: Always.
        """
        raise UsageError(f"rank {fault.rank} is of a job that rankdeck did not start: no fault is injected")

    async def stacks(self, *, is_native: bool) -> list[NodeStacks]:
        """Return the stacks of the latest looks.

        Raises:
            UsageError: No job is seen, or C frames are wanted: they pause the ranks.
        """
        picture = self._picture
        if picture is None:
            raise UsageError("no job is seen yet")
        if is_native:
            raise UsageError("native frames pause each rank: not in a job that rankdeck did not start")
        return picture.stacks()

    def targets(self) -> list[Target]:
        """Return the processes of the shown job that a signal may be sent to, by rank."""
        return [] if self._picture is None else self._picture.targets()

    async def send(self, targets: Sequence[Target], number: int) -> str:
        """Send a signal to processes; return a sentence about it.

        Raises:
            AppError: The session is read-only, or it did not reach all that are left of them.
        """
        if not self.can_signal:
            raise UsageError("this console only watches", "open it without --read-only")
        name = "" if self._picture is None else self._picture.name
        audited = AuditedAction("signal", tuple(dict.fromkeys(target.host for target in targets)), name)
        done = await self._before.audit.kept(
            audited, in_daemon_thread(lambda: send_signal(self._links, targets, number))
        )
        self.events.add_event(f"on request: {done}", time.monotonic())
        return done

    async def close(self) -> None:
        """Look no longer, and close the other session."""
        self.leave()
        await self._before.close()


class InspectSession(OutsideSession):
    """A session on the jobs of other launchers alone: no agent takes part; after the last job comes the first again."""

    watched_job = ""
    must_succeed = False
    cut_off = ""
    leads_back = False
    evidence_notices = ()

    def __init__(
        self,
        links: Sequence[AgentLink],
        title: str,
        options: SessionOptions,
        make_looks: Callable[[AgentLink], HostLooks] = HostLooks,
    ) -> None:
        super().__init__(Session({}, options), title, links, dict, make_looks)
        self.started_at_s = time.monotonic()

    async def start(self) -> None:
        """Begin to look."""
        self.turn()

    def turn(self) -> bool:
        """Go on to the next job; after the last one, look for all of them again."""
        return super().turn() or super().turn()

    def view(self) -> View:
        """Return the rows of the latest picture: no other session's count for the exit code."""
        self.own_view = view = super().view()
        return view

    def _reach(self, link: AgentLink) -> None:
        if not link.is_alive:
            link.go_again()

    def farewell(self) -> str:
        """Return nothing: what runs was started elsewhere."""
        return ""
