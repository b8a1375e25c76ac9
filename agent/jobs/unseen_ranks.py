"""Ranks that ended before anybody had seen their processes: in no time, or while no agent ran.

Nobody but their launcher knows how. It ends with 0 only after all of them have; else it lists those that failed, and
that the others began is told by their files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.logs.failure_files import told_exit_codes
from agent.logs.log_tail import log_path
from agent.processes.worker_sampler import Ending
from agent.wire.logs import LogStream

if TYPE_CHECKING:
    from collections.abc import Container

    from agent.jobs.launch import Launch


def endings(launch: Launch, exit_code: int | None, seen: Container[int]) -> list[Ending]:
    """Return how those ranks of an attempt ended that were never seen, as far as they began; who failed first is first.

    Args:
        launch: The job, whose launcher has ended.
        exit_code: Of the launcher; None where nobody knows it: then nobody knows of the ranks either.
        seen: The other ranks.
    """
    if exit_code is None or launch.job.is_gathering:
        return []
    unseen = [rank for rank in launch.job.ranks if rank not in seen]
    if exit_code == 0:
        return [Ending(launch.job_id, rank, 0, None) for rank in unseen]
    codes = told_exit_codes(launch.job_dir) if unseen else {}
    began = [rank for rank in unseen if log_path(launch.ranks_dir, rank, LogStream.STDOUT).exists()]
    began.sort(key=[*codes, *began].index)
    return [_ending(launch.job_id, rank, codes.get(rank)) for rank in began]


def _ending(job_id: str, rank: int, code: int | None) -> Ending:
    is_signal = code is not None and code < 0
    return Ending(job_id, rank, None if is_signal else code, -code if is_signal and code else None)
