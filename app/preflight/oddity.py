"""Who differs from the others. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_HOSTS_NAMED = 4
"""Hosts that a sentence names, of several that have the same."""


class Odd(NamedTuple):
    """How values differ between hosts."""

    usual: str | None
    """What more than half of the hosts have; None if there is no such thing."""
    others: str
    """Who has the usual one, seen from one that has not: `the others` or `most others`."""
    by_value: dict[str, list[str]]
    """The hosts of each value that is not the usual one, in the order of the hosts."""


def odd_ones(values: Mapping[str, str]) -> Odd | None:
    """Return who differs; None where all are alike.

    Args:
        values: By host.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    most, count = counts.most_common(1)[0]
    usual = most if 2 * count > len(values) else None
    by_value: dict[str, list[str]] = {}
    for host, value in values.items():
        if value != usual:
            by_value.setdefault(value, []).append(host)
    num_odd = len(values) - count
    return Odd(usual, "the others" if num_odd == 1 else "most others", by_value)
