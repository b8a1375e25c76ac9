"""In which order files begin where tests run side by side: those that wait beside those that compute, long ones first.

A test that starts processes or speaks to hosts waits most of the time. Four of them leave a core idle, and four that
compute hold each other up. `--dist loadfile` hands out files in the order of collection: here the two kinds alternate,
so that at any time about as many workers do the one as the other. The short files come last, for an even end.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

WAITING = frozenset({"chaos", "e2e", "fault", "integration"})
SECONDS = {
    "chaos": 6.0,
    "corpus": 0.9,
    "e2e": 3.5,
    "fault": 6.0,
    "integration": 1.3,
    "property": 0.3,
    "tui": 0.8,
    "unit": 0.13,
}
"""What a test takes on average, by its folder."""
LONG = {
    "tests/fault/test_nemesis.py": 310,
    "tests/corpus/generated/test_generated.py": 25,
    "tests/corpus/reported/test_reported.py": 25,
    "tests/unit/app/diagnosis/test_scenarios_standing.py": 70,
    "tests/unit/app/diagnosis/test_scenarios_faults.py": 60,
    "tests/unit/app/diagnosis/test_scenarios_healthy.py": 40,
    "tests/unit/app/diagnosis/test_scenarios_endings.py": 30,
    "tests/unit/app/diagnosis/test_memory_growth.py": 25,
    "tests/unit/app/recording/test_looking_back.py": 30,
    "tests/property/test_what_slow_ranks_cost.py": 25,
}
"""Seconds of files of which that would be far from true (build/test-durations.txt)."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort what a worker has collected by its file: all workers do it alike."""
    if not hasattr(config, "workerinput"):
        return
    num_tests: dict[str, int] = {}
    for item in items:
        file = _file(item.nodeid)
        num_tests[file] = num_tests.get(file, 0) + 1
    place = {file: number for number, file in enumerate(order_of(num_tests))}
    items.sort(key=lambda item: place[_file(item.nodeid)])


def order_of(num_tests: Mapping[str, int]) -> list[str]:
    """Return files in the order in which they begin, by how many tests each has."""
    places: dict[str, float] = {}
    for is_waiting in (True, False):
        took_s = {file: _seconds(file, count) for file, count in num_tests.items() if _waits(file) is is_waiting}
        longest = sorted(took_s, key=lambda file: (-took_s[file], file))
        ends_s = list(accumulate(took_s[file] for file in longest))
        # Each file stands where the seconds before it are the same share of both kinds.
        places |= {file: (end_s - took_s[file]) / ends_s[-1] for file, end_s in zip(longest, ends_s, strict=True)}
    return sorted(places, key=lambda file: (places[file], file))


def _seconds(file: str, num_tests: int) -> float:
    return LONG.get(file, num_tests * SECONDS.get(_folder(file), 0.5))


def _waits(file: str) -> bool:
    return _folder(file) in WAITING


def _folder(file: str) -> str:
    parts = PurePosixPath(file).parts
    return parts[1] if len(parts) > 2 else ""


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
