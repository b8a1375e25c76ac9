"""When a host's agent is asked to listen, where it is heard, and when its reports come over SSH instead."""

from __future__ import annotations

import msgspec
import pytest

from agent.wire.direct import Listening
from app.roads.direct_addresses import MAX_ADDRESSES
from app.sessions.road_choice import (
    MAX_ROUNDS,
    RENEWALS,
    RETRY_S,
    SILENT_S,
    TRY_S,
    Ask,
    Effect,
    FallBack,
    HearAt,
    RoadChoice,
)

LEASE_S = 300.0
HERE = Listening("k" * 40, ["10.0.0.5"], 47000, LEASE_S)
HEARD_HERE = HearAt("10.0.0.5", 47000, "k" * 40)


def elsewhere(server_key: str = "k" * 40, *addresses: str) -> Listening:
    return msgspec.structs.replace(HERE, server_key=server_key, addresses=list(addresses or HERE.addresses))


def asked(preferred: str = "10.0.0.5") -> RoadChoice:
    choice = RoadChoice(preferred)
    assert choice.look(0.0, None) == Ask()
    return choice


def heard(until_s: float = 1.0) -> RoadChoice:
    """Return the choice of a host that was asked at 0 and is heard until then."""
    choice = asked()
    assert choice.answered(HERE, 0.0) == HEARD_HERE
    assert choice.look(until_s, until_s) is None
    return choice


def test_an_agent_is_asked_once_and_heard_where_it_listens() -> None:
    choice = asked()
    assert choice.look(1.0, None) is None, "asked already"
    assert choice.answered(HERE, 2.0) == HEARD_HERE
    assert [choice.look(2.0 + s, 2.0 + s) for s in range(1, 50)] == [None] * 49


def test_a_lease_is_renewed_in_time_and_nothing_else_changes() -> None:
    choice = heard()
    renewed_s = LEASE_S / RENEWALS
    assert choice.look(renewed_s - 0.1, renewed_s - 0.1) is None
    assert choice.look(renewed_s, renewed_s) == Ask()
    assert choice.answered(HERE, renewed_s) is None
    assert choice.look(renewed_s + 1, renewed_s + 1) is None
    assert choice.look(2 * renewed_s, 2 * renewed_s) == Ask()


@pytest.mark.parametrize("lease_s", [0.0, 0.001])
def test_an_agent_cannot_have_itself_asked_all_the_time(lease_s: float) -> None:
    choice = asked()
    choice.answered(msgspec.structs.replace(HERE, lease_s=lease_s), 0.0)
    assert [choice.look(s, s) for s in (1.0, 2.0, 4.0)] == [None] * 3


def test_one_that_falls_silent_is_asked_and_heard_anew_by_another_socket() -> None:
    choice = heard(1.0)
    assert choice.look(1.0 + SILENT_S - 0.1, 1.0) is None
    assert choice.look(1.0 + SILENT_S, 1.0) == Ask()
    assert choice.answered(HERE, 6.0) == HEARD_HERE, "also at the same place: libzmq does not come back by itself"
    assert choice.look(6.5, 6.4) is None


def test_one_that_is_heard_again_before_it_answers_keeps_its_connection() -> None:
    choice = heard(1.0)
    assert choice.look(6.0, 1.0) == Ask()
    assert choice.look(7.0, 6.9) is None
    assert choice.answered(HERE, 7.5) is None
    assert choice.look(8.0, 7.9) is None


def test_while_ssh_is_away_it_is_heard_all_the_same_and_keeps_its_connection_afterwards() -> None:
    choice, renewed_s = heard(), LEASE_S / RENEWALS
    assert choice.look(renewed_s, renewed_s) == Ask()
    choice.unanswered(renewed_s + 10)
    assert choice.look(renewed_s + 11, renewed_s + 11) is None
    assert choice.look(renewed_s + 12, renewed_s + 12) == Ask()
    assert choice.answered(HERE, renewed_s + 12.1) is None
    assert choice.look(renewed_s + 13, renewed_s + 13) is None


def test_an_agent_that_began_anew_is_heard_by_its_new_key() -> None:
    choice = heard(1.0)
    assert choice.look(6.0, 1.0) == Ask()
    assert choice.answered(elsewhere("n" * 40), 6.1) == HearAt("10.0.0.5", 47000, "n" * 40)


