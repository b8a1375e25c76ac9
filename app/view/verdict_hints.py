"""What to do about a verdict, and which facts it needs.

`hint` returns the hint for each cause. app/help/verdicts.md explains each cause: `rankdeck help verdicts`.

`standstill_parts` and the functions below it return parts of the sentence about ranks that stand outside collectives.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause, Severity
from app.diagnosis.memory import is_of_gpu
from app.model.unreachable_reason import UnreachableKind
from app.text import clean_name, nodes_text, percent_text, place_text, ranks_text, seconds_text
from app.view.because_text import because_hint
from app.view.end_causes import end_hint, memory_limit_hint
from app.view.memory import growth_hint
from ddpcore.wire import FIRST_GROUP, MONITORED_BARRIER, NEW_COMMUNICATOR, NEW_GROUP, Phase

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Side, Verdict
    from app.view.rows import JobRow
    from ddpcore.wire import PeerCall, Place

ROOT_ARGUMENT = {"broadcast": "src", "scatter": "src", "gather": "dst", "reduce": "dst"}
"""Name of the argument in torch.distributed for the one rank that an operation's data come from or go to."""


def hint(verdict: Verdict, pid: int | None) -> str:
    """Return the next step, as a clean sentence."""
    node = nodes_text([clean_name(node) for node in verdict.nodes[:1]])
    on_node = f" on {node}" if node else ""
    if verdict.cause is Cause.EXITED:
        return end_hint(verdict) or _exit_hint(verdict, on_node)
    if verdict.cause is Cause.OOM:
        return _memory_hint(verdict, on_node)
    if verdict.cause is Cause.MEMORY_GROWTH:
        return growth_hint(verdict.growth)
    if verdict.aftermath is not None and verdict.cause in (Cause.STRAGGLER, Cause.FROZEN, Cause.SILENT):
        stopped = "a debugger or job control may have stopped it; " if verdict.cause is Cause.FROZEN else ""
        return f"{stopped}its last stack, if evidence was kept: rankdeck replay {clean_name(verdict.job)}, key s"
    if verdict.is_behind_work and not verdict.because:
        return "run with CUDA_LAUNCH_BLOCKING=1 to see which kernel does not end; the GPUs view shows clocks and Xids"
    if verdict.cause is Cause.STRAGGLER:
        return _straggler_hint(verdict, on_node)
    if verdict.cause is Cause.MISMATCH:
        return _mismatch_hint(verdict)
    if verdict.cause is Cause.TRANSPORT:
        return _transport_hint(verdict)
    if verdict.cause in (Cause.CHECKPOINTING, Cause.EVALUATING) and verdict.aftermath is not None:
        return f"{SHORTER[verdict.cause]}, or give the group a longer timeout: init_process_group(timeout=...)"
    # The process is the first culprit's, which may be on any of several nodes.
    pid = None if len(verdict.nodes) > 1 else pid
    is_one, first = len(verdict.culprits) == 1, ranks_text(verdict.culprits[:1])
    thaw = f"{':' if is_one else f', {first} by'} kill -CONT {pid}{on_node}" if pid else ""
    spy = f" with py-spy dump --pid {pid}" if pid else ""
    return {
        Cause.FROZEN: f"thaw {'it' if is_one else 'each of them'}{thaw}; a debugger or job control may have stopped it",
        Cause.SILENT: _hung(on_node)
        if verdict.is_blocked
        else f"look at {'it' if is_one else first}{on_node}{spy}: a C extension may hold the GIL",
        Cause.NODE_LOST: _restart_without(verdict)
        if verdict.unreachable_reason is not None or verdict.is_back
        else f"is {node or 'the node'} up, and its agent running?"
        + (" the other ranks cannot go on without it" if verdict.waiting else ""),
        Cause.FEWER_CALLS: "call destroy_process_group only when all ranks are done; if it has not, its network failed"
        if verdict.has_closed
        else "every rank must make the same calls: look for uneven inputs or an early return",
        Cause.NOT_JOINED: "see its launcher's log and its own"
        + ("; the others begin when it comes" if verdict.aftermath is None else ""),
        Cause.STANDSTILL: f"look at these lines: {COMPUTES if is_busy(verdict) else WAITS}"
        + (f", or {ranks_text(verdict.waiting)} may hold what the others need" if verdict.waiting else ""),
        Cause.NOT_EXITING: "empty the queue before the end, or call its cancel_join_thread()"
        if verdict.exit_wait is not None and verdict.exit_wait.what == "queue"
        else "end that thread, handler or process first, or make it a daemon",
        Cause.INPUT_BOUND: "more loader workers, prefetching or a faster disk make every step shorter",
        Cause.CHECKPOINTING: "nothing is wrong while it takes its usual time; an asynchronous one does not block",
        Cause.EVALUATING: "nothing is wrong while it takes its usual time; all ranks may share an evaluation",
    }[verdict.cause]


