"""Texts of actions on a whole job: which ranks they affect, and how.

`action_title` and `action_question` are for stop, kill and the like. `parse_fault` parses a fault as a user types it,
`fault_text` describes its effect.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from enum import StrEnum
from typing import TYPE_CHECKING

from agent.wire.jobs import GRACE_S, MAX_LOCAL_WORLD_SIZE
from app.diagnosis.rank_facts import LOST
from app.errors import UsageError
from app.model.cluster import MAX_WORLD_SIZE
from app.text import nodes_text, ranks_text
from app.view.summary import ENDED
from ddpcore.wire import DEFAULT_HOLD_S, DEFAULT_SLOW_FACTOR, Fault, FaultKind

if TYPE_CHECKING:
    from app.view.rows import JobRow
    from app.view.view import View

MAX_NODES_NAMED = 3
MAX_PIDS_NAMED = 4
"""Process ids named per node."""

NOT_AGAIN = "the job ends and is not restarted"
"""Effect of leaving the console while it restarts a job."""


class JobAction(StrEnum):
    """An action on a job as a whole."""

    STOP = "stop"
    STOP_NOW = "stop now"
    KILL = "kill"
    RESTART = "restart"
    RESTART_NOW = "restart now"
    RESTART_WITHOUT = "restart without"
    """Restart on the nodes that are left, without the lost ones."""

    @property
    def restarts(self) -> bool:
        """True when the job's next attempt follows."""
        return self in {JobAction.RESTART, JobAction.RESTART_NOW, JobAction.RESTART_WITHOUT}


BY_SIGTERM = f"are ended by SIGTERM, and by SIGKILL after a grace period, {GRACE_S:.0f} s unless the job has its own"
ACTION_EFFECTS = {
    JobAction.STOP: "finish a step, write a checkpoint, and end",
    JobAction.STOP_NOW: BY_SIGTERM,
    JobAction.KILL: "are killed at once: what is not saved is lost",
    JobAction.RESTART: "finish a step, write a checkpoint, and end; then the job restarts",
    JobAction.RESTART_NOW: "are killed at once: what is not saved is lost; then the job restarts",
    JobAction.RESTART_WITHOUT: "are killed at once, as far as they can be; then the job restarts",
}
"""What happens to the ranks of a program with the engine."""
PLAIN_EFFECTS = {JobAction.STOP: BY_SIGTERM, JobAction.RESTART: f"{BY_SIGTERM}; then the job restarts"}
"""What differs for ranks that cannot end at an agreed step."""


def max_ranks(num_nodes: int) -> int:
    """Return the most ranks of a job on so many nodes; agents and this console accept no more."""
    return min(MAX_WORLD_SIZE, num_nodes * MAX_LOCAL_WORLD_SIZE)


def lost_nodes(view: View, job: JobRow) -> list[str]:
    """Return the job's nodes that are lost and could be left out; empty when no other node is left."""
    ranks = [view.ranks_on(index) for index in range(view.num_nodes)]
    may_be_unheard = sum(map(bool, ranks)) < job.num_nodes
    named = zip(view.node_names, view.node_codes.tolist(), ranks, strict=True)
    lost = [name for name, code, its_ranks in named if code >= LOST and (its_ranks or may_be_unheard)]
    return lost if len(lost) < view.num_nodes else []


def action_title(action: JobAction, job: JobRow, *, has_ended: bool) -> str:
    """Return a button's text: `Stop job demo`."""
    if action is JobAction.RESTART_WITHOUT:
        return f"Restart job {job.job_id} without lost nodes"
    if action.restarts and has_ended:
        return f"Start job {job.job_id} again"
    verb = {JobAction.STOP_NOW: "Stop job {} now", JobAction.RESTART_NOW: "Restart job {} now"}.get(action)
    return verb.format(job.job_id) if verb else f"{action.capitalize()} job {job.job_id}"


def action_question(action: JobAction, view: View, job: JobRow, *, has_ended: bool, num_ranks: int) -> str:
    """Return the question asked before the action, with nodes, ranks and processes."""
    title = action_title(action, job, has_ended=has_ended)
    if action is JobAction.RESTART_WITHOUT:
        nodes = nodes_text(lost_nodes(view, job))
        return (
            f"{title}? It is killed where it runs, and restarts without {nodes}: the other nodes keep their ranks. "
            f"What may still run on {nodes} cannot be ended from here.{_company_text(view) if has_ended else ''}"
        )
    count = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    with_ranks = "" if num_ranks == job.world_size else f" instead of {job.world_size}"
    if has_ended:
        question = f"{title}? Its next attempt has {count}{with_ranks}, and goes on from its checkpoint if it has one."
        return question + _company_text(view)
    again = f" with {count}{with_ranks}" if action.restarts else ""
    effects = ACTION_EFFECTS if view.ends_in_step else ACTION_EFFECTS | PLAIN_EFFECTS
    return f"{title}? {whom(view)}: they {effects[action]}{again}."


def busy_text(view: View, where: str) -> str:
    """Return `Job b runs on gpu1`, of the shown job or else of another one; empty when no job runs there."""
    job = view.job()
    if job is not None and job.state not in ENDED:
        return f"Job {job.job_id} runs on {where}"
    return next((f"Job {job_id} runs on {nodes_text(nodes)}" for job_id, nodes in view.jobs_beside().items()), "")


