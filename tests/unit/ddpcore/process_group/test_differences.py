"""What differs between ranks, in words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddpcore.process_group.equality import comparable_arguments, differences

FACTS = st.dictionaries(st.sampled_from(["torch", "program", "NCCL"]), st.sampled_from(["1", "2", ""]))


def test_equal_ranks_have_no_differences() -> None:
    assert differences([{"torch": "2.13.0"}] * 3, ["a", "a", "b"]) == {}
    assert differences([], []) == {}


def test_the_largest_group_comes_first_and_hosts_are_named() -> None:
    facts = [{"torch": "2.12.1"}, {"torch": "2.13.0"}, {"torch": "2.13.0"}, {}]

    assert differences(facts, ["a", "b", "b", "c"]) == {
        "torch": "torch differs: 2.13.0 on ranks 1-2 (b), 2.12.1 on rank 0 (a), nothing on rank 3 (c)"
    }


def test_an_empty_value_reads_as_nothing() -> None:
    assert differences([{"args": ""}, {"args": "-x"}], ["a", "b"]) == {
        "args": "args differs: nothing on rank 0 (a), -x on rank 1 (b)"
    }


def test_many_values_and_many_hosts_are_cut() -> None:
    facts = [{"seed": str(rank)} for rank in range(8)]

    (text,) = differences(facts, ["h"] * 8).values()
    assert text.endswith("and 4 more values")
    (text,) = differences([{"x": "1"}] * 5 + [{"x": "2"}], [f"h{rank}" for rank in range(6)]).values()
    assert "1 on ranks 0-4 (h0, h1, h2 and 2 more)" in text


def test_of_long_values_the_part_is_shown_in_which_they_differ() -> None:
    common = "--data /very/long " * 20

    (text,) = differences(
        [{"args": f"{common}--lr 0.1 {'x' * 200}"}, {"args": f"{common}--lr 0.2"}], ["a", "a"]
    ).values()

    assert "--lr 0.1" in text
    assert "--lr 0.2" in text
    assert len(text) < 400
    assert differences([{"v": "a" * 200}, {"v": "b" * 200}], ["h", "h"])["v"].count("...") == 2


def test_what_says_which_rank_it_is_is_no_argument() -> None:
    argv = ["--local-rank=1", "--lr", "0.1", "--rank", "3", "--node_rank", "0", "--ranks", "4", "a b"]

    assert comparable_arguments(argv) == "--lr 0.1 --ranks 4 'a b'"
    assert comparable_arguments(["--local_rank"]) == ""


@given(st.lists(FACTS, min_size=1, max_size=8))
def test_a_fact_is_named_if_and_only_if_ranks_differ_in_it(facts: list[dict[str, str]]) -> None:
    names = {name for of_rank in facts for name in of_rank}
    expected = {name for name in names if len({of_rank.get(name, "nothing") for of_rank in facts}) > 1}

    found = differences(facts, ["h"] * len(facts))

    assert set(found) == {text.partition(" differs: ")[0] for text in found.values()} == expected