SHORTER = {Cause.CHECKPOINTING: "save asynchronously", Cause.EVALUATING: "share the evaluation among all ranks"}
TCP_PAUSE_S = 60.0
"""Seconds for which connections are given time to go on, at least: TCP sends again after pauses that double.

Source: RFC 6298, 5.5."""
MEETING_HINTS = {
    NEW_GROUP: "every rank calls new_group for every group, in the same order",
    NEW_COMMUNICATOR: "every rank makes the first collective of a group, in which NCCL starts its communicator",
    MONITORED_BARRIER: "every rank of the group calls monitored_barrier as often as the others",
}
"""Hint for each call that all ranks of a group have to make."""


def _restart_without(verdict: Verdict) -> str:
    """Return how to go on without lost nodes; where only the agent is missing, how to start that."""
    if verdict.is_back:
        return "the system log there may show what happened then"
    reason = verdict.unreachable_reason
    if verdict.severity is Severity.WARNING and reason is not None:
        names = nodes_text([clean_name(node) for node in verdict.nodes])
        if reason.unreachable_kind is not UnreachableKind.AGENT:
            return f"rankdeck doctor shows what is wrong with {names}; training needs no agent"
        return f"start the agent{'' if len(verdict.nodes) == 1 else 's'} on {names} again (rankdeck up)"
    if len(verdict.nodes) > 1:
        return "x in the console restarts without them"
    job, node = clean_name(verdict.job), clean_name(verdict.nodes[0])
    # Behind a relay, or under a scheduler, an agent is started by other means: its reason says so.
    if reason is not None and reason.unreachable_kind is UnreachableKind.AGENT and "rankdeck up" in reason.why:
        return f"rankdeck up {node} starts its agent again; x in the console restarts without {node}"
    return f"without it: rankdeck restart {job} --exclude {node} --on-these-hosts, or x in the console"


def _mismatch_hint(verdict: Verdict) -> str:
    if verdict.meetings:
        return "give all ranks one MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and each its own RANK"
    ops = {side.peer_call.op for side in verdict.sides if side.peer_call is not None}
    if meetings := ops & MEETING_HINTS.keys():
        return MEETING_HINTS[min(meetings)]
    if ops and verdict.aborted:
        return "give the receive a tensor as large as that of the send, in shape and element type"
    if ops:
        return "each send needs its receive: reorder one side or compare tags"
    if len({side.group for side in verdict.sides}) > 1:
        return "call the groups in the same order on every rank"
    if any(side.op == "broadcast" and side.phase in (Phase.FORWARD, Phase.EVAL) for side in verdict.sides):
        return "DDP broadcasts buffers: evaluate model.module, or on all ranks"
    if verdict.is_shifted or (verdict.counts is not None and verdict.counts.difference):
        return "look for a swallowed exception, a skipped batch or an extra call"
    if verdict.aborted or len({(side.op, side.label) for side in verdict.sides}) < len(verdict.sides):
        places = _shown_places(verdict)
        if None not in places and len({*places}) == len(places) > 1:
            return "the lines differ: a rank may have left out a call; make the same calls on every rank"
        return "pass the same sizes, types, roots and reductions on every rank"
    return "compare the lines: the ranks have taken different branches"


