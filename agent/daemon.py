"""The agent's asyncio shell: carries what happens to the cores, and what they decide to the adapters; decides nothing.

Sources: datagrams of ranks, commands, pidfds of workers and shims, the clock. Cores: `Job` for each job, `NodeState`.
One thread, so that nothing happens in the midst of anything else.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, assert_never

from agent.control import ControlSocket
from agent.inbox import Inbox
from agent.job import Job, launcher_ended, refusal_to_prepare
from agent.launch import Launch
from agent.lifecycle import (
    AbortReceived,
    Answer,
    AskToStop,
    CommitReceived,
    Effect,
    Event,
    FaultReceived,
    ForgetJob,
    KillReceived,
    KillTree,
    ReleasePort,
    SignalWorker,
    SlowWorker,
    StartLauncher,
    StopReceived,
    TerminateLauncher,
    Ticked,
    WorkerExited,
    WorkerFound,
)
from agent.log_tail import LogTail
from agent.node_state import JobAdmitted, JobForgotten, NodeState, RankReported, WorkerEnded
from agent.preflight import check_files, make_job_dir, reserve_port, resolve
from agent.process import sweep_leftovers
from agent.publisher import Publisher
from agent.shim import become_subreaper
from agent.wire import (
    CONTROL_SOCKET,
    INBOX_SOCKET,
    MAX_PULLED_LINES,
    TELEMETRY_SOCKET,
    Abort,
    Accepted,
    Command,
    Commit,
    GetStatus,
    InjectFault,
    Kill,
    Logs,
    NodeReport,
    Prepare,
    PullLogs,
    RefusalReason,
    Refused,
    Reply,
    Shutdown,
    Status,
    Stop,
)
from agent.worker_sampler import Ending, HostSampler, WorkerSampler
from ddpcore.wire import RankReport, SlowDown, StopTraining

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.preflight import Address
    from agent.state_dir import StateDir

PUBLISH_PERIOD_S = 0.2
"""Between regular reports; also how often workers are sampled and logs read."""
MIN_PUBLISH_GAP_S = 0.02
"""Between reports when much happens at once."""
DISCOVERY_PERIOD_S = 0.05
"""While a job's workers are not all known: one that fails at once should still be seen."""
HOST_PERIOD_S = 1.0
"""Between samples of the machine's own figures."""
FAREWELL_S = 4.0
"""How long the agent waits, as it ends, for its jobs' trees to be gone; its console waits longer."""


