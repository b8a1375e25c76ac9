"""What all ranks of a job are doing, as arrays by rank: for questions that are asked of every rank at once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from app.diagnosis.rank_facts import STATE_CODE, STATES
from app.model.job_model import Process
from app.rows import RankState, Severity
from app.wording.node_words import clean_names
from app.wording.rank_words import LATE_MISSING_S, STATE_SEVERITY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.diagnosis.diagnoser import JobDiagnosis
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel

_IS_ODD = np.array([STATE_SEVERITY[state] in {Severity.WARNING, Severity.CRITICAL} for state in STATES])
_WAITING = STATE_CODE[RankState.WAITING]


class RankTable:
    """The ranks of a job at one moment; the same facts as in their rows (`app.wording.rank_words`)."""

    def __init__(self, cluster: Cluster, job: JobModel, found: JobDiagnosis, now_s: float) -> None:
        self._cluster, self._job, self._found, self._now_s = cluster, job, found, now_s

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return self._job.world_size

    @cached_property
    def states(self) -> NDArray[np.int8]:
        """Index into `app.diagnosis.rank_facts.STATES`."""
        is_unprobed = (self._found.states == STATE_CODE[RankState.STARTING]) & self._job.is_unprobed
        return np.where(is_unprobed, STATE_CODE[RankState.UNPROBED], self._found.states).astype(np.int8)

    @property
    def node_of(self) -> NDArray[np.int32]:
        """Index into `node_names`; -1 while no node claims the rank."""
        return self._job.node_of

    @cached_property
    def node_names(self) -> list[str]:
        """Clean names of the nodes."""
        return clean_names(self._cluster.node_names)

    @property
    def phases(self) -> NDArray[np.int8]:
        """Index into `app.model.job_model.PHASES`; -1 while the rank has told none."""
        return np.where(np.isnan(self._job.report_at_s), -1, self._job.phase).astype(np.int8)

    @property
    def step(self) -> NDArray[np.float64]:
        """NaN while it is not known."""
        return np.where(self._job.step < 0, np.nan, self._job.step)

    @property
    def rss_bytes(self) -> NDArray[np.float64]:
        """NaN where there is no process."""
        return np.where(self._job.process == Process.EXITED, np.nan, self._job.rss_bytes)

    @property
    def waiting_s(self) -> NDArray[np.float64]:
        """How long each rank has waited; NaN where it does not."""
        since_s = np.full(self.num_ranks, np.inf)
        for group in self._job.groups.values():
            members = group.members[group.is_waiting]
            since_s[members] = np.minimum(since_s[members], group.wait_since_s[group.is_waiting])
        is_waiting = (self.states == _WAITING) & np.isfinite(since_s)
        return np.where(is_waiting, self._now_s - since_s, np.nan)

    @property
    def cpu_cores(self) -> NDArray[np.float64]:
        """Cores that each process keeps busy; NaN where there is none."""
        is_there = (self._job.process != Process.UNSEEN) & (self._job.process != Process.EXITED)
        return np.where(is_there, self._job.cpu_cores, np.nan)

    @property
    def is_problem(self) -> NDArray[np.bool_]:
        """Which ranks want to be looked at: those whose rows are not OK."""
        is_problem: NDArray[np.bool_] = _IS_ODD[self.states]
        for wait in self._found.waits:
            if wait.waited_s >= LATE_MISSING_S:
                is_problem[wait.missing] |= self.states[wait.missing] == STATE_CODE[RankState.MISSING]
        for verdict in reversed(self._found.verdicts):
            is_problem[list(verdict.culprits)] = verdict.severity in {Severity.WARNING, Severity.CRITICAL}
        return is_problem
