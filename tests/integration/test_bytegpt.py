"""The demo's program: it learns, on four real gloo ranks, and says what it does."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys

import pytest

from ddpcore.checkpoint import Checkpointer
from tests.support.ranks import EXAMPLES, RealRanks

BYTEGPT = EXAMPLES / "bytegpt.py"
RUN_S = 300.0

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1.5 * RUN_S)]


@pytest.mark.slow
def test_four_ranks_learn_the_standard_library_in_200_steps() -> None:
    with RealRanks([BYTEGPT, "--steps", "200", "--checkpoint-dir", "checkpoints"], 4) as job:
        assert job.wait_for_end(RUN_S) == 0, job.logs()
        reports, first_log = job.reports, job.log(0)
        start_lines = [job.log(rank).splitlines()[0] for rank in range(4)]
        checkpoint = Checkpointer(job.directory / "checkpoints").load_latest()

    assert sorted(reports) == [0, 1, 2, 3]
    for report in reports.values():
        assert (report.step, report.steps_done, report.epoch) == (200, 200, 0)
        assert report.loss_first is not None
        assert 5.0 < report.loss_first < 6.0
        assert report.training is not None
        assert (report.training.last_step, report.training.checkpoint_step) == (200, 200)
        assert 0 < (report.training.goodput_frac or 0) <= 1
    assert statistics.fmean(report.loss or 99 for report in reports.values()) < 2.5
    validation = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", first_log)]
    assert len(validation) == 2
    assert validation[-1] < 2.4
    assert re.search(r"^step 20 loss \d\.\d{3} \d+ ms/step$", first_log, re.MULTILINE)
    assert all(line.startswith(f"rank {rank} of 4 on ") for rank, line in enumerate(start_lines))
    assert checkpoint is not None
    assert checkpoint.step == 200
    assert sum(parameter.numel() for parameter in checkpoint.state["model"].values()) < 140_000


@pytest.mark.slow
def test_without_torchrun_it_trains_alone() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}

    done = subprocess.run(
        [sys.executable, str(BYTEGPT), "--steps", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1 on " in done.stdout
    assert "step 1 loss 5." in done.stdout


def test_a_launch_that_makes_no_sense_is_one_line() -> None:
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}

    done = subprocess.run(
        [sys.executable, str(BYTEGPT)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )

    assert done.returncode == 1
    assert done.stderr.startswith("bytegpt: ")
    assert "rank 3 is outside the world of 2" in done.stderr
    assert "Traceback" not in done.stderr