class Daemon:
    """One agent, from `run` to its end."""

    def __init__(self, state_dir: StateDir, node: str, *, is_private: bool) -> None:
        """`state_dir` is open. A private agent ends with its console, and its jobs with it."""
        self._state_dir = state_dir
        self._is_private = is_private
        self._node = node
        self.epoch = secrets.token_hex(8)
        self._launches: dict[str, Launch] = {}
        self._state = NodeState(node, self.epoch, socket.gethostname(), os.getpid(), os.cpu_count() or 1)
        self._workers = WorkerSampler(self._on_worker_end)
        self._host = HostSampler()
        self._logs = LogTail()
        self._inbox = Inbox(state_dir.socket_path(INBOX_SOCKET), self._on_rank_report)
        self._control = ControlSocket(state_dir.socket_path(CONTROL_SOCKET), self._carry_out)
        self._publisher: Publisher | None = None
        self._publish_timer: asyncio.TimerHandle | None = None
        self._published_at_s = 0.0
        self._report_seq = 0
        self._has_leftovers = False
        """True after a shim was killed, until a sweep finds nothing."""
        self._launched = asyncio.Event()
        """Set when there may be workers to look for."""
        self._end = asyncio.Event()

    def end_soon(self) -> None:
        """Begin to end: jobs are killed, then `run` returns."""
        self._end.set()

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until told to end, and leave nothing that runs.

        Raises:
            OSError: A socket cannot be bound.
        """
        become_subreaper()
        try:
            self._publisher = Publisher(self._state_dir.socket_path(TELEMETRY_SOCKET))
            self._inbox.open()
            await self._control.open()
            on_ready()
            async with asyncio.TaskGroup() as tasks:
                beats = [tasks.create_task(self._beat()), tasks.create_task(self._discover())]
                await self._end.wait()
                for beat in beats:
                    beat.cancel()
        finally:
            await self._end_jobs()
            await self._close()

    async def _beat(self) -> None:
        """Sample, read logs, let time pass for the lifecycles, publish: five times a second."""
        next_host_s = 0.0
        while True:
            now_s = time.monotonic()
            if now_s >= next_host_s:
                self._state.apply(self._host.sample(), now_s)
                next_host_s = now_s + HOST_PERIOD_S
            for launch in list(self._launches.values()):
                self._sample(launch)
                self._feed(launch, Ticked())
            if self._has_leftovers:
                self._has_leftovers = sweep_leftovers(self._living_shims())
            self._logs.poll()
            self._publish()
            await asyncio.sleep(max(0.0, PUBLISH_PERIOD_S - (time.monotonic() - now_s)))

    async def _discover(self) -> None:
        """Look for workers of running jobs until each is known."""
        while True:
            wanted = [
                launch
                for launch in self._launches.values()
                if launch.shim and self._workers.is_searching(launch.job_id)
            ]
            for launch in wanted:
                for seen in self._workers.discover(launch.job_id):
                    self._state.apply(seen, time.monotonic())
                    self._feed(launch, WorkerFound(seen.rank))
            if not wanted:
                self._launched.clear()
                await self._launched.wait()
            await asyncio.sleep(DISCOVERY_PERIOD_S)

    async def _end_jobs(self) -> None:
        """Kill what runs and wait until it is gone, within bounds."""
        for launch in list(self._launches.values()):
            self._feed(launch, KillReceived())
        deadline_s = time.monotonic() + FAREWELL_S
        while time.monotonic() < deadline_s and (self._living_shims() or self._has_leftovers):
            if self._has_leftovers:
                self._has_leftovers = sweep_leftovers(self._living_shims())
            await asyncio.sleep(MIN_PUBLISH_GAP_S)

    async def _close(self) -> None:
        if self._publisher:
            self._publish()
        await self._control.close()
        self._inbox.close()
        if self._publish_timer:
            self._publish_timer.cancel()
        if self._publisher:
            self._publisher.close()
        self._workers.close()
        self._logs.close()
        for launch in self._launches.values():
            launch.close()

    async def _carry_out(self, command: Command) -> Reply:
        try:
            return await self._reply(command)
        except Exception as error:  # noqa: BLE001 - one bad command must not end the agent and its jobs
            traceback.print_exc(file=sys.stderr)
            return Refused(RefusalReason.INTERNAL, f"{type(error).__name__}: {error}"[:4096])

    async def _reply(self, command: Command) -> Reply:
        match command:
            case Prepare():
                return await self._prepare(command)
            case Commit(job_id=job_id):
                return self._command_job(job_id, CommitReceived())
            case Abort(job_id=job_id):
                return self._command_job(job_id, AbortReceived())
            case Stop(job_id=job_id, is_agreed=is_agreed):
                return self._command_job(job_id, StopReceived(is_agreed, self._state.can_agree_to_stop(job_id)))
            case Kill(job_id=job_id):
                return self._command_job(job_id, KillReceived())
            case InjectFault(job_id=job_id, kind=kind, rank=rank, factor=factor):
                return self._command_job(job_id, FaultReceived(kind, rank, factor))
            case PullLogs(since_seq=since_seq):
                lines = self._logs.since(since_seq, MAX_PULLED_LINES)
                return Logs(epoch=self.epoch, first_seq=self._logs.first_seq, lines=lines)
            case GetStatus():
                return Status(self._report())
            case Shutdown():
                self.end_soon()
                return Accepted()
        assert_never(command)

    async def _prepare(self, command: Prepare) -> Accepted | Refused:
        spec = command.spec
        address: Address | None = None
        if spec.node_rank == 0:
            # The only wait, before the first look at any state.
            found = await resolve(spec.master_addr)
            if isinstance(found, Refused):
                return found
            address = found
        existing = self._launches.get(spec.job_id)
        refused = refusal_to_prepare(spec, existing.job if existing else None) or check_files(spec)
        if refused:
            return refused
        port_holder = reserve_port(address, spec.master_port) if address else None
        if isinstance(port_holder, Refused):
            return port_holder
        job_dir = self._state_dir.job_dir(spec.job_id, spec.attempt)
        if refused := make_job_dir(job_dir, spec.first_rank + spec.local_world_size - 1):
            if port_holder:
                port_holder.close()
            return refused
        self._forget(spec.job_id)
        now_s = time.monotonic()
        launch = self._launches[spec.job_id] = Launch(Job(spec, now_s), job_dir, port_holder)
        self._state.apply(
            JobAdmitted(spec.job_id, spec.attempt, spec.first_rank, spec.local_world_size, spec.world_size), now_s
        )
        self._publish_soon()
        return Accepted(launch.master_port)

    def _command_job(self, job_id: str, event: Event) -> Accepted | Refused:
        launch = self._launches.get(job_id)
        if launch is None:
            return Refused(RefusalReason.UNKNOWN_JOB, f"there is no job {job_id} on node {self._node}")
        reply = self._feed(launch, event)
        assert reply is not None
        return reply

    def _feed(self, launch: Launch, event: Event) -> Accepted | Refused | None:
        """Give an event to a job, carry out what it wants, and return its answer if there is one."""
        before = launch.job.state
        reply: Accepted | Refused | None = None
        for effect in launch.job.handle(event, time.monotonic()):
            # An effect that fails has the first word: what was to be answered is not true then.
            answer = self._perform(launch, effect)
            reply = reply or answer
        if launch.job.state is not before:
            self._publish_soon()
        return reply

    def _perform(  # noqa: C901, PLR0912 - one case for each effect
        self, launch: Launch, effect: Effect
    ) -> Accepted | Refused | None:
        job_id = launch.job_id
        match effect:
            case StartLauncher():
                return self._start(launch)
            case AskToStop(request_id=request_id):
                launch.ask_to_stop(StopTraining(request_id))
            case TerminateLauncher():
                if launch.shim:
                    launch.shim.terminate()
            case KillTree():
                if launch.shim:
                    launch.shim.kill_tree()
                else:
                    self._has_leftovers = True
            case ReleasePort():
                launch.release_port()
            case ForgetJob():
                self._forget(job_id)
                self._state_dir.remove_job_dir(job_id, launch.job.spec.attempt)
            case SignalWorker(rank=rank, signal=number):
                if not self._workers.send_signal(job_id, rank, number):
                    return Refused(RefusalReason.WRONG_STATE, f"rank {rank} has exited")
                self._sample(launch)
                self._publish_soon()
            case SlowWorker(rank=rank, request_id=request_id, factor=factor):
                return launch.slow_down(rank, SlowDown(request_id, factor))
            case Answer(reply=reply):
                return reply
            case _:
                assert_never(effect)
        return None

    def _start(self, launch: Launch) -> Accepted | Refused | None:
        event = launch.start(self._state_dir.socket_path(INBOX_SOCKET), dies_with_us=self._is_private)
        if launch.shim:
            self._launched.set()
            job_id, ranks = launch.job_id, launch.job.ranks
            self._workers.watch(job_id, ranks, launch.shim.launcher_pid)
            self._logs.follow(job_id, launch.job_dir, ranks)
            asyncio.get_running_loop().add_reader(launch.shim.pidfd, self._on_shim_end, launch)
        return self._feed(launch, event)

    def _on_shim_end(self, launch: Launch) -> None:
        shim = launch.shim
        if shim is None or not shim.has_ended():
            return
        asyncio.get_running_loop().remove_reader(shim.pidfd)
        exit_code = shim.exit_code()
        launch.close()
        self._logs.unfollow(launch.job_id)
        self._feed(launch, launcher_ended(exit_code, launch.any_error() if exit_code else ""))

    def _on_worker_end(self, ending: Ending) -> None:
        launch = self._launches[ending.job_id]
        error = launch.error_of(ending.rank) if ending.code != 0 else ""
        self._state.apply(WorkerEnded(ending.job_id, ending.rank, ending.code, ending.signal, error), time.monotonic())
        self._feed(launch, WorkerExited(ending.rank, ending.code, ending.signal, error))
        self._publish_soon()

    def _on_rank_report(self, report: RankReport) -> None:
        self._state.apply(RankReported(report), time.monotonic())

    def _sample(self, launch: Launch) -> None:
        now_s = time.monotonic()
        for sample in self._workers.sample(launch.job_id):
            self._state.apply(sample, now_s)

    def _forget(self, job_id: str) -> None:
        launch = self._launches.pop(job_id, None)
        if launch:
            launch.close()
            self._workers.forget(job_id)
            self._logs.unfollow(job_id)
            self._state.apply(JobForgotten(job_id), time.monotonic())

    def _living_shims(self) -> frozenset[int]:
        return frozenset(launch.shim.pid for launch in self._launches.values() if launch.shim)

    def _report(self) -> NodeReport:
        now_s = time.monotonic()
        self._report_seq += 1
        return self._state.report(
            now_s,
            report_seq=self._report_seq,
            jobs=[launch.job.status(now_s) for launch in self._launches.values()],
            log_seq=self._logs.log_seq,
            malformed_datagrams=self._inbox.num_malformed,
        )

    def _publish_soon(self) -> None:
        """Publish at once, or as soon as the last report is `MIN_PUBLISH_GAP_S` old."""
        if self._publish_timer is None:
            wait_s = self._published_at_s + MIN_PUBLISH_GAP_S - time.monotonic()
            self._publish_timer = asyncio.get_running_loop().call_later(max(0.0, wait_s), self._publish)

    def _publish(self) -> None:
        if self._publish_timer:
            self._publish_timer.cancel()
            self._publish_timer = None
        self._published_at_s = time.monotonic()
        if self._publisher:
            self._publisher.publish(self._report())
