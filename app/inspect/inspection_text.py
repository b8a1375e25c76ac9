"""An inspection as text and as JSON: a sentence on each job, a line a class of ranks, what was not seen. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from app.diagnosis.causes import Severity
from app.inspect.comparison import SURE_LOOP_S, Kind, What
from app.inspect.nccl_ras import ras_lines
from app.text import LINE_LIMIT, clean, clean_name, nodes_text, percent_text, place_text, ranks_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from app.inspect.comparison import Finding, Standing
    from app.inspect.seen import HostSeen, SeenChild, SeenJob
    from ddpcore.wire import Place

KERNEL_TEXTS = (
    ("futex", "waits for a lock"),
    ("nanosleep", "sleeps"),
    ("do_wait", "waits for a child process"),
    ("wait_for_partner", "opens a fifo"),
    ("fifo_open", "opens a fifo"),
    ("pipe", "waits at a pipe"),
    ("locks_lock", "waits for a file lock"),
    ("poll", "polls"),
    ("select", "polls"),
    ("sk_wait", "waits for the network"),
    ("unix_stream", "waits for another process"),
    ("nfs", "waits for NFS"),
    ("rpc_", "waits for NFS"),
    ("io_schedule", "waits for a disk"),
    ("folio", "waits for a disk"),
)
"""Parts of the kernel function in which a process waits, and what it does there."""
LONG_S = 10.0
"""Seconds from which a sleep is worth its length."""
STATE_TEXTS = {"R": "runs", "S": "sleeps", "D": "blocked in the kernel", "T": "stopped", "t": "traced"}


def sentence(job: SeenJob, finding: Finding, *, is_followed: bool = False) -> str:
    """Return what is wrong with a job, in one clean sentence; of one that is followed more looks come by themselves."""
    parts = _PARTS[finding.what](job, finding)
    on_gpu = any(one.kind is Kind.DEVICE for group in finding.waiting for one in group)
    if on_gpu and not is_followed and job.size > 1 and job.ras is None and not finding.culprits:
        parts.append("NCCL may know which rank is behind: --nccl")
    if finding.num_looks and not is_followed:
        parts.append(f"no alarm yet; to be sure, look longer: --looks {finding.num_looks}")
    elif _moves_while_others_wait_long(finding) and not is_followed:
        parts.append("inspect again in some minutes: a rank that is still there then may never come")
    return clean("; ".join(filter(None, parts)), 2 * LINE_LIMIT)


def _frozen(_job: SeenJob, finding: Finding) -> list[str]:
    who, _, is_ = _subject(finding)
    first = finding.culprits[0]
    is_traced = first.rank.looks[-1].state == "t"
    how = "stopped by a debugger or tracer" if is_traced else "frozen (SIGSTOP)"
    return [f"{who} {is_} {how}{_at(first.place)}", _all_waits(finding)]


def _elsewhere(_job: SeenJob, finding: Finding) -> list[str]:
    who, has, _ = _subject(finding)
    it = "it" if len(finding.culprits) == 1 else "they"
    classes = _classes(finding.culprits)
    stands = "; ".join(_stands_text(group, "" if len(classes) > 1 else it) for group in classes)
    waits = _all_waits(finding) + _waited_text(finding)
    if finding.severity is Severity.CRITICAL:
        return [f"{who} {has} not come to the call in which others wait: {stands}", waits]
    return [waits, f"{who} {has} not come to it, {_excuse(finding, it, has)}: {stands}"]


def _missing(job: SeenJob, finding: Finding) -> list[str]:
    missing = sorted({*job.missing, *(one.rank.rank for one in finding.culprits)})
    is_ = "is" if len(missing) == 1 else "are"
    return [f"{ranks_text(missing)} {is_} not there: ended, or on a host that was not looked at", _all_waits(finding)]


def _mismatch(_job: SeenJob, finding: Finding) -> list[str]:
    is_one = len({group[0].op.partition("(")[0] for group in finding.waiting}) == 1
    how = "in the same call with different arguments" if is_one else "in different calls"
    return [f"all ranks wait {how}, for each other: {_all_waits(finding)}"]


def _same_call(_job: SeenJob, finding: Finding) -> list[str]:
    (group,) = finding.waiting
    if len(group) > 1:
        everybody = "both ranks" if len(group) == 2 else f"all {len(group)} ranks"
        return [f"{_waits_text(group, everybody)}: the network, or arguments that cannot be seen from outside"]
    why = "a lock, or another thread, holds it up"
    if group[0].kind is Kind.JOINS:
        why = "the store does not answer"
    elif group[0].kind is Kind.DEVICE:
        why = "a kernel on it does not end, or runs long"
    elif group[0].rank.uses_gpu:
        why = "a kernel on its GPU does not end, or runs long"
    return [f"{_waits_text(group)}: {why}"]


def _not_exiting(_job: SeenJob, finding: Finding) -> list[str]:
    who, has, _ = _subject(finding)
    ends = "its process does" if len(finding.culprits) == 1 else "their processes do"
    return [f"{who} {has} finished the program, and {ends} not end: a thread or child process keeps it"]


def _none_waits(_job: SeenJob, finding: Finding) -> list[str]:
    what = "no rank moves" if finding.what is What.STANDSTILL else "some ranks stand"
    where = [_stands_text(group) for group in finding.waiting[:3]]
    return [f"{what}, and none waits in a call that needs others", *where]


def _unseen(_job: SeenJob, finding: Finding) -> list[str]:
    who, _, _ = _subject(finding)
    why = clean(finding.culprits[0].trouble, LINE_LIMIT)
    return [f"the stack of {who} cannot be read: {why}", _all_waits(finding)]


_PARTS: dict[What, Callable[[SeenJob, Finding], list[str]]] = {
    What.FROZEN: _frozen,
    What.ELSEWHERE: _elsewhere,
    What.MISSING: _missing,
    What.MISMATCH: _mismatch,
    What.SAME_CALL: _same_call,
    What.NOT_EXITING: _not_exiting,
    What.STANDSTILL: _none_waits,
    What.STANDING: _none_waits,
    What.UNSEEN: _unseen,
    What.MOVING: lambda _job, _finding: ["the ranks move, none hangs; whether one is slow cannot be seen from outside"],
}


def _subject(finding: Finding) -> tuple[str, str, str]:
    """Return the culprits, with the forms of `have` and `be` that go with them."""
    who = ranks_text([one.rank.rank for one in finding.culprits])
    return (who, "has", "is") if len(finding.culprits) == 1 else (who, "have", "are")


def _all_waits(finding: Finding) -> str:
    return "; ".join(_waits_text(group) for group in finding.waiting)


def _waited_text(finding: Finding) -> str:
    """Return for how long all that wait have waited, where that is long."""
    waited_s = min((one.asleep_s for group in finding.waiting for one in group), default=0.0)
    return f" for {seconds_text(waited_s)}" if waited_s >= LONG_S else ""


def _excuse(finding: Finding, it: str, has: str) -> str:
    """Return why ranks that have not come to a call are no alarm."""
    one = finding.culprits[0]
    if one.is_moving and not (one.is_in_loop and finding.num_looks):
        return f"no alarm while {it} move{'s' if it == 'it' else ''}"
    return "and may have work there" if finding.num_looks else f"and {it} {has} just started"


def _moves_while_others_wait_long(finding: Finding) -> bool:
    """Return whether ranks that move are no alarm, however long one looks, though others have waited long for them."""
    waited_s = min((one.asleep_s for group in finding.waiting for one in group), default=0.0)
    is_warning = finding.what is What.ELSEWHERE and finding.severity is Severity.WARNING
    return is_warning and waited_s >= SURE_LOOP_S and all(one.is_moving for one in finding.culprits)


def _at(place: Place | None) -> str:
    return f" at {place_text(place)}" if place is not None else ""


def _waits_text(group: Sequence[Standing], who: str = "") -> str:
    places = {one.place for one in group}
    where = _at(group[0].place) if len(places) == 1 else ""
    return f"{who or ranks_text([one.rank.rank for one in group])} {_call_text(group)}{where}"


def _call_text(group: Sequence[Standing]) -> str:
    """Return `waits in all_reduce`, or `wait for their GPUs in synchronize`, of ranks that wait alike."""
    verb, gpu = ("waits", "its GPU") if len(group) == 1 else ("wait", "their GPUs")
    what = f"in {clean_name(group[0].op)}" if group[0].op else ""
    return f"{verb} for {gpu} {what}".rstrip() if group[0].kind is Kind.DEVICE else f"{verb} {what}"


def _stands_text(group: Sequence[Standing], pronoun: str = "") -> str:
    one = group[0]
    verb = ("is" if one.is_moving else "stands") if len(group) == 1 else "are" if one.is_moving else "stand"
    if one.is_in_loop:
        where = "the script itself" if one.place is not None and one.place.function == "<module>" else "one function"
        verb = f"{'runs' if len(group) == 1 else 'run'} within {where},"
    inner = (
        f", calling {clean_name(one.op)}" if one.op and one.place is not None and one.op != one.place.function else ""
    )
    where = (
        f" at {place_text(one.place)}{inner}" if one.place is not None else f" in {clean_name(one.op) or 'its start'}"
    )
    child = "; ".join(_child_text(child) for child in one.rank.children[:2])
    text = f"{pronoun or ranks_text([each.rank.rank for each in group])} {verb}{where} ({facts_text(group)})"
    return f"{text}; its child {child}" if child else text


def _gpus_text(group: Sequence[Standing]) -> str:
    """Return `GPU 100 %, 121 of 700 W`, or `GPUs 97 to 100 %, ...`; empty where the driver shows none of them."""
    gpus = [one.rank.gpu for one in group if one.rank.gpu is not None]
    busy = [gpu.busy_percent for gpu in gpus if gpu.busy_percent is not None]
    if not busy:
        return ""
    watts = [gpu.power_watts for gpu in gpus if gpu.power_watts is not None]
    limits = [gpu.power_limit_watts for gpu in gpus if gpu.power_limit_watts is not None]
    limit = f" of {max(limits):.0f}" if limits else ""
    power = f", {_span(watts)}{limit} W" if watts else ""
    return f"GPU{'s' if len(gpus) > 1 else ''} {_span(busy)} %{power}"


def _span(figures: Sequence[float]) -> str:
    low, high = f"{min(figures):.0f}", f"{max(figures):.0f}"
    return low if low == high else f"{low} to {high}"


def facts_text(group: Sequence[Standing]) -> str:
    """Return what ranks do where they are: `sleeps for 2 h 3 min, 0 % CPU, i=54`."""
    one = group[0]
    cpu = f"{percent_text(one.busy_frac)} CPU"
    return ", ".join(filter(None, [one.phase, _doing_for(one), cpu, _gpus_text(group), _steps(one)]))


def _steps(one: Standing) -> str:
    first, last = (clean(step) for step in one.steps)
    return f"{first} to {last}" if first and last and first != last else last or first


def _child_text(child: SeenChild) -> str:
    own = next((frame for frame in child.frames if "/lib/python" not in frame.file and frame.file[:1] != "<"), None)
    where = f" at {clean_name(own.file.rpartition('/')[2])}:{own.line} in {clean_name(own.name)}" if own else ""
    return f"{clean_name(child.name)} (pid {child.pid}) is{where or ' there'}"


def doing_text(one: Standing) -> str:
    """Return what a rank's main thread does, by the kernel: `sleeps`."""
    last = one.rank.looks[-1]
    if last.state in ("R", "T", "t"):
        return STATE_TEXTS[last.state]
    return next((text for part, text in KERNEL_TEXTS if part in last.wchan), STATE_TEXTS.get(last.state, ""))


