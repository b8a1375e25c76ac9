"""The agent's asyncio shell: carries events to the cores, and their reports to consoles; decides nothing.

Sources: datagrams of ranks, commands, the clock; pidfds of workers and shims come to `Jobs`. Cores: `Job` for each job,
`NodeState`. One thread, so that nothing happens in the midst of anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, assert_never

import msgspec

from agent.errors import log_line
from agent.jobs.all_jobs import Jobs
from agent.jobs.lifecycle import AbortReceived, FaultReceived, KillReceived, StopReceived
from agent.jobs.record import current_boot_id
from agent.logs.log_tail import read_log
from agent.machine.gpu_watch import LOG_FILE, GpuWatch
from agent.machine.host import HostSampler
from agent.node_state.node_state import NodeState
from agent.node_state.observations import RankReported
from agent.processes.leftovers import chosen, clean, find_leftovers
from agent.processes.shim import become_subreaper
from agent.transport.audit import AUDIT_FILE, AuditLog
from agent.transport.command_socket import ControlSocket
from agent.transport.control_lease import ControlLease
from agent.transport.history import PastFrames
from agent.transport.inbox import Inbox
from agent.transport.subscribers import NodeReports
from agent.wire.codec import CONTROL_SOCKET, REPORTS_SOCKET
from agent.wire.commands import (
    Abort,
    Accepted,
    Claim,
    CleanLeftovers,
    Command,
    Commit,
    FindLeftovers,
    GetStatus,
    History,
    InjectFault,
    Kill,
    Leftovers,
    PackedHistory,
    PastReport,
    Prepare,
    PrepareAgain,
    PullHistory,
    RefusalReason,
    Refused,
    Reply,
    ShowJob,
    Shutdown,
    Status,
    Stop,
)
from agent.wire.digest import encode_frame
from agent.wire.jobs import ENDED_STATES, JobState
from agent.wire.logs import MAX_PULLED_LINES, Logs, PullLogs, ReadLog
from agent.wire.relay import MAX_UNPACKED_BYTES, pack
from agent.wire.reports import NodeReport, decode_node_report, encode_node_report
from agent.wire.stacks import GetStacks
from ddpcore.wire_launch import INBOX_SOCKET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agent.state_dir import StateDir
    from agent.transport.command_socket import Peer
    from ddpcore.wire import RankReport

PUBLISH_PERIOD_S = 0.2
"""Seconds between regular reports, samples of workers and looks at logs."""
IDLE_PERIOD_S = 1.0
"""Seconds between regular reports of a node on which no job is under way."""
MIN_PUBLISH_GAP_S = 0.02
"""Seconds between reports when much happens at once."""
NEWS_GAP_S = 0.1
"""Seconds between reports when ranks begin or end waits, which with long steps each of them does in every one."""
HOST_PERIOD_S = 1.0
"""Seconds between samples of the machine's own figures."""
MAX_HISTORY_BYTES = 200_000
"""Bytes of kept reports in one reply: as JSON they are up to four times as long."""
LAST_LOOK_S = 2.5
"""Seconds for which an agent that ends with its jobs still reports how they ended; consoles ask once a second."""
LAST_REPORT_S = 0.5
"""How long an agent that ends waits for consoles to ask for its last report."""
FAREWELL_S = 4.0
"""How long an agent that takes its jobs with it waits for their trees to be gone; its console waits longer."""


