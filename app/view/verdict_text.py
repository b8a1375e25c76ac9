"""Verdicts as text: a sentence with who, where, why, since when and who suffers.

`meeting_head` and `store_text` are parts of the sentence about ranks that do not find each other in
`init_process_group`.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from agent.wire.logs import LOST_PEER
from app.diagnosis.causes import Cause
from app.diagnosis.memory import is_killed_by_kernel, is_of_gpu
from app.text import (
    bytes_text,
    call_text,
    clean,
    clean_name,
    nodes_text,
    place_text,
    ranks_text,
    seconds_text,
    signal_text,
    sizes_text,
)
from app.view.because_text import because_parts, nothing_differs_text
from app.view.end_causes import end_parts, explains_loss, memory_limit_text
from app.view.memory import growth_parts, past_growth_text
from app.view.pace import input_bound_parts, slow_parts
from app.view.verdict_hints import (
    ROOT_ARGUMENT,
    child_text,
    cpu_text,
    not_exiting_parts,
    peer_text,
    standstill_parts,
    tensed,
)
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.reports import ExitReport
    from app.diagnosis.verdicts import MeetingSide, Side, Verdict

MAX_TEXT = 600
"""Limit of characters in a sentence: seven lines of a narrow terminal."""
MAX_ERROR = 160
AT_END_S = 0.1
"""Seconds before its end from which a rank's last sample is no more its last act."""
MAX_SIDES_FIRST = 2
"""Sides of a mismatch that leave room on a narrow screen for the ranks that wait."""

PHASE_TEXTS = {
    Phase.STARTING: "is still starting",
    Phase.JOINING: "waits in init_process_group",
    Phase.DATA: "is loading data",
    Phase.FORWARD: "is in forward",
    Phase.BACKWARD: "is in backward",
    Phase.OPTIMIZER: "is in the optimizer",
    Phase.BARRIER: "is in a collective of its own",
    Phase.CHECKPOINT: "is saving a checkpoint",
    Phase.EVAL: "is evaluating",
}


def sentence(verdict: Verdict) -> str:
    """Return what is wrong, in one clean sentence."""
    parts = {
        Cause.FROZEN: _frozen,
        Cause.EXITED: _exited,
        Cause.OOM: _out_of_memory,
        Cause.SILENT: _silent,
        Cause.NODE_LOST: _node_lost,
        Cause.NOT_JOINED: _not_joined,
        Cause.MISMATCH: _mismatch,
        Cause.FEWER_CALLS: _fewer_calls,
        Cause.TRANSPORT: _transport,
        Cause.STRAGGLER: _straggler,
        Cause.STANDSTILL: _standstill,
        Cause.NOT_EXITING: _not_exiting,
        Cause.INPUT_BOUND: input_bound_parts,
        Cause.MEMORY_GROWTH: _memory_growth,
        Cause.CHECKPOINTING: _known,
        Cause.EVALUATING: _known,
    }[verdict.cause](verdict)
    return clean("; ".join(part for part in [*parts, _aftermath(verdict)] if part), MAX_TEXT)


def _aftermath(verdict: Verdict) -> str:
    """Return how the hang ended: `the job ended when ranks 0, 2 timed out after 20 s`."""
    after = verdict.aftermath
    if after is None:
        return ""
    one = len(after.ranks) == 1
    if after.is_timeout:
        how = "timed out" + ("" if after.timeout_s is None else f" after {seconds_text(after.timeout_s)}")
    elif after.code is not None:
        how = f"exited with code {after.code}"
    elif after.signal is not None:
        how = f"{'was' if one else 'were'} ended by {signal_text(after.signal)}"
        how += f" with {'its' if one else 'their'} launcher" if after.is_with_launcher else ""
    else:
        how = f"lost {'its' if one else 'their'} connection"
    return f"the job ended when {ranks_text(after.ranks)} {how}"


def who(verdict: Verdict) -> str:
    """Return `rank 2 on demo-1`."""
    ranks = f"all {len(verdict.culprits)} ranks" if verdict.is_everyone else ranks_text(verdict.culprits)
    return f"{ranks} on {nodes_text([clean_name(node) for node in verdict.nodes])}" if verdict.nodes else ranks


