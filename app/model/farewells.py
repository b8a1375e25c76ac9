"""Ends that ranks announce themselves, before their processes have ended, and those with their launcher.

From its last report to the end of its process a rank may take seconds: torch is taken down, memory is given back.
It calls nothing more in that time. So an end counts from that report, and no other rank is taken to wait for it.
"""

from __future__ import annotations

import re
import signal
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.logs import INTERRUPTED, LAUNCHER_RANK, LOST_PEER, exception_line, rank_with_problem
from agent.wire.reports import ExitReport
from app.model.job_model import Death, Process

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.model.group_table import GroupTable
    from app.model.job_model import JobModel

TIMED_OUT = re.compile(
    r"timed out|timeout after|socket timeout|wait timeout|application timeout|before timing out"
    r"|failed to pass monitoredbarrier",
    re.IGNORECASE,
)
"""Messages of a rank whose wait exceeded the process group's timeout.

Source: torch 2.13, gloo/transport/tcp/unbound_buffer.cc, pair.cc; ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp,
TCPStore.cpp.
"""
GLOO_PAIR = "gloo/transport/tcp/pair.cc"
"""Part of gloo's message on a lost connection. Source: torch 2.13, seen."""
LAUNCHER_S = 1.5
"""Seconds before their launcher's end from outside from which ranks that a signal ends have ended with it."""
LAUNCHER_END_S = 35.0
"""Seconds; torchrun gives ranks 30 s to end before it ends itself."""
_PASSED_ON = "SignalException"
"""torchrun's own exception when it was asked to end: it passes the signal on first."""
REQUEST_SIGNALS = frozenset({int(signal.SIGTERM), int(signal.SIGKILL)})
"""Signals by which a launcher or an agent ends a rank."""
MAX_TEXTS = 4096
"""Number of error texts whose meaning is cached: the texts of 16,384 ranks are much the same."""


def is_clean(death: Death) -> bool:
    return death.exit.signal is None and death.exit.code == 0


@lru_cache(MAX_TEXTS)
def names_lost_peer(error_text: str) -> bool:
    """Return whether a rank's error reports the loss of a peer."""
    return LOST_PEER.search(error_text) is not None


def is_of_another(rank: int, error_text: str) -> bool:
    """Return whether a rank's error reports the loss of a peer, or the problem of another rank, which all raise."""
    return names_lost_peer(error_text) or _rank_with_problem(error_text) not in (None, rank)


_rank_with_problem = lru_cache(MAX_TEXTS)(rank_with_problem)
_line_of = lru_cache(MAX_TEXTS)(exception_line)


@lru_cache(MAX_TEXTS)
def names_time_out(error_text: str) -> bool:
    """Return whether a rank's error reports a wait that timed out."""
    return TIMED_OUT.search(error_text) is not None


def ends_of(job: JobModel) -> dict[int, Death]:
    """Return the deaths of a job, and the exceptions of ranks whose programs they have ended.

    An exception caused by another rank's end, or by a timeout, is not among them before the process has ended: the
    report of its cause may be on its way.
    """
    is_over = job.is_ending | job.has_raised
    ends = {rank: death for rank, death in job.deaths.items() if not is_over[rank]}
    for rank in np.flatnonzero(is_over).tolist():
        raised, death = raised_text(job, rank), job.deaths.get(rank)
        # The launcher may have ended it while it was exiting.
        by = int(signal.SIGINT) if raised.startswith(INTERRUPTED) else None
        end = ExitReport(signal=by, error=raised) if death is None else death.exit
        if raised and not end.error_text:
            end = msgspec.structs.replace(end, error=raised)
        is_consequence = is_of_another(rank, end.error_text) or names_time_out(end.error_text)
        if death is not None:
            since_s = death.at_s if is_clean(death) or is_consequence else min(death.at_s, job.report_at_s[rank])
            ends[rank] = Death(rank, float(since_s), end)
        elif raised and not is_consequence:
            ends[rank] = Death(rank, float(job.report_at_s[rank]), end)
    return ends


