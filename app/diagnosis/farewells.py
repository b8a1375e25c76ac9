"""Ends that ranks announce themselves, before their processes have ended.

From its last report to the end of its process a rank may take seconds: torch is taken down, memory is given back.
Nothing is called any more in that time. So an end counts from that report, and others need not wait for it in vain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.reports import ExitReport
from app.diagnosis.exits import is_clean, names_lost_peer, names_time_out
from app.model.job_model import Death, Process

if TYPE_CHECKING:
    from app.diagnosis.rank_facts import Flags
    from app.model.group_table import GroupTable
    from app.model.job_model import JobModel


def ends_of(job: JobModel) -> dict[int, Death]:
    """Return the deaths of a job, and the exceptions of ranks that are about to end by them.

    An exception that has come from another rank's end, or from a time-out, is not among them before the process has
    ended: the report of its cause may be on its way.
    """
    ends = {rank: death for rank, death in job.deaths.items() if not job.is_ending[rank]}
    for rank in np.flatnonzero(job.is_ending).tolist():
        raised, death = _raised(job, rank), job.deaths.get(rank)
        # The launcher may have ended it on its way out.
        end = ExitReport(error=raised) if death is None else death.exit
        if raised and not end.words:
            end = msgspec.structs.replace(end, error=raised)
        is_consequence = names_lost_peer(end.words) or names_time_out(end.words)
        if death is not None:
            since_s = death.at_s if is_clean(death) or is_consequence else min(death.at_s, job.report_at_s[rank])
            ends[rank] = Death(rank, float(since_s), end)
        elif raised and not is_consequence:
            ends[rank] = Death(rank, float(job.report_at_s[rank]), end)
    return ends


def _raised(job: JobModel, rank: int) -> str:
    worker = job.worker(rank) if job.has_raised[rank] else None
    return worker.report.raised if worker is not None and worker.report is not None else ""


def is_leaving(job: JobModel) -> Flags:
    """Return which ranks end without an exception that nobody has caught, and whose processes have not ended yet."""
    leaving: Flags = job.is_ending & ~job.has_raised & (job.process != Process.EXITED)
    return leaving


def has_final_calls(job: JobModel, table: GroupTable) -> Flags:
    """Return of which members of a group it is known that they call nothing more in it: their last report has it."""
    final: Flags = job.is_ending[table.members] & (table.stamp == job.stamp[table.members])
    return final