def _is(verdict: Verdict) -> str:
    is_one = len(verdict.culprits) == 1
    return tensed(verdict, "is" if is_one else "are", "was" if is_one else "were")


def _has(verdict: Verdict) -> str:
    return tensed(verdict, "has" if len(verdict.culprits) == 1 else "have", "had")


def _it(verdict: Verdict) -> str:
    return "it" if len(verdict.culprits) == 1 else "them"


def _call(verdict: Verdict) -> str:
    return call_text(verdict.group, verdict.seq, verdict.op, verdict.label) if verdict.seq is not None else ""


def _victims(verdict: Verdict, idle: str = "") -> str:
    """Return `ranks 0-1, 3 wait for it in all_reduce #57 for 1.7 s`."""
    if not verdict.waiting:
        return idle
    here = [rank for rank in verdict.waiting_here if rank in verdict.waiting] or verdict.waiting
    elsewhere = [rank for rank in verdict.waiting if rank not in here]
    verb = tensed(verdict, "waits" if len(here) == 1 else "wait", "waited")
    call = _call(verdict) or verdict.op
    where = f" in {call}" if call else ""
    text = f"{ranks_text(here)} {verb} for {_it(verdict)}{where} for {seconds_text(verdict.waited_s)}"
    return f"{text}, {ranks_text(elsewhere)} in other calls" if elsewhere else text


def _past_victims(verdict: Verdict) -> list[str]:
    """Return which ranks waited for ranks that are gone, and which lost the connection to them."""
    lost = set(verdict.lost_connection)
    waited = [rank for rank in verdict.waiting if rank not in lost]
    where = f" in {_call(verdict)}" if _call(verdict) else ""
    parts = [f"{ranks_text(waited)} waited for {_it(verdict)}{where}"] if waited else []
    if lost:
        their = "its" if len(lost) == 1 else "their"
        parts.append(f"{ranks_text(sorted(lost))} lost {their} connection to {_it(verdict)}")
    return parts


def _last_seen(verdict: Verdict) -> str:
    if verdict.place is None:
        return ""
    first = "it" if len(verdict.culprits) == 1 else ranks_text(verdict.culprits[:1])
    seen = f"py-spy sees {first}" if verdict.is_seen_outside else "last seen"
    is_sudden = verdict.exit is None or not verdict.exit.error
    return f"{seen} at {place_text(verdict.place)}{before_end_text(verdict.seen_before_s) if is_sudden else ''}"


def before_end_text(seen_before_s: float | None) -> str:
    """Return `, 0.3 s before its end`, from a rank's last sample; empty while it lives, and where that was its end."""
    return (
        "" if seen_before_s is None or seen_before_s < AT_END_S else f", {seconds_text(seen_before_s)} before its end"
    )


def _after_step(verdict: Verdict) -> str:
    """Return the last step that the first culprit reported; it may be in the next step, or a few further."""
    return "" if verdict.step is None else f" after step {verdict.step}"


def _frozen(verdict: Verdict) -> list[str]:
    head = f"{who(verdict)} {_is(verdict)} frozen (SIGSTOP) for {seconds_text(verdict.for_s)}"
    return [
        head,
        _victims(verdict, "nobody waits for it yet" if len(verdict.culprits) == 1 else ""),
        _last_seen(verdict),
    ]


def _exited(verdict: Verdict) -> list[str]:
    end = verdict.exit
    was = "was" if len(verdict.culprits) == 1 else "were"
    is_alive = end is not None and _is_about_to_end(end) and bool(end.error)
    if is_alive:
        how = f"{'fails' if len(verdict.culprits) == 1 else 'fail'}{_after_step(verdict)}"
    elif end is not None and end.signal == signal.SIGTERM and end.error and not LOST_PEER.search(end.error):
        how = f"failed{_after_step(verdict)} and {was} ended by SIGTERM then"
    elif end is not None and end.signal is not None:
        how = f"{was} killed by {signal_text(end.signal)}{_after_step(verdict)}"
    elif end is not None and end.code is not None:
        how = f"exited with code {end.code}{_after_step(verdict)}"
    else:
        how = f"ended{_after_step(verdict)}, it is not known how"
    error = "" if end is None else _error_text_of(end, verdict.culprits)
    if end is not None and LOST_PEER.search(end.error_text) and not explains_loss(end):
        error += f"; whose connection {'it' if len(verdict.culprits) == 1 else 'they'} lost is not known"
    grew = past_growth_text(verdict.growth)
    victims = [_victims(verdict)] if is_alive else _past_victims(verdict)
    return [f"{who(verdict)} {how}{error}", grew, *end_parts(verdict), *victims, _last_seen(verdict)]


