"""A test that fails beside others is run once more, alone, when all have run: what then passes is FLAKY, not failed.

Where tests run side by side (`-n 3`), hundreds of processes share a few cores, and now and then one comes too late for
what a test waits for. Such a test is reported with its name, and the run passes; with more than `MAX_FLAKY` of them,
or one that fails again, the run fails. A run without workers (`-n 0`, or no `-n`) crowds nobody: there it has failed.

Why not pytest-rerunfailures: it runs a test again at once, in the same worker, beside the load that it failed under;
it counts what passes then as passed, without a limit, and keeps what the first run left in the process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

MAX_FLAKY = 2
MAX_SECOND_RUNS = 10
"""More failures than that are no accident: none of them is run again."""
PATIENCE_S = 900.0
"""For one second run. pytest-timeout ends a test long before."""


def pytest_configure(config: pytest.Config) -> None:
    """Watch a run whose tests run side by side; what the workers themselves do stays as it is."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondRuns(config), "second-runs")


class SecondRuns:
    """What has failed, and what became of it when it was alone."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember each phase of a test that fails: setup, call, teardown, or the end of its worker."""
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Run again what has failed once everything else is over. A run that `-x` or ctrl-c ends gets no second one."""
        result = yield
        if self._failed and len(self._failed) <= MAX_SECOND_RUNS:
            self._terminal.write_line(f"\nrun again, alone: what failed ({len(self._failed)})")
            self._flaky = [nodeid for nodeid in self._failed if self._passes_alone(nodeid)]
        if len(self._flaky) <= MAX_FLAKY:
            self._forgive(session)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what is flaky, above pytest's closing line."""
        if len(self._failed) > MAX_SECOND_RUNS:
            terminalreporter.write_line(f"{len(self._failed)} tests failed: none was run a second time.")
        if len(self._flaky) <= MAX_FLAKY:
            for nodeid in self._flaky:
                terminalreporter.write_sep("_", f"what {nodeid} failed by before it passed alone")
                terminalreporter.write_line(self._failed[nodeid][0].longreprtext)
        for nodeid in self._flaky:
            terminalreporter.write_line(f"FLAKY {nodeid}", yellow=True)
        if len(self._flaky) > MAX_FLAKY:
            terminalreporter.write_line(
                f"{len(self._flaky)} tests are FLAKY, which count as failed: {MAX_FLAKY} at most may be.", red=True
            )

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.getplugin("terminalreporter")

    def _passes_alone(self, nodeid: str) -> bool:
        command = [sys.executable, "-m", "pytest", *_same_options(self._config), "-n", "0", nodeid]
        try:
            done = subprocess.run(
                command,
                cwd=self._config.rootpath,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self._failed[nodeid][-1].sections.append(("second run, alone", f"not over within {PATIENCE_S:.0f} s"))
            return False
        if done.returncode == pytest.ExitCode.OK:
            return True
        self._failed[nodeid][-1].sections.append(("second run, alone", textwrap.indent(done.stdout, "  ")))
        return False

    def _forgive(self, session: pytest.Session) -> None:
        """Count the flaky as such: in the exit status, and in the closing line."""
        forgiven = [report for nodeid in self._flaky for report in self._failed[nodeid]]
        session.testsfailed -= len(forgiven)
        for category in ("failed", "error"):
            kept = [report for report in self._terminal.stats.pop(category, []) if report not in forgiven]
            if kept:
                self._terminal.stats[category] = kept
        for nodeid in self._flaky:
            self._terminal._add_stats("flaky", [self._failed[nodeid][0]])


def _same_options(config: pytest.Config) -> Sequence[str]:
    """Return what decides which tests are collected, and how."""
    options = ["-q", "-p", "no:cacheprovider"]
    if config.inipath is not None:
        options += ["-c", str(config.inipath), "--rootdir", str(config.rootpath)]
    return options
