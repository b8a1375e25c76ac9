"""Which tests a run takes of those that take long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.durations import table
from tests.support.long_tests import (
    CODE_OF_TESTS,
    LONG_S,
    NUM_SHARES,
    Share,
    dealt,
    is_taken,
    listed,
    long_ones,
    one_in,
    seconds_of,
    share_of,
)

ROOT = Path(__file__).parents[2]
NODEIDS = [f"tests/chaos/test_agent_kills.py::test_whoever_is_killed[{number}]" for number in range(100)]


def test_without_a_word_only_tests_without_such_a_mark_run() -> None:
    assert is_taken("a", {"ranks", "asyncio"}, "", None)
    assert not is_taken("a", {"ranks", "slow"}, "", None)
    assert not is_taken("a", {"chaos"}, "not gpu", None)


@pytest.mark.parametrize(("mark", "is_in"), [("slow", True), ("chaos", True), ("reported", False)])
def test_what_the_expression_names_runs(mark: str, is_in: bool) -> None:
    assert is_taken("a", {mark}, "slow or chaos", None) is is_in


def test_as_many_commits_as_there_are_shares_run_each_test_once() -> None:
    shares = [share_of(f"{number:08x}abc", "") for number in range(NUM_SHARES)]

    taken = [[nodeid for nodeid in NODEIDS if is_taken(nodeid, {"slow"}, "", share)] for share in shares]

    assert sorted(nodeid for each in taken for nodeid in each) == sorted(NODEIDS)
    assert max(len(each) for each in taken) < len(NODEIDS) / 4
    assert share_of("", "a.py") is None


def test_shares_are_of_equal_length_but_for_those_of_one_test_that_is_longer() -> None:
    shares = [[listed()[nodeid] for nodeid, of in dealt().items() if of == number] for number in range(NUM_SHARES)]
    lengths_s = [sum(share) for share in shares if len(share) > 1]

    assert set(dealt()) == set(listed())
    assert all(shares)
    assert max(lengths_s) < 1.2 * min(lengths_s)


def test_a_commit_runs_all_that_test_what_it_changes() -> None:
    share = Share(NUM_SHARES, ("README.md", "agent/jobs/job.py", "tests/e2e/test_relay.py"))

    assert is_taken("tests/chaos/test_agent_kills.py::test_x[1]", {"slow", "chaos"}, "", share)
    assert is_taken("tests/e2e/test_relay.py::test_x", {"slow"}, "", share)
    assert not is_taken("tests/chaos/test_checkpoint_kills.py::test_x", {"slow", "chaos"}, "", share)
    # Of two beginnings the longer one counts.
    of_ssh = Share(NUM_SHARES, ("app/ssh/connection.py",))
    assert is_taken("tests/e2e/test_many_hosts.py::test_x", {"slow"}, "", of_ssh)
    assert not is_taken("tests/e2e/test_install.py::test_x", {"slow"}, "", of_ssh)


def test_a_commit_that_changes_the_diagnosis_runs_all_stories_and_another_one_its_share() -> None:
    nodeids = [f"tests/corpus/generated/test_generated.py::test_x[{number}]" for number in range(30)]
    of_diagnosis, of_another = Share(0, ("app/diagnosis/waits.py",)), Share(0, ("app/ssh/login.py",))

    assert all(is_taken(nodeid, {"slow"}, "", of_diagnosis) for nodeid in nodeids)
    assert sum(is_taken(nodeid, {"slow"}, "", of_another) for nodeid in nodeids) <= 6
    assert not is_taken("tests/corpus/reported/test_reported.py::test_x", {"reported"}, "", of_diagnosis)


def test_of_cases_one_in_so_many_is_in_every_run() -> None:
    cases = one_in(3, ["a", "b", "c", "d"], str.upper)
    assert [(case.id, case.values, [mark.name for mark in case.marks]) for case in cases] == [
        ("A", ("a",), []),
        ("B", ("b",), ["slow"]),
        ("C", ("c",), ["slow"]),
        ("D", ("d",), []),
    ]


def test_programs_that_users_report_are_of_no_share() -> None:
    taken = [is_taken(nodeid, {"reported"}, "", share_of("00000001", "")) for nodeid in NODEIDS]
    assert not any(taken)


def test_every_beginning_is_one_of_files_that_are_there() -> None:
    for tests, code in CODE_OF_TESTS.items():
        for beginning in (tests, *code):
            assert list(ROOT.glob(f"{beginning}*")), beginning


def test_of_the_long_tests_of_a_file_the_shortest_stays_in_every_run() -> None:
    of_view = {"tests/tui/a.py::x": 9.0, "tests/tui/a.py::y[1 of 2]": 2.0, "tests/tui/a.py::z": LONG_S / 2}
    seconds = of_view | {"tests/tui/b.py::only": 3.0, "tests/test_all.py::x": 2.0, "tests/test_all.py::y": 2.0}

    assert long_ones(seconds_of(table(seconds)), {}) == {"tests/tui/a.py::x"}
    assert long_ones(seconds, {"tests/tui/a.py::x"}) == set()


def test_what_is_listed_as_long_is_of_files_that_are_there_and_runs_when_the_code_it_tests_changes() -> None:
    assert [nodeid for nodeid in listed() if not (ROOT / nodeid.partition("::")[0]).is_file()] == []
    assert [nodeid for nodeid in listed() if not any(nodeid.startswith(row) for row in CODE_OF_TESTS)] == []
