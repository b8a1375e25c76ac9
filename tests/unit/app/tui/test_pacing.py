"""What moves by itself waits for the terminal; keys do not; a terminal that never answers is no worse off."""

from __future__ import annotations

import pytest

from app.tui.pacing import CHOKED_BYTES, MAX_UNANSWERED, MIN_SLICE_BYTES, NUM_TAGS, PATIENCE_S, SLICE_S, Pacer

FRAME = 10_000


def asked(pacer: Pacer, now_s: float, num_bytes: int = FRAME) -> int:
    tag = pacer.ask(num_bytes, now_s)
    assert tag is not None
    return tag


def moves(pacer: Pacer) -> bool:
    return pacer.may_move


def is_choked(pacer: Pacer) -> bool:
    return pacer.is_choked


def over_a_link(pacer: Pacer, bytes_s: float, round_trip_s: float, num_paints: int = 20) -> None:
    """Paint large and small in turn, each answered when the link has carried it."""
    for turn in range(num_paints):
        num_bytes = 20_000 if turn % 2 else 100
        tag = asked(pacer, float(turn), num_bytes)
        pacer.answered(tag, turn + round_trip_s + num_bytes / bytes_s)


def test_nothing_moves_while_an_answer_is_owed() -> None:
    pacer = Pacer()
    assert moves(pacer)
    tag = asked(pacer, 0.0)

    assert not moves(pacer)
    pacer.answered(tag, 0.05)
    assert moves(pacer)


def test_a_later_answer_answers_earlier_questions_that_were_lost() -> None:
    pacer = Pacer()
    asked(pacer, 0.0)
    second = asked(pacer, 0.1)

    pacer.answered(second, 0.2)

    assert moves(pacer)


def test_a_stray_answer_answers_nothing() -> None:
    pacer = Pacer()
    tag = asked(pacer, 0.0)

    pacer.answered(tag + 1, 0.1)
    pacer.answered(77, 0.1)

    assert not moves(pacer)


def test_keys_share_a_paint_only_once_the_link_is_behind_by_more_than_a_screenful() -> None:
    pacer = Pacer()
    first = asked(pacer, 0.0, CHOKED_BYTES)
    assert not is_choked(pacer), "a single paint, however large, has nothing before it"

    asked(pacer, 0.1, 1)
    assert is_choked(pacer)
    pacer.answered(first, 0.2)
    assert not is_choked(pacer)


def test_a_slice_is_what_the_link_carries_in_a_moment() -> None:
    quick, slow, slowest = Pacer(), Pacer(), Pacer()
    assert quick.slice_bytes == float("inf"), "nothing is known of the link yet"

    over_a_link(slow, bytes_s=1e6, round_trip_s=0.04)
    over_a_link(slowest, bytes_s=2e4, round_trip_s=0.1, num_paints=4)

    assert slow.slice_bytes == pytest.approx(1e6 * SLICE_S, rel=0.1)
    assert slowest.slice_bytes == MIN_SLICE_BYTES


def test_a_terminal_that_never_answers_is_asked_no_more_and_painted_all_the_same() -> None:
    pacer = Pacer()
    now_s = 0.0
    for _ in range(MAX_UNANSWERED):
        asked(pacer, now_s)
        assert not moves(pacer)
        now_s += PATIENCE_S
        pacer.look(now_s)
        assert moves(pacer), "what moves goes on, if only every other second"

    assert not pacer.is_pacing
    assert pacer.ask(FRAME, now_s) is None
    assert moves(pacer)


def test_an_answer_that_comes_late_begins_the_pacing_again() -> None:
    pacer = Pacer()
    for turn in range(MAX_UNANSWERED):
        asked(pacer, turn * PATIENCE_S)
        pacer.look((turn + 1) * PATIENCE_S)
    assert pacer.ask(FRAME, 99.0) is None

    pacer.answered(0, 100.0)

    assert pacer.is_pacing
    assert pacer.ask(FRAME, 100.0) is not None


def test_patience_with_one_answer_is_not_lost_to_another() -> None:
    pacer = Pacer()
    asked(pacer, 0.0)
    asked(pacer, PATIENCE_S / 2)

    pacer.look(PATIENCE_S)

    assert not moves(pacer)
    pacer.look(1.5 * PATIENCE_S)
    assert moves(pacer)


def test_no_tag_stands_for_two_open_questions() -> None:
    pacer = Pacer()

    tags = [pacer.ask(1, 0.0) for _ in range(3 * NUM_TAGS)]

    told = [tag for tag in tags if tag is not None]
    assert len(told) == len(set(told)) == NUM_TAGS - 1


def test_a_terminal_that_was_given_away_owes_nothing() -> None:
    pacer = Pacer()
    over_a_link(pacer, bytes_s=1e5, round_trip_s=0.1)
    asked(pacer, 100.0)

    pacer.restart()

    assert moves(pacer)
    assert pacer.slice_bytes == float("inf")


def test_a_terminal_that_is_taken_again_is_asked_again() -> None:
    pacer = Pacer()
    for turn in range(MAX_UNANSWERED):
        asked(pacer, turn * PATIENCE_S)
        pacer.look((turn + 1) * PATIENCE_S)
    assert pacer.ask(FRAME, 99.0) is None

    pacer.restart()

    assert pacer.ask(FRAME, 100.0) is not None


def test_keys_do_not_hide_a_terminal_that_never_answers() -> None:
    pacer, now_s = Pacer(), 0.0
    while pacer.is_pacing and now_s < 60:
        pacer.ask(FRAME, now_s)
        now_s += 0.3
        pacer.look(now_s)

    assert now_s < 2 * PATIENCE_S
    assert moves(pacer)
