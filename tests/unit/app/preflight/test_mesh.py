"""Who tries to reach whom, and whose fault it is when that fails."""

from __future__ import annotations

import msgspec
import pytest

from agent.wire.examination import Health, Listening
from app.errors import ExitCode
from app.preflight.comparison import compare
from app.preflight.mesh import MAX_FULL_MESH, routes, target_text
from tests.support.examinations import H1, H2, H3, address, answers, failed, meshed, unwell

SILENT = "No answer within 4 s"


def test_few_hosts_all_try_all() -> None:
    assert routes([H1, H2, H3]) == {H1: (H2, H3), H2: (H1, H3), H3: (H1, H2)}
    assert routes([H1]) == {H1: ()}
    assert routes([]) == {}


def test_many_hosts_try_the_first_and_the_next() -> None:
    hosts = [f"n{number}" for number in range(MAX_FULL_MESH + 1)]

    tried = routes(hosts)

    assert tried["n0"] == ("n1",)
    assert tried["n4"] == ("n0", "n5")
    assert tried["n8"] == ("n0",)
    assert {target for targets in tried.values() for target in targets} == set(hosts)


@pytest.mark.parametrize(
    ("place", "port", "target"),
    [
        ("10.0.0.1", 40_000, "10.0.0.1:40000"),
        ("fd00::1", 40_000, "[fd00::1]:40000"),
        ("10.0.0.1", 0, ""),
        ("127.0.0.1", 40_000, ""),
        ("0.0.0.0", 40_000, ""),
        ("239.1.1.1", 40_000, ""),
        ("169.254.169.254", 40_000, ""),
        ("fe80::1%eth0", 40_000, ""),
        ("::ffff:127.0.0.1", 40_000, ""),
        ("::ffff:0.0.0.0", 40_000, ""),
        ("::ffff:169.254.169.254", 40_000, ""),
        ("::ffff:10.0.0.1", 40_000, "10.0.0.1:40000"),
        ("metadata.internal", 80, ""),
        ("", 0, ""),
    ],
)
def test_a_host_is_sent_only_to_what_may_be_a_neighbour(place: str, port: int, target: str) -> None:
    assert target_text(Listening(1, place, port)) == target


def test_where_all_reach_all_one_row_says_so() -> None:
    found = compare(meshed(answers(H1), answers(H2), answers(H3)))
    assert [(row.name, row.status) for row in found.rows] == [("reach", Health.OK)]
    assert found.rows[0].detail.startswith("every host reaches every other (6 connections; the slowest 0.4 ms, ")

    found = compare([*meshed(answers(H1), answers(H2)), failed(H3)])
    assert found.rows[0].detail.startswith("every host that answers reaches every other (2 connections")

    many = [answers(f"n{number}") for number in range(MAX_FULL_MESH + 1)]
    assert compare(meshed(*many)).rows[0].detail.startswith("every host reaches the first and the next")


def test_a_way_that_is_cut_is_told_of_where_it_begins() -> None:
    found = compare(meshed(answers(H1), answers(H2), answers(H3), broken={(H1, H3): SILENT}))

    assert unwell(found) == [(H1, "reach", f"it does not reach h3 at {address(H3)}:40000: no answer within 4 s")]
    assert found.exit_code is ExitCode.JOB_FAILED


def test_a_host_that_nobody_reaches_is_told_once() -> None:
    found = compare(meshed(answers(H1), answers(H2), answers(H3), broken={(H1, H3): SILENT, (H2, H3): SILENT}))

    assert unwell(found) == [(H3, "reach", "none of the others reaches it: no answer within 4 s")]


def test_a_host_that_reaches_nobody_is_told_once() -> None:
    found = compare(meshed(answers(H1), answers(H2), answers(H3), broken={(H3, H1): SILENT, (H3, H2): SILENT}))

    assert unwell(found) == [(H3, "reach", "it reaches none of the others: no answer within 4 s")]


def test_a_host_that_is_cut_off_both_ways_is_told_once() -> None:
    broken = {(H1, H3): SILENT, (H2, H3): SILENT, (H3, H1): SILENT, (H3, H2): SILENT}

    assert unwell(compare(meshed(answers(H1), answers(H2), answers(H3), broken=broken))) == [
        (H3, "reach", "none of the others reaches it: no answer within 4 s")
    ]


def test_two_hosts_that_do_not_reach_each_other_are_both_told() -> None:
    found = compare(meshed(answers(H1), answers(H2), broken={(H1, H2): SILENT, (H2, H1): SILENT}))

    assert [host for host, _, _ in unwell(found)] == [H1, H2]


def test_another_machine_at_the_address_is_not_taken_for_the_host() -> None:
    first, second = meshed(answers(H1), answers(H2))
    assert first.listening is not None
    impostor = msgspec.structs.replace(first, listening=msgspec.structs.replace(first.listening, token="mine"))

    ((host, name, detail),) = unwell(compare([impostor, second]))

    assert (host, name) == (H2, "reach")
    assert detail.endswith("another machine answers there (is its address given twice?)")


def test_a_port_that_is_taken_is_told() -> None:
    taken = msgspec.structs.replace(answers(H1), listening=Listening(1, error="port 29500 is taken by pid 7"))

    assert unwell(compare([taken])) == [(H1, "ports", "port 29500 is taken by pid 7")]


def test_a_host_with_nothing_but_loopback_is_told_among_others_only() -> None:
    lonely = msgspec.structs.replace(answers(H1, address=""), listening=Listening(1, "127.0.0.1", 40_000, "t"))
    nowhere = msgspec.structs.replace(answers(H2), listening=Listening(1, "", 0, "t"))

    assert unwell(compare([lonely])) == []
    assert unwell(compare([lonely, nowhere])) == [
        (H1, "reach", "it listens at 127.0.0.1, where no other host can reach it"),
        (H2, "reach", "it listens at no address, where no other host can reach it"),
    ]


def test_a_host_that_could_not_try_is_told_and_nobody_is_called_unreached_for_it() -> None:
    first, second = meshed(answers(H1), answers(H2))
    broken = msgspec.structs.replace(first, reached=None, reach_error="the connection broke")

    found = compare([broken, second])

    assert unwell(found) == [(H1, "reach", "it could not try the others: the connection broke")]
    assert found.exit_code is ExitCode.WELL