def _shown_places(verdict: Verdict) -> list[Place | None]:
    """Return the line of each side of a mismatch, and of the rank that is on none."""
    known = {rank for side in verdict.sides for rank in side.ranks}
    others = [rank for rank in (verdict.culprits or verdict.aborted) if verdict.aborted and rank not in known]
    places = [side.place for side in verdict.sides]
    return [*places, verdict.place if len(others) == 1 else None] if others else places


def _transport_hint(verdict: Verdict) -> str:
    if verdict.is_root_unknown:
        compared = f"compare {ROOT_ARGUMENT.get(verdict.op, 'root')} at that line on every rank"
        return f"{compared}; if all are equal, {'the network' if verdict.num_hosts > 1 else 'their stacks'}"
    network = "check the network between the nodes: interface, firewall, MTU"
    if verdict.aftermath is None and verdict.away is not None and verdict.away[2] <= max(TCP_PAUSE_S, verdict.away[1]):
        return f"its connections may pause for as long again, then go on: wait before you restart; if not, {network}"
    if verdict.num_hosts > 1:
        return network
    if verdict.store_port_owner:
        return "if that is not rank 0's store, end it or choose another MASTER_PORT"
    if verdict.seq is None:
        port = f"port {verdict.meetings[0].port}" if verdict.meetings else "MASTER_PORT"
        return f"another program may listen on {port}: see ss -ltnp, or choose another port"
    if verdict.num_members == 1:
        return "a kernel on its GPU does not end: run with CUDA_LAUNCH_BLOCKING=1, and its stack shows that line"
    return "compare the stacks of these ranks; if each has a GPU of its own, try NCCL_P2P_DISABLE=1"


def _exit_hint(verdict: Verdict, on_node: str) -> str:
    error, number = ("", None) if verdict.exit is None else (verdict.exit.error, verdict.exit.signal)
    if error and (number == signal.SIGTERM or (number == signal.SIGABRT and "gloo" not in error)):
        number = None
    rank = verdict.culprits[0]
    logs = f"see the logs of rank {rank}"
    command = f": rankdeck logs {clean_name(verdict.job)} --rank {rank}"
    is_known = verdict.exit is not None and verdict.exit.code is not None
    it = "they left" if verdict.is_everyone else "it left"
    traced = f"run with PYTHONFAULTHANDLER=1 and see rank {rank}'s stderr"
    traced = f"{command[2:]} has the whole traceback" if error else traced
    plain = f"{it} no traceback: {logs}{command}" if is_known else logs + command
    if "Duplicate GPU detected" in error:
        return "each rank needs a GPU of its own: torch.cuda.set_device(LOCAL_RANK), and no more ranks than GPUs"
    return {
        None: f"the whole traceback{command}" if error else plain,
        int(signal.SIGKILL): f"somebody{on_node} sent it, or a memory guard; if nobody did, see dmesg for the kernel",
        int(signal.SIGABRT): f"gloo aborts when sizes or types differ between ranks: see rank {rank}'s stderr",
        int(signal.SIGSEGV): f"a crash in native code: {traced}",
        int(signal.SIGBUS): f"shared memory may be full: see df /dev/shm{on_node}",
        int(signal.SIGTERM): f"somebody, or a scheduler, asked it to end{on_node}",
    }.get(number, logs)


def failure_hint(job: JobRow) -> str:
    """Return what to do about a failed job on which no verdict stands; empty while its root cause is not known."""
    cause = job.root_cause
    if cause is None or job.state != "failed":
        return ""
    if cause.rank is not None:
        return f"see the logs of rank {cause.rank}: rankdeck logs {job.job_id} --rank {cause.rank}"
    if "was killed" in cause.end:
        return f"somebody on {cause.node} did it, or a memory guard; if nobody did, see dmesg for the kernel"
    if "got signal" in cause.exception:
        return f"somebody on {cause.node}, or a scheduler, asked it to end"
    return f"see its output: rankdeck logs {job.job_id} --rank launcher"


