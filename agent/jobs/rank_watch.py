"""Watches the ranks of all jobs, their processes and their output, and feeds the node's state.

`RankWatch` does this. `endings` returns the ends of ranks whose processes were never seen: they ended in no time, or
while no agent ran. Only their launcher knows how. It ends with 0 only after all of them have; else it lists those that
failed, and the files of the others show that they began.

`StoreListeners` finds the process that listens where ranks of this node wait for the others in `init_process_group`.
The search covers all processes of the machine, so it is done once for each port at which ranks wait for long, and on
another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING

from agent.errors import MetricPatternError, log_line
from agent.jobs.preflight import holder_of
from agent.logs.failure_files import reported_exit_codes
from agent.logs.log_tail import LogTail, log_path
from agent.machine.host import interface_of
from agent.node_state.observations import JobAdmitted, JobForgotten, RankPrinted, StorePortSeen, WorkerSeen
from agent.processes.worker_sampler import WorkerSampler, has_uninterruptible_thread, kernel_facts, worker_ended
from agent.wire.logs import LogStream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterable, Mapping

    from agent.jobs.job import Job
    from agent.jobs.launch import Launch
    from agent.jobs.rank_stacks import RanksHere
    from agent.node_state.node_state import NodeState
    from agent.node_state.observations import WorkerEnded

DISCOVERY_PERIOD_S = 0.05
"""Seconds between searches while a job's workers are not all known: one that fails immediately should still be seen."""
NO_PID = 0
"""Pid of a process that nobody has seen."""


class RankWatch:
    """Watches the ranks of all jobs; lives on the event loop's thread."""

    def __init__(self, state: NodeState, on_end: Callable[[WorkerEnded], None]) -> None:
        """`on_end` is called once for each worker that was found."""
        self._state = state
        self.workers = WorkerSampler(on_end)
        self.logs = LogTail()
        self._launched = asyncio.Event()
        """Set when there may be workers to look for."""

    def admit(self, job: Job) -> None:
        """Take reports of a job's ranks from now on, and of no other attempt."""
        now_s = time.monotonic()
        self._state.apply(JobAdmitted(job.status(now_s)), now_s)

    def begin(self, launch: Launch) -> None:
        """Look for the processes and the files of a job's ranks, which are new ones."""
        self.admit(launch.job)
        spec, where = launch.job.spec, (launch.job_dir, launch.ranks_dir)
        try:
            self.logs.follow(spec.job_id, *where, launch.job.ranks, spec.metrics)
        except MetricPatternError as error:  # a record of an agent that could read them
            log_line(f"job {spec.job_id} goes on without figures from its lines: {error}")
            self.logs.follow(spec.job_id, *where, launch.job.ranks)
        if launch.shim and not launch.job.is_gathering:
            self.workers.watch(launch.job_id, launch.job.ranks, launch.launcher_pid)
            self._launched.set()

    async def discover(self, launches: Iterable[Launch], on_found: Callable[[Launch, int], object]) -> None:
        """Look for workers of running jobs until each is known; never returns.

        `on_found` takes a job and a rank of it whose process is known now.
        """
        while True:
            wanted = [launch for launch in launches if launch.shim and self.workers.is_searching(launch.job_id)]
            for launch in wanted:
                for seen in self.workers.discover(launch.job_id):
                    self._state.apply(seen, time.monotonic())
                    on_found(launch, seen.rank)
            if not wanted:
                self._launched.clear()
                await self._launched.wait()
            await asyncio.sleep(DISCOVERY_PERIOD_S)

    def sample(self, job_id: str) -> None:
        now_s = time.monotonic()
        for sample in self.workers.sample(job_id):
            self._state.apply(sample, now_s)

    def read_logs(self) -> None:
        """Read what the ranks of all jobs have printed."""
        now_s = time.monotonic()
        self.logs.poll()
        for (job_id, rank), printed in self.logs.take_printed().items():
            self._state.apply(RankPrinted(job_id, rank, *printed), now_s)

    def note_unseen(
        self, launch: Launch, exit_code: int | None, now_s: float, restored: Collection[int] = ()
    ) -> list[WorkerEnded]:
        """Note that ranks began which ended unseen, once their launcher has ended; return how they ended.

        Of ranks that are `restored` this is known.
        """
        found = endings(launch, exit_code, self.workers.seen(launch.job_id).union(restored))
        for ending in found:
            self._state.apply(WorkerSeen(launch.job_id, ending.rank, NO_PID), now_s)
        return found

    def forget(self, job_id: str) -> None:
        self.workers.forget(job_id)
        self.logs.forget(job_id)
        self._state.apply(JobForgotten(job_id), time.monotonic())

    def close(self) -> None:
        self.workers.close()
        self.logs.close()


def undying(pids: Mapping[int, int]) -> str:
    """Return the first rank in state D, which no signal ends, and where it waits; empty where none is."""
    for rank, pid in pids.items():
        if has_uninterruptible_thread(pid):
            facts = kernel_facts(pid)
            where = f" in {facts.wchan}" if facts and facts.state == "D" and facts.wchan else ""
            return f"pid {pid} (rank {rank}) does not die: state D{where}"
    return ""


def endings(launch: Launch, exit_code: int | None, seen: Container[int]) -> list[WorkerEnded]:
    """Return how ranks of an attempt ended that were never `seen`, as far as they began; the first failure is first.

    `exit_code` is the launcher's; where it is unknown nothing is known of the ranks either.
    """
    if exit_code is None or launch.job.is_gathering:
        return []
    unseen = [rank for rank in launch.job.ranks if rank not in seen]
    if exit_code == 0:
        return [worker_ended(launch.job_id, rank, 0) for rank in unseen]
    codes = reported_exit_codes(launch.job_dir) if unseen else {}
    began = [rank for rank in unseen if log_path(launch.ranks_dir, rank, LogStream.STDOUT).exists()]
    began.sort(key=[*codes, *began].index)
    return [worker_ended(launch.job_id, rank, codes.get(rank)) for rank in began]


LOOK_S = 10.0
"""Longest time in seconds of one look."""
MAX_KNOWN = 256


class StoreListeners:
    """Finds the listeners at ports where ranks wait; lives on the event loop's thread."""

    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._looked_at: set[tuple[str, str, int]] = set()
        self._task: asyncio.Task[None] | None = None

    def tick(self, job: RanksHere) -> None:
        """Begin a look if a rank of this job waits where nobody has looked, and none is running."""
        if self._task is not None and not self._task.done():
            return
        for address, port in self._state.stores_waited_at(job.job_id):
            key = (f"{job.job_id} {job.attempt}", address, port)
            if key not in self._looked_at:
                if len(self._looked_at) >= MAX_KNOWN:
                    self._looked_at.clear()
                self._looked_at.add(key)
                self._task = asyncio.get_running_loop().create_task(self._look(job.job_id, address, port))
                return

    def close(self) -> None:
        """Cancel a look that is running."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self, job_id: str, address: str, port: int) -> None:
        with contextlib.suppress(TimeoutError, KeyError):  # too many processes; the job has gone
            found = await asyncio.wait_for(asyncio.to_thread(port_owner_at, address, port), LOOK_S)
            if found:
                self._state.apply(StorePortSeen(job_id, port, found), time.monotonic())


def port_owner_at(address: str, port: int) -> str:
    """Return the process that listens at an address of this node; empty where it is another node's, or nobody does."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    is_here = any(interface_of(str(one[4][0])) or str(one[4][0]).startswith("127.") for one in found)
    return holder_of(port, if_free="") if is_here else ""