def _is_about_to_end(end: ExitReport) -> bool:
    """Return whether a rank's program is over while its process still lives."""
    return end.code is None and end.signal is None


def _error_text_of(end: ExitReport, ranks: Sequence[int]) -> str:
    """Return the exception, or the last line of the first rank, as the end of a sentence about ranks with one end."""
    if end.error:
        return f": {clean(end.error, MAX_ERROR)}"
    whose = "its" if len(ranks) == 1 else f"rank {ranks[0]}'s"
    return f"; {whose} last line: {clean(end.last_line, MAX_ERROR)}" if end.last_line else ""


def _out_of_memory(verdict: Verdict) -> list[str]:
    end = verdict.exit
    assert end is not None
    was = "was" if len(verdict.culprits) == 1 else "were"
    held = f"; it held {bytes_text(verdict.held_bytes)}" if verdict.held_bytes and not is_of_gpu(end) else ""
    by_kernel = memory_limit_text(end)
    if is_killed_by_kernel(end) and end.signal is not None:
        how = f"{was} killed by {signal_text(end.signal)}{_after_step(verdict)}, {by_kernel}{held}"
    elif is_killed_by_kernel(end):
        how = f"lost a process{_after_step(verdict)}, {by_kernel}"
    else:
        how = f"ran out of memory{_after_step(verdict)}{held}"
    error = _error_text_of(end, verdict.culprits)
    return [
        f"{who(verdict)} {how}{error}",
        past_growth_text(verdict.growth),
        *_past_victims(verdict),
        _last_seen(verdict),
    ]


def _memory_growth(verdict: Verdict) -> list[str]:
    growth = verdict.growth
    assert growth is not None
    return growth_parts(growth, who(verdict))


def _silent(verdict: Verdict) -> list[str]:
    lives = "its process lives" if len(verdict.culprits) == 1 else "their processes live"
    lives = tensed(verdict, lives, f"{lives.removesuffix('s')}d")
    if verdict.is_blocked:
        lives = f"its process {tensed(verdict, 'hangs', 'hung')} in the kernel (uninterruptible sleep)"
    head = f"{who(verdict)} {_has(verdict)} not reported for {seconds_text(verdict.for_s)} though {lives}"
    return [head, _victims(verdict), _last_seen(verdict)]


def _node_lost(verdict: Verdict) -> list[str]:
    nodes, ranks = nodes_text([clean_name(node) for node in verdict.nodes]), ranks_text(verdict.culprits)
    is_one = len(verdict.culprits) == 1
    lost_it = [f"{ranks_text(verdict.lost_connection)} lost a connection"] if verdict.lost_connection else []
    if verdict.is_back:
        did = f"what {ranks} did then is not known"
        return [f"{nodes} did not report{_for(verdict.for_s)}: {did}", *(lost_it or [_victims(verdict)])]
    unseen = unseen_text(verdict.culprits)
    if verdict.others_step:
        unseen = f"{ranks} {'trains' if is_one else 'train'} on unseen, as the others step on"
    if (reason := verdict.unreachable_reason) is not None:
        head = f"{reason.unreachable_kind} {nodes}{_for(verdict.for_s)}: {reason.why}"
        return [head, unseen, *(lost_it or [_victims(verdict)])]
    what = unseen if verdict.others_step else f"{ranks} {_is(verdict)} lost"
    has_not = tensed(verdict, f"{'has' if len(verdict.nodes) == 1 else 'have'} not reported", "did not report")
    head = f"{nodes} {has_not}{_for(verdict.for_s)}: {what}"
    return [head, *(lost_it or [_victims(verdict)]), "" if verdict.others_step else _last_seen(verdict)]