def test_one_that_does_not_answer_is_asked_again_for_ever_and_never_given_up() -> None:
    choice, now_s = heard(1.0), 6.0
    for _ in range(20):
        assert choice.look(now_s, 1.0) == Ask()
        choice.unanswered(now_s)
        assert choice.look(now_s + RETRY_S / 2, 1.0) is None
        now_s += RETRY_S
    assert choice.look(now_s, 1.0) == Ask()
    assert choice.answered(HERE, now_s) == HEARD_HERE


def test_addresses_are_tried_in_turn_that_of_ssh_first_and_only_those_that_may_lead_there() -> None:
    choice, tried, now_s = asked("10.0.0.7"), [], 0.0
    effect: Effect | None = choice.answered(
        elsewhere("k" * 40, "127.0.0.1", "::", "nonsense", "10.0.0.6", "10.0.0.7", "2001:db8::5", "10.0.0.8"), now_s
    )
    while isinstance(effect, HearAt):
        tried.append(effect.address)
        assert choice.look(now_s + TRY_S - 0.1, None) is None
        now_s += TRY_S
        effect = choice.look(now_s, None)
    assert tried == ["10.0.0.7", "10.0.0.6", "2001:db8::5"]
    assert len(tried) == MAX_ADDRESSES
    assert effect == Ask(), "is the way over SSH still there?"


def test_where_ssh_answers_and_nothing_is_heard_reports_come_over_ssh_and_it_is_said_what_to_do() -> None:
    choice = asked()
    choice.answered(HERE, 0.0)
    assert choice.look(TRY_S, None) == Ask()

    effect = choice.answered(HERE, TRY_S)

    assert isinstance(effect, FallBack)
    assert "10.0.0.5, TCP port 47000" in effect.words
    assert "telemetry_port" in effect.words
    assert choice.look(1000.0, 999.0) is None, "and it stays so"


def test_silence_is_no_reason_while_ssh_is_silent_too() -> None:
    choice = asked()
    choice.answered(HERE, 0.0)
    assert choice.look(TRY_S, None) == Ask()
    choice.unanswered(13.0)
    assert choice.look(13.0 + RETRY_S, None) == Ask()
    assert choice.answered(HERE, 16.0) == HEARD_HERE, "the cable was pulled: it is tried anew"


def test_an_agent_that_is_never_heard_and_tells_of_another_place_each_time_is_given_up() -> None:
    choice, now_s = asked(), 0.0
    effect = choice.answered(HERE, now_s)
    for number in range(MAX_ROUNDS):
        assert isinstance(effect, HearAt)
        now_s += TRY_S
        assert choice.look(now_s, None) == Ask()
        effect = choice.answered(elsewhere(f"{number:040}"), now_s)
    assert isinstance(effect, FallBack)


def test_a_refusal_is_told_and_ends_the_attempt() -> None:
    choice = asked()
    assert choice.refused("no address on eth9", 1.0) == FallBack("no address on eth9")
    assert choice.look(100.0, None) is None


def test_a_refusal_that_may_pass_is_asked_about_once_more() -> None:
    choice = asked()
    assert choice.refused("no free port", 1.0, may_pass=True) is None
    assert choice.look(1.0 + RETRY_S / 2, None) is None
    assert choice.look(1.0 + RETRY_S, None) == Ask()
    assert choice.refused("no free port", 4.0, may_pass=True) == FallBack("no free port")
    assert choice.look(100.0, None) is None

    choice = asked()
    choice.refused("no free port", 1.0, may_pass=True)
    assert choice.look(1.0 + RETRY_S, None) == Ask()
    assert choice.answered(HERE, 4.0) == HEARD_HERE, "it has passed"


def test_one_whose_addresses_are_all_our_own_is_not_heard_there() -> None:
    effect = asked().answered(
        elsewhere("k" * 40, "127.0.0.1", "::1", "0.0.0.0", "fe80::1", "224.0.0.1", "::ffff:127.0.0.1"), 0.0
    )
    assert isinstance(effect, FallBack)
    assert "telemetry_interface" in effect.words
