"""Which host tries to reach which, and the findings from the results. Pure.

With few hosts each tries all others. With many, each tries the first one, where the store of a job listens, and the
next one, as the ring of an all-reduce does: two connections a host instead of a square.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

from agent.wire.examination import Health, Row
from app.text import short_seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.wire.examination import Listening, Reached
    from app.preflight.findings import Answers

MAX_FULL_MESH = 8


def routes(hosts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the hosts that each host tries to reach."""
    if len(hosts) <= MAX_FULL_MESH:
        return {host: tuple(other for other in hosts if other != host) for host in hosts}
    following = (*hosts[1:], hosts[0])
    return {
        host: tuple(dict.fromkeys(other for other in (hosts[0], after) if other != host))
        for host, after in zip(hosts, following, strict=True)
    }


def target_text(listening: Listening) -> str:
    """Return where a host listens, for another one to connect to; empty if no host may be sent there.

    A host reports its address itself, and it becomes another host's command: only possible neighbours are accepted.
    """
    address = _address_elsewhere(listening.address)
    if not listening.port or not address:
        return ""
    return f"[{address}]:{listening.port}" if ":" in address else f"{address}:{listening.port}"


def _address_elsewhere(text: str) -> str:
    """Return a normalised address; empty unless it may be one of another machine."""
    try:
        parsed = ip_address(text)
    except ValueError:
        return ""
    # Not all Pythons see through ::ffff:127.0.0.1; the kernel does.
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    is_ours = parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local
    return "" if is_ours else str(parsed)


def reach_remarks(answers: Sequence[Answers]) -> Iterator[tuple[str, Row]]:
    """Yield the findings on who reaches whom: the host, or an empty name for all of them, and a row."""
    yield from _silent_remarks(answers)
    tried = {one.host: one.reached for one in answers if one.reached}
    tokens = {one.host: one.listening.token for one in answers if one.listening}
    places = {one.host: target_text(one.listening) for one in answers if one.listening}
    failed = [
        (source, target, _why_not_reached(reached, tokens[target]))
        for source, found in tried.items()
        for target, reached in found.items()
        if _why_not_reached(reached, tokens[target])
    ]
    came = {target: sum(target in found for found in tried.values()) for target in places}
    # One finding for a host that none reaches, or that reaches none, instead of one for each of the others.
    unreached = {target for target, count in came.items() if count > 1 and count == _count(failed, 1, target)}
    cut_off = {source for source, found in tried.items() if len(found) > 1 and len(found) == _count(failed, 0, source)}
    for target, place in places.items():
        if target in unreached:
            why = next(why for _, failed_target, why in failed if failed_target == target)
            todo = f"let the others through: a firewall, or the wrong network? It listened at {place}"
            yield target, Row("reach", Health.BAD, f"none of the others reaches it: {why}", todo)
    for source in tried:
        if source in cut_off - unreached:
            why = next(why for failed_source, _, why in failed if failed_source == source)
            yield source, Row("reach", Health.BAD, f"it reaches none of the others: {why}", "has it a route to them?")
    for source, target, why in failed:
        if target not in unreached and source not in cut_off:
            todo = f"is there a route, or a firewall between? try there: nc -vz {places[target].rpartition(':')[0]} 22"
            yield source, Row("reach", Health.BAD, f"it does not reach {target} at {places[target]}: {why}", todo)
    if tried and not failed:
        is_whole = all(one.reached is not None for one in answers)
        yield "", _all_well(tried, "every host" if is_whole else "every host that answers")


def _silent_remarks(answers: Sequence[Answers]) -> Iterator[tuple[str, Row]]:
    has_others = sum(one.listening is not None for one in answers) > 1
    for one in answers:
        if one.listening is not None and one.listening.error:
            yield one.host, Row("ports", Health.BAD, one.listening.error, "end what holds it, or name another: --port")
        elif has_others and one.listening is not None and not target_text(one.listening):
            detail = f"it listens at {one.listening.address or 'no address'}, where no other host can reach it"
            yield one.host, Row("reach", Health.BAD, detail, "give it an address that the others have a route to")
        if one.reach_error:
            yield one.host, Row("reach", Health.WARN, f"it could not try the others: {one.reach_error}", "try again")


def _count(failed: Sequence[tuple[str, str, str]], place: int, host: str) -> int:
    return sum(entry[place] == host for entry in failed)


def _why_not_reached(reached: Reached, token: str) -> str:
    """Return why a host was not reached; empty if it was."""
    if reached.error:
        return reached.error[:1].lower() + reached.error[1:]
    return "" if reached.token == token else "another machine answers there (is its address given twice?)"


def _all_well(tried: Mapping[str, Mapping[str, Reached]], who: str) -> Row:
    count = sum(len(found) for found in tried.values())
    slowest_s, source, target = max(
        (reached.connect_s, source, target) for source, found in tried.items() for target, reached in found.items()
    )
    whom = "every other" if len(tried) <= MAX_FULL_MESH else "the first and the next"
    slowest = short_seconds_text(slowest_s)
    return Row(
        "reach",
        Health.OK,
        f"{who} reaches {whom} ({count} connections; the slowest {slowest}, {source} to {target})",
    )
