"""The demo's program: it learns, on four real gloo ranks, and says what it does."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys

import pytest
import torch

from ddpcore.wire import BARRIER_GROUP
from tests.support.ranks import EXAMPLES, RealRanks, group

pytestmark = pytest.mark.ranks

BYTEGPT = EXAMPLES / "bytegpt.py"
RUN_S = 150.0


def test_four_ranks_learn_the_standard_library_in_200_steps() -> None:
    with RealRanks([BYTEGPT, "--steps", "200", "--checkpoint-dir", "checkpoints"], 4) as job:
        assert job.wait_for_end(RUN_S) == 0, job.logs()
        reports, first_log = job.reports, job.log(0)
        start_lines = [job.log(rank).splitlines()[0] for rank in range(4)]
        checkpoint = torch.load(job.directory / "checkpoints" / "bytegpt.pt", weights_only=True)

    assert sorted(reports) == [0, 1, 2, 3]
    for report in reports.values():
        assert (report.step, report.steps_done, report.epoch) == (200, 200, 1)
        assert report.loss_first is not None
        assert 5.3 < report.loss_first < 5.8
        barrier = group(report, BARRIER_GROUP)
        assert barrier is not None
        assert (barrier.label, barrier.enqueued_seq, barrier.completed_seq) == ("end", 5, 5)
    assert statistics.fmean(report.loss or 99 for report in reports.values()) < 2.5
    validation = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", first_log)]
    assert len(validation) == 2
    assert validation[-1] < 2.4
    assert re.search(r"^step 20 loss \d\.\d{3} \d+ ms/step$", first_log, re.MULTILINE)
    assert all(line.startswith(f"rank {rank} of 4 on ") for rank, line in enumerate(start_lines))
    assert checkpoint["step"] == 200
    assert sum(parameter.numel() for parameter in checkpoint["model"].values()) < 140_000


def test_without_torchrun_it_says_what_to_run() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}

    done = subprocess.run(
        [sys.executable, str(BYTEGPT)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 1
    assert "bytegpt: RANK is not set" in done.stderr
    assert "torchrun --nproc-per-node" in done.stderr
    assert "Traceback" not in done.stderr
