"""Ranks that stand outside collectives, in words: parts of a verdict's sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.words import place_text, ranks_text, seconds_text

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Verdict
    from ddpcore.wire import PeerCall


def peer_text(call: PeerCall | None) -> str:
    """Return ` to rank 2 with tag 7`, of a send; empty of a collective."""
    if call is None or call.op not in {"send", "recv"}:
        return ""
    direction = "to" if call.op == "send" else "from"
    peer = "any rank" if call.peer is None else f"rank {call.peer}"
    return f" {direction} {peer}" + (f" with tag {call.tag}" if call.tag else "")


def standstill_parts(verdict: Verdict, who: str) -> list[str]:
    """Return since when no rank has moved, and which ranks stand where."""
    step = "" if verdict.step is None else f" after step {verdict.step}"
    head = f"no rank has moved for {seconds_text(verdict.for_s)}{step}, and none waits in a collective"
    places = [f"{ranks_text(side.ranks)} at {place_text(side.place)}" for side in verdict.sides if side.place]
    is_one = len(verdict.sides) == 1 and len(verdict.sides[0].ranks) == 1
    stand = f"{'it stands' if is_one else 'they stand'} still: {', '.join(places)}" if places else ""
    is_odd = "is" if len(verdict.culprits) == 1 else "are"
    odd = f"{who} {is_odd} at another line than the others" if verdict.culprits else ""
    return [head, stand, odd, child_text(verdict)]


def not_exiting_parts(verdict: Verdict, who: str, victims: str) -> list[str]:
    """Return whose process does not end, and what keeps it from that."""
    wait = verdict.exit_wait
    assert wait is not None
    process = "its process does" if len(verdict.culprits) == 1 else "their processes do"
    head = f"the program of {who} is done and {process} not end for {seconds_text(verdict.for_s)}"
    place = f" at {place_text(wait.place)}" if wait.place else ""
    pid = f" {wait.pid}" if wait.pid else ""
    why = {
        "thread": f'thread "{wait.name}", which is no daemon, runs on{place}',
        "process": f"child process{pid} runs on",
        "atexit": f"exit handler {wait.name} runs{place}",
    }.get(wait.what, "what it waits for is not known")
    return [head, why, victims, child_text(verdict)]


def child_text(verdict: Verdict) -> str:
    """Return `rank 1 waits for its loader worker (pid 4711), which is at data.py:12 in read`."""
    child = verdict.child
    if child is None:
        return ""
    what = child.what if child.what.endswith(("process", "worker")) else "child process"
    first = verdict.culprits[:1] or verdict.sides[0].ranks[:1]
    place = f", which is at {place_text(verdict.child_place)}" if verdict.child_place else ""
    return f"{ranks_text(first)} waits for its {what} (pid {child.pid}){place}"
