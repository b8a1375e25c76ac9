"""What ended a rank beside its own words, as parts of a sentence, and what to do about it.

`end_parts` and `end_hint` read the facts that a node has added to a rank's end: its GPU, the limit of its memory, a
full disk, the sender of a signal. A fact that is not known makes no part.
"""

from __future__ import annotations

import re
from signal import SIGHUP, SIGXCPU, SIGXFSZ
from typing import TYPE_CHECKING

import msgspec

from agent.wire.ends import DiskLimit, EndFacts, Sender
from agent.wire.machine import GpuCondition
from app.diagnosis.memory import is_killed_by_kernel
from app.model.xids import XIDS, Action, Blame, gpu_cause
from app.text import bytes_text, clean_name, nodes_text, seconds_text
from app.view.rows import EndRow

if TYPE_CHECKING:
    from agent.wire.ends import FullDisk
    from agent.wire.machine import Xid
    from agent.wire.reports import ExitReport
    from app.diagnosis.verdicts import Verdict
    from app.model.xids import GpuCause

MAX_XIDS_NAMED = 2
MAX_PATH = 60

_GONE_TEXTS = {GpuCondition.LOST: "is lost", GpuCondition.RESET_REQUIRED: "needs a reset"}
_ACTION_HINTS = {
    Action.FIX_PROGRAM: "as a rule the program did this: run it with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer",
    Action.RESTART_JOB: "restart the job; if the GPU does it again, replace it: ask its vendor",
    Action.RESET_GPU: "end what uses {gpu}, then nvidia-smi --gpu-reset -i {index}; if that fails, reboot {node}",
    Action.REBOOT_NODE: "drain {node} and reboot it, or switch it off and on; if it happens again, ask its vendor",
    Action.CHECK_LINKS: "see nvidia-smi nvlink --errorcounters{on}, its Fabric Manager and the GPU at the other end",
    Action.CHECK_POWER: "check the power cables of {gpu}",
    Action.NOTHING: "",
}
_BLAME_HINTS = {
    Blame.DRIVER: "; see whether its driver is up to date",
    Blame.HARDWARE: "; leave {node} out: rankdeck restart --exclude",
}
_UNKNOWN_XID = "look it up in NVIDIA's catalog: https://docs.nvidia.com/deploy/xid-errors/"
_CGROUP_HINTS = (
    (re.compile(r"slurm|/job_\d"), "give the Slurm job more with --mem"),
    (re.compile(r"kubepods"), "raise limits.memory of the pod"),
    (re.compile(r"docker|libpod|containerd"), "give the container more memory"),
    (re.compile(r"\.(service|scope|slice)\b"), "raise MemoryMax of the unit"),
)
_DISK_TEXTS = {
    DiskLimit.SPACE: "the file system {path} is full",
    DiskLimit.INODES: "the file system {path} has no inodes left",
    DiskLimit.QUOTA: "the quota on {path} is used up",
}
_DISK_HINTS = {
    DiskLimit.SPACE: "make room in {path}{on}, or write elsewhere",
    DiskLimit.INODES: "remove small files in {path}{on}: see df -i",
    DiskLimit.QUOTA: "see quota -s, or lfs quota on Lustre{on}; remove files or ask for more",
}
NO_SPACE = re.compile(r"No space left on device|StorageFull|\bENOSPC\b")
NO_QUOTA = re.compile(r"Disk quota exceeded|QuotaExceeded|\bEDQUOT\b")
"""Source: strerror(3) of 28 and 122; Rust's io::ErrorKind, as safetensors prints it."""
_SIGNAL_HINTS = {
    int(SIGXCPU): "its limit of CPU time is used up: see ulimit -t{on}",
    int(SIGXFSZ): "it wrote a larger file than it may: see ulimit -f{on}",
    int(SIGHUP): "its terminal was closed: start it with rankdeck run --detach, or in tmux",
}


def end_parts(verdict: Verdict) -> list[str]:
    """Return what is known of an end: `its GPU 3 reported Xid 79 (it has fallen off the bus) 0.4 s before`."""
    end = verdict.exit
    if end is None:
        return []
    whose = "its" if len(verdict.culprits) == 1 else f"rank {verdict.culprits[0]}'s"
    gpu = gpu_cause(end)
    parts = [] if gpu is None else [f"{whose} GPU {gpu.gpu} {_gpu_text(gpu)}"]
    if end.facts.disk is not None:
        parts.append(_disk_text(end.facts.disk))
    if end.facts.sender is Sender.RANKDECK:
        parts.append("an operator had rankdeck send that signal")
    return parts


def explains_loss(end: ExitReport) -> bool:
    """Return whether it is known why a rank lost its connection: by its own GPU."""
    cause = gpu_cause(end)
    return cause is not None and cause.is_own


def memory_limit_text(end: ExitReport) -> str:
    """Return at which limit the kernel killed: `when its cgroup job_12/step_0 was at its limit (8.0 GiB)`."""
    if end.facts.sender is Sender.OOMD:
        return f"by oomd, since memory was short in {_cgroup_text(end.facts.cgroup)}"
    limit = end.facts.memory_limit
    if limit is None:
        return "when the kernel was out of memory"
    return f"when {_cgroup_text(end.facts.cgroup)} was at its limit of memory ({bytes_text(limit.limit_bytes)})"