def unseen_text(ranks: Sequence[int]) -> str:
    """Return what is known of ranks that no report comes from: the one sentence about them, on every screen."""
    return f"whether {ranks_text(ranks)} still {'runs' if len(ranks) == 1 else 'run'} is not known"


def _for(for_s: float | None) -> str:
    return "" if for_s is None else f" for {seconds_text(for_s)}"


def _not_joined(verdict: Verdict) -> list[str]:
    has, for_s = _has(verdict), seconds_text(verdict.waited_s)
    wait = tensed(verdict, "waits" if len(verdict.waiting) == 1 else "wait", "waited")
    victims = f"{ranks_text(verdict.waiting)} {wait} for {_it(verdict)} there for {for_s}" if verdict.waiting else ""
    if not verdict.is_born:
        where = f" in {verdict.op}" if victims else ""
        waiting = victims.replace(" there", where)
        return [f"{who(verdict)} {has} not been started" + ("" if victims else f" for {for_s}"), waiting]
    if verdict.phase is None:
        stands = f"{ranks_text(verdict.culprits[:1])} has not imported torch yet, or cannot be probed"
    else:
        where = f"{tensed(verdict, 'is', 'was')} at {place_text(verdict.place)}" if verdict.place else ""
        stands = where and f"{ranks_text(verdict.culprits[:1])} {where}"
    return [f"{who(verdict)} {has} not come to {verdict.op}", victims, stands]


def _mismatch(verdict: Verdict) -> list[str]:
    if verdict.meetings:
        place = f" at {place_text(verdict.place)}" if verdict.place else ""
        return [meeting_head(verdict), f"they wait for {seconds_text(verdict.waited_s)}{place}"]
    described = [_side(side, verdict) for side in verdict.sides]
    wait = tensed(verdict, "wait", "waited")
    if not verdict.aborted:
        for_s = seconds_text(verdict.waited_s)
        if len(described) > MAX_SIDES_FIRST:
            everybody = sorted({rank for side in verdict.sides for rank in side.ranks})
            return [
                f"{ranks_text(everybody)} {wait} for each other for {for_s}: {', '.join(described)}",
                _counts(verdict),
            ]
        meet = tensed(verdict, "meet", "met")
        return [", ".join(described) + f": they {wait} for each other for {for_s} and never {meet}", _counts(verdict)]
    known = {rank for side in verdict.sides for rank in side.ranks}
    place = f" at {place_text(verdict.place)}" if verdict.place else ""
    if others := [rank for rank in verdict.culprits if rank not in known]:
        described.append(f"{ranks_text(others)} with another size or type{place if len(others) == 1 else ''}")
    unclear = "" if verdict.culprits else "; whose call differs is not known"
    is_part = len(described) > 1
    op = "" if described else verdict.op  # the op of a possibly different call would mislead
    head = ", ".join(described) if is_part else f"the ranks pass different sizes or types to one {op or 'collective'}"
    single = "" if is_part or not described else described[0]
    ended = f"gloo ended {ranks_text(verdict.aborted)} (SIGABRT), which received more than expected{unclear}"
    unplaced = [rank for rank in verdict.aborted if rank not in known]
    at_end = f"{ranks_text(unplaced[:1])} ended{place}" if place and unplaced and not verdict.culprits else ""
    return [f"{head}: {ended}", at_end, single, _counts(verdict) or _shifted(verdict)]


def _shifted(verdict: Verdict) -> str:
    """Return that ranks whose calls differ made the same ones before, in the same order, where all calls are known."""
    if not verdict.is_shifted or any(side.num_elements < 0 for side in verdict.sides):
        return ""
    whose = ranks_text(verdict.culprits) if len(verdict.culprits) == 1 else "one of them"
    return f"all ranks make both calls: {whose} has left out or doubled one"


