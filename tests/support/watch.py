"""A job of light ranks on some hosts, a console that watches it, and the invariants that hold whatever is done to both.

    async with watched(network) as watch:
        with measure(9, "told"):
            await watch.do(network["h2"].pull_cable)
            await watch.until(lambda: watch.state("h2") == "stale", 10, "it is seen")
        ...
        await watch.until_green()

The console is a session with a frame loop, in this process: what it does is that of the real one but for painting. At
the end of the block the job is stopped, and I1 to I8 are checked.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.fleet.host_link import Access, HostLink
from app.session.remote_session import RemoteSession
from app.ssh.login import Logins
from app.ssh.questions import QuestionDesk
from tests.support.invariants import CoreTime, Invariants, Training, TrueReports, broken_lines
from tests.support.light_job import LightJob
from tests.support.people import LocalUser
from tests.support.plain_hosts import these
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from agent.wire.jobs import JobState
    from app.view.rows import NodeRow
    from tests.support.hosts import Host, Network

ROOT = Path(__file__).parents[2]
SSHD = (f"SetEnv PYTHONPATH={ROOT}",)
"""For the hosts of a watch: agents are those of this checkout."""
FRAME_S = 0.1
START_S = 60.0
GREEN_S = 60.0
"""I8, on a machine with other work: the design says 15 s."""
WHILE_S = 180.0
FRESH_S = 1.5
"""A file to which each row adds what it has measured."""


class Watch:
    """A console, and what it watches.

    Attributes:
        session: Of the console; its frames come by themselves.
        links: Of the hosts, as the console has them.
        said: Notices so far.
        printed: Lines of the ranks so far, each with its rank.
        training: The job's ranks as they were when the fault came.
        lost_ranks: Those that the fault itself ends.
    """

    def __init__(self, network: Network, session: RemoteSession, links: dict[str, HostLink], job: LightJob) -> None:
        self.network = network
        self.session = session
        self.links = links
        self.python = sys.executable
        self.job = job
        self.said: list[str] = []
        self.printed: list[tuple[int, str]] = []
        self.headline = ""
        self.rows: dict[str, NodeRow] = {}
        self.lost_ranks: set[int] = set()
        self.truth = TrueReports({host: Path(link.place.dir) for host, link in links.items() if link.place})
        self.invariants = Invariants(self.truth)
        self.training = Training(job, ())
        self._frames = asyncio.create_task(self._take_frames())

    @property
    def hosts(self) -> list[Host]:
        return [self.network[name] for name in self.links]

    async def _take_frames(self) -> None:
        core_time = CoreTime()
        while True:
            began_s = time.monotonic()
            view = self.session.view()
            self.rows = {row.node: row for row in view.nodes()}
            self.headline = view.headline().text
            view.verdicts()
            self.said += self.session.drain_notices()
            self.printed += [
                (line.rank, line.text)
                for _, line in self.session.drain_logs()
                if line.rank >= 0 and line.job_id == self.job.job_id
            ]
            await asyncio.sleep(FRAME_S)
            lag_s = time.monotonic() - began_s - FRAME_S
            self.invariants.look_at_frame(self.session, lag_s, core_time.waited_s())

    async def do(self, what: Callable[..., Any], *arguments: Any) -> Any:
        """Do something that takes its time, while frames come."""
        return await asyncio.to_thread(what, *arguments)

    async def until(self, condition: Callable[[], Any], within_s: float, what: str) -> float:
        """Wait for something that the console shows; return how long that took."""
        began_s = time.monotonic()

        def look() -> Any:
            if self._frames.done():
                self._frames.result()
            return condition()

        try:
            await until_async(look, within_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.headline}\n{self.rows}\n{self.said}") from None
        return time.monotonic() - began_s

    def state(self, host: str) -> str:
        return self.rows[host].state if host in self.rows else ""

    def trouble(self, host: str) -> str:
        return self.rows[host].trouble if host in self.rows else ""

    def job_state(self) -> str:
        job = self.session.view().job()
        return "" if job is None else job.state

    async def watch_a_while(self, num_ages: int = 30) -> None:
        """Wait until so many more ages were compared with the truth."""
        before = self.invariants.num_ages
        await self.until(lambda: self.invariants.num_ages > before + num_ages, WHILE_S, "it is watched for a while")

    def job_detail(self) -> str:
        """Return what is said of the job on any of its hosts."""
        statuses = (status for assignment in self.session.assignments() for status in assignment.values())
        return "; ".join(status.detail for status in statuses if status.detail)

    def state_on(self, host: str) -> JobState | None:
        """Return the state of the job on a host, as the console has it."""
        statuses = (assignment[host] for assignment in self.session.assignments() if host in assignment)
        return next((status.state for status in statuses if status.job_id == self.job.job_id), None)

    def said_of(self, *words: str) -> list[str]:
        """Return the notices that have all these words."""
        return [notice for notice in self.said if all(word in notice for word in words)]

    def is_green(self) -> bool:
        return len(self.rows) == len(self.links) and all(
            row.state == "up" and row.age_s is not None and row.age_s < FRESH_S and not row.trouble
            for row in self.rows.values()
        )

    async def until_green(self, within_s: float = GREEN_S) -> float:
        """I8: wait until every host is up and fresh, and every living rank steps; return how long that took."""
        took_s = await self.until(self.is_green, within_s, "I8: all is green")
        here = await self.do(Training, self.job, self.hosts)
        await until_async(here.moves, within_s, "I3: every rank makes steps")
        return took_s

    async def begin(self) -> None:
        """Start the job, and wait until it steps and the console shows that."""
        await self.until(self.is_green, START_S, "all hosts are up")
        assert self.session.starter is not None
        await self.session.start_another(self.job.request)
        num = self.job.num_ranks * len(self.links)
        await self.until(lambda: len(self.job.steps()) == num, START_S, "every rank makes steps")

        def shown() -> bool:
            job = self.session.view().job()
            return job is not None and job.state == "running" and bool(job.step)

        await self.until(shown, START_S, "the console shows steps")
        self.training = await self.do(Training, self.job, self.hosts)

    async def finish(self) -> None:
        """Stop the job, and check every invariant."""
        broken = await self.do(lambda: self.training.broken(without=self.lost_ranks))
        assert not broken, broken
        await self.do(self.invariants.look_at_jobs, self.hosts, self.job)
        if await self.do(self.job.processes, self.hosts):
            await self.session.job_control.stop(self.job.job_id, is_agreed=False)
        left = [1]

        async def nothing_left() -> None:
            while left:
                left[:] = await self.do(self.job.processes, self.hosts)

        await asyncio.wait_for(nothing_left(), GREEN_S)  # I2
        assert self.invariants.num_ages > 0, "no age was compared with the truth"
        self.invariants.broken.update(broken_lines(self.printed))
        self.invariants.check(self.session, self.said)

    async def close(self) -> None:
        self._frames.cancel()
        await asyncio.gather(self._frames, return_exceptions=True)
        self.truth.close()


@asynccontextmanager
async def watched(network: Network, *hosts: str, num_ranks: int = 1, lines_a_step: int = 0) -> AsyncIterator[Watch]:
    """Bring up agents on some hosts, by default all, start a job over them and watch it; check all at the end."""
    job = LightJob(network.directory, num_ranks=num_ranks)
    job.lines_a_step = lines_a_step
    async with _console(network, hosts or tuple(network.hosts), job) as watch:
        await watch.begin()
        yield watch
        await watch.finish()


@asynccontextmanager
async def another_console(first: Watch) -> AsyncIterator[Watch]:
    """Open a second console on the hosts and the job of another one; it stops the job and checks all at the end."""
    async with _console(first.network, tuple(first.links), first.job) as watch:
        watch.training, watch.lost_ranks = first.training, first.lost_ranks
        yield watch
        await watch.finish()
        first.lost_ranks = set(range(first.job.num_ranks * len(first.links)))


@asynccontextmanager
async def _console(network: Network, hosts: tuple[str, ...], job: LightJob) -> AsyncIterator[Watch]:
    logins = Logins(desk := QuestionDesk(LocalUser([])))
    async with AsyncExitStack() as stack:
        links = {
            name: stack.enter_context(HostLink(Access(name, sys.executable, str(network.ssh_config)), logins))
            for name in hosts
        }
        await asyncio.gather(*(asyncio.to_thread(bring_up, link) for link in links.values()))
        session = RemoteSession(these(*links.values()))
        session.patience_s, session.asked_at, session.backfills = math.inf, desk, True
        await session.start()
        stack.push_async_callback(session.close)
        watch = Watch(network, session, links, job)
        stack.push_async_callback(watch.close)
        yield watch


def bring_up(link: HostLink) -> None:
    link.connect()
    link.bring_up()
