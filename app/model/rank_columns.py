"""What is known of each rank of a job, a column per fact: its process, its own report, its texts.

`RankColumns` keeps the last frame with a rank beside its figures: the texts of its row are decoded on demand.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from agent.wire.digest import (
    HAS_EXIT_WAIT,
    HAS_METRICS,
    HAS_OPEN_TRANSFERS,
    HAS_PEER_CALLS,
    HAS_PEER_WAIT,
    HAS_RAISED,
    HAS_REPORT,
    HAS_WORKED,
    IS_COMPARED,
    IS_ENDING,
    IS_GROWING,
    LATENESS,
    PHASES,
    PROCESSES,
)
from agent.wire.reports import ProcessState
from app.model.rank_batch import COUNT, SECOND
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from agent.wire.reports import ExitReport, WorkerReport


class Process(IntEnum):
    """`ProcessState` as records have it, with one for a worker that no node has reported."""

    UNSEEN = 0
    RUNNING = 1 + PROCESSES.index(ProcessState.RUNNING)
    FROZEN = 1 + PROCESSES.index(ProcessState.FROZEN)
    BLOCKED = 1 + PROCESSES.index(ProcessState.BLOCKED)
    EXITED = 1 + PROCESSES.index(ProcessState.EXITED)


PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


def which_phases(*phases: Phase) -> NDArray[np.bool_]:
    """Return by phase code whether the phase is one of these: an index is many times cheaper than `np.isin`."""
    return np.array([phase in phases for phase in PHASES])


CPU_WINDOW_S = 2.0
"""Seconds after which a node knows how busy a new process is."""
ALIKE_S = 5.0
"""Longest time between ends with one text that count as one event."""


class Death(NamedTuple):
    """How and when a worker's process ended."""

    rank: int
    at_s: float
    exit: ExitReport

    def is_like(self, first: Death) -> bool:
        """Return whether a rank has left the very text of an earlier one, by its own code and soon after it.

        A bad argument ends all ranks so, as far apart as their starts are: none is to blame more than another.
        """
        end, other = self.exit, first.exit
        is_same = (end.code, end.error, end.last_line) == (other.code, other.error, other.last_line)
        return is_same and end.code is not None and bool(end.error_text) and self.at_s - first.at_s <= ALIKE_S


