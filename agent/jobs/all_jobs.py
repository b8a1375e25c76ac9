"""The jobs of this node: feeds their lifecycles, carries out what these decide, and keeps their records on disk.

Lives on the event loop's thread. Decides nothing: that is for `agent.jobs.job`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from typing import TYPE_CHECKING, assert_never

import msgspec

from agent.jobs.admission import is_prepared, next_attempt, refusal_by_gpus, refusal_to_prepare
from agent.jobs.adopted import AdoptedJobs
from agent.jobs.job import KILL_AGAIN_S, Job
from agent.jobs.launch import Launch, boot_clock_s
from agent.jobs.lifecycle import (
    Answer,
    AskAll,
    AskProbe,
    CommitReceived,
    Effect,
    Event,
    FollowRanks,
    ForgetJob,
    KillReceived,
    KillTree,
    LauncherFound,
    LauncherLost,
    LauncherNotStarted,
    ReleasePort,
    RestartAttempt,
    RoundBegan,
    ShimKilled,
    SignalWorker,
    StartLauncher,
    TerminateLauncher,
    Ticked,
    WorkerExited,
    WorkerFound,
)
from agent.jobs.preflight import check_files, check_kept, check_metrics, find_store, reserve
from agent.jobs.rank_stacks import OutsideLooks, StackTaker
from agent.jobs.rank_watch import RankWatch, StoreListeners, undying
from agent.jobs.record import SETTLED_S, KnownJobs, keep_ranks, read_ranks
from agent.logs.disk_space import LogSpace
from agent.logs.full_disk import FullDisks
from agent.logs.traceback_text import FailureText
from agent.node_state.observations import DiskFound, RanksRestored
from agent.processes.leftovers import ANYBODYS, Leftovers
from agent.processes.oom_kills import OomKills
from agent.processes.shim import WRITER_PATIENCE_S
from agent.processes.shim_process import has_been_started, is_shim_alive, recorded_exit_code
from agent.slow_reader import TimedReads
from agent.wire.commands import Accepted, RefusalReason, Refused, Shown
from agent.wire.ends import Sender
from agent.wire.jobs import JobState, JobStatus
from agent.wire.secret_mask import masked_spec
from ddpcore.wire_launch import INBOX_SOCKET

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from agent.jobs.record import JobRecord
    from agent.logs.traceback_text import FoundFailure
    from agent.node_state.node_state import NodeState
    from agent.node_state.observations import WorkerEnded
    from agent.processes.shim_process import ShimProcess
    from agent.state_dir import StateDir
    from agent.wire.commands import Commit, PrepareAgain
    from agent.wire.jobs import JobSpec
    from agent.wire.stacks import Stacks

END_PERIOD_S = 0.02
"""Seconds between looks at processes that are being killed as the agent ends."""
SHIM_KILLED = "no agent ran when its shim was killed"


class Jobs:
    """All jobs of a node, from `adopt` to `close`."""

    def __init__(
        self,
        state_dir: StateDir,
        state: NodeState,
        on_change: Callable[[], None],
        sampler_pids: AbstractSet[int],
        *,
        die_with_us: bool,
    ) -> None:
        """`on_change` is called for what consoles should see immediately.

        `sampler_pids` is read at each sweep for leftovers: children of this process that serve no job.
        """
        self._state_dir = state_dir
        self._state = state
        self._on_change = on_change
        self._sampler_pids = sampler_pids
        self._die_with_us = die_with_us
        self._watch = RankWatch(state, self._on_worker_end)
        self._known = KnownJobs(state_dir, self._watch)
        self.logs = self._watch.logs
        self._space = LogSpace(state_dir.jobs_dir)
        self._oom_kills = OomKills()
        self._full_disks = FullDisks()
        self._reads = TimedReads("rankdeck-files")
        self._sent: dict[tuple[str, int, int], int] = {}
        """Signals that operators have had sent, by job, attempt and rank."""
        self._leftovers = Leftovers(state_dir.socket_path(INBOX_SOCKET))
        self._stacks = StackTaker()
        self._outside = OutsideLooks(state, self._stacks.py_spy)
        self._listeners = StoreListeners(state)
        self.adopted = AdoptedJobs(state, state_dir.path, self._known, self._full_disks.suspect, on_change)
        """Jobs that no agent has launched."""

    def adopt(self) -> None:
        """Take up the jobs of an earlier agent in this directory, and report how those that have ended did.

        Raises StateDirError if a newer agent wrote their records.
        """
        records = self._known.read()
        for record in records:
            self._adopt(record)
        if records:
            self._leftovers.suspect(ANYBODYS)

    @property
    def are_moving(self) -> bool:
        """True while a job has not ended."""
        return self.adopted.are_moving or not self._have_own_ended

    @property
    def _have_own_ended(self) -> bool:
        return all(launch.job.has_ended for launch in self._known)

    async def prepare(self, spec: JobSpec) -> Accepted | Refused:
        """Check a job and reserve what it needs."""
        # The only wait, before the first look at any state.
        address, unfit = await asyncio.gather(find_store(spec), check_files(spec, self._reads))
        if isinstance(address, Refused):
            return address
        if refused := self._refusal_by_adopted(spec.job_id):
            return refused
        launch = self._known.get(spec.job_id)
        existing = launch.job if launch else None
        if launch and is_prepared(spec, existing):
            launch.prepared_s, launch.job.since_s = boot_clock_s(), time.monotonic()
            return Accepted(launch.master_port)
        num_gpus = self._state.num_visible_gpus({**os.environ, **spec.env})
        refused = refusal_to_prepare(spec, existing) or refusal_by_gpus(spec, num_gpus) or unfit
        job_dir = self._state_dir.job_dir(spec.job_id, spec.attempt)
        if refused := refused or check_metrics(spec) or check_kept(job_dir):
            return refused
        if existing and self._leftovers.may_have(spec.job_id):
            reason = f"what is left of the last attempt of job {spec.job_id} is being killed: try again in a moment"
            return Refused(RefusalReason.WRONG_STATE, reason)
        last_rank = spec.first_rank + spec.local_world_size - 1
        port_holder = reserve(job_dir, last_rank, None if spec.node_rank else address, spec.master_port)
        if isinstance(port_holder, Refused):
            return port_holder
        launch = Launch(Job(spec, time.monotonic()), job_dir, address, port_holder)
        self._keep_ranks(launch.job.since_s)  # those of the attempt before it may be asked for again
        if refused := self._known.take_in(launch):
            return refused
        self._on_change()
        return Accepted(launch.master_port)

    async def prepare_again(self, command: PrepareAgain) -> Accepted | Refused:
        """Check the next attempt of a job that has ended, and reserve what it needs."""
        launch = self._known.get(command.job_id)
        if launch is None:
            return self._known.unknown(command.job_id)
        return await self.prepare(next_attempt(launch.job.spec, command))

    def commit(self, command: Commit) -> Accepted | Refused:
        """Start a prepared job, unless that has been given up."""
        launch = self._known.get(command.job_id)
        late_s = 0.0
        if launch and command.within_s is not None:
            late_s = boot_clock_s() - launch.prepared_s - command.within_s
        return self.command(command.job_id, CommitReceived(late_s))

    def command(self, job_id: str, event: Event) -> Accepted | Refused:
        """Feed a console's command to a job, and return its answer."""
        if adopted := self.adopted.get(job_id):
            return self.adopted.command(adopted, event)
        launch = self._known.get(job_id)
        if launch is None:
            return self._known.unknown(job_id)
        reply = self._feed(launch, event)
        assert reply is not None
        return reply

    def show(self, job_id: str) -> Shown | Refused:
        """Return a job's spec without its secrets."""
        launch = self._known.get(job_id)
        if launch is None:
            return self._known.unknown(job_id)
        return Shown(masked_spec(launch.job.spec), str(launch.ranks_dir), launch.master_port)

    async def stacks(self, job_id: str, *, is_native: bool) -> Stacks | Refused:
        """Return the stacks of a job's ranks."""
        if adopted := self.adopted.get(job_id):
            return await self._stacks.take(adopted, self.adopted.pids, is_native=is_native)
        launch = self._known.get(job_id)
        if launch is None:
            return self._known.unknown(job_id)
        if launch.shim is None:
            return Refused(RefusalReason.WRONG_STATE, f"job {job_id} does not run: it has no stacks")
        return await self._stacks.take(launch, self._watch.workers.pids, is_native=is_native)

    def tick(self, unattended_s: float) -> None:
        """Sample workers, let time pass for the jobs, end what nobody watches, read logs.

        `unattended_s` is how long no console has been connected.
        """
        now_s = time.monotonic()
        sought = self._known.sought
        sought -= {job_id for job_id in list(sought) if self._seek(self._known[job_id])}
        for launch in self._known:
            self._watch.sample(launch.job_id)
            self._outside.tick(launch)
            self._listeners.tick(launch)
            if launch.shim and (begun := launch.next_round()):
                self._feed(launch, RoundBegan(begun))
            abandoned_s = min(unattended_s, self._state.stalled_s(launch.job_id, now_s))
            killed_s = None if launch.job.has_ended else launch.job.killed_s
            is_late = killed_s is not None and now_s - killed_s >= KILL_AGAIN_S
            stuck = undying(self._watch.workers.pids(launch.job_id)) if is_late else ""
            self._feed(launch, Ticked(self._leftovers.may_have(launch.job_id), abandoned_s, stuck))
        self.adopted.tick()
        for adopted in self.adopted:
            self._outside.tick(adopted)
            self._listeners.tick(adopted)
        self._sweep(now_s)
        self._watch.read_logs()
        self._space.look(now_s)
        self._oom_kills.look(now_s)
        for failed, disk in self._full_disks.take():
            self._state.apply(DiskFound(failed.job_id, failed.rank, disk), now_s)
        self._keep_ranks(now_s)

    async def discover(self) -> None:
        """Look for workers of running jobs; never returns."""
        await self._watch.discover(self._known, lambda launch, rank: self._feed(launch, WorkerFound(rank)))

    def statuses(self, now_s: float) -> list[JobStatus]:
        """Return the status of every job, in the order of their preparation."""
        launched = [self._space.with_warning(launch.job.status(now_s)) for launch in self._known]
        return launched + self.adopted.statuses(now_s)

    async def kill_all(self, within_s: float) -> None:
        """Kill what runs and wait at most `within_s` until it is gone."""
        for launch in self._known:
            self._feed(launch, KillReceived())
        deadline_s = time.monotonic() + within_s
        while (now_s := time.monotonic()) < deadline_s and not (self._have_own_ended and self._leftovers.is_clean):
            self._sweep(now_s)
            self.tick(0.0)
            await asyncio.sleep(END_PERIOD_S)

    def close(self) -> None:
        """Release everything; jobs that run continue."""
        self._keep_ranks(time.monotonic())
        self._outside.close()
        self._listeners.close()
        self._watch.close()
        self._full_disks.close()
        self.adopted.close()
        self._known.close()

    def _adopt(self, record: JobRecord) -> None:
        """Make a job of its record, and find out how its launcher is."""
        launch = self._restored(record)
        job = launch.job
        if job.state is JobState.PREPARED and not has_been_started(launch.job_dir):
            # Its port is lost: whoever prepared it must do so again.
            launch.before = self._restored(record.before) if record.before else None
            self._take_back(launch)
            return
        self._known.take_over(launch)
        is_a_step_further = launch.job_dir != self._state_dir.job_dir(launch.job_id, job.spec.attempt)
        if job.has_ended:
            self._log_ends(launch)
            return
        if job.state is JobState.RESTARTING and not is_a_step_further:
            return
        self._feed(launch, LauncherFound())
        self._watch.admit(launch.job)
        if not self._seek(launch, SHIM_KILLED if record.is_of_this_boot else "the node was rebooted"):
            self._known.sought.add(launch.job_id)

    def _restored(self, record: JobRecord) -> Launch:
        """Return a job as its record shows it, which may be a step behind what has been started."""
        job = record.job_now()
        job_id, attempt = job.spec.job_id, job.spec.attempt
        job_dir, next_dir = (self._state_dir.job_dir(job_id, number) for number in (attempt, attempt + 1))
        if job.state is JobState.RESTARTING and has_been_started(next_dir):
            job_dir = next_dir
        return Launch(job, job_dir, record.address)

    def _seek(self, launch: Launch, why_lost: str = SHIM_KILLED) -> bool:
        """Adopt the launcher of an earlier agent's job, or feed how it ended; return False while its shim is silent."""
        if launch.adopt() or recorded_exit_code(launch.job_dir) is not None:
            self._follow(launch)
        elif is_shim_alive(launch.job_dir):
            return False
        else:
            self._feed(launch, LauncherLost(f"nobody knows how it ended: {why_lost}"))
        return True

    def _feed(self, launch: Launch, event: Event) -> Accepted | Refused | None:
        """Feed an event to a job, perform its effects, and return its answer if there is one."""
        before = launch.job.state
        reply: Accepted | Refused | None = None
        effects = launch.job.handle(event, time.monotonic())
        self._known.keep(launch)
        for effect in effects:
            # An effect that fails has the first word: what was to be answered is not true then.
            answer = self._perform(launch, effect)
            reply = reply or answer
        if launch.job.state is not before:
            self._on_change()
        return reply

    def _perform(  # noqa: C901, PLR0912 - one case for each effect
        self, launch: Launch, effect: Effect
    ) -> Accepted | Refused | None:
        job_id = launch.job_id
        match effect:
            case StartLauncher():
                return self._start(launch, launch.job.spec)
            case RestartAttempt(attempt=attempt):
                self._restart(launch, attempt)
            case AskAll(request=request):
                launch.ask_all(request)
            case TerminateLauncher():
                if launch.shim:
                    launch.shim.terminate()
            case KillTree(spares_writers=spares_writers):
                if launch.shim:
                    launch.shim.kill_tree(spares_writers=spares_writers)
                if launch.shim is None or launch.is_lone:
                    self._suspect(job_id, spares_writers=spares_writers)
            case ReleasePort():
                launch.release_port()
            case ForgetJob():
                self._take_back(launch)
            case FollowRanks():
                self._watch.begin(launch)
            case SignalWorker(rank=rank, signal=number):
                if not self._watch.workers.send_signal(job_id, rank, number):
                    return Refused(RefusalReason.WRONG_STATE, f"rank {rank} has exited")
                self._sent[job_id, launch.job.spec.attempt, rank] = number
                self._watch.sample(launch.job_id)
                self._on_change()
            case AskProbe(rank=rank, request=request):
                return launch.ask_probe(rank, request)
            case Answer(reply=reply):
                return reply
            case _:
                assert_never(effect)
        return None

    def _start(self, launch: Launch, spec: JobSpec) -> Accepted | Refused | None:
        """Spawn the shim of an attempt, whose directory and port are ready."""
        event = launch.start(spec, self._state_dir.socket_path(INBOX_SOCKET), dies_with_us=self._die_with_us)
        reply = self._feed(launch, event)
        if launch.shim:
            launch.before = None
            self._follow(launch)
        return reply

    def _restart(self, launch: Launch, attempt: int) -> None:
        """Prepare another attempt and start it, once its files have been looked at: it is asked for at each tick."""
        spec = msgspec.structs.replace(launch.job.spec, attempt=attempt)
        launch.look = launch.look or asyncio.create_task(check_files(spec, self._reads))
        if not launch.look.done():
            return
        unfit, launch.look = launch.look.result(), None
        job_dir = self._state_dir.job_dir(spec.job_id, attempt)
        if not has_been_started(job_dir):  # else an agent was killed before it could spawn anything there
            shutil.rmtree(job_dir, ignore_errors=True)
        reserved = unfit or reserve(job_dir, launch.job.ranks[-1], launch.address, spec.master_port)
        if isinstance(reserved, Refused):
            self._feed(launch, LauncherNotStarted(reserved.message))
            return
        launch.take(job_dir, reserved)
        self._start(launch, spec)

    def _follow(self, launch: Launch) -> None:
        """Watch the workers, logs and shim of an attempt that runs, or has just ended."""
        self._watch.begin(launch)
        if launch.shim:
            self._await_end(launch, launch.shim)
        else:
            self._end(launch, recorded_exit_code(launch.job_dir))

    def _await_end(self, launch: Launch, shim: ShimProcess) -> None:
        asyncio.get_running_loop().add_reader(shim.pidfd, self._on_shim_end, launch)
        if launch.is_lone:
            self._feed(launch, ShimKilled())

    def _on_shim_end(self, launch: Launch) -> None:
        shim = launch.shim
        if shim is None or not shim.has_ended():
            return
        asyncio.get_running_loop().remove_reader(shim.pidfd)
        exit_code, was_lone = shim.exit_code(), launch.is_lone
        if exit_code is None and not was_lone and not self._die_with_us:
            launch.close()
            if launch.adopt() and launch.shim:
                self._await_end(launch, launch.shim)
                return
        self._end(launch, exit_code)
        if was_lone:
            self._suspect(launch.job_id, spares_writers=True)

    def _sweep(self, now_s: float) -> None:
        for launch in self._known:
            self._on_shim_end(launch)  # of a shim that has just been killed nothing is an orphan yet
        has_lone = any(launch.is_lone for launch in self._known)
        self._leftovers.sweep(self._own_pids(), self._known.kept_jobs, now_s, owns_all=not has_lone)

    def _suspect(self, job_id: str, *, spares_writers: bool) -> None:
        """Have what is left of a job killed where no shim does."""
        self._leftovers.suspect(job_id, time.monotonic() + WRITER_PATIENCE_S if spares_writers else float("-inf"))

    def _end(self, launch: Launch, exit_code: int | None) -> None:
        """Feed the launcher's end to a job."""
        launch.close()
        self.logs.unfollow(launch.job_id)
        for ended in self._watch.note_unseen(launch, exit_code, time.monotonic()):
            self._on_worker_end(ended)
        launch.remove_sockets()
        self._feed(launch, launch.job.launcher_ended(exit_code, launch.any_failure(exit_code) if exit_code else None))

    def _on_worker_end(self, ended: WorkerEnded) -> None:
        launch, how, now_s = self._known[ended.job_id], ended.exit, time.monotonic()
        oom_kills = self._oom_kills.recent(now_s) if ended.cgroup_kills is None else ended.cgroup_kills
        found = self._log_end(launch, ended, now_s, 0 if how.code == 0 else oom_kills)
        self._feed(launch, WorkerExited(ended.rank, how.code, how.signal, found))
        self._on_change()

    def _log_end(self, launch: Launch, ended: WorkerEnded, ended_s: float, oom_kills: int = 0) -> FoundFailure | None:
        """Add to a worker's end its exception or last line, for the node's state; return these."""
        rank, how, found = ended.rank, ended.exit, None
        if how.code != 0:
            found = launch.failure_of(rank, how.signal) or self._space.failure_of(rank)
            found = found or launch.last_failure_of(rank, how.code)
        text = found.text if found else FailureText()
        if how.code != 0:
            error = text.exception or text.last_line
            self._full_disks.suspect(ended.job_id, rank, error, how.signal, launch.job.spec.workdir)
        sent = self._sent.pop((ended.job_id, launch.job.spec.attempt, rank), None)
        if sent is not None and sent == how.signal:
            how = msgspec.structs.replace(how, facts=msgspec.structs.replace(how.facts, sender=Sender.RANKDECK))
        how = msgspec.structs.replace(
            how, error=text.exception, last_line=text.last_line, oom_kills=oom_kills, place=text.place
        )
        self._state.apply(msgspec.structs.replace(ended, exit=how), ended_s)
        return found

    def _log_ends(self, launch: Launch) -> None:
        """Add to the node's state how the ranks of an ended job ended that it does not know."""
        job, kept = launch.job, read_ranks(launch)
        self._state.apply(RanksRestored(launch.job_id, kept), job.since_s + SETTLED_S)
        restored = [worker.rank for worker in kept]
        for ended in self._watch.note_unseen(launch, job.exit_code, job.since_s, restored):
            self._log_end(launch, ended, job.since_s)

    def _keep_ranks(self, now_s: float) -> None:
        """Keep on disk how the ranks ended of jobs that have ended of late."""
        for launch in self._known:
            settled_s = launch.job.since_s + SETTLED_S
            if launch.job.has_ended and now_s < settled_s:
                keep_ranks(launch, self._state.ended_ranks(launch.job_id, settled_s))

    def _take_back(self, launch: Launch) -> None:
        """Drop a job that has been prepared; its last attempt is reported again."""
        self._known.take_back(launch)
        if launch.before:
            self._log_ends(launch.before)

    def _refusal_by_adopted(self, job_id: str) -> Refused | None:
        """Return why a name is taken by a job that no agent has launched; forget one that has ended."""
        adopted = self.adopted.get(job_id)
        if adopted is None:
            return None
        if adopted.job.has_ended:
            self.adopted.forget(job_id)
            return None
        return Refused(RefusalReason.JOB_EXISTS, f"a job {job_id} of another launcher runs here: give another --name")

    def _own_pids(self) -> set[int]:
        return self._known.shim_pids | self._sampler_pids | self._stacks.spy_pids