def _doing_for(one: Standing) -> str:
    """Return what a rank's main thread does, and how long it has not run where that is long: `sleeps for 2 h 3 min`."""
    last = one.rank.looks[-1]
    is_long = one.is_at_rest and (last.asleep_s or 0.0) >= LONG_S
    return f"{doing_text(one)} for {seconds_text(last.asleep_s or 0.0)}" if is_long else doing_text(one)


def _classes(standings: Iterable[Standing]) -> list[list[Standing]]:
    """Return the ranks by what they do and where, the fewest first."""
    groups: dict[object, list[Standing]] = defaultdict(list)
    for one in standings:
        groups[one.kind, one.op, one.place, one.is_moving].append(one)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank.rank))


def launcher_text(job: SeenJob) -> str:
    """Return `started by torchrun`, or `job gpt of rankdeck` where its ranks name one.

    For RANK set by hand, or by a launcher that leaves nothing else, that alone is returned.
    """
    if own := job.ranks[0].own_job:
        return f"job {clean_name(own)} of rankdeck"
    return "found by its environment (RANK)" if job.how == "RANK" else f"started by {clean_name(job.how)}"


def job_lines(job: SeenJob, standings: Sequence[Standing], finding: Finding, apart: str = "") -> list[str]:
    """Return the lines of a job: what it is, as `apart` from others of its name, the sentence, its classes of ranks."""
    hosts = list(dict.fromkeys(one.rank.host for one in standings))
    looks = job.ranks[0].looks
    seconds = seconds_text(looks[-1].at_s - looks[0].at_s)
    mark = {Severity.CRITICAL: "CRITICAL", Severity.WARNING: "WARNING"}.get(finding.severity, "OK")
    where = nodes_text([clean_name(host) for host in hosts])
    num_ranks = f"{len(job.ranks)} of {job.size} rank{'' if job.size == 1 else 's'}"
    program = ", ".join(filter(None, (clean(job.ranks[0].program, LINE_LIMIT), launcher_text(job), apart)))
    lines = [
        f"{program}: {num_ranks} on {where}, seen from outside {len(looks)} times in {seconds}",
        f"  {mark}  {sentence(job, finding)}",
    ]
    for group in _classes(standings):
        one = group[0]
        plural = "" if len(group) > 1 else "s"
        what = _call_text(group) if one.is_waiting and (one.op or one.kind is Kind.DEVICE) else one.kind.value
        what = f"move{plural}" if one.is_moving else f"stand{plural}" if one.kind is Kind.ELSEWHERE else what
        where = place_text(one.place) or clean_name(one.op)
        pids = f"pid {one.rank.pid} on {clean_name(one.rank.host)}" if len(group) == 1 else ""
        ranks = ranks_text([each.rank.rank for each in group])
        cpu = f"{percent_text(one.busy_frac)} CPU"
        cells = (what, where, doing_text(one), cpu, _gpus_text(group), _steps(one), pids)
        lines.append(f"    {ranks}: " + ", ".join(filter(None, cells)))
    return lines + [f"    {line}" for line in ras_lines(job)]


