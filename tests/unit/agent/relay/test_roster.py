"""Which agents a relay lets in."""

from __future__ import annotations

from typing import Any

from agent.relay.roster import LetIn, Roster, Turned
from agent.wire.relay import MAX_NODES, RELAY_VERSION, SILENT_S, Hello


def hello(node: str = "a", instance: str = "1", **fields: Any) -> Hello:
    facts: dict[str, Any] = {"version": RELAY_VERSION, "node": node, "instance": instance, "place": b"{}"}
    return Hello(**(facts | fields))


def test_an_agent_is_known_by_its_connection_from_its_first_word_on() -> None:
    roster = Roster()

    assert roster.mark_seen(b"p", 0.0) is None
    assert isinstance(roster.hello(b"p", hello(), 0.0), LetIn)
    known = roster.mark_seen(b"p", 1.0)
    assert known is not None
    assert (known.node, known.received_at_s, roster.peers, len(roster)) == ("a", 1.0, [b"p"], 1)


def test_two_agents_of_one_name_the_second_is_turned_away_and_told_what_to_do() -> None:
    roster = Roster()
    roster.hello(b"p", hello(), 0.0)

    answer = roster.hello(b"q", hello(instance="2"), 1.0)

    assert isinstance(answer, Turned)
    assert "serve --node" in answer.why
    assert answer.in_the_way is roster.find("a")
    assert roster.by_peer(b"q") is None


def test_an_agent_that_comes_by_a_new_connection_takes_the_place_of_itself() -> None:
    roster = Roster()
    roster.hello(b"p", hello(), 0.0)

    answer = roster.hello(b"q", hello(), 1.0)

    assert isinstance(answer, LetIn)
    assert answer.instead_of is not None
    assert answer.instead_of.peer == b"p"
    assert roster.peers == [b"q"]


def test_another_version_and_a_second_name_on_one_connection_are_turned_away() -> None:
    roster = Roster()

    assert isinstance(roster.hello(b"p", hello(version=RELAY_VERSION + 1), 0.0), Turned)
    roster.hello(b"p", hello(), 0.0)
    assert isinstance(roster.hello(b"p", hello("b"), 0.0), Turned)
    assert len(roster) == 1


def test_there_are_only_so_many_nodes() -> None:
    roster = Roster()
    for number in range(MAX_NODES):
        assert isinstance(roster.hello(b"%d" % number, hello(f"n{number}"), 0.0), LetIn)

    assert isinstance(roster.hello(b"x", hello("one-more"), 0.0), Turned)
    assert isinstance(roster.hello(b"y", hello("n7"), 0.0), LetIn)


def test_who_says_nothing_for_too_long_is_silent_and_who_is_forgotten_is_not() -> None:
    roster = Roster()
    roster.hello(b"p", hello(), 0.0)
    roster.hello(b"q", hello("b"), 0.0)
    roster.mark_seen(b"q", SILENT_S)

    assert [known.node for known in roster.silent(SILENT_S + 1)] == ["a"]
    assert roster.forget(b"p") is not None
    assert roster.forget(b"p") is None
    assert roster.find("a") is None
    assert roster.silent(SILENT_S + 1) == []


def test_the_largest_number_of_nodes_that_anybody_expects_counts() -> None:
    roster = Roster(2)
    roster.hello(b"p", hello(num_expected=8), 0.0)
    roster.hello(b"q", hello("b", num_expected=4), 0.0)

    assert roster.num_expected == 8
