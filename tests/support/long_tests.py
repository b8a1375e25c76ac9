"""Which of the long tests a run takes: by default none of those marked slow, chaos or reported.

`pytest -m "slow or chaos"` runs all of these two kinds, `-m fault` every fault of the fault matrix, and a test that is
named (`pytest FILE::TEST`) runs whatever it is. `.ci/run` sets RANKDECK_SLOW_SHARE to the commit: then one of
`NUM_SHARES` equal shares of the slow and chaos tests runs with the rest, another one for another commit, and besides it
all that test code which the commit changes (RANKDECK_CHANGED_FILES).
A share is so small that `.ci/run` takes less than its eight minutes on two cores (`tests/bench/RESULTS.md`).

`long_tests.txt` has the worker-seconds of the slow and chaos tests, by which shares are equal. It also names more slow
tests: of the tests of a file that each took longer than `LONG_S` in a whole run all but the shortest.
`python -m tests.support.long_tests build/test-durations.txt` takes the seconds of another run and adds its long tests.
"""

from __future__ import annotations

import heapq
import os
import sys
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from _pytest.mark.structures import ParameterSet

T = TypeVar("T")

LONG = frozenset({"slow", "chaos", "reported"})
"""Marks of tests that do not run unless `-m` names the mark."""
SHARED = frozenset({"slow", "chaos"})
"""Marks of tests of which a commit runs a share. Programs that users report take half an hour by themselves."""
NUM_SHARES = 120
LONG_S = 0.8
"""Worker-seconds of a whole run on two cores: about half of that alone."""
LISTED = Path(__file__).with_suffix(".txt")
CODE_OF_TESTS = {
    "tests/chaos/test_agent_kills": ("agent/jobs/", "agent/processes/", "agent/daemon.py"),
    "tests/chaos/test_checkpoint_": ("ddpcore/checkpoint/",),
    "tests/chaos/test_rank_kills": ("ddpcore/process_group/", "ddpcore/barriers/"),
    "tests/corpus/": ("app/diagnosis/", "ddpcore/probe/", "agent/node_state/"),
    "tests/corpus/test_inspected": ("app/inspect/",),
    "tests/e2e/": ("app/ssh/", "app/session/", "app/cli/"),
    "tests/e2e/test_any_launcher": ("app/cli/", "agent/jobs/adopted", "agent/processes/", "ddpcore/adoption.py"),
    "tests/e2e/test_console_in_tmux": ("app/tui/console.py", "app/cli/presenting.py", "app/cli/run.py"),
    "tests/e2e/test_demo_": ("app/session/", "app/cli/headless.py", "app/cli/run.py"),
    "tests/e2e/test_doctor": ("app/preflight/", "agent/doctor/"),
    "tests/e2e/test_install": ("app/install/",),
    "tests/e2e/test_rehearsal": ("ddpcore/rehearsal/", "ddpcore/launch_plugin/", "ddpcore/torch_names.py"),
    "tests/e2e/test_relay": ("agent/relay/",),
    "tests/e2e/test_slurm": ("app/slurm/", "agent/wire/slurm.py", "agent/serve.py"),
    "tests/fault/test_agent_": ("agent/jobs/", "agent/processes/", "agent/daemon.py"),
    "tests/fault/test_console_": ("app/session/", "app/fleet/", "app/ssh/"),
    "tests/fault/test_nemesis": ("tests/fault/nemesis.py",),
    "tests/fault/test_serve": ("app/web/",),
    "tests/integration/test_adopted_jobs": ("agent/jobs/", "agent/processes/", "ddpcore/adoption.py", "ddpcore/launch"),
    "tests/integration/test_agent_": ("agent/jobs/", "agent/processes/", "agent/daemon.py"),
    "tests/integration/test_agents_": ("agent/serve.py", "agent/relay/", "app/session/"),
    "tests/integration/test_agreed_": ("ddpcore/engine",),
    "tests/integration/test_best_": ("ddpcore/checkpoint/",),
    "tests/integration/test_bytegpt": ("ddpcore/engine", "ddpcore/examples/"),
    "tests/integration/test_checkpoint_": ("ddpcore/checkpoint/",),
    "tests/integration/test_closing": ("ddpcore/process_group/",),
    "tests/integration/test_collecting": ("ddpcore/collecting.py", "ddpcore/samplers/"),
    "tests/integration/test_compiled_": ("ddpcore/parallel/",),
    "tests/integration/test_console_": ("app/session/",),
    "tests/integration/test_control": ("app/session/", "app/fleet/", "agent/jobs/"),
    "tests/integration/test_elastic_": ("agent/jobs/",),
    "tests/integration/test_engine": ("ddpcore/engine",),
    "tests/integration/test_examples": ("ddpcore/engine", "ddpcore/examples/"),
    "tests/integration/test_faults_": ("ddpcore/probe/faults",),
    "tests/integration/test_fewer_calls": ("app/diagnosis/", "ddpcore/probe/"),
    "tests/integration/test_first_": ("ddpcore/barriers/",),
    "tests/integration/test_fleet": ("app/fleet/", "agent/jobs/"),
    "tests/integration/test_full_disk_": ("agent/logs/",),
    "tests/integration/test_fully_": ("ddpcore/parallel/", "ddpcore/checkpoint/"),
    "tests/integration/test_gates_": ("ddpcore/barriers/",),
    "tests/integration/test_gpu_": ("agent/machine/",),
    "tests/integration/test_host_doctor": ("app/preflight/", "agent/doctor/"),
    "tests/integration/test_host_link": ("app/fleet/", "app/ssh/"),
    "tests/integration/test_host_questions": ("app/session/", "app/ssh/"),
    "tests/integration/test_inspecting_": ("app/inspect/",),
    "tests/integration/test_install": ("app/install/",),
    "tests/integration/test_leftovers": ("agent/processes/",),
    "tests/integration/test_loader_": ("ddpcore/engine",),
    "tests/integration/test_local_": ("app/fleet/", "app/session/"),
    "tests/integration/test_loop_": ("ddpcore/engine",),
    "tests/integration/test_memory_growth": ("agent/node_state/", "app/diagnosis/"),
    "tests/integration/test_moved_": ("ddpcore/engine", "ddpcore/examples/"),
    "tests/integration/test_opening": ("ddpcore/process_group/",),
    "tests/integration/test_prepared_": ("agent/jobs/",),
    "tests/integration/test_probe_": ("ddpcore/probe/",),
    "tests/integration/test_relay": ("agent/relay/", "app/fleet/"),
    "tests/integration/test_report_": ("agent/transport/", "app/fleet/"),
    "tests/integration/test_root_": ("agent/logs/", "agent/jobs/"),
    "tests/integration/test_samplers_": ("ddpcore/samplers/",),
    "tests/integration/test_schedules": ("ddpcore/engine",),
    "tests/integration/test_slurm_": ("agent/serve.py", "agent/wire/slurm.py", "app/slurm/"),
    "tests/integration/test_signals_of_": ("agent/processes/", "agent/machine/", "agent/node_state/signals.py"),
    "tests/integration/test_slow_link": ("app/fleet/", "agent/transport/"),
    "tests/integration/test_ssh": ("app/ssh/",),
    "tests/integration/test_stack_": ("app/stacks/", "agent/processes/"),
    "tests/integration/test_stacks_": ("app/stacks/", "agent/processes/", "ddpcore/probe/stack"),
    "tests/integration/test_systemd_": ("agent/service/",),
    "tests/integration/test_torch_": ("ddpcore/probe/torch_faults", "ddpcore/probe/faults"),
    "tests/integration/test_types_": ("ddpcore/__init__.py", "ddpcore/samplers/", "ddpcore/engine/engine.py"),
    "tests/integration/test_unseen_": ("agent/processes/", "app/diagnosis/"),
    "tests/integration/test_unmodified_": ("ddpcore/launch_plugin/", "ddpcore/probe/"),
    "tests/integration/test_web_": ("app/web/",),
    "tests/integration/test_weighted_": ("ddpcore/parallel/", "ddpcore/examples/"),
    "tests/integration/test_whose_verdict": ("app/diagnosis/", "app/view/"),
    "tests/integration/test_wrap_": ("ddpcore/parallel/",),
    "tests/property/": ("app/diagnosis/", "ddpcore/probe/"),
    "tests/tui/": ("app/tui/", "app/view/view.py", "app/view/", "app/view/rows.py"),
    "tests/unit/agent/logs/": ("agent/logs/",),
    "tests/unit/agent/processes/": ("agent/processes/",),
    "tests/unit/app/": ("app/diagnosis/", "app/recording/history.py", "app/recording/"),
    "tests/unit/app/diagnosis/": ("app/diagnosis/", "app/model/", "agent/node_state/", "ddpcore/probe/"),
    "tests/unit/ddpcore/test_adoption": ("ddpcore/adoption.py", "ddpcore/launch"),
    "tests/unit/ddpcore/barriers/": ("ddpcore/barriers/",),
    "tests/unit/ddpcore/probe/": ("ddpcore/probe/",),
    "tests/unit/ddpcore/checkpoint/": ("ddpcore/checkpoint/",),
    "tests/unit/ddpcore/samplers/": ("ddpcore/samplers/",),
    "tests/unit/test_second_run": ("tests/support/second_run.py",),
}
"""Beginnings of tests' names, and of the files that they test the most: the longest that fits counts."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a commit runs of the slow and chaos tests."""

    number: int
    changed_files: tuple[str, ...]

    def takes(self, nodeid: str) -> bool:
        """Whether this test is of the commit's share, or tests what it changes, or is itself changed."""
        if dealt().get(nodeid, zlib.crc32(nodeid.encode()) % NUM_SHARES) == self.number:
            return True
        return any(file.startswith(_watched_by(nodeid)) for file in self.changed_files)