def _counts(verdict: Verdict) -> str:
    """Return since when ranks make fewer or more calls than the others, or until when all made the same number."""
    counts = verdict.counts
    if counts is None:
        return ""
    if counts.difference == 0:
        return f"as far as known (up to step {counts.equal_step}) they made the same number of calls"
    number = abs(counts.difference)
    since = "" if counts.equal_step is None else f" since step {counts.equal_step}"
    ranks, has = ranks_text(verdict.sides[0].ranks), "has" if len(verdict.sides[0].ranks) == 1 else "have"
    amount = f"{number:,} call{'' if number == 1 else 's'} {'fewer' if counts.difference < 0 else 'more'}"
    return f"{ranks} {has} made {amount} than {ranks_text(verdict.sides[-1].ranks)}{since}"


def arguments_text(side: Side, sides: Sequence[Side]) -> str:
    """Return the arguments of some ranks that differ from those of other ranks in the same call."""
    same = [one for one in sides if _key(one) == _key(side)]
    described = []
    if len({one.num_elements for one in same}) > 1 and side.num_elements >= 0:
        described.append(sizes_text(side.num_elements))
    if len({one.dtype for one in same}) > 1 and side.dtype:
        described.append(f"type {clean_name(side.dtype)}")
    if len({one.root for one in same}) > 1 and side.root is not None:
        described.append(f"{ROOT_ARGUMENT.get(side.op, 'root')}={side.root}")
    if len({one.reduce_op for one in same}) > 1 and side.reduce_op:
        described.append(f"op={clean_name(side.reduce_op)}")
    return f" with {', '.join(described)}" if described else ""


def _key(side: Side) -> tuple[str, str, str, int]:
    return (side.op, side.label, side.group, side.seq)


def _side(side: Side, verdict: Verdict) -> str:
    calls = tensed(verdict, "calls" if len(side.ranks) == 1 else "call", "called")
    place = f" at {place_text(side.place)}" if side.place else ""
    peer = peer_text(side.peer_call)
    call = call_text(side.group, side.seq, side.op, side.label)
    return f"{ranks_text(side.ranks)} {calls} {call}{peer}{arguments_text(side, verdict.sides)}{place}"


def _fewer_calls(verdict: Verdict) -> list[str]:
    call = f" without calling {_call(verdict)}" if _call(verdict) else " before the others"
    end = verdict.exit
    is_killed = end is not None and end.signal is not None
    code = 0 if end is None else end.code or 0
    how = "was about to end" if is_killed else f"exited with code {code}" if code else "finished (exit code 0)"
    if end is not None and _is_about_to_end(end):
        how = f"{_is(verdict)} about to end"
    how = "worked on" if verdict.has_closed else how
    head = f"{who(verdict)} {how}{_after_step(verdict)}{call}"
    is_alive = end is not None and _is_about_to_end(end) and bool(verdict.waiting)
    victims = [_victims(verdict)] if is_alive else _past_victims(verdict)
    if victims and verdict.waiting_place is not None:
        victims[-1] += f" at {place_text(verdict.waiting_place)}"
    return [head, *victims, _last_seen(verdict)]


def _transport(verdict: Verdict) -> list[str]:
    has, does = tensed(verdict, "has", "had"), tensed(verdict, "does", "did")
    head = f"every member {has} called {_call(verdict)} and it {does} not complete"
    if verdict.seq is None:
        head = f"every rank has come to {verdict.op}" if verdict.op else "the launchers of all nodes run"
        head += " and they do not find each other"
        head += f" at {store_text(verdict.meetings[0])}" if verdict.meetings else ""
    verb = tensed(verdict, "waits" if len(verdict.waiting) == 1 else "wait", "waited")
    place = f" at {place_text(verdict.place)}" if verdict.place else ""
    argument = ROOT_ARGUMENT.get(verdict.op, "root")
    cause = f"which {argument} each rank passes is not known: they may differ" if verdict.is_root_unknown else ""
    if verdict.store_port_owner:
        cause = f"{clean(verdict.store_port_owner, MAX_ERROR)} listens there"
    away = ""
    if verdict.away is not None:
        node, for_s, ago_s = verdict.away
        away = f"{clean_name(node)} did not report for {seconds_text(for_s)}, until {seconds_text(ago_s)} ago"
    return [head, away, cause, f"{ranks_text(verdict.waiting)} {verb} for {seconds_text(verdict.waited_s)}{place}"]


