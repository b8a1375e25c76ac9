"""What differs between ranks that should be equal, in words.

Pure.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ddpcore.barriers.rank_words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_VALUES = 4
"""Different values of one fact told apart."""

MAX_CHARS = 120
"""Of one value."""

MAX_HOSTS = 3

ABSENT = "nothing"

_OWN_ARGUMENTS = frozenset(
    {"--local-rank", "--local_rank", "--rank", "--node-rank", "--node_rank", "--machine-rank", "--machine_rank"}
)
"""Options that say which rank this is: they differ by their meaning."""


def differences(facts: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> list[str]:
    """Return a sentence for each fact that is not the same on all ranks, the largest group first.

    Args:
        facts: Of each rank, in the order of ranks.
        hosts: Where each rank runs.
    """
    found = []
    for name in sorted({name for of_rank in facts for name in of_rank}):
        holders: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(facts):
            holders.setdefault(of_rank.get(name, ABSENT), []).append(rank)
        if len(holders) > 1:
            found.append(f"{name} differs: {_told(holders, hosts)}")
    return found


def comparable_arguments(argv: Iterable[str]) -> str:
    """Return a command line without what says which rank this is."""
    kept = []
    skips = False
    for argument in argv:
        if skips:
            skips = False
            continue
        if argument in _OWN_ARGUMENTS:
            skips = True
        elif argument.partition("=")[0] not in _OWN_ARGUMENTS:
            kept.append(argument)
    return shlex.join(kept)


def _told(holders: Mapping[str, list[int]], hosts: Sequence[str]) -> str:
    largest_first = sorted(holders.items(), key=lambda one: (-len(one[1]), one[1]))
    shown = _without_what_they_share([value for value, _ in largest_first])
    texts = [
        f"{value} on {ranks_text(ranks)} ({_hosts_text([hosts[rank] for rank in ranks])})"
        for value, (_, ranks) in zip(shown[:MAX_VALUES], largest_first, strict=False)
    ]
    more = [f"and {len(holders) - MAX_VALUES} more values"] if len(holders) > MAX_VALUES else []
    return ", ".join([*texts, *more])


def _without_what_they_share(values: Sequence[str]) -> list[str]:
    """Return long values cut to the part in which they differ."""
    if all(len(value) <= MAX_CHARS for value in values):
        return [value or ABSENT for value in values]
    start = 0
    while len({value[start : start + 1] for value in values}) == 1:
        start += 1
    start = max(0, start - MAX_CHARS // 4)
    head = "..." if start else ""
    return [
        f"{head}{value[start : start + MAX_CHARS]}{'...' if len(value) > start + MAX_CHARS else ''}" for value in values
    ]


def _hosts_text(hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts))
    more = f" and {len(names) - MAX_HOSTS} more" if len(names) > MAX_HOSTS else ""
    return ", ".join(names[:MAX_HOSTS]) + more