def unseen_lines(hosts: Mapping[str, HostSeen]) -> list[str]:
    """Return what each host could not show, and what would help."""
    lines = []
    for host, seen in hosts.items():
        name = clean_name(host)
        users = ", ".join(f"{count} of {clean_name(user)}" for user, count in sorted(seen.unseen.items()))
        if users and not seen.is_root:
            lines.append(
                f"{name}: Python processes of other users cannot be looked at: {users} (log in as them or root)"
            )
        if seen.gpus and (why := seen.gpus.gpus.trouble or seen.gpus.processes.trouble):
            lines.append(f"{name}: its GPUs are not seen: {clean(why, LINE_LIMIT)}")
        troubles = [look.trouble for rank in seen.ranks for look in rank.looks]
        is_refused = any("ermission" in trouble and "is not run" not in trouble for trouble in troubles)
        if is_refused and seen.yama and not seen.is_root:
            lines.append(f"{name}: the kernel lets only root read stacks (sudo sysctl kernel.yama.ptrace_scope=0)")
    return lines


def job_object(job: SeenJob, standings: Sequence[Standing], finding: Finding) -> dict[str, Any]:
    """Return a job as JSON values."""
    return {
        "program": clean(job.ranks[0].program, LINE_LIMIT),
        "launcher": job.how,
        "key": job.name,
        "world_size": job.size,
        "finding": finding.what.value,
        "severity": finding.severity.value,
        "text": sentence(job, finding),
        "culprits": [one.rank.rank for one in finding.culprits],
        "waiting": [[one.rank.rank for one in group] for group in finding.waiting],
        "missing": job.missing,
        "nccl": ras_lines(job),
        "ranks": [_rank_object(one) for one in standings],
    }


def _rank_object(one: Standing) -> dict[str, Any]:
    return {
        "rank": one.rank.rank,
        "host": clean_name(one.rank.host),
        "pid": one.rank.pid,
        "state": one.kind.value,
        "is_waiting": one.is_waiting,
        "is_moving": one.is_moving,
        "op": clean_name(one.op),
        "where": place_text(one.place),
        "phase": one.phase,
        "cpu_cores": round(one.busy_frac, 2),
        "gpu": None if one.rank.gpu is None else msgspec.structs.asdict(one.rank.gpu),
        "kernel": doing_text(one),
        "step": clean(one.steps[1]),
        "trouble": clean(one.trouble, LINE_LIMIT),
    }
