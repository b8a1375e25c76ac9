"""Ranks that stand outside collectives, in words: parts of a verdict's sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.words import place_text, ranks_text, seconds_text

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Side, Verdict
    from ddpcore.wire import PeerCall


def peer_text(call: PeerCall | None) -> str:
    """Return ` to rank 2 with tag 7 and 400 bytes`, of a send; empty of a collective."""
    if call is None or call.op not in {"send", "recv"}:
        return ""
    direction = "to" if call.op == "send" else "from"
    peer = "any rank" if call.peer is None else f"rank {call.peer}"
    size = "room for " if call.op == "recv" else ""
    told = [f"tag {call.tag}"] if call.tag else []
    told += [f"{size}{call.num_bytes[-1]:,} bytes"] if call.num_bytes else []
    return f" {direction} {peer}" + (f" with {' and '.join(told)}" if told else "")


def standstill_parts(verdict: Verdict, who: str, victims: str) -> list[str]:
    """Return since when no rank has moved, which ranks stand where, and who waits for them."""
    step = "" if verdict.step is None else f" after step {verdict.step}"
    others = "" if verdict.waiting else ", and none waits in a collective"
    rank = "rank that is left" if verdict.ended else "rank"
    head = f"no {rank} has moved for {seconds_text(verdict.for_s)}{step}{others}"
    # Who stands elsewhere comes first: a narrow screen cuts the end.
    sides = sorted(
        (side for side in verdict.sides if side.place), key=lambda side: side.ranks[0] not in verdict.culprits
    )
    places = [f"{_standing(side, verdict, who)} at {place_text(side.place)}" for side in sides]
    has = "has" if len(verdict.ended) == 1 else "have"
    ended = f"{ranks_text(verdict.ended)} {has} ended (exit code 0)" if verdict.ended else ""
    return [head, ", ".join(places), victims, ended, child_text(verdict)]


def _standing(side: Side, verdict: Verdict, who: str) -> str:
    ranks = who if side.ranks == verdict.culprits else ranks_text(side.ranks)
    return f"{ranks} {'stands' if len(side.ranks) == 1 else 'stand'}"


def not_exiting_parts(verdict: Verdict, who: str, victims: str) -> list[str]:
    """Return whose process does not end, and what keeps it from that."""
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
    place = f", which is at {place_text(verdict.child_place)}" if verdict.child_place else ""
    return f"{ranks_text(first)} waits for its {what} (pid {child.pid}){place}"
