"""The jobs of this node that no agent has launched: taken in by their ranks' reports, watched, and ended on request.

Lives on the event loop's thread. What a report means for a job is decided by `agent.jobs.adopted_job`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.jobs.adopted_job import Action, AdoptedJob
from agent.jobs.launch import ask_rank, listens
from agent.jobs.lifecycle import KillReceived, StopReceived
from agent.node_state.observations import JobAdmitted, JobForgotten, JobGrown, WorkerSeen
from agent.processes.foreign_launcher import Launcher, ancestors, launcher_pid_of, lowest_launchers, marked_launchers
from agent.processes.mute_ranks import has_ranks, mute_ranks, unreported_ranks
from agent.processes.worker_sampler import WorkerSampler, worker_ended
from agent.wire.codec import is_job_id
from agent.wire.commands import Accepted, RefusalReason, Refused
from ddpcore.wire import ReportNow, StopTraining
from ddpcore.wire_launch import ADOPTED_DIR

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from agent.jobs.adopted_job import Seen
    from agent.jobs.lifecycle import Event
    from agent.node_state.node_state import NodeState
    from agent.node_state.observations import WorkerEnded
    from agent.processes.mute_ranks import MuteRank
    from agent.wire.jobs import JobStatus
    from ddpcore.wire import ProbeRequest, RankReport

MAX_JOBS = 32
"""Jobs known at a time: one more takes the place of one without a process, else its report is dropped."""
MAX_ENDED_JOBS = 8
"""Ended jobs that are still reported."""
FIRST_LOOK_S, LONGEST_PAUSE_S = 5.0, 60.0
"""Seconds from a launcher's or a job's beginning to a look for ranks without a probe, then twice as long each time."""
SUFFIX = "-adopted"
"""Ends the name of a job here whose own is that of a launched one."""
MAX_NAME_CHARS = 64
NO_PID = 0
"""Pid of a sender in a namespace that this process does not see. Source: unix(7), pid_namespaces(7)."""


class _Looks:
    """Times at which ranks without a probe are looked for."""

    def __init__(self, begun_s: float) -> None:
        self._last_s, self._pause_s = begun_s, FIRST_LOOK_S

    def are_due(self, now_s: float) -> bool:
        """Return whether it is time for one, which puts off the next."""
        if now_s - self._last_s < self._pause_s:
            return False
        self._last_s, self._pause_s = now_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


class AdoptedRun:
    """A job and what is held of it: its launcher, the directory of its probes."""

    def __init__(self, job: AdoptedJob, ranks_dir: Path, launcher: Launcher | None) -> None:
        self.job = job
        self.ranks_dir = ranks_dir
        self.launcher = launcher
        self.launcher_id = launcher and launcher.identity
        self._last_request_id = 0
        self.looks = _Looks(job.started_s)

    @property
    def job_id(self) -> str:
        return self.job.job_id

    @property
    def attempt(self) -> int:
        return self.job.attempt

    @property
    def ranks(self) -> list[int]:
        return self.job.ranks

    @property
    def python(self) -> str:
        """The interpreter of a rank, as it was called; this one's where it cannot be seen."""
        for member in self.job.members.values():
            with contextlib.suppress(OSError):
                called = Path(f"/proc/{member.pid}/cmdline").read_bytes().split(b"\0")[0]
                if called.startswith(b"/"):
                    return os.fsdecode(called)
        return sys.executable

    def new_request_id(self) -> int:
        """Return a number that is higher than any before, also an earlier agent's."""
        self._last_request_id = max(self._last_request_id + 1, time.monotonic_ns() // 1_000_000)
        return self._last_request_id

    def ask(self, rank: int, request: ProbeRequest) -> bool:
        """Send a request to a rank's probe; return whether it listens."""
        return ask_rank(self.ranks_dir, rank, request)

    def close(self) -> None:
        """Let go of the launcher; it goes on."""
        if self.launcher:
            self.launcher.close()
            self.launcher = None


class AdoptedJobs:
    """All of them, until `close`."""

    def __init__(
        self,
        state: NodeState,
        state_dir: Path,
        launched: Container[str],
        suspect_disk: Callable[[str, int, str, int | None, str], None],
        on_change: Callable[[], None],
    ) -> None:
        """`launched` holds the names of jobs that agents have launched; `on_change` is called for what is news.

        `suspect_disk` is `FullDisks.suspect`.
        """
        self._state = state
        self._dir = state_dir / ADOPTED_DIR
        self._launched = launched
        self._suspect_disk = suspect_disk
        self._on_change = on_change
        self._runs: dict[str, AdoptedRun] = {}
        self._launchers: dict[int, _Looks] = {}
        """What `rankdeck exec` has become here, by pid."""
        self._workers = WorkerSampler(self._on_rank_end)
        self._remove_old_dirs()

    def __iter__(self) -> Iterator[AdoptedRun]:
        """Iterate over all of them as they are now, even if some are forgotten during it."""
        return iter(list(self._runs.values()))

    def get(self, job_id: str) -> AdoptedRun | None:
        return self._runs.get(job_id)

    @property
    def are_moving(self) -> bool:
        """True while a job has not ended."""
        return any(not run.job.has_ended for run in self)

    def statuses(self, now_s: float) -> list[JobStatus]:
        """Return the status of every job, in the order of their first reports."""
        return [run.job.status(now_s) for run in self]

    @property
    def running_pids(self) -> set[int]:
        """Pids of ranks that have not ended, and of their launchers."""
        ranks = {one.pid for run in self for one in run.job.members.values() if not one.has_ended}
        return ranks | {run.launcher.pid for run in self if run.launcher and run.launcher.is_running}

    def num_unseen(self) -> int:
        """Return how many launchers under `rankdeck exec` run ranks of which no job here knows yet."""
        known = {run.launcher.pid for run in self if run.launcher is not None}
        return sum(has_ranks(pid) for pid in marked_launchers(self._dir) - known)

    def take(self, report: RankReport, pid: int) -> RankReport | None:
        """Take a rank in by its report; return the report as the node's state takes it, None where it is refused.

        Args:
            report: Report of a rank that no agent has launched.
            pid: Process that has sent it, as the kernel shows it: in a container it has another number.
        """
        if pid == NO_PID or not is_job_id(report.job_id):
            return None  # a name becomes a directory
        now_s = time.monotonic()
        job_id = self._name_here(report.job_id)
        report = msgspec.structs.replace(report, job_id=job_id, pid=pid)
        run = self._runs.get(job_id)
        if run is None or run.job.is_succeeded_by(report):
            self._forget_mute(report)
            is_taken = self._begin(report, now_s, launcher_pid_of(pid))
        else:
            is_taken = self._join(run, report, now_s)
        return report if is_taken else None

    def tick(self) -> None:
        """Sample the ranks, let time pass for the jobs, and do what is due."""
        now_s = time.monotonic()
        self._look_for_unreported(now_s)
        for run in self:
            for sample in self._workers.sample(run.job_id):
                self._state.apply(sample, now_s)
            launcher, before = run.launcher, run.job.state
            is_running = launcher is not None and launcher.is_running
            exit_code = None if launcher is None or is_running else launcher.exit_code
            if is_running and run.looks.are_due(now_s):
                self._look_for_mute(run, now_s)
            is_shared = is_running and self._is_shared(run)
            actions = run.job.tick(now_s, lives_launcher=is_running, exit_code=exit_code, is_shared=is_shared)
            self._carry_out(run, actions)
            if run.job.state is not before:
                self._on_change()
            if run.job.has_ended:
                run.close()
        ended = [run.job_id for run in self if run.job.has_ended]
        for job_id in ended[:-MAX_ENDED_JOBS]:
            self.forget(job_id)

    def command(self, run: AdoptedRun, event: Event) -> Accepted | Refused:
        """Carry out a console's command to a job."""
        now_s = time.monotonic()
        match event:
            case StopReceived(is_agreed=is_agreed, can_agree=can_agree):
                actions = run.job.stop(now_s, is_agreed=is_agreed and can_agree)
            case KillReceived():
                actions = run.job.kill(now_s)
            case _:
                why = f"job {run.job_id} was not launched by rankdeck, which can stop and kill it, and nothing else"
                return Refused(RefusalReason.NOT_PERMITTED, why)
        self._carry_out(run, actions)
        self._on_change()
        return Accepted()

    def pids(self, job_id: str) -> dict[int, int]:
        """Return the process of each rank that has not ended."""
        return self._workers.pids(job_id)

    def forget(self, job_id: str) -> None:
        """Drop a job of which no rank runs, with what its probes have left."""
        run = self._runs.pop(job_id)
        run.close()
        self._workers.forget(job_id)
        self._state.apply(JobForgotten(job_id), time.monotonic())
        shutil.rmtree(run.ranks_dir, ignore_errors=True)

    def close(self) -> None:
        """Let go of everything; jobs that run continue."""
        for run in self:
            run.close()
        self._workers.close()

    def _remove_old_dirs(self) -> None:
        """Remove what probes of ended jobs have left that an earlier agent knew."""
        with contextlib.suppress(OSError):
            for directory in self._dir.iterdir():
                if directory.is_dir() and not any(map(listens, directory.glob("rank-*.sock"))):
                    shutil.rmtree(directory, ignore_errors=True)

    def _name_here(self, job_id: str) -> str:
        return f"{job_id[: MAX_NAME_CHARS - len(SUFFIX)]}{SUFFIX}" if job_id in self._launched else job_id

    def _begin(self, first: Seen, now_s: float, launcher_pid: int, why_mute: str | None = None) -> bool:
        """Begin a job, or another run of it, by its first rank."""
        before = self._runs.get(first.job_id)
        if before is None and len(self._runs) >= MAX_JOBS:
            idle_runs = (run for run in self if run.job.is_idle)
            idle = min(idle_runs, key=lambda run: not run.job.has_ended, default=None)
            if idle is None:
                return False
            self.forget(idle.job_id)
        if before is not None:
            before.close()
        self._workers.forget(first.job_id)
        launcher = None
        with contextlib.suppress(OSError):  # it ends just now
            launcher = Launcher(launcher_pid)
        run = AdoptedRun(AdoptedJob(first, now_s, why_mute), self._dir / first.job_id, launcher)
        # Those that ran last are reported last.
        self._runs.pop(first.job_id, None)
        self._runs[first.job_id] = run
        self._state.apply(JobAdmitted(run.job.status(now_s)), now_s)
        self._hold(run, first.rank, first.pid, now_s)
        self._on_change()
        return True

    def _join(self, run: AdoptedRun, report: RankReport, now_s: float) -> bool:
        """Take a report of a job that runs, and its rank if that is new."""
        pids = {rank: member.pid for rank, member in run.job.members.items()}
        if not run.job.take(report, report.pid, now_s):
            return False
        if pids.get(report.rank) != report.pid:
            self._grow(run, report.rank, report.pid, now_s)
        return True

    def _grow(self, run: AdoptedRun, rank: int, pid: int, now_s: float) -> None:
        self._state.apply(JobGrown(run.job.status(now_s)), now_s)
        self._hold(run, rank, pid, now_s)
        self._on_change()

    def _look_for_mute(self, run: AdoptedRun, now_s: float) -> None:
        """Take in the ranks of a launcher that no probe reports, once it is clear that none will."""
        job = run.job
        reporting = next((one.pid for one in job.members.values() if not one.has_ended and one.why_mute is None), None)
        if run.launcher is None or reporting is None or len(job.members) >= job.world_size:
            return
        for rank, (pid, why) in mute_ranks(run.launcher.pid, reporting, job.members).items():
            if job.add_mute(rank, pid, why):
                self._grow(run, rank, pid, now_s)

    def _look_for_unreported(self, now_s: float) -> None:
        """Take in the ranks of launchers under `exec` none of which reports, as a job unless there is one."""
        marked = marked_launchers(self._dir)
        self._launchers = {pid: self._launchers.get(pid) or _Looks(now_s) for pid in marked}
        due = [pid for pid, looks in self._launchers.items() if looks.are_due(now_s)]
        for launcher_pid in due:
            running = [(run, one) for run in self for one in run.job.members.values() if not one.has_ended]
            reporting = {one.pid: run for run, one in running if one.why_mute is None}
            waiting = [run for run in reporting.values() if len(run.job.members) < run.job.world_size]
            if any(run.launcher and run.launcher.pid == launcher_pid for run in waiting):
                continue  # its others are looked for by the rank that reports
            for seen in unreported_ranks(launcher_pid, reporting):
                self._take_mute(seen._replace(job_id=self._name_here(seen.job_id)), launcher_pid, now_s)

    def _take_mute(self, seen: MuteRank, launcher_pid: int, now_s: float) -> None:
        run = self._runs.get(seen.job_id)
        if run is None or run.job.is_succeeded_by(seen):
            self._begin(seen, now_s, launcher_pid, seen.why)
        elif run.job.is_of(seen) and run.job.add_mute(seen.rank, seen.pid, seen.why):
            self._grow(run, seen.rank, seen.pid, now_s)

    def _forget_mute(self, report: RankReport) -> None:
        """Drop the job of another name to which a process that reports was counted as a rank without a probe."""
        for run in self:
            is_other = run.job_id != report.job_id
            if is_other and any(one.pid == report.pid and one.why_mute for one in run.job.members.values()):
                self.forget(run.job_id)

    def _hold(self, run: AdoptedRun, rank: int, pid: int, now_s: float) -> None:
        self._state.apply(WorkerSeen(run.job_id, rank, pid), now_s)
        if not self._workers.hold(run.job_id, rank, pid):
            self._on_rank_end(worker_ended(run.job_id, rank, None))

    def _on_rank_end(self, ended: WorkerEnded) -> None:
        now_s = time.monotonic()
        run = self._runs[ended.job_id]
        event = run.job.rank_ended(ended.rank, ended.exit.code, ended.exit.signal, now_s)
        error = event.found.text.exception if event.found else ""
        how = msgspec.structs.replace(ended.exit, code=event.code, signal=event.signal, error=error)
        self._state.apply(msgspec.structs.replace(ended, exit=how), now_s)
        if event.code != 0:
            self._suspect_disk(run.job_id, ended.rank, error, event.signal, "")
        if event.code != 0 and not run.job.has_ended:
            # The launcher may end the others soon: what they have called is reported before.
            self._ask_all(run, ReportNow(run.new_request_id()))
        self._on_change()

    def _carry_out(self, run: AdoptedRun, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Action.ASK_TO_STOP:
                    self._ask_all(run, StopTraining(run.new_request_id()))
                case Action.END_LAUNCHER if run.launcher:
                    self._end_launcher(run, Launcher.terminate)
                case Action.KILL:
                    self._end_launcher(run, Launcher.kill_tree)
                    self._signal_all(run, signal.SIGKILL)
                case _:
                    self._signal_all(run, signal.SIGTERM)
            if action in {Action.END_LAUNCHER, Action.END_RANKS}:
                self._signal_all(run, signal.SIGCONT)  # a frozen rank hears nothing

    def _end_launcher(self, run: AdoptedRun, end: Callable[[Launcher], None]) -> None:
        """End a job's launcher; of one that has other jobs, what is this job's alone."""
        launcher = run.launcher
        if launcher is None or not launcher.is_running:
            return
        pids, others = {launcher.pid}, self._other_pids(run)
        if self._is_shared(run) or any(launcher.pid in ancestors(pid) for pid in others):
            pids = lowest_launchers(launcher.pid, self.pids(run.job_id).values(), others)
        run.job.leaves_launcher = launcher.pid not in pids
        for pid in pids:
            with contextlib.suppress(OSError), contextlib.closing(Launcher(pid)) as lowest:
                end(lowest)

    def _is_shared(self, run: AdoptedRun) -> bool:
        """Return whether a launcher is known to have started another job, too."""
        ids = [one.launcher_id for one in self if one is not run]
        return run.launcher_id is not None and run.launcher_id in ids

    def _other_pids(self, run: AdoptedRun) -> set[int]:
        """Return the processes of other jobs' ranks."""
        pids = {pid for one in self if one is not run for pid in self.pids(one.job_id).values()}
        return pids - set(self.pids(run.job_id).values())

    def _signal_all(self, run: AdoptedRun, number: signal.Signals) -> None:
        for rank in run.ranks:
            self._workers.send_signal(run.job_id, rank, number)

    def _ask_all(self, run: AdoptedRun, request: StopTraining | ReportNow) -> None:
        for rank in run.ranks:
            run.ask(rank, request)
