"""What scripts and people read without a screen, kept: `--json`, the lines of `--headless`, exit codes.

A change of them is a commit of its own: `RANKDECK_UPDATE_SNAPSHOTS=1 pytest tests/unit/app/test_golden.py` writes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app import errors
from app.cli.headless import LINE_GAP_S, Headless
from app.errors import AppError
from app.view.summary import exit_code, status_object, summary_lines, summary_object
from tests.corpus.scenarios import ALL
from tests.support.consoles import TalkingSource
from tests.support.screens import assert_looks_as_before, fail_what_is_written_anew
from tests.support.sim import TICK_S, SimCluster
from tests.support.sim_node import START_S

__all__ = ["fail_what_is_written_anew"]

GOLDEN = Path(__file__).parent / "golden"
AFTER_S = 4.0
"""From the verdict to the end: by then all who wait for the culprit have reported it."""
KEPT = (
    "freeze",
    "kill",
    "an exception",
    "killed by the kernel for memory",
    "a rank holds the GIL",
    "a node is lost",
    "one broadcasts",
    "20 % slower",
    "a live rank that does not come",
    "a rank does not come",
    "a job that ends well",
    "a job that is stopped",
)
SCENARIOS = {scenario.name: scenario for scenario in ALL}


class HeadlessSource(TalkingSource):
    """A simulated training as `--headless` follows it."""

    started_at_s = START_S
    watched_job = ""

    async def start(self) -> None:
        """It has begun."""


@pytest.mark.parametrize("name", KEPT)
def test_what_is_printed_is_as_before(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = SCENARIOS[name]
    source = HeadlessSource(SimCluster(seed=3, **scenario.cluster))  # type: ignore[arg-type]
    headless = Headless(source)
    if scenario.step:
        source.sim.run_to_step(scenario.step)
    headless._print_view(source.view(), source.sim.now_s)
    scenario.strike(source.sim)
    over_s = scenario.within_s + AFTER_S if scenario.expected else scenario.watch_s
    while over_s > 0 and not (scenario.expected and scenario.expected <= source.sim.alarming):
        source.run(LINE_GAP_S + TICK_S)
        headless._print_view(source.view(), source.sim.now_s)
        over_s -= LINE_GAP_S + TICK_S
    source.run(AFTER_S)
    headless._print_view(source.view(), source.sim.now_s)

    view = source.view()
    summary = summary_lines(summary_object(view))
    file = name.replace("20 %", "20 percent").replace(" ", "-")
    printed = capsys.readouterr().err.splitlines()
    assert_looks_as_before(file, [*printed, "", *summary, f"exit code {int(exit_code(view))}"], GOLDEN)
    assert_looks_as_before(f"{file}.json", json.dumps(status_object(view), indent=1).splitlines(), GOLDEN)


def test_exit_codes_are_as_before() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AppError)]
    lines = [f"{code.value} {code.name}" for code in errors.ExitCode]
    lines += sorted(f"{kind.exit_code.value} {kind.__name__}" for kind in kinds)
    assert_looks_as_before("exit-codes", lines, GOLDEN)
