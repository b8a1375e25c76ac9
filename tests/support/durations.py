"""How long each test of a run took, by kind: build/test-durations.txt, after every run whose tests run side by side.

The sums are worker-seconds: of a run with three workers they are three times its minutes, less what workers stood idle.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

FILE = Path("build/test-durations.txt")


def pytest_configure(config: pytest.Config) -> None:
    """Watch a run from outside of its workers."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config.rootpath / FILE), "durations")


class Durations:
    """Seconds of each test: setup, call and teardown together."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the sums of each kind, then all tests, the longest first."""
        self._path.parent.mkdir(exist_ok=True)
        self._path.write_text(table(self._seconds))


def table(seconds: Mapping[str, float]) -> str:
    """Return the file's text: seconds and tests of each folder, then of each file, then the seconds of each test."""
    lines: list[str] = []
    for title, name_of in (("kind", _kind), ("file", _file)):
        sums: defaultdict[str, list[float]] = defaultdict(list)
        for nodeid, took_s in seconds.items():
            sums[name_of(nodeid)].append(took_s)
        lines.append(f"# worker-seconds, tests, {title}")
        longest = sorted(sums.items(), key=lambda item: -sum(item[1]))
        lines += [f"{sum(each_s):9.1f} {len(each_s):6d} {name}" for name, each_s in longest]
    lines.append("# seconds, test")
    lines += [f"{took_s:9.2f} {nodeid}" for nodeid, took_s in sorted(seconds.items(), key=lambda item: -item[1])]
    return "\n".join(lines) + "\n"


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _kind(nodeid: str) -> str:
    parts = PurePosixPath(_file(nodeid)).parts
    return parts[1] if len(parts) > 2 else parts[-1]