class Daemon:
    """One agent, from `run` to its end."""

    def __init__(self, state_dir: StateDir, node: str, *, is_private: bool) -> None:
        """`state_dir` is open. A private agent ends with its console, and its jobs with it."""
        self._state_dir = state_dir
        self._kills_jobs = is_private
        self.epoch = secrets.token_hex(8)
        self._state = NodeState(node, self.epoch, socket.gethostname(), os.getpid(), os.cpu_count() or 1)
        inbox_path = state_dir.socket_path(INBOX_SOCKET)
        self._gpus = GpuWatch(inbox_path, state_dir.path / LOG_FILE, self._state)
        self._jobs = Jobs(state_dir, self._state, self._publish_soon, self._gpus.pids, die_with_us=is_private)
        self._lease = ControlLease(state_dir.read_holder(), time.monotonic())
        self._host = HostSampler(state_dir.path)
        self._inbox = Inbox(inbox_path, self._on_rank_report, self._gpus.receive)
        self._control = ControlSocket(state_dir.socket_path(CONTROL_SOCKET), self._carry_out)
        self.reports = NodeReports(state_dir.socket_path(REPORTS_SOCKET), self.epoch)
        """Sends reports to whoever watches."""
        self._publish_timer: asyncio.TimerHandle | None = None
        self._published_at_s = 0.0
        self._attended_at_s = time.monotonic()
        """When a console was last connected."""
        self._next_host_s = 0.0
        """When the machine's own figures are due."""
        self._complaint = ""
        self._report_seq = 0
        self._history: PastFrames | None = (
            None if is_private else PastFrames(state_dir.path / "history", current_boot_id())
        )
        self._keeps_past = True
        self._audit: AuditLog | None = None if is_private else AuditLog(state_dir.path / AUDIT_FILE, node)
        self.latest_report: NodeReport | None = None
        """The last one that was published; may be read from any thread."""
        self._end = asyncio.Event()
        self._is_closing = False
        """Whether each report is the last from now on: what ranks and consoles send until its end changes nothing."""
        self._ends_with_jobs = ""
        """Why it ends once its jobs have; empty where it does not."""
        self._moving_at_s = float("-inf")
        """When a job was last under way."""
        self._has_news = asyncio.Event()
        """Set where something has changed since the last tick."""

    def end_soon(self) -> None:
        """Begin to end: `run` returns, once a private agent's jobs are gone. Another's go on."""
        self._end.set()

    def end_with_jobs(self, why: str) -> bool:
        """Stop all jobs as a console does, start no other, and end once they have; return False if that is under way.

        Of other launchers' jobs those are stopped that can stop at an agreed step; the end reaches their launchers too.

        Args:
            why: For whoever wants to start a job in that time.
        """
        if self._ends_with_jobs:
            return False
        self._ends_with_jobs = why
        for status in self._jobs.statuses(time.monotonic()):
            can_agree = self._state.can_agree_to_stop(status.job_id)
            if status.is_adopted and not can_agree:
                continue
            self._jobs.command(status.job_id, StopReceived(is_agreed=True, can_agree=can_agree))
        return True

    @property
    def num_jobs_left(self) -> int:
        """How many jobs go on when this agent ends now: those of other launchers are never killed for it."""
        return self._num_jobs(adopted=True) + (0 if self._kills_jobs else self._num_jobs(adopted=False))

    @property
    def has_had_jobs(self) -> bool:
        """Whether a job has been under way here, or is."""
        return bool(self._jobs.statuses(time.monotonic()))

    def _num_jobs(self, *, adopted: bool) -> int:
        idle = ENDED_STATES | {JobState.PREPARED}
        statuses = self._jobs.statuses(time.monotonic())
        return sum(status.state not in idle and status.is_adopted is adopted for status in statuses)

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until a shutdown is requested.

        Raises:
            OSError: A socket cannot be bound.
            StateDirError: The directory holds jobs of a newer agent.
        """
        become_subreaper()
        try:
            self.reports.open()
            self._jobs.adopt()
            self._inbox.open()
            await self._control.open()
            on_ready()
            async with asyncio.TaskGroup() as tasks:
                loops = [tasks.create_task(self._tick_loop()), tasks.create_task(self._discover())]
                await self._end.wait()
                for tick in loops:
                    tick.cancel()
        finally:
            if self._kills_jobs:
                await self._jobs.kill_all(FAREWELL_S)
            await self._close()

    async def _tick_loop(self) -> None:
        """Sample, read logs, let time pass for jobs, publish: five times a second, once where nothing runs."""
        while True:
            now_s = time.monotonic()
            with self._surviving():
                self._tick(now_s)
            self._has_news.clear()  # what the tick itself has found is no reason for another one at once
            if now_s < self._moving_at_s + LAST_LOOK_S:
                await asyncio.sleep(max(0.0, now_s + PUBLISH_PERIOD_S - time.monotonic()))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(now_s + IDLE_PERIOD_S - time.monotonic()):
                    await self._has_news.wait()

    def _tick(self, now_s: float) -> None:
        if self.reports.look():
            self._attended_at_s = now_s
        self._jobs.tick(now_s - self._attended_at_s)
        if now_s >= self._next_host_s:
            # Right after the ranks, whose CPU time is compared with the machine's: whole seconds of the clock.
            self._next_host_s = (now_s // HOST_PERIOD_S + 1) * HOST_PERIOD_S
            self._state.apply(self._host.sample(), now_s)
        are_moving = self._jobs.are_moving
        if are_moving:
            self._moving_at_s = now_s
        elif self._ends_with_jobs and now_s >= self._moving_at_s + LAST_LOOK_S:
            self.end_soon()
        self._gpus.tick()
        if are_moving or now_s - self._published_at_s >= IDLE_PERIOD_S - PUBLISH_PERIOD_S / 2:
            self._publish()
            self._keep(now_s)

    async def _discover(self) -> None:
        while True:
            with self._surviving():
                await self._jobs.discover()
            await asyncio.sleep(HOST_PERIOD_S)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """Go on after a failure that may pass: for want of a descriptor an agent does not give up its jobs."""
        try:
            yield
        except OSError as error:
            if (reason := error.strerror or str(error)) != self._complaint:
                self._complaint = reason
                log_line(f"something was left out: {reason}; retrying")

    async def _close(self) -> None:
        self._is_closing = True
        self._publish()
        self._keep(time.monotonic())
        await self.reports.finish(LAST_REPORT_S)
        await self._control.close()
        self.reports.close()
        self._inbox.close()
        self._gpus.close()
        self._host.close()
        if self._publish_timer:
            self._publish_timer.cancel()
        if self._history:
            self._history.close()
        self._jobs.close()

    async def _carry_out(self, command: Command, peer: Peer) -> Reply:
        reply: Reply | None = None
        try:
            reply = await self._reply_or_trace(command)
        finally:
            # Before it is answered: who has the reply finds the line.
            if self._audit:
                self._audit.add(command, reply, peer)
        return reply

    async def _reply_or_trace(self, command: Command) -> Reply:
        try:
            return await self._reply(command)
        except Exception as error:  # noqa: BLE001 - one bad command must not end the agent and its jobs
            with contextlib.suppress(OSError):  # it may be a file on a full disk
                traceback.print_exc(file=sys.stderr)
            return Refused(RefusalReason.INTERNAL, f"{type(error).__name__}: {error}"[:4096])

    async def _reply(self, command: Command) -> Reply:  # noqa: C901, PLR0912 - one case for each command
        if refused := self._lease.refusal(command, time.monotonic()):
            return refused
        if self._ends_with_jobs and isinstance(command, Prepare | PrepareAgain | Commit):
            return Refused(RefusalReason.WRONG_STATE, f"{self._ends_with_jobs}: nothing is started any more")
        match command:
            case Claim(generation=generation, holder=holder):
                return self._claim(generation, holder)
            case Prepare():
                return await self._jobs.prepare(command.spec)
            case PrepareAgain():
                return await self._jobs.prepare_again(command)
            case Commit():
                return self._jobs.commit(command)
            case Abort(job_id=job_id):
                return self._jobs.command(job_id, AbortReceived())
            case Stop(job_id=job_id, is_agreed=is_agreed):
                can_agree = self._state.can_agree_to_stop(job_id)
                return self._jobs.command(job_id, StopReceived(is_agreed, can_agree))
            case Kill(job_id=job_id):
                return self._jobs.command(job_id, KillReceived())
            case InjectFault(job_id=job_id, rank=rank):
                step = self._state.last_step(job_id, rank)
                return self._jobs.command(job_id, FaultReceived(command.fault, step))
            case PullLogs(since_seq=since_seq):
                lines = self._jobs.logs.since(since_seq, MAX_PULLED_LINES)
                return Logs(epoch=self.epoch, first_seq=self._jobs.logs.first_seq, lines=lines)
            case PullHistory():
                return self._past(command)
            case ShowJob(job_id=job_id):
                return self._jobs.show(job_id)
            case GetStacks(job_id=job_id, is_native=is_native):
                return await self._jobs.stacks(job_id, is_native=is_native)
            case FindLeftovers():
                return Leftovers(await asyncio.to_thread(find_leftovers, self._jobs.adopted.running_pids))
            case CleanLeftovers():
                return await _clean(command, self._jobs.adopted.running_pids)
            case ReadLog():
                # Also of a job that is no longer known, but on disk.
                return read_log(self._state_dir.jobs_dir / command.job_id, command)
            case GetStatus():
                return Status(self._report())
            case Shutdown(kill_jobs=kill_jobs):
                self._kills_jobs = self._kills_jobs or kill_jobs
                self.end_soon()
                num_ended = self._num_jobs(adopted=False) if self._kills_jobs else None
                # An agent that began just now has no report of the ranks of other launchers yet.
                num_left = self.num_jobs_left + self._jobs.adopted.num_unseen()
                return Accepted(num_jobs_left=num_left, num_jobs_ended=num_ended)
        assert_never(command)

    def _claim(self, generation: int, holder: str) -> Accepted | Refused:
        before = self._lease.holder
        if refused := self._lease.claim(generation, holder, time.monotonic()):
            return refused
        try:
            self._state_dir.write_holder(self._lease.holder)
        except OSError as error:
            self._lease = ControlLease(before, time.monotonic())
            return Refused(RefusalReason.NO_SPACE, f"the claim cannot be kept: {error.strerror}: make room")
        self._publish_soon()
        return Accepted()

    def _on_rank_report(self, report: RankReport, pid: int) -> None:
        taken = self._jobs.adopted.take(report, pid) if report.is_adopted else report
        self._state.apply(RankReported(report if taken is None else taken), time.monotonic())
        if self._state.has_news:
            self._publish_soon(NEWS_GAP_S)

    def _report(self) -> NodeReport:
        now_s = time.monotonic()
        self._report_seq += 1
        report = self._state.report(
            now_s,
            report_seq=self._report_seq,
            jobs=self._jobs.statuses(now_s),
            log_seq=self._jobs.logs.log_seq,
            malformed_datagrams=self._inbox.num_malformed,
            control=self._lease.report(now_s),
        )
        return msgspec.structs.replace(report, log_losses=self._jobs.logs.losses, is_last=self._is_closing)

    def _publish_soon(self, gap_s: float = MIN_PUBLISH_GAP_S) -> None:
        """Publish at once, or as soon as the last report is so old."""
        self._has_news.set()
        loop = asyncio.get_running_loop()
        wait_s = max(0.0, self._published_at_s + gap_s - time.monotonic())
        if self._publish_timer is None or loop.time() + wait_s < self._publish_timer.when():
            if self._publish_timer:
                self._publish_timer.cancel()
            self._publish_timer = loop.call_later(wait_s, self._publish)

    def _publish(self) -> None:
        """Send a report to whoever listens."""
        if self._publish_timer:
            self._publish_timer.cancel()
            self._publish_timer = None
        self._published_at_s = time.monotonic()
        self.latest_report = self._report()
        self.reports.publish(encode_frame(self.latest_report))

    def _keep(self, now_s: float) -> None:
        """Add the latest report to the past, as long as there is room for it."""
        if self._history is None or self.latest_report is None:
            return
        if not (self._is_closing or self._history.is_due(now_s)):
            return
        try:
            frame = encode_node_report(_without_tracebacks(self.latest_report))
            self._history.append(frame, now_s, is_last=self._is_closing)
        except OSError as error:
            if self._keeps_past:
                log_line(f"reports of the past are lost: {error.strerror}: make room")
            self._keeps_past = False
        else:
            self._keeps_past = True

    def _past(self, wanted: PullHistory) -> History | PackedHistory:
        room = MAX_UNPACKED_BYTES if wanted.is_packed else MAX_HISTORY_BYTES
        asked = (wanted.tier, wanted.since_seq, room, wanted.max_age_s, wanted.period_s)
        found = self._history.since(*asked) if self._history else []
        if wanted.is_packed:
            frames = [past.frame for past in found]
            sizes = [len(frame) for frame in frames]
            return PackedHistory([past.seq for past in found], [past.age_s for past in found], sizes, pack(frames))
        return History([PastReport(past.seq, past.age_s, decode_node_report(past.frame)) for past in found])


async def _clean(command: CleanLeftovers, watched: set[int]) -> Leftovers | Refused:
    wanted = chosen(await asyncio.to_thread(find_leftovers, watched), command.names)
    foreign = [item for item in wanted if not item.is_ours]
    if foreign and not command.is_confirmed:
        return Refused(
            RefusalReason.NOT_PERMITTED,
            f"{len(foreign)} of these are not rankdeck's, {foreign[0].text!r} for one: confirm that they may be ended",
        )
    return Leftovers(await asyncio.to_thread(clean, wanted))


def _without_tracebacks(report: NodeReport) -> NodeReport:
    """Return what is worth keeping many times over."""
    lean = [
        job
        if job.root_cause is None
        else msgspec.structs.replace(job, root_cause=msgspec.structs.replace(job.root_cause, traceback=""))
        for job in report.jobs
    ]
    return msgspec.structs.replace(report, jobs=lean)