def raised_text(job: JobModel, rank: int) -> str:
    """Return the line of the exception that ends a rank's program; empty while there is none."""
    worker = job.worker(rank) if job.has_raised[rank] else None
    return _line_of(worker.report.raised) if worker is not None and worker.report is not None else ""


def have_lost_peers(job: JobModel) -> set[int]:
    """Return the ranks whose programs have ended by an exception that reports the loss of another rank."""
    return {rank for rank in np.flatnonzero(job.has_raised).tolist() if names_lost_peer(raised_text(job, rank))}


def that_has_closed(job: JobModel) -> Death | None:
    """Return the one rank that has closed its connections and keeps running; None where it may be another.

    All others have lost a gloo connection in a call that it has not made, and it has reported since.
    """
    errors = {rank: death.exit.error_text for rank, death in job.deaths.items() if not is_clean(death)}
    errors |= {rank: raised_text(job, rank) for rank in np.flatnonzero(job.has_raised).tolist()}
    lost = [rank for rank, error_text in errors.items() if GLOO_PAIR in error_text and names_lost_peer(error_text)]
    left = np.setdiff1d(np.arange(job.world_size), lost)
    if not lost or len(left) != 1 or job.is_ending[left[0]] or any(names_time_out(errors[rank]) for rank in lost):
        return None
    rank, reported_s = int(left[0]), float(job.report_at_s[left[0]])
    is_clear = rank not in job.deaths or job.deaths[rank].exit.signal in REQUEST_SIGNALS
    if not is_clear or not reported_s > job.report_at_s[lost].max():
        return None
    for table in job.groups.values():
        if np.isin([rank, *lost], table.members).all():
            calls = table.enqueued[table.slots(np.array(lost))[0]]
            if calls.min() > table.enqueued[table.slots(left)[0][0]]:
                return Death(rank, reported_s, ExitReport())
    return None


def is_leaving(job: JobModel) -> NDArray[np.bool_]:
    """Return which ranks are ending without an uncaught exception, and whose processes have not ended yet."""
    leaving: NDArray[np.bool_] = job.is_ending & ~job.has_raised & (job.process != Process.EXITED)
    return leaving


def has_final_calls(job: JobModel, table: GroupTable) -> NDArray[np.bool_]:
    """Return which members of a group are known to call nothing more in it: their last report holds its state."""
    final: NDArray[np.bool_] = job.is_ending[table.members] & (table.stamp == job.stamp[table.members])
    return final


def ended_with_launcher(job: JobModel, now_s: float, news_s: float) -> frozenset[int]:
    """Return the ranks that a signal ended when their launcher was ended from outside.

    A killed launcher takes all its ranks with it, which are seen first: for `news_s` it may have been so.
    """
    found: set[int] = set()
    for node in set(job.assignments).difference(job.together.over_nodes):
        ends = [job.deaths.get(rank) for rank in job.ranks_of(node)]
        killed = [end for end in ends if end is not None and end.exit.signal == signal.SIGKILL]
        if len(killed) == len(ends) and now_s - max((end.at_s for end in killed), default=-np.inf) < news_s:
            found.update(end.rank for end in killed)
    for node in job.together.nodes_with_cause:
        assignment = job.assignments[node]
        cause = assignment.status.root_cause
        if cause is None or cause.rank != LAUNCHER_RANK or cause.is_consequence:
            continue
        patience_s = LAUNCHER_END_S if _PASSED_ON in cause.exception else LAUNCHER_S
        from_s = assignment.received_s - cause.age_s - patience_s
        deaths = [job.deaths[rank] for rank in job.ranks_of(node) if rank in job.deaths]
        found.update(death.rank for death in deaths if death.exit.signal is not None and death.at_s >= from_s)
    return frozenset(found)


def are_launchers_over(job: JobModel) -> bool:
    """Return whether the launchers of all dead ranks have ended; each has reported whether its end was its own."""
    nodes = set(job.node_of[list(job.deaths)].tolist())
    return bool(nodes) and nodes <= set(job.together.over_nodes)
