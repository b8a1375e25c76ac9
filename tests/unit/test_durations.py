"""What a run writes about how long its tests took."""

from __future__ import annotations

from tests.support.durations import table


def test_the_longest_kind_file_and_test_come_first() -> None:
    seconds = {
        "tests/unit/app/test_a.py::test_one": 0.5,
        "tests/unit/agent/test_b.py::test_two[a::b]": 0.25,
        "tests/e2e/test_c.py::test_three": 12.0,
        "tests/test_d.py::test_four": 0.1,
    }

    assert table(seconds).splitlines() == [
        "# worker-seconds, tests, kind",
        "     12.0      1 e2e",
        "      0.8      2 unit",
        "      0.1      1 test_d.py",
        "# worker-seconds, tests, file",
        "     12.0      1 tests/e2e/test_c.py",
        "      0.5      1 tests/unit/app/test_a.py",
        "      0.2      1 tests/unit/agent/test_b.py",
        "      0.1      1 tests/test_d.py",
        "# seconds, test",
        "    12.00 tests/e2e/test_c.py::test_three",
        "     0.50 tests/unit/app/test_a.py::test_one",
        "     0.25 tests/unit/agent/test_b.py::test_two[a::b]",
        "     0.10 tests/test_d.py::test_four",
    ]
