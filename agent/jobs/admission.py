"""Which jobs a node takes, judged by their specs and by what is here already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.wire.commands import RefusalReason, Refused
from agent.wire.jobs import JobState

if TYPE_CHECKING:
    from agent.jobs.job import Job
    from agent.wire.commands import PrepareAgain
    from agent.wire.jobs import JobSpec


def next_attempt(spec: JobSpec, command: PrepareAgain) -> JobSpec:
    changed = {
        name: value
        for name in ("num_nodes", "node_rank", "master_addr", "master_port")
        if (value := getattr(command, name)) is not None
    }
    if changed.get("num_nodes", spec.num_nodes) > 1 and not spec.elastic_min_nodes:
        changed["max_restarts"] = 0  # it was the budget of a job on one node
    return msgspec.structs.replace(
        spec,
        attempt=command.attempt,
        first_rank=command.first_rank,
        local_world_size=command.local_world_size,
        world_size=command.world_size,
        faults=[],
        **changed,
    )


def is_prepared(spec: JobSpec, existing: Job | None) -> bool:
    """Return whether exactly this has been prepared before: a console that lost the reply sends it again."""
    return existing is not None and existing.state is JobState.PREPARED and existing.spec == spec


def refusal_to_prepare(spec: JobSpec, existing: Job | None) -> Refused | None:
    """Return why a spec is refused, because of itself or of the job of the same id on this node; None if it is not."""
    if contradiction := _contradiction(spec):
        return Refused(RefusalReason.MALFORMED, f"job {spec.job_id}: {contradiction}")
    if spec.faults and not spec.allow_faults:
        reason = f"job {spec.job_id} comes with faults and does not allow them: set allow_faults in its spec"
        return Refused(RefusalReason.NOT_PERMITTED, reason)
    if existing is None or (existing.has_ended and spec.attempt > existing.attempt):
        return None
    todo = f"rankdeck stop {spec.job_id} first, or another --name"
    if existing.has_ended:
        todo = f"attempt {existing.attempt} was the last, and a later one is needed"
    return Refused(RefusalReason.JOB_EXISTS, f"job {spec.job_id} is {existing.state} here: {todo}")


def refusal_by_gpus(spec: JobSpec, num_visible: int | None) -> Refused | None:
    """Return why a node's GPUs are too few for a job, or None.

    `num_visible` are those that its ranks would see: None is unknown, 0 where there are none to share.
    """
    if not num_visible or spec.shares_gpus or spec.local_world_size <= num_visible:
        return None
    return Refused(
        RefusalReason.TOO_FEW_GPUS,
        f"{spec.local_world_size} ranks would share the {num_visible} GPUs that they see here: start fewer, allow it "
        "(shares_gpus), or set CUDA_VISIBLE_DEVICES to nothing for a job without GPUs",
    )


def _contradiction(spec: JobSpec) -> str:
    if spec.node_rank >= spec.num_nodes:
        return f"node_rank {spec.node_rank} of {spec.num_nodes} nodes"
    if spec.first_rank + spec.local_world_size > spec.world_size:
        return f"ranks {spec.first_rank} to {spec.first_rank + spec.local_world_size - 1} of {spec.world_size}"
    if spec.node_rank > 0 and spec.master_port == 0:
        return "only the node with node_rank 0 can choose the port: give the others its master_port"
    if spec.elastic_min_nodes > spec.num_nodes:
        return f"at least {spec.elastic_min_nodes} of {spec.num_nodes} nodes"
    if spec.max_restarts and spec.num_nodes > 1 and not spec.elastic_min_nodes:
        return (
            "over several nodes max_restarts has to be 0, since a node begins only its own share again: let a console "
            "restart the job, or torchrun itself (elastic_min_nodes)"
        )
    if any("\0" in text for text in (spec.python, spec.workdir, *spec.command, *spec.env, *spec.env.values())):
        return "a NUL byte in an argument or a variable"
    if any("=" in name or not name for name in spec.env):
        return "a variable's name is empty or holds '='"
    return ""