def _straggler(verdict: Verdict) -> list[str]:
    place = f"at {place_text(verdict.place)}" if verdict.place else ""
    about = PHASE_TEXTS.get(verdict.phase or Phase.STARTING, "is" if place else "")
    about = tensed(verdict, about, about.replace("is", "was", 1))
    does = " and ".join(word for word in (f"{about} {place}".strip(), cpu_text(verdict)) if word)
    holds = tensed(verdict, "holds" if len(verdict.culprits) == 1 else "hold", "held")
    if verdict.unreported is not None:
        hosts = nodes_text([clean_name(node) for node in verdict.unreported])
        where = f"nothing came from {hosts}" if hosts else f"no host that is watched here reports {_it(verdict)}"
        return [f"{who(verdict)} {holds} the others up", _victims(verdict), where]
    if verdict.cost_frac is None:
        gpu = "its GPU" if len(verdict.culprits) == 1 else "their GPUs"
        on_gpu = f"{gpu} {_has(verdict)} not come to that call" if verdict.is_behind_work else ""
        return [
            f"{who(verdict)} {holds} the others up",
            _victims(verdict),
            *because_parts(verdict),
            on_gpu,
            f"{ranks_text(verdict.culprits[:1])} {does}" if does else "",
            child_text(verdict),
            # What a rank does accounts for a hang: signals would only say that they do not.
            nothing_differs_text(verdict) if verdict.cpu_cores is None else "",
        ]
    return slow_parts(verdict, who(verdict))


def _standstill(verdict: Verdict) -> list[str]:
    if verdict.is_behind_work:
        has, does = tensed(verdict, "has", "had"), tensed(verdict, "does", "did")
        gpu = f"the GPU of {who(verdict)} {has} not" if verdict.culprits else f"no GPU {has}"
        place = f"last seen at {place_text(verdict.place)}" if verdict.place else ""
        return [
            f"{gpu} come to {_call(verdict)} for {seconds_text(verdict.for_s)}: work before it {does} not end",
            place,
        ]
    return standstill_parts(verdict, who(verdict), _victims(verdict))


def _not_exiting(verdict: Verdict) -> list[str]:
    return not_exiting_parts(verdict, who(verdict), _victims(verdict))


def _known(verdict: Verdict) -> list[str]:
    does = f"{_is(verdict)} {'saving a checkpoint' if verdict.cause is Cause.CHECKPOINTING else 'evaluating'}"
    usual = "" if verdict.usual_s is None else f" (the longest so far took {seconds_text(verdict.usual_s)})"
    place = f"at {place_text(verdict.place)}" if verdict.place else ""
    return [f"{who(verdict)} {does} for {seconds_text(verdict.for_s)}{usual}", _victims(verdict), place]


MAX_MEETINGS_SHOWN = 3


def meeting_head(verdict: Verdict) -> str:
    """Return how the ranks that have come differ: in the store, a rank's number, or the world size."""
    sides = verdict.meetings[:MAX_MEETINGS_SHOWN]
    if len({(side.address, side.port) for side in verdict.meetings}) > 1:
        described = ", ".join(f"{ranks_text(side.ranks)} to {store_text(side)}" for side in sides)
        return f"in {verdict.op} ranks go to different stores and never meet: {described}"
    if any(side.number is not None for side in sides):
        described = ", ".join(_number(side) for side in sides if side.number is not None)
        return f"{described}: two ranks cannot have one number"
    described = ", ".join(f"{ranks_text(side.ranks)} for {side.world_size}" for side in sides)
    num_ranks = sum(len(side.ranks) for side in verdict.meetings)
    return f"the ranks wait in {verdict.op} for another number of ranks than there are ({num_ranks}): {described}"


def _number(side: MeetingSide) -> str:
    verb = "comes" if len(side.ranks) == 1 else "come"
    return f"{ranks_text(side.ranks)} {verb} to init_process_group as rank {side.number}"


def store_text(side: MeetingSide) -> str:
    """Return `127.0.0.1:29500`; an IPv6 address is in brackets."""
    address = clean_name(side.address)
    return f"[{address}]:{side.port}" if ":" in address else f"{address}:{side.port}"