def _memory_hint(verdict: Verdict, on_node: str) -> str:
    if verdict.exit is not None and is_of_gpu(verdict.exit):
        return "see the Memory view: smaller micro-batches, checkpointed activations or sharding need less"
    less = f"see the Memory view: fewer loader workers, smaller batches or fewer ranks{on_node} need less"
    limit = "" if verdict.exit is None else memory_limit_hint(verdict.exit)
    return f"{limit}; {less}" if limit else less


def _straggler_hint(verdict: Verdict, on_node: str) -> str:
    if verdict.unreported:
        return f"rankdeck doctor {clean_name(verdict.unreported[0])} shows what is in the way there"
    if verdict.unreported is not None:
        return "its host may be off: name it by --host too, or leave --exclude out"
    if verdict.slow_factor > 1:
        return "heal it by injecting slow with factor 1"
    if verdict.because:
        return because_hint(verdict)
    if verdict.group.startswith(FIRST_GROUP):
        return f"it prepares something that the others wait for; look at its stack if it takes too long{on_node}"
    if verdict.phase in (Phase.CHECKPOINT, Phase.EVAL):
        return "the others need not wait: a longer phase is normal, a growing one is not"
    if verdict.phase in (Phase.STARTING, None):
        return f"see the logs of rank {verdict.culprits[0]}: an import or a download may take its time"
    if verdict.cost_frac is None:
        return _stall_hint(verdict, on_node)
    is_input = (verdict.phase if verdict.habit is None else verdict.habit.phase) is Phase.DATA
    compared = verdict.comparison
    if compared is not None and compared.num_signals and not compared.differing:
        return (
            f"{'its input' if is_input else 'its own program'} takes longer: look at its stack and that line{on_node}"
        )
    return (INPUT_IS_LATE if is_input else "look at its stack and at the load") + on_node


def _stall_hint(verdict: Verdict, on_node: str) -> str:
    """Return what to do about a rank that has not come, by what its process does."""
    stack = f"s in the console, or rankdeck stacks {clean_name(verdict.job)}, shows its stack; x stops or restarts"
    if verdict.is_blocked:
        return _hung(on_node)
    if is_busy(verdict):
        return f"{COMPUTES}; {stack}"
    if verdict.phase is Phase.DATA:
        return INPUT_IS_LATE + on_node
    return f"{WAITS}{on_node}; {stack}" if _is_idle(verdict) else stack


INPUT_IS_LATE = "its input is late: look at the line that loads it, at the disk and at loader workers"
COMPUTES = "a loop may not end, or a computation take long"
WAITS = "a file system, lock or server may not answer"
LOOP_CORES = 0.25
"""Cores from which a loop is named as possible: where others take most of the CPUs, one gets little more."""
IDLE_CORES = 0.1
"""Cores; a process that keeps fewer busy does no more than its probe and some threads that wake up now and then."""


def is_busy(verdict: Verdict) -> bool:
    """Return whether a process of the culprits computes, as far as known."""
    return verdict.cpu_cores is not None and verdict.cpu_cores > LOOP_CORES


def _is_idle(verdict: Verdict) -> bool:
    return verdict.cpu_cores is not None and verdict.cpu_cores < IDLE_CORES


def _hung(on_node: str) -> str:
    return f"a disk or a network file system{on_node} does not answer; see dmesg there"


def tensed(verdict: Verdict, now: str, then: str) -> str:
    """Return `then` of a hang after which the job has ended, else `now`."""
    return now if verdict.aftermath is None else then


def cpu_text(verdict: Verdict) -> str:
    """Return `uses 98 % of a CPU`, `uses no CPU` or `is in uninterruptible sleep`; empty where that is not known."""
    if verdict.is_blocked:
        return f"{tensed(verdict, 'is', 'was')} in uninterruptible sleep"
    if verdict.cpu_cores is None:
        return ""
    if _is_idle(verdict):
        return f"{tensed(verdict, 'uses', 'used')} no CPU"
    return f"{tensed(verdict, 'uses', 'used')} {percent_text(verdict.cpu_cores)} of a CPU"