def end_hint(verdict: Verdict) -> str:
    """Return what to do about what ended a rank; empty where nothing beside its own words is known."""
    end = verdict.exit
    if end is None:
        return ""
    node = nodes_text([clean_name(node) for node in verdict.nodes[:1]])
    on = f" on {node}" if node else ""
    if gpu := gpu_cause(end):
        return _gpu_hint(gpu, node, on)
    if disk := end.facts.disk:
        return _DISK_HINTS[disk.limit].format(path=_path_text(disk.path), on=on)
    if NO_QUOTA.search(end.error_text):
        return _DISK_HINTS[DiskLimit.QUOTA].format(on=on)
    if NO_SPACE.search(end.error_text):
        return f"a file system was full{on}: see df -h and df -i there, also for /dev/shm"
    if end.facts.sender is Sender.RANKDECK:
        return f"the agent's audit log{on} names the console"
    return "" if end.error or end.signal is None else _SIGNAL_HINTS.get(end.signal, "").format(on=on)


def memory_limit_hint(end: ExitReport) -> str:
    """Return how a limit of memory is raised, as the beginning of a hint; empty where none is known."""
    if end.facts.memory_limit is None:
        return ""
    known = (text for pattern, text in _CGROUP_HINTS if pattern.search(end.facts.cgroup))
    return next(known, "raise the limit of that cgroup")


def end_row(end: ExitReport | None) -> EndRow | None:
    """Return the facts on an end for `--json`; None where there are none."""
    if end is None:
        return None
    # A rank may end by an exception of its own just after another process of its cgroup was killed for want of memory.
    facts = end.facts if is_killed_by_kernel(end) else _without_kill(end.facts)
    gpu = gpu_cause(end)
    if gpu is None and facts == EndFacts(gpu=facts.gpu):
        return None
    kind = None if gpu is None else gpu.kind
    return EndRow(
        gpu=None if gpu is None else gpu.gpu,
        gpu_state="" if gpu is None else str(gpu.condition),
        xids=[] if gpu is None else [xid.code for xid in gpu.xids],
        blame="" if kind is None else str(kind.blame),
        action="" if kind is None else str(kind.action),
        memory_limit_bytes=None if facts.memory_limit is None else facts.memory_limit.limit_bytes,
        cgroup=clean_name(facts.cgroup),
        disk="" if facts.disk is None else clean_name(facts.disk.path),
        disk_limit="" if facts.disk is None else str(facts.disk.limit),
        sender="" if facts.sender is None else str(facts.sender),
    )


def _without_kill(facts: EndFacts) -> EndFacts:
    sender = None if facts.sender is Sender.OOMD else facts.sender
    return msgspec.structs.replace(facts, memory_limit=None, cgroup="", sender=sender)


def _gpu_text(gpu: GpuCause) -> str:
    """Return `reported Xid 79 (it has fallen off the bus) 0.4 s before, and is lost`."""
    gone = _GONE_TEXTS.get(gpu.condition, "")
    if not gpu.xids:
        return gone
    reported = "reported " + " and ".join(map(_xid_text, gpu.xids[:MAX_XIDS_NAMED]))
    return f"{reported}, and {gone}" if gone else reported


def _xid_text(xid: Xid) -> str:
    meaning = f" ({XIDS[xid.code].what})" if xid.code in XIDS else ""
    when = f"{seconds_text(xid.age_s)} before" if xid.age_s > 0 else "as it ended"
    return f"Xid {xid.code}{meaning} {when}"


def _gpu_hint(gpu: GpuCause, node: str, on: str) -> str:
    kind = gpu.kind
    action = Action.NOTHING if kind is None else kind.action
    if gpu.condition is GpuCondition.LOST:
        action = Action.REBOOT_NODE
    elif gpu.condition is GpuCondition.RESET_REQUIRED:
        action = Action.RESET_GPU
    hint = _ACTION_HINTS[action] or _UNKNOWN_XID
    blame = Blame.HARDWARE if gpu.is_gone else None if kind is None else kind.blame
    if blame is not None:
        hint += _BLAME_HINTS.get(blame, "") if node or blame is not Blame.HARDWARE else ""
    return hint.format(gpu=f"GPU {gpu.gpu}{on}", index=gpu.gpu, node=node or "the node", on=on)


def _disk_text(disk: FullDisk) -> str:
    text = _DISK_TEXTS[disk.limit].format(path=_path_text(disk.path))
    if disk.limit is DiskLimit.SPACE and disk.total_bytes is not None and disk.free_bytes is not None:
        text += f" ({bytes_text(disk.free_bytes)} of {bytes_text(disk.total_bytes)} free)"
    return text


def _path_text(path: str) -> str:
    shown = clean_name(path)
    return shown if len(shown) <= MAX_PATH else f"...{shown[3 - MAX_PATH :]}"


def _cgroup_text(path: str) -> str:
    """Return `its cgroup job_12/step_0`: the last two of its names show whose it is."""
    names = [name for name in path.split("/") if name]
    return f"its cgroup {_path_text('/'.join(names[-2:]))}" if names else "its cgroup"
