"""Nodes that have come after a console was opened: when they are told of, and in which words."""

from __future__ import annotations

from app.model.new_nodes import MAX_KNOWN, MAX_WAIT_S, SETTLE_S, NewNodes, NewNodeWatch
from app.view.nodes import new_nodes_notice, new_nodes_text

NONE = NewNodes()


def come(*nodes: str) -> NewNodes:
    return NewNodes("login1", nodes)


def test_those_that_come_together_are_told_of_together() -> None:
    watch = NewNodeWatch()

    assert watch.news(come(), 0.0) == NONE
    assert watch.news(come("a"), 1.0) == NONE
    assert watch.news(come("a", "b"), 2.5) == NONE
    assert watch.news(come("a", "b"), 2.5 + 0.9 * SETTLE_S) == NONE
    assert watch.news(come("a", "b"), 2.5 + SETTLE_S) == come("a", "b")
    assert watch.news(come("a", "b"), 60.0) == NONE, "once is enough"


def test_a_stream_of_them_is_told_of_before_it_ends() -> None:
    watch = NewNodeWatch()
    told_s = [
        float(number)
        for number in range(25)
        if watch.news(come(*(f"n{i}" for i in range(number))), float(number)) != NONE
    ]

    assert told_s == [1.0 + MAX_WAIT_S, 2.0 + 2 * MAX_WAIT_S]


def test_one_that_goes_and_comes_again_is_told_of_once_and_the_next_one_too() -> None:
    watch = NewNodeWatch()
    watch.news(come("a"), 0.0)
    assert watch.news(come("a"), SETTLE_S) == come("a")

    assert watch.news(come(), 10.0) == NONE
    assert watch.news(come("a"), 20.0) == NONE
    assert watch.news(come("a"), 30.0) == NONE
    assert watch.news(come("a", "b"), 40.0) == NONE
    assert watch.news(come("a", "b"), 40.0 + SETTLE_S) == come("b"), "the new one alone"


def test_one_that_has_gone_before_it_was_told_of_is_not_told_of() -> None:
    watch = NewNodeWatch()
    watch.news(come("a"), 0.0)

    assert watch.news(come(), 1.0) == NONE
    assert watch.news(come(), 30.0) == NONE


def test_the_words_say_how_many_and_what_to_do() -> None:
    assert new_nodes_text(come()) == ""
    assert new_nodes_text(come("a")) == "1 more node has come to the relay: leave and come in again"
    many = come(*(f"gpu{number}" for number in range(1200)))
    assert new_nodes_text(many) == "1,200 more nodes have come to the relay: leave and come in again"
    assert new_nodes_notice(many, "rankdeck attach") == (
        "1,200 more nodes have come to the relay on login1 (gpu0, gpu1 and 1198 more): leave and come in again to see "
        "them, by rankdeck attach"
    )


def test_names_of_nodes_are_safe_to_show() -> None:
    assert "\x1b" not in new_nodes_notice(come("\x1b[2J"), "rankdeck attach")


def test_names_without_end_are_not_kept() -> None:
    watch = NewNodeWatch()
    for first in range(0, 4 * MAX_KNOWN, MAX_KNOWN // 2):
        some = come(*(str(number) for number in range(first, first + MAX_KNOWN // 2)))
        watch.news(some, float(first))
        assert watch.news(some, first + SETTLE_S) == some
        assert len(watch._notified) <= 2 * MAX_KNOWN
