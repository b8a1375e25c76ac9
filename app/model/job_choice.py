"""Which job is shown: the one that is asked for, else the one under way that was started last, else the last to end.

A session asks for the job that it has started. A console that only watches stays with the job shown while that runs,
and a few seconds longer; then one follows that was started after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.model.cluster import ended_s

if TYPE_CHECKING:
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel


NEVER = 2**63
"""Attempt of a job that has not been started yet."""
LEAVES_S = 3.0
"""Seconds after its end for which a job that was watched is shown before another one: its end and cause are seen."""
TOGETHER_S = 1.0
"""Seconds between two ends between which neither is taken for the later one."""


class JobChoice:
    """The choice of one console."""

    def __init__(self, job_id: str = "", attempt: int = 0) -> None:
        """Choose the job of an id, from an attempt on; without an id, the current job of the cluster."""
        self.wanted = job_id
        """Id that is asked for; empty where none is."""
        self.stays = False
        """Whether the first job seen under way is kept, whatever is started after it."""
        self._attempt = attempt
        self.shown = ""
        """Id of the last choice among all jobs; empty where there was none."""
        self._has_seen_run = False

    def choose(self, cluster: Cluster, now_s: float) -> str:
        """Return the id of the job to show now; empty where there is none."""
        if self.wanted:
            job = cluster.jobs.get(self.wanted)
            return "" if job is None or job.attempt < self._attempt else self.wanted
        best, shown = cluster.current_job(), cluster.jobs.get(self.shown)
        if (
            shown is None
            or not (self._has_seen_run or _ended_together(shown, best))
            or self._is_followed_by(shown, best, now_s)
        ):
            shown = best
        if shown is None:
            self.shown, self._has_seen_run = "", False
            return ""
        self._has_seen_run &= shown.job_id == self.shown
        self._has_seen_run |= shown.is_under_way() and _are_all_known(cluster)
        self.shown = shown.job_id
        return self.shown

    def _is_followed_by(self, shown: JobModel, best: JobModel | None, now_s: float) -> bool:
        """Return whether another job, started later, runs a while after the one shown has ended."""
        if self.stays or best is None or not shown.is_ended() or now_s - ended_s(shown) < LEAVES_S:
            return False
        return best.is_under_way() and best.started_s > shown.started_s


def _ended_together(shown: JobModel, best: JobModel | None) -> bool:
    """Return whether both ended at about the same moment: which was the later one changes from report to report."""
    if best is None or not (shown.is_ended() and best.is_ended()) or shown.together.is_past:
        return False
    return abs(ended_s(shown) - ended_s(best)) < TOGETHER_S


def _are_all_known(cluster: Cluster) -> bool:
    """Return whether every reachable node has reported its jobs."""
    return bool((np.isfinite(cluster.last_report_s) | cluster.is_cut_off).all())