def _company_text(view: View) -> str:
    """Return ` Job b runs on gpu1: ...`, a sentence about other jobs on the shown job's nodes; empty without any."""
    own = {node for index, node in enumerate(view.node_names) if view.ranks_on(index)}
    shared = {job_id: [node for node in nodes if node in own] for job_id, nodes in view.jobs_beside().items()}
    running = [f"job {job_id} runs on {nodes_text(nodes)}" for job_id, nodes in shared.items() if nodes]
    if not running:
        return ""
    return f" J{'; '.join(running)[1:]}: the jobs then share CPUs, memory and GPUs there."


def whom(view: View) -> str:
    """Return `ranks 0-1 on demo-0 (pids 11, 12) and ranks 2-3 on demo-1 (pids 21, 22)`; other nodes are counted."""
    parts: list[str] = []
    num_others = 0
    for index, node in enumerate(view.node_names):
        ranks = view.ranks_on(index)
        if not ranks:
            continue
        if len(parts) == MAX_NODES_NAMED:
            num_others += 1
            continue
        pids = [str(row.pid) for row in view.ranks(ranks[: MAX_PIDS_NAMED + 1]) if row.pid is not None]
        more = ", ..." if len(pids) > MAX_PIDS_NAMED or len(ranks) > MAX_PIDS_NAMED + 1 else ""
        named = ", ".join(pids[:MAX_PIDS_NAMED])
        processes = f" (pid{'' if len(pids) == 1 else 's'} {named}{more})" if pids else ""
        parts.append(f"{ranks_text(ranks)} on {node}{processes}")
    if num_others:
        parts.append(f"those of {num_others} more node{'' if num_others == 1 else 's'}")
    sentence = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
    return sentence[:1].upper() + sentence[1:] if sentence else "No rank has a process yet"


DEFAULT_FAULT_STEP = 10
AT_START = tuple(kind for kind in FaultKind if kind is not FaultKind.THAW)
"""Kinds of faults that a job can be started with."""
SIGNALS = frozenset({FaultKind.FREEZE, FaultKind.THAW, FaultKind.KILL})
"""Kinds that take effect immediately unless they wait for a step; `SLOW` does too."""

_FAULT = re.compile(r"(?P<kind>[a-z-]+):(?P<rank>\d{1,5})(?:@(?P<step>\d{1,9}))?")


def parse_fault(text: str) -> Fault:
    """Return the fault in `KIND:RANK@STEP`.

    Raises:
        UsageError: The text does not have that form, or the kind is unknown.
    """
    kinds = ", ".join(AT_START)
    match = _FAULT.fullmatch(text)
    if match is None:
        raise UsageError(f"--fault {text!r} is not KIND:RANK@STEP", f"for example freeze:2@10; KIND is one of {kinds}")
    kind = match["kind"]
    if kind not in AT_START:
        close = get_close_matches(kind, AT_START, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"--fault {text!r}: there is no fault {kind!r}", f"{hint}KIND is one of {kinds}")
    step = DEFAULT_FAULT_STEP if match["step"] is None else int(match["step"])
    return Fault(kind=FaultKind(kind), rank=int(match["rank"]), at_step=step)


def make_fault(
    kind: FaultKind, rank: int, at_step: int | None = None, factor: float | None = None, duration_s: float | None = None
) -> Fault:
    """Return a fault from options; None is an option that was not given.

    Raises:
        UsageError: An option does not fit the kind.
    """
    if factor is not None and kind is not FaultKind.SLOW:
        raise UsageError(f"--factor goes with slow, not with {kind}", "leave --factor out")
    if duration_s is not None and kind is not FaultKind.GIL:
        raise UsageError(f"--for goes with gil, not with {kind}", "leave --for out")
    if at_step is not None and kind is FaultKind.THAW:
        raise UsageError("--at-step does not go with thaw: a frozen rank comes to no step", "leave --at-step out")
    return Fault(
        kind=kind,
        rank=rank,
        at_step=at_step,
        factor=DEFAULT_SLOW_FACTOR if factor is None else factor,
        duration_s=DEFAULT_HOLD_S if duration_s is None else duration_s,
    )


def fault_text(fault: Fault) -> str:
    """Return what is or will be done to a rank: `is frozen (SIGSTOP)`, `will leave with exit code 0 ...`."""
    is_immediate = fault.at_step is None and (fault.kind in SIGNALS or fault.kind is FaultKind.SLOW)
    when = "" if is_immediate else f" at step {fault.at_step}" if fault.at_step is not None else " at its next step"
    is_ = "is" if is_immediate else "will be"
    done = {
        FaultKind.FREEZE: f"{is_} frozen (SIGSTOP)",
        FaultKind.THAW: f"{is_} thawed (SIGCONT)",
        FaultKind.KILL: f"{is_} killed (SIGKILL)",
        FaultKind.SLOW: f"{is_} slowed {fault.factor:g} times" if fault.factor > 1 else f"{is_} no longer slowed",
        FaultKind.GIL: f"will hold the interpreter's lock for {fault.duration_s:g} s",
        FaultKind.SKIP_BARRIER: "will leave out a barrier or collective",
        FaultKind.MISMATCH: "will call a collective that the others do not call",
        FaultKind.OOM: "will run out of memory",
        FaultKind.LEAVE: "will leave with exit code 0",
    }[fault.kind]
    return f"{done}{when}"
