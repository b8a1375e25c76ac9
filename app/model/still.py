"""A copy of the model on which later reports leave no trace: what a picture that stands still is made from."""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from app.model.job_shares import SharesTogether

if TYPE_CHECKING:
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel

Thing = TypeVar("Thing")


def still_cluster(cluster: Cluster) -> Cluster:
    """Return a copy of a cluster; reports themselves are never changed, so they are shared."""
    copied = _still(cluster)
    copied.nodes = {name: copy.copy(node) for name, node in cluster.nodes.items()}
    copied.jobs = {job_id: _still_job(job) for job_id, job in cluster.jobs.items()}
    return copied


def _still_job(job: JobModel) -> JobModel:
    copied = _still(job)
    copied.together = SharesTogether(copied.shares)
    copied.group_tables = _still(job.group_tables)
    copied.group_tables.tables = {name: _still(table) for name, table in job.groups.items()}
    copied.oddities, copied.step_rate = copy.deepcopy(job.oddities), copy.deepcopy(job.step_rate)
    copied.output = copy.copy(job.output)
    return copied


def _still(thing: Thing) -> Thing:
    """Return a copy with arrays and collections of its own."""
    copied = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, np.ndarray | list | dict | deque):
            setattr(copied, name, value.copy())
    return copied
