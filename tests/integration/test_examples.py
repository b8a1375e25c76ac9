"""The programs in `ddpcore/examples` do under torchrun what their first lines say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddpcore.wire import StopTraining
from tests.support.ranks import EXAMPLES, RealRanks

RUN_S = 240.0

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(2 * RUN_S)]

README = Path(__file__).parents[2] / "README.md"


def run_to_end(job: RealRanks) -> str:
    assert job.wait_for_end(RUN_S) == 0, job.logs()
    return job.log(0)


def test_the_readme_shows_the_quickstart_as_it_is() -> None:
    block = re.search(r"<!-- quickstart -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    code = (EXAMPLES / "quickstart.py").read_text().partition('"""\n\n')[2]
    assert block[1] == code
    assert len([line for line in code.splitlines() if line]) <= 25


@pytest.mark.slow
def test_the_quickstart_learns_and_leaves_metrics_and_checkpoints() -> None:
    with RealRanks([EXAMPLES / "quickstart.py"], 2) as job:
        log = run_to_end(job)
        runs = job.directory / "runs" / "spirals"
        lines = [json.loads(line) for line in (runs / "metrics.jsonl").read_text().splitlines()]
        listing = subprocess.run(
            [sys.executable, "-m", "ddpcore.checkpoint", "verify", str(runs)],
            capture_output=True,
            text=True,
            check=False,
        )

    assert "trained for 504 steps" in log
    assert [line["step"] for line in lines] == [63 * epoch for epoch in range(1, 9)]
    assert lines[0]["loss"] > lines[-1]["loss"]
    assert lines[-1]["accuracy"] > 0.9
    assert listing.returncode == 0, listing.stderr
    assert "504" in listing.stdout


@pytest.mark.slow
def test_the_parts_alone_fit_a_line() -> None:
    with RealRanks([EXAMPLES / "own_loop.py"], 2) as job:
        assert "step 192: y = 3.0 x + 2.0" in run_to_end(job)


@pytest.mark.slow
def test_a_quickstart_without_torchrun_is_one_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "trained for 504 steps" in done.stdout


@pytest.mark.slow
def test_a_stop_that_one_rank_is_asked_for_stops_all_with_a_checkpoint(tmp_path: Path) -> None:
    program: list[str | Path] = [EXAMPLES / "bytegpt.py", "--checkpoint-dir", tmp_path, "--steps"]
    with RealRanks([*program, "100000"], 2) as job:
        job.wait_until(lambda reports: all((r.step or 0) >= 5 for r in reports.values()), "five steps")
        assert all(report.can_stop for report in job.reports.values())
        job.ask(1, StopTraining(request_id=1))
        assert job.wait_for_end(RUN_S) == 0, job.logs()
        last_steps = {report.step for report in job.reports.values()}

    assert len(last_steps) == 1
    with RealRanks([*program, str((last_steps.pop() or 0) + 2)], 3) as job:
        assert "goes on from step" in run_to_end(job)
        assert {report.steps_done for report in job.reports.values()} == {2}


@pytest.mark.slow
def test_lines_of_different_lengths_are_learnt_on_two_ranks() -> None:
    with RealRanks([EXAMPLES / "lines.py", "--steps", "100"], 2) as job:
        losses = [float(loss) for loss in re.findall(r"step \d+: ([\d.]+) nats", run_to_end(job))]
    assert len(losses) == 2
    assert losses[-1] < 3.0
