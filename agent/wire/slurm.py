"""The Slurm step in which a process runs, by the variables that srun sets for its tasks. Pure.

Source: srun(1), OUTPUT ENVIRONMENT VARIABLES. Measured with 22.05: a batch script has SLURM_PROCID, and no
SLURM_STEP_ID.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER = re.compile(r"[0-9]{1,10}")


class SlurmStep(NamedTuple):
    """A step, and which of its tasks this process belongs to."""

    job_id: str
    """Digits alone."""
    task: int
    """Number of the task, from 0."""
    num_tasks: int
    num_nodes: int
    nodes: str
    """The step's nodes as Slurm writes them: `node[001-004]`."""


def slurm_step(environ: Mapping[str, str]) -> SlurmStep | None:
    """Return the step that a process with these variables runs in; None outside of one, and in a batch script."""
    job_id = environ.get("SLURM_JOB_ID", "")
    names = ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
    texts = [environ.get(name, "") for name in names]
    if not all(_NUMBER.fullmatch(text) for text in (job_id, *texts)):
        return None
    task, num_tasks, num_nodes = map(int, texts[1:])
    return SlurmStep(job_id, task, num_tasks, num_nodes, environ.get("SLURM_STEP_NODELIST", ""))