def peer_text(call: PeerCall | None) -> str:
    """Return ` to rank 2 with tag 7 and 400 bytes` for a send; empty for a collective."""
    if call is None or call.op not in {"send", "recv"}:
        return ""
    direction = "to" if call.op == "send" else "from"
    peer = "any rank" if call.peer is None else f"rank {call.peer}"
    size = "room for " if call.op == "recv" else ""
    parts = [f"tag {call.tag}"] if call.tag else []
    parts += [f"{size}{call.num_bytes[-1]:,} bytes"] if call.num_bytes else []
    return f" {direction} {peer}" + (f" with {' and '.join(parts)}" if parts else "")


def standstill_parts(verdict: Verdict, who: str, victims: str) -> list[str]:
    """Return for how long no rank has moved, which ranks stand where, and who waits for them."""
    step = "" if verdict.step is None else f" after step {verdict.step}"
    others = "" if verdict.waiting else f", and none {tensed(verdict, 'waits', 'waited')} in a collective"
    rank = "rank that is left" if verdict.ended else "rank"
    head = f"no {rank} {tensed(verdict, 'has', 'had')} moved for {seconds_text(verdict.for_s)}{step}{others}"
    # Ranks that stand elsewhere come first: a narrow screen cuts the end.
    sides = sorted(
        (side for side in verdict.sides if side.place), key=lambda side: side.ranks[0] not in verdict.culprits
    )
    places = [f"{_standing(side, verdict, who)} at {place_text(side.place)}" for side in sides]
    has = "has" if len(verdict.ended) == 1 else "have"
    ended = f"{ranks_text(verdict.ended)} {has} ended (exit code 0)" if verdict.ended else ""
    return [head, ", ".join(places), _cpu_of_all(verdict), victims, ended, child_text(verdict)]


def _cpu_of_all(verdict: Verdict) -> str:
    """Return how busy the process of the culprits, or of all that stand, is that computes most."""
    cpu = cpu_text(verdict)
    ranks = verdict.culprits or [rank for side in verdict.sides for rank in side.ranks]
    if not cpu or len(ranks) == 1:
        return cpu and f"{ranks_text(ranks)} {cpu}"
    return (
        f"none of them {tensed(verdict, 'uses', 'used')} a CPU" if _is_idle(verdict) else f"the busiest of them {cpu}"
    )


def _standing(side: Side, verdict: Verdict, who: str) -> str:
    ranks = who if side.ranks == verdict.culprits else ranks_text(side.ranks)
    return f"{ranks} {tensed(verdict, 'stands' if len(side.ranks) == 1 else 'stand', 'stood')}"


def not_exiting_parts(verdict: Verdict, who: str, victims: str) -> list[str]:
    """Return whose process does not end, and what keeps it from ending."""
    wait = verdict.exit_wait
    assert wait is not None
    is_one = len(verdict.culprits) == 1
    process = "has finished its program, but its process has" if is_one else "have finished, but their processes have"
    head = f"{who} {process} not ended for {seconds_text(verdict.for_s)}"
    place = f" at {place_text(wait.place)}" if wait.place else ""
    pid = f" {wait.pid}" if wait.pid else ""
    its = "its" if is_one else f"rank {verdict.culprits[0]}'s"
    why = {
        "thread": f'{its} non-daemon thread "{wait.name}" still runs{place}',
        "process": f"{its} child process{pid} still runs",
        "queue": f"{its} multiprocessing.Queue holds what nobody takes",
        "atexit": f"{its} exit handler {wait.name} still runs{place}",
    }.get(wait.what, "what keeps it is not known")
    return [head, why, victims, child_text(verdict)]


def child_text(verdict: Verdict) -> str:
    """Return `rank 1 waits for its loader worker (pid 4711), which is at data.py:12 in read`."""
    child = verdict.child
    if child is None:
        return ""
    what = child.what if child.what.endswith(("process", "worker")) else "child process"
    first = verdict.culprits[:1] or verdict.sides[0].ranks[:1]
    is_at = f", which {tensed(verdict, 'is', 'was')} at"
    place = f"{is_at} {place_text(verdict.child_place)}" if verdict.child_place else ""
    return f"{ranks_text(first)} {tensed(verdict, 'waits', 'waited')} for its {what} (pid {child.pid}){place}"
