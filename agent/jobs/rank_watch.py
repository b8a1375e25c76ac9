"""Looks at the ranks of all jobs, at their processes and at what they print, and tells the node's state."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from agent.errors import MetricPatternError
from agent.jobs.unseen_ranks import endings
from agent.logs.log_tail import LogTail
from agent.processes.worker_sampler import WorkerSampler
from agent.saying import say
from agent.state.observations import JobAdmitted, JobForgotten, RankPrinted, WorkerSeen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from signal import Signals

    from agent.jobs.job import Job
    from agent.jobs.launch import Launch
    from agent.processes.worker_sampler import Ending
    from agent.state.node_state import NodeState

DISCOVERY_PERIOD_S = 0.05
"""While a job's workers are not all known: one that fails at once should still be seen."""
NO_PID = 0
"""Of a process that nobody has seen."""


class RankWatch:
    """The eyes of `Jobs`; lives on the event loop's thread."""

    def __init__(self, state: NodeState, on_end: Callable[[Ending], None]) -> None:
        """`on_end` is called once for each worker that was found."""
        self._state = state
        self._workers = WorkerSampler(on_end)
        self.logs = LogTail()
        self._launched = asyncio.Event()
        """Set when there may be workers to look for."""

    def admit(self, job: Job) -> None:
        """Take reports of a job's ranks from now on, and of no other attempt's."""
        now_s = time.monotonic()
        told = job.status(now_s)
        self._state.apply(
            JobAdmitted(told.job_id, told.attempt, told.first_rank, told.local_world_size, told.world_size), now_s
        )

    def begin(self, launch: Launch) -> None:
        """Look for the processes and the files of a job's ranks, which are new ones."""
        self.admit(launch.job)
        spec, where = launch.job.spec, (launch.job_dir, launch.ranks_dir)
        try:
            self.logs.follow(spec.job_id, *where, launch.job.ranks, spec.metrics)
        except MetricPatternError as error:  # a record of an agent that could read them
            say(f"job {spec.job_id} goes on without figures from its lines: {error}")
            self.logs.follow(spec.job_id, *where, launch.job.ranks)
        if launch.shim and not launch.job.is_gathering:
            self._workers.watch(launch.job_id, launch.job.ranks, launch.shim.launcher_pid)
            self._launched.set()

    async def discover(self, launches: Iterable[Launch], on_found: Callable[[Launch, int], object]) -> None:
        """Look for workers of running jobs until each is known; never returns.

        Args:
            launches: All jobs, as they come and go.
            on_found: Takes a job and a rank of it whose process is known now.
        """
        while True:
            wanted = [launch for launch in launches if launch.shim and self._workers.is_searching(launch.job_id)]
            for launch in wanted:
                for seen in self._workers.discover(launch.job_id):
                    self._state.apply(seen, time.monotonic())
                    on_found(launch, seen.rank)
            if not wanted:
                self._launched.clear()
                await self._launched.wait()
            await asyncio.sleep(DISCOVERY_PERIOD_S)

    def sample(self, job_id: str) -> None:
        """Ask the kernel about a job's workers."""
        now_s = time.monotonic()
        for sample in self._workers.sample(job_id):
            self._state.apply(sample, now_s)

    def read_logs(self) -> None:
        """Read what the ranks of all jobs have printed."""
        now_s = time.monotonic()
        self.logs.poll()
        for (job_id, rank), metrics in self.logs.take_printed().items():
            self._state.apply(RankPrinted(job_id, rank, metrics), now_s)

    def pids(self, job_id: str) -> dict[int, int]:
        """Return the process of each rank that has been seen and has not ended."""
        return self._workers.pids(job_id)

    def note_unseen(self, launch: Launch, exit_code: int | None, now_s: float) -> list[Ending]:
        """Know of ranks that ended unseen, once their launcher has, that they began; return how they ended."""
        found = endings(launch, exit_code, self._workers.seen(launch.job_id))
        for ending in found:
            self._state.apply(WorkerSeen(launch.job_id, ending.rank, NO_PID), now_s)
        return found

    def send_signal(self, job_id: str, rank: int, number: Signals) -> bool:
        """Signal a worker; return whether it was there to be signalled."""
        return self._workers.send_signal(job_id, rank, number)

    def forget(self, job_id: str) -> None:
        """Let go of a job."""
        self._workers.forget(job_id)
        self.logs.forget(job_id)
        self._state.apply(JobForgotten(job_id), time.monotonic())

    def close(self) -> None:
        """Let go of everything."""
        self._workers.close()
        self.logs.close()