class RankColumns:
    """The ranks of one attempt of a job.

    Attributes:
        node_of: Index of the node that runs each rank; -1 until a node claims it.
        process: `Process` of each rank.
        received_s: When the node last reported the rank.
        process_since_s: Since when its process has been in this state.
        last_frozen_s: When it was last seen frozen.
        report_at_s: When its probe's last report reached its node; NaN before the first.
        report_age_s: Age of that report when the node last reported the rank.
        phase_since_s: Since when it has been in its phase; NaN before its first report.
        loss_step: Step of its loss; -1 while that is not known.
        is_ending: Whether its last report was its farewell.
        has_raised: Whether an exception ends its program, as it reports itself.
        stamp: Count of its probe's reports that have been folded in.
        worked_s: Seconds in which it waited for nobody, by phase (in the order of `Phase`) and rank.
        num_compared: Collectives for which the last rank of its node to arrive is known.
        num_last: Collectives of these at which it was the last.
        lateness: The exact figures of a `LatenessReport`, in the order of `agent.wire.digest.LATENESS`, by rank.
        pss_bytes: Resident memory with shared pages split among their users; NaN when unknown.
        cpu_cores: Cores that its process keeps busy.
        seen_s: How long its process has been known.
        place: Checksum of the line at which it was last seen; 0 is none.
        stood_s: How long its main thread had not moved at its last report, since it makes no steps.
        stepped_at_s: When it was last seen to make a step; NaN while that is not known.
        step_limit_s: Longest duration of its steps; 0 while that is not known.
        has_peer_calls: Whether it has ever made sends or receives.
        has_peer_wait: Whether it waits in a send or a receive.
        has_open_transfers: Whether NCCL's recorder holds unfinished sends or receives of it.
        has_exit_wait: Whether its program is done and its process does not end.
        is_growing: Whether its node reports that its memory grows steadily.
        has_metrics: Whether the job's patterns have found anything in its lines.
        deaths: Deaths by rank, of those whose process has ended.
        died_at_s: When the process ended; NaN while it lives.
        died_badly: Whether a signal or an exit code other than 0 ended it.
        died_somehow: Whether it has ended, and it is not known how.
    """

    latest_news: tuple[object, float] | None = None
    """What was known of the job's end when there was news of it, and when; None while it has not ended."""

    def __init__(self, job_id: str, attempt: int, world_size: int) -> None:
        self.job_id = job_id
        self.attempt = attempt
        self.world_size = world_size
        self.node_of = np.full(world_size, -1, np.int32)
        self.process = np.zeros(world_size, np.int8)
        self.received_s = np.full(world_size, -np.inf)
        self.process_since_s = np.full(world_size, -np.inf)
        self.last_frozen_s = np.full(world_size, -np.inf)
        self.report_at_s = np.full(world_size, np.nan)
        self.report_age_s = np.zeros(world_size)
        self.phase = np.full(world_size, PHASE_CODE[Phase.STARTING], np.int8)
        self.phase_since_s = np.full(world_size, np.nan)
        self.is_ending, self.has_raised = np.zeros((2, world_size), np.bool_)
        self.step, self.loss_step = np.full((2, world_size), -1, np.int64)
        self.loss = np.full(world_size, np.nan)
        self.has_loss = np.zeros(world_size, np.bool_)
        self.observed_s = np.zeros(world_size)
        self.waited_s = np.zeros(world_size)
        self.worked_s = np.zeros((len(Phase), world_size))
        self.num_compared, self.num_last = np.zeros((2, world_size))
        self.lateness = np.zeros((len(LATENESS), world_size))
        self.rss_bytes = np.full(world_size, np.nan)
        self.peak_rss_bytes = np.full(world_size, np.nan)
        self.stamp = np.zeros(world_size, np.int64)
        self.pss_bytes = np.full(world_size, np.nan)
        self.cpu_cores = np.zeros(world_size)
        self.seen_s = np.zeros(world_size)
        self.is_growing, self.has_metrics = np.zeros((2, world_size), np.bool_)
        self.place = np.zeros(world_size, np.uint32)
        self.stood_s, self.step_limit_s = np.zeros((2, world_size))
        self.stepped_at_s = np.full(world_size, np.nan)
        self.has_peer_calls, self.has_peer_wait, self.has_exit_wait, self.has_open_transfers = np.zeros(
            (4, world_size), np.bool_
        )
        self._frames = np.full(world_size, None, np.object_)
        """Last frame that holds each rank."""
        self._report_key = np.full((2, world_size), -1, np.int64)
        """Process and number of its latest report, which show whether another one is new."""
        self.died_at_s = np.full(world_size, np.nan)
        self.died_badly, self.died_somehow = np.zeros((2, world_size), np.bool_)
        self.deaths: dict[int, Death] = {}
        self.deaths_version = 0

    def worker(self, rank: int) -> WorkerReport | None:
        """Return the node's last report on a rank; None before the first, or where it is invalid."""
        frame = self._frames[rank]
        found: WorkerReport | None = None if frame is None else frame.worker(self.job_id, self.attempt, rank)
        return found

    def workers(self, ranks: Iterable[int]) -> list[WorkerReport]:
        """Return the nodes' last reports on ranks, of those that are known."""
        return [worker for rank in ranks if (worker := self.worker(rank)) is not None]

    def put(
        self,
        ranks: NDArray[np.int64],
        records: NDArray[np.void],
        frames: NDArray[np.object_],
        at_s: NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """Take the nodes' records of ranks: a record, a frame and a time for each.

        Returns:
            Which ranks have a report that was not received before.
        """
        seconds, counts, flags = records["seconds"].T, records["counts"].T, records["flags"]
        self._frames[ranks] = frames
        self.received_s[ranks] = at_s
        self.seen_s[ranks] = seconds[SECOND["seen_s"]]
        self.cpu_cores[ranks] = records["cpu_cores"]
        self.is_growing[ranks] = flags & IS_GROWING != 0
        self.has_metrics[ranks] = flags & HAS_METRICS != 0
        self.place[ranks] = records["place"]
        self._put_processes(ranks, records, at_s)
        is_compared = flags & IS_COMPARED != 0
        if is_compared.any():
            self.num_compared[ranks[is_compared]] = counts[COUNT["num_compared"], is_compared]
            self.num_last[ranks[is_compared]] = counts[COUNT["num_last"], is_compared]
            self.lateness[:, ranks[is_compared]] = records["lateness"].T[:, is_compared]
        has_report = flags & HAS_REPORT != 0
        self.report_age_s[ranks[has_report]] = seconds[SECOND["report_age_s"], has_report]
        for at in np.flatnonzero(~has_report & ~np.isnan(self.report_at_s[ranks])).tolist():
            self._put_unreported(int(ranks[at]), float(at_s[at]))
        key = counts[[COUNT["pid"], COUNT["report_seq"]]]
        is_new: NDArray[np.bool_] = has_report & (self._report_key[:, ranks] != key).any(axis=0)
        self._report_key[:, ranks[has_report]] = key[:, has_report]
        return is_new

    def _put_unreported(self, rank: int, now_s: float) -> None:
        """Set the report age of a rank from which a restarted agent has no report, while this model has one."""
        worker = self.worker(rank)
        if worker is not None and worker.pid == self._report_key[0, rank]:
            self.report_age_s[rank] = min(worker.seen_s, now_s - self.report_at_s[rank])

    def busy_cores(self, ranks: NDArray[np.int64]) -> float | None:
        """Return the most cores that the process of one of some ranks keeps busy; None where that is not known."""
        known = self.cpu_cores[ranks][self.seen_s[ranks] >= CPU_WINDOW_S]
        return float(known.max()) if len(known) else None

    def put_reports(self, ranks: NDArray[np.int64], records: NDArray[np.void], at_s: NDArray[np.float64]) -> None:
        """Take the reports of ranks' own probes, where they are new."""
        seconds, flags = records["seconds"].T, records["flags"]
        self.report_at_s[ranks] = report_at_s = at_s - seconds[SECOND["report_age_s"]]
        self.phase[ranks] = records["phase"]
        self.phase_since_s[ranks] = report_at_s - seconds[SECOND["phase_s"]]
        self.is_ending[ranks] = flags & IS_ENDING != 0
        self.has_raised[ranks] = flags & HAS_RAISED != 0
        self.observed_s[ranks] = seconds[SECOND["observed_s"]]
        self.waited_s[ranks] = seconds[SECOND["waited_s"]]
        self.stood_s[ranks] = seconds[SECOND["stood_s"]]
        self.step_limit_s[ranks] = step_limit_s = seconds[SECOND["step_limit_s"]]
        self.stepped_at_s[ranks] = np.where(step_limit_s > 0, report_at_s - seconds[SECOND["step_age_s"]], np.nan)
        self.has_peer_calls[ranks] |= flags & HAS_PEER_CALLS != 0
        self.has_peer_wait[ranks] = flags & HAS_PEER_WAIT != 0
        self.has_open_transfers[ranks] = flags & HAS_OPEN_TRANSFERS != 0
        self.has_exit_wait[ranks] = flags & HAS_EXIT_WAIT != 0
        has_worked = flags & HAS_WORKED != 0
        self.worked_s[:, ranks[has_worked]] = seconds[len(SECOND) :, has_worked]
        self.stamp[ranks] += 1

    def _put_processes(self, ranks: NDArray[np.int64], records: NDArray[np.void], at_s: NDArray[np.float64]) -> None:
        process = records["process"]
        seconds, counts = records["seconds"].T, records["counts"].T
        self.process[ranks] = process
        self.process_since_s[ranks] = at_s - seconds[SECOND["process_s"]]
        is_frozen, has_ended = process == Process.FROZEN, process == Process.EXITED
        if is_frozen.any():
            self.last_frozen_s[ranks[is_frozen]] = at_s[is_frozen]
        if self.deaths or has_ended.any():
            for at in np.flatnonzero(has_ended | ~np.isnan(self.died_at_s[ranks])).tolist():
                self._put_death(int(ranks[at]), float(at_s[at]))
        lives = ~has_ended
        living, rss = ranks[lives], counts[COUNT["rss_bytes"], lives].astype(np.float64)
        self.rss_bytes[living] = rss
        self.peak_rss_bytes[living] = np.fmax(self.peak_rss_bytes[living], rss)
        pss = counts[COUNT["pss_bytes"]]
        self.pss_bytes[ranks] = np.where(pss < 0, np.nan, pss)

    def _put_death(self, rank: int, now_s: float) -> None:
        """Store how a rank ended; the earliest estimate of the time is the best, for delays only add."""
        known, worker = self.deaths.get(rank), self.worker(rank)
        if worker is None or worker.exit is None or worker.process is not ProcessState.EXITED:
            if known is not None:
                del self.deaths[rank]
                self.died_at_s[rank] = np.nan
                self.deaths_version += 1
            return
        at_s = now_s - worker.exit.age_s
        if known is not None:
            same = msgspec.structs.replace(worker.exit, age_s=known.exit.age_s) == known.exit
            if same and at_s >= known.at_s:
                return
            at_s = min(at_s, known.at_s)
        self.deaths[rank] = Death(rank, at_s, worker.exit)
        self.died_at_s[rank] = at_s
        self.died_badly[rank] = worker.exit.signal is not None or worker.exit.code not in (0, None)
        self.died_somehow[rank] = worker.exit.signal is None and worker.exit.code is None
        self.deaths_version += 1
