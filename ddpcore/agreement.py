"""Do the ranks agree? From what each of them has brought to `barriers.exchange`, every rank draws the same conclusion.

Pure: texts of all ranks in, one sentence out, the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def common_problem(problems: Sequence[str]) -> str:
    """Return what is wrong on some ranks, in one sentence: each problem once, with its ranks; "" for none."""
    ranks_of = ranks_by_value(problems)
    if len(ranks_of) == 1:
        return problems[0]
    return "; ".join(f"{ranks_text(ranks)}: {problem}" for problem, ranks in ranks_of.items() if problem)


def speakers(digests: Sequence[str]) -> list[int]:
    """Return one rank for each different digest, for an error that names them; none if all digests are equal."""
    ranks_of = ranks_by_value(digests)
    return [ranks[0] for ranks in ranks_of.values()] if len(ranks_of) > 1 else []


def difference(digests: Sequence[str], listings: Mapping[int, Mapping[str, str]]) -> str:
    """Return the first place where the ranks' listings differ, each value with the ranks that have it.

    `digests` are of ranks 0, 1, ...: equal digests stand for equal listings. `listings` are those of the `speakers`.
    """
    of_digest = {digests[rank]: listing for rank, listing in listings.items()}
    places = dict.fromkeys(place for listing in listings.values() for place in listing)
    for place in places:
        ranks_of = ranks_by_value([of_digest[digest].get(place, "absent") for digest in digests])
        if len(ranks_of) > 1:
            # What most ranks have comes last: the odd one is what people look for.
            values = sorted(ranks_of.items(), key=lambda value: len(value[1]))
            return f"{place} is " + ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in values)
    return "their digests differ"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 7", as the console writes it."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def ranks_by_value(values: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks of each value, in the order of first appearance."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(rank)
    return ranks_of
