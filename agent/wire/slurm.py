"""The Slurm step in which a process runs, by the variables that srun sets for its tasks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ddpcore.wire_launch import slurm_step_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    numbers = slurm_step_numbers(environ)
    if numbers is None:
        return None
    job_id, _, *texts = numbers
    task, num_tasks, num_nodes = map(int, texts)
    return SlurmStep(job_id, task, num_tasks, num_nodes, environ.get("SLURM_STEP_NODELIST", ""))