def share_of(commit: str, changed_files: str) -> Share | None:
    """Return the share of a commit, by its hash; None without one."""
    if not commit:
        return None
    return Share(int(commit[:8], 16) % NUM_SHARES, tuple(changed_files.split()))


def is_taken(nodeid: str, marks: AbstractSet[str], mark_expression: str, share: Share | None) -> bool:
    """Whether a run takes this test.

    Args:
        nodeid: Of the test.
        marks: The names of all its marks.
        mark_expression: What follows `-m`, or "".
        share: What is taken of the long ones nevertheless.
    """
    long = marks & LONG
    if not long or any(mark in mark_expression for mark in long | (marks & {"fault"})):
        return True
    return share is not None and long <= SHARED and share.takes(nodeid)


def one_in(number: int, cases: Iterable[T], id_of: Callable[[T], str] = str) -> list[ParameterSet]:
    """Return the cases of a test, of which the first of each `number` is in every run and the others are slow."""
    slow = [pytest.mark.slow]
    return [pytest.param(case, id=id_of(case), marks=slow if at % number else []) for at, case in enumerate(cases)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests that the run does not take."""
    if any("::" in argument for argument in config.args):
        return
    environment = os.environ
    share = share_of(environment.get("RANKDECK_SLOW_SHARE", ""), environment.get("RANKDECK_CHANGED_FILES", ""))
    taken: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        if item.nodeid in listed():
            item.add_marker("slow")
        marks = {mark.name for mark in item.iter_markers()}
        where = taken if is_taken(item.nodeid, marks, config.option.markexpr, share) else left_out
        where.append(item)
    items[:] = taken
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def _watched_by(nodeid: str) -> tuple[str, ...]:
    rows = [beginning for beginning in CODE_OF_TESTS if nodeid.startswith(beginning)]
    watched = CODE_OF_TESTS[max(rows, key=len)] if rows else ()
    return (nodeid.partition("::")[0], *watched)


@cache
def listed() -> dict[str, float]:
    """Return the worker-seconds of each test of `long_tests.txt`."""
    rows = (line.split(None, 1) for line in LISTED.read_text().splitlines())
    return {nodeid: float(seconds) for seconds, nodeid in rows}


@cache
def dealt() -> dict[str, int]:
    """Return the number of the share of each listed test: the longest first, each to the share with the least."""
    shares = [(0.0, number) for number in range(NUM_SHARES)]
    share_of_test: dict[str, int] = {}
    for nodeid, seconds in sorted(listed().items(), key=lambda item: (-item[1], item[0])):
        held_s, number = shares[0]
        heapq.heapreplace(shares, (held_s + seconds, number))
        share_of_test[nodeid] = number
    return share_of_test


def long_ones(durations: Mapping[str, float], known: Iterable[str]) -> set[str]:
    """Return the tests of a run that are to be slow besides the known ones; none that tests all code."""
    files: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for nodeid, seconds in durations.items():
        if seconds > LONG_S and nodeid not in known and nodeid.startswith(tuple(CODE_OF_TESTS)):
            files[nodeid.partition("::")[0]].append((seconds, nodeid))
    return {nodeid for tests in files.values() for _, nodeid in sorted(tests)[1:]}


def seconds_of(durations: str) -> dict[str, float]:
    """Return the worker-seconds of each test by the text of build/test-durations.txt."""
    rows = (line.split(None, 1) for line in durations.partition("# seconds, test\n")[2].splitlines())
    return {nodeid: float(seconds) for seconds, nodeid in rows}


def relisted(durations: Mapping[str, float], *, are_all_long: bool) -> dict[str, float]:
    """Return the list with what a run adds; of a run of the long tests alone nothing else stays."""
    if are_all_long:
        return dict(durations)
    added = long_ones(durations, listed())
    return listed() | {nodeid: seconds for nodeid, seconds in durations.items() if nodeid in added | listed().keys()}


if __name__ == "__main__":
    found = relisted(seconds_of(Path(sys.argv[1]).read_text()), are_all_long="--all" in sys.argv[2:])
    LISTED.write_text("".join(f"{seconds:.1f} {nodeid}\n" for nodeid, seconds in sorted(found.items())))
