"""Whatever ranks list, they all come to the same verdict, and it names a real difference."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ddpcore.agreement import common_problem, difference, ranks_text, speakers

LISTINGS = st.dictionaries(st.sampled_from(["parameter 0", "parameter 1", "buffer 0"]), st.sampled_from("ab"))


def ranks_in(text: str) -> list[int]:
    """Read back what `ranks_text` has written."""
    ranks: list[int] = []
    for run in text.removeprefix("ranks ").removeprefix("rank ").split(", "):
        first, _, last = run.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return ranks


@given(st.sets(st.integers(0, 40), min_size=1))
def test_spelt_ranks_can_be_read_back(ranks: set[int]) -> None:
    assert ranks_in(ranks_text(list(ranks))) == sorted(ranks)


def test_ranks_are_spelt_as_people_do() -> None:
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([7, 1, 0, 2, 9]) == "ranks 0-2, 7, 9"


@given(st.lists(LISTINGS, min_size=1, max_size=6))
def test_a_difference_is_named_where_there_is_one_with_every_rank_on_its_side(listings: list[dict[str, str]]) -> None:
    digests = [json.dumps(listing, sort_keys=True) for listing in listings]

    speaking = speakers(digests)

    assert bool(speaking) == (len(set(digests)) > 1)
    if not speaking:
        return
    said = difference(digests, {rank: listings[rank] for rank in speaking})
    place, _, sides = said.partition(" is ")
    values = [listing.get(place, "absent") for listing in listings]
    assert len(set(values)) > 1
    for value in set(values):
        ranks = [rank for rank, one in enumerate(values) if one == value]
        assert f"{value} on {ranks_text(ranks)}" in sides


def test_listings_that_differ_only_in_their_order_are_said_to_differ() -> None:
    assert difference(["x", "y"], {0: {"a": "1"}, 1: {"a": "1"}}) == "their digests differ"


def test_a_problem_of_all_is_told_once_and_others_with_their_ranks() -> None:
    assert common_problem(["", "", ""]) == ""
    assert common_problem(["bad", "bad"]) == "bad"
    assert common_problem(["", "bad", "worse", "bad"]) == "ranks 1, 3: bad; rank 2: worse"
