"""What a console is told of the nodes of a relay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.transport.latest_reports import LatestReports, ReportSubscriber
from agent.wire.relay import MAX_NODES, MERGED_BYTES, Merged, RosterEntry, decode_merged, encode_merged


def newest_of(*nodes: str) -> LatestReports:
    newest = LatestReports()
    for node in nodes:
        newest.put_node(RosterEntry(node, is_here=True, place=b"{}"), 0.0)
    return newest


def taken(subscriber: ReportSubscriber, now_s: float = 10.0) -> Merged:
    merged = subscriber.take(1, 0, 0, now_s)
    assert merged is not None
    return decode_merged(encode_merged(merged))


def test_the_first_frame_comes_at_once_also_of_a_relay_without_nodes() -> None:
    subscriber = ReportSubscriber(LatestReports(), "r")

    assert subscriber.has_news
    assert taken(subscriber).is_whole
    assert not subscriber.has_news


def test_of_many_reports_of_a_node_a_console_gets_the_newest_with_its_age() -> None:
    newest = newest_of("a", "b")
    for number in range(5):
        newest.put_report("a", b"%d" % number, 4.0 + number)
    subscriber = ReportSubscriber(newest, "r")

    first = taken(subscriber)

    assert [(report.node, report.frame, report.age_ms) for report in first.reports] == [("a", b"4", 2000)]
    assert {entry.node for entry in first.nodes} == {"a", "b"}
    assert subscriber.take(1, 0, 0, 11.0) is None


def test_a_console_hears_only_of_what_has_changed_since_it_was_told() -> None:
    newest = newest_of("a", "b")
    newest.put_report("a", b"1", 1.0)
    newest.put_report("b", b"1", 1.0)
    subscriber = ReportSubscriber(newest, "r")
    taken(subscriber)

    newest.put_report("b", b"2", 2.0)
    second = taken(subscriber)

    assert (second.nodes, [report.frame for report in second.reports]) == ([], [b"2"])


def test_a_slow_console_costs_a_quick_one_nothing_and_finds_the_newest_of_all() -> None:
    newest = newest_of("a", "b")
    quick, slow = ReportSubscriber(newest, "r"), ReportSubscriber(newest, "r")
    for number in range(100):
        for node in ("a", "b"):
            newest.put_report(node, b"%d" % number, float(number))
        assert {report.frame for report in taken(quick, 100.0).reports} == {b"%d" % number}

    assert {report.frame for report in taken(slow, 100.0).reports} == {b"99"}


def test_a_frame_is_cut_and_a_console_that_is_too_slow_still_hears_of_every_node_in_turn() -> None:
    names = [f"n{number}" for number in range(40)]
    newest = newest_of(*names)
    subscriber = ReportSubscriber(newest, "r")
    heard: list[str] = []
    for round_ in range(4):
        for node in names:
            newest.put_report(node, bytes([round_]) * 30_000, float(round_))
        merged = taken(subscriber)
        assert len(encode_merged(merged)) < MERGED_BYTES + 40_000
        assert subscriber.is_behind
        heard += [report.node for report in merged.reports]

    assert len(set(heard)) == len(heard)
    untold = set(names) - set(heard)
    assert untold
    assert {report.node for report in taken(subscriber).reports[: len(untold)]} == untold


def test_a_console_that_is_too_slow_for_the_reports_knows_every_node_before_them() -> None:
    names = [f"n{number}" for number in range(MAX_NODES)]
    newest = newest_of(*names)
    for node in names:
        newest.put_node(RosterEntry(node, is_here=True, place=b"x" * 400), 0.0)
    subscriber = ReportSubscriber(newest, "r")
    known: list[str] = []
    for _ in range(100):
        for node in names:
            newest.put_report(node, b"x" * 8000, 1.0)
        merged = taken(subscriber)
        known += [entry.node for entry in merged.nodes]
        assert merged.is_whole or not merged.reports
        if merged.is_whole:
            break

    assert sorted(known) == sorted(names)
    assert subscriber.is_behind


def test_a_node_that_goes_is_told_at_once_to_a_console_that_is_too_slow_for_the_reports() -> None:
    names = [f"n{number}" for number in range(40)]
    newest = newest_of(*names)
    subscriber = ReportSubscriber(newest, "r")
    for node in names:
        newest.put_report(node, b"x" * 30_000, 1.0)
    taken(subscriber)
    newest.put_node(RosterEntry("n7", is_here=False, why="x"), 2.0)

    assert [(entry.node, entry.is_here) for entry in taken(subscriber).nodes] == [("n7", False)]


def test_a_node_that_has_gone_is_told_with_its_reason_and_without_its_old_report() -> None:
    newest = newest_of("a")
    newest.put_report("a", b"old", 1.0)
    newest.put_node(RosterEntry("a", is_here=False, why="nothing has come from it"), 3.0)

    merged = taken(ReportSubscriber(newest, "r"))

    assert merged.reports == []
    assert (merged.nodes[0].why, merged.nodes[0].silent_ms) == ("nothing has come from it", 7000)
    assert newest.num_bytes == 0


def test_a_node_that_comes_back_reports_again_to_a_console_that_knew_it() -> None:
    newest = newest_of("a")
    newest.put_report("a", b"before", 1.0)
    subscriber = ReportSubscriber(newest, "r")
    taken(subscriber)
    newest.put_node(RosterEntry("a", is_here=False, why="x"), 2.0)
    newest.put_node(RosterEntry("a", is_here=True), 3.0)
    newest.put_report("a", b"after", 4.0)

    merged = taken(subscriber)

    assert [entry.is_here for entry in merged.nodes] == [True]
    assert [report.frame for report in merged.reports] == [b"after"]


def test_reports_that_nobody_looks_at_are_let_go_of() -> None:
    newest = newest_of("a")
    newest.put_report("a", b"12345", 1.0)
    assert newest.num_bytes == 5

    newest.forget_reports()

    assert newest.num_bytes == 0
    assert taken(ReportSubscriber(newest, "r")).reports == []


def test_a_node_that_is_forgotten_is_told_of_no_more() -> None:
    newest = newest_of("a", "b")
    subscriber = ReportSubscriber(newest, "r")
    taken(subscriber)
    newest.forget_node("a")
    newest.put_report("b", b"1", 1.0)

    assert [report.node for report in taken(subscriber).reports] == ["b"]
    assert newest.names == ["b"]


def test_of_more_nodes_than_there_may_be_the_one_that_is_gone_longest_is_forgotten() -> None:
    newest = newest_of(*(f"n{number}" for number in range(MAX_NODES)))
    newest.put_node(RosterEntry("n7", is_here=False, why="x"), 5.0)
    newest.put_node(RosterEntry("n3", is_here=False, why="x"), 4.0)

    assert newest.put_node(RosterEntry("n8", is_here=True), 6.0) == ""
    assert newest.put_node(RosterEntry("new", is_here=True), 6.0) == "n3"
    assert newest.put_node(RosterEntry("newer", is_here=True), 6.0) == "n7"
    assert len(newest.names) == MAX_NODES


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=60))
def test_whoever_takes_now_and_then_ends_with_the_newest_of_every_node(steps: list[tuple[str, int]]) -> None:
    newest = newest_of(*"abc")
    consoles = [ReportSubscriber(newest, "r") for _ in range(2)]
    shown: list[dict[str, bytes]] = [{}, {}]
    truth: dict[str, bytes] = {}
    for number, (node, who) in enumerate(steps):
        truth[node] = b"%d" % number
        newest.put_report(node, truth[node], float(number))
        if who < 2 and (merged := consoles[who].take(1, 0, 0, 100.0)) is not None:
            shown[who] |= {report.node: report.frame for report in merged.reports}

    for console, seen in zip(consoles, shown, strict=True):
        if (merged := console.take(1, 0, 0, 100.0)) is not None:
            seen |= {report.node: report.frame for report in merged.reports}
        assert seen == truth
