"""Hosts beside each other: who differs is named, and nobody is blamed for what all are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from agent.wire.examination import Clock, Health, Interface, Row
from app.errors import ExitCode
from app.preflight.comparison import MAX_HOSTS_NAMED, compare
from app.preflight.examining import _clock
from app.preflight.findings import ClockDifference, FailureKind
from app.text import nodes_text
from tests.support.examinations import H1, H2, H3, H4, answers, code, failed, of_host, unwell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.fleet.agent_link import Talk

EPOCH_S = 1.8e9


def test_hosts_that_are_alike_are_well() -> None:
    found = compare([answers(H1), answers(H2), answers(H3)])

    assert (unwell(found), found.problems, found.exit_code) == ([], [], ExitCode.WELL)
    assert {row.name for row in found.hosts[0].rows} >= {"reachable", "host_key", "torch"}


def test_nothing_is_said_of_no_host() -> None:
    assert compare([]).exit_code is ExitCode.WELL


@pytest.mark.parametrize(
    ("field", "value", "row", "is_bad"),
    [
        ("torch", "2.12.0", "torch", True),
        ("nccl", "2.26.2", "nccl", True),
        ("python", "3.12.1", "job_python", False),
        ("cuda", "12.6", "cuda", False),
        ("driver", "550.1", "driver", False),
        ("rankdeck", "0.0.9", "rankdeck", False),
    ],
)
def test_the_odd_one_out_is_named(field: str, value: str, row: str, is_bad: bool) -> None:
    found = compare([answers(H1), answers(H2), answers(H3, changes={field: value})])

    ((host, name, detail),) = unwell(found)
    assert (host, name) == (H3, row)
    assert detail.startswith(f"{value}; the others have ")
    assert found.exit_code == (ExitCode.JOB_FAILED if is_bad else ExitCode.WELL)


def test_what_is_unknown_differs_from_nothing() -> None:
    assert unwell(compare([answers(H1), answers(H2, driver="", nccl=""), answers(H3)])) == []


def test_two_hosts_that_differ_are_told_together() -> None:
    found = compare([answers(H1), answers(H2, torch="2.12.0")])

    assert unwell(found) == [("", "torch", f"2.13.0+cu129 on {H1}; 2.12.0 on {H2}")]
    assert found.problems == [
        f"torch: 2.13.0+cu129 on {H1}; 2.12.0 on {H2} (install the same torch there: whichever it is)"
    ]
    assert [row.status for row in of_host(found, H1).rows if row.name == "torch"] == [Health.OK]


def test_several_odd_ones_are_each_told_what_most_others_have() -> None:
    hosts = [answers(host) for host in ("a", "b", "c")] + [answers(H1, torch="1"), answers(H2, torch="2")]

    found = compare(hosts)

    assert unwell(found) == [
        (H1, "torch", "1; most others have 2.13.0+cu129"),
        (H2, "torch", "2; most others have 2.13.0+cu129"),
    ]
    assert [row.detail for row in of_host(found, H1).rows if row.name == "torch"] == [
        "1; most others have 2.13.0+cu129"
    ]


def test_what_is_bad_of_itself_stays_beside_what_is_odd() -> None:
    worse = Row("gpus", Health.BAD, "GPU 3 is lost, of 8", "reset it")

    found = compare([answers(H1, worse, num_ranks=8, gpus=["H100"] * 7), answers(H2)])

    assert [detail for host, name, detail in unwell(found) if (host, name) == (H1, "gpus")] == [
        "GPU 3 is lost, of 8",
        "7 GPUs for the 8 ranks asked for",
    ]


def test_a_host_that_does_not_answer_is_a_row_and_an_exit_code() -> None:
    found = compare([answers(H1), failed(H2), failed(H3, FailureKind.HOST_KEY)])

    assert found.exit_code is ExitCode.UNREACHABLE
    assert unwell(found) == [(H2, "reachable", "it sleeps"), (H3, "host_key", "it sleeps")]
    assert [row.name for row in of_host(found, H2).rows] == ["reachable"]
    assert [row.name for row in of_host(found, H3).rows] == ["reachable", "host_key"]
    assert found.problems[0] == f"{H2}: reachable: it sleeps (wake it)"


def test_a_host_without_rankdeck_is_reached_all_the_same() -> None:
    found = compare([failed(H1, FailureKind.RANKDECK, ExitCode.INCOMPATIBLE)])

    assert found.exit_code is ExitCode.INCOMPATIBLE
    assert [(row.name, row.status) for row in found.hosts[0].rows] == [
        ("reachable", Health.OK),
        ("host_key", Health.OK),
        ("agent_python", Health.BAD),
    ]


def test_fewer_gpus_than_ranks_are_bad() -> None:
    found = compare([answers(H1, num_ranks=8), answers(H2, num_ranks=8, gpus=["H100"] * 7), answers(H3, num_ranks=4)])

    assert ("h2", "gpus", "7 GPUs for the 8 ranks asked for") in unwell(found)
    assert found.problems[0].endswith("ask for 7 (--nproc-per-node, nproc in the inventory), or: --share-gpus)")
    assert found.exit_code is ExitCode.JOB_FAILED
    assert not any(name == "gpus" for host, name, _ in unwell(found) if host != H2)


def test_a_host_without_gpus_among_others_is_told_so() -> None:
    with_ranks = compare([answers(H1), answers(H2), answers(H3, num_ranks=8, gpus=[])])
    assert unwell(with_ranks) == [(H3, "gpus", "no GPUs for the 8 ranks asked for")]

    free = compare([answers(H1), answers(H2), answers(H3, gpus=[])])
    assert unwell(free) == [(H3, "gpus", "no GPUs; the others have 8 GPUs")]


def test_ranks_on_cpus_need_no_gpus() -> None:
    assert unwell(compare([answers(H1, num_ranks=8, gpus=[]), answers(H2, num_ranks=2, gpus=[]), failed(H3)])) == [
        (H3, "reachable", "it sleeps")
    ]


def test_slower_gpus_are_told() -> None:
    found = compare([answers(H1), answers(H2), answers(H3, gpus=["A100"] * 8), failed(H4)])

    assert (H3, "gpu_models", "A100; the others have NVIDIA H100 80GB HBM3") in unwell(found)


def test_one_machine_under_two_names_is_bad_and_two_of_one_name_are_told() -> None:
    hosts = [answers(host, hostname="box", address="10.0.0.1") for host in (H1, H2)]
    found = compare([*hosts, answers(H3)])
    assert unwell(found) == [("", "same_machine", "h1 and h2 are the same machine: box, 10.0.0.1")]

    clones = compare([answers(H1, hostname="ubuntu"), answers(H2, hostname="ubuntu")])
    assert unwell(clones) == [("", "hostname", "h1 and h2 all call themselves ubuntu")]
    assert clones.exit_code is ExitCode.WELL


def test_other_packet_sizes_are_told() -> None:
    jumbo = [Interface("eth1", "10.9.9.9", 65_520), Interface("eth0", "10.0.0.77", 9000)]
    found = compare(
        [answers(H1), answers(H2), answers(H3, address="10.0.0.77", interfaces=jumbo), answers(H4, address="")]
    )

    assert unwell(found) == [(H3, "mtu", "packets of 9000 bytes; the others have packets of 1500 bytes")]


@pytest.mark.parametrize(
    ("offset_s", "uncertainty_s", "is_told"),
    [(0.0, 0.001, False), (0.9, 0.001, False), (1.1, 0.5, False), (1.6, 0.5, True), (-42.0, 0.01, True)],
)
def test_a_clock_is_called_wrong_only_beyond_what_is_uncertain(
    offset_s: float, uncertainty_s: float, is_told: bool
) -> None:
    found = compare([answers(H1, clock=ClockDifference(offset_s, uncertainty_s)), answers(H2)])

    assert [name for _, name, _ in unwell(found)] == ["clock"] * is_told
    assert found.exit_code is ExitCode.WELL


def test_the_clock_of_this_machine_is_told_where_all_hosts_agree_against_it() -> None:
    clocks = [ClockDifference(42.0, 0.01), ClockDifference(42.3, 0.01)]
    found = compare([answers(host, clock=clock) for host, clock in zip((H1, H2), clocks, strict=True)])
    assert unwell(found) == [("", "clock", "this machine is 42 s behind all hosts, which agree")]

    apart = [ClockDifference(42.0, 0.01), ClockDifference(-42.0, 0.01)]
    found = compare([answers(host, clock=clock) for host, clock in zip((H1, H2), apart, strict=True)])
    assert [(host, detail.partition(",")[0]) for host, _, detail in unwell(found)] == [
        (H1, "42 s ahead of this machine"),
        (H2, "42 s behind this machine"),
    ]


@pytest.mark.fault(row=33)
@pytest.mark.parametrize(
    ("offsets_s", "status", "said"),
    [
        ((3600, 3600, 3600, 3600), Health.WARN, "1 h ahead of this machine, to within 1.0 ms"),
        ((0, 0, 3600, 3600), Health.WARN, "1 h ahead of this machine, to within 20 ms"),
        ((0, -3600, -3600, -3600), Health.WARN, "1 h behind this machine, to within 10 ms"),
        ((3600, 3600, 3600, 0), Health.OK, "as this machine's, to within 50 ms"),
        ((3600, 0, -3600, 0), Health.OK, "as this machine's, to within 50 ms"),
    ],
)
def test_a_clock_that_is_set_between_two_pings_is_told_as_it_is_at_last(
    offsets_s: Sequence[float], status: Health, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    pings = iter(zip((0.001, 0.01, 0.02, 0.05), offsets_s, strict=True))

    def line() -> bytes:
        nonlocal now_s
        half_s, offset_s = next(pings)
        now_s += 2 * half_s
        return msgspec.json.encode(Clock(EPOCH_S + now_s - half_s + offset_s))

    clocks = SimpleNamespace(monotonic=lambda: now_s, time=lambda: EPOCH_S + now_s)
    monkeypatch.setattr("app.preflight.examining.time", clocks)
    talk = SimpleNamespace(send=lambda _line: None, line=line)
    found = compare([answers(H1, clock=_clock(cast("Talk", talk))), answers(H2)])

    (row,) = (row for row in of_host(found, H1).rows if row.name == "clock")
    assert (row.status, row.detail) == (status, said)
    assert ("set it: timedatectl" in row.todo) is (status is Health.WARN)


def test_names_are_counted_from_the_sixth_on() -> None:
    assert nodes_text(list("abcde"), MAX_HOSTS_NAMED) == "a, b, c, d and e"
    assert nodes_text(list("abcdef"), MAX_HOSTS_NAMED) == "a, b, c, d and 2 more"


class TestCode:
    """The program of each host."""

    def test_the_same_files_are_the_same_program(self) -> None:
        assert unwell(compare([answers(H1, code=code()), answers(H2, code=code()), answers(H3)])) == []

    def test_files_that_differ_are_named(self) -> None:
        usual = code(train="1", model="1", old="1")
        odd = code(digest="d2", train="2", model="1", new="1")

        found = compare([answers(H1, code=usual), answers(H2, code=usual), answers(H3, code=odd)])

        assert unwell(found) == [
            (
                H3,
                "code",
                "not the program of the others: old.py is missing, new.py is only there, train.py differs",
            )
        ]
        assert found.exit_code is ExitCode.JOB_FAILED

    def test_many_files_that_differ_are_counted(self) -> None:
        usual, odd = code(), code("b" * 40, 0, "d2", a="1", b="1", c="1")
        (difference,) = [
            detail
            for _, _, detail in unwell(
                compare([answers(host, code=code(z="1")) for host in (H1, H2)] + [answers(H3, code=odd)])
            )
        ]
        assert difference.endswith(f"commit {'b' * 9}, not {'a' * 9}, z.py is missing, a.py is only there and 2 more")

        ((_, _, without_files),) = unwell(compare([answers(H1, code=usual), answers(H2, code=code(digest="d2"))]))
        assert without_files == "2 different programs: h1 | h2"

    def test_two_programs_are_told_together(self) -> None:
        found = compare([answers(H1, code=code(train="1")), answers(H2, code=code(digest="d2", train="2"))])

        assert unwell(found) == [("", "code", "2 different programs: h1 | h2: train.py differs")]

    def test_another_commit_of_the_same_files_is_no_error(self) -> None:
        found = compare([answers(host, code=code()) for host in (H1, H2)] + [answers(H3, code=code("b" * 40, 1))])
        assert unwell(found) == [
            (H3, "code", f"{'b' * 9}+; the others are at {'a' * 9}; its source files are the same")
        ]
        assert found.exit_code is ExitCode.WELL

        found = compare([answers(H1, code=code()), answers(H2, code=code("b" * 40))])
        assert unwell(found) == [("", "code", f"{'a' * 9} on h1; {'b' * 9} on h2; its source files are the same")]

    def test_what_has_too_many_files_is_compared_by_its_commit(self) -> None:
        large = code(digest="")
        assert unwell(compare([answers(H1, code=large), answers(H2, code=large)])) == []

        found = compare([answers(host, code=large) for host in (H1, H2)] + [answers(H3, code=code("b" * 40, 0, ""))])
        assert unwell(found) == [(H3, "code", f"{'b' * 9}; the others are at {'a' * 9}")]
        assert found.exit_code is ExitCode.JOB_FAILED

    @pytest.mark.parametrize(("commit", "num_changed"), [("", 0), ("a" * 40, 2)])
    def test_what_cannot_be_compared_is_told(self, commit: str, num_changed: int) -> None:
        large = code(commit, num_changed, "")

        found = compare([answers(H1, code=large), answers(H2, code=large)])

        assert unwell(found) == [("", "code", "not compared: too many source files on h1 and h2")]


def test_rows_of_a_name_can_be_left_out() -> None:
    found = compare([answers(H1, Row("reach", Health.BAD, "no way")), answers(H2, torch="2.12.0")])

    assert [name for _, name, _ in unwell(found.without("reach"))] == ["torch"]
    assert [name for _, name, _ in unwell(found.without("torch"))] == ["reach"]
