"""Training stops before Slurm ends the job: squeue is asked again and again, and never waited for."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.engine import stop_signals
from ddpcore.engine.stop_agreement import StopReason
from ddpcore.engine.stop_signals import Deadline
from tests.support.waiting import until
from tests.support.warm_ranks import run_ranks

JOB = "SLURM_JOB_ID"
VARIABLES = (JOB, "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_END_TIME", "SQUEUE_STATES", "SLURM_CLUSTERS")


def in_s(seconds: float) -> int:
    return int(time.time() + seconds)  # noqa: TID251 - Slurm speaks of Unix time


def squeue(directory: Path, answer: str) -> None:
    """Put a stand-in for squeue into `directory`, which writes down how it was called."""
    path = directory / "squeue"
    new = directory / "new"
    new.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $SQUEUE_STATES$SLURM_CLUSTERS $*" >> {path}-calls\n{answer}\n')
    new.chmod(0o755)
    new.replace(path)


def calls(directory: Path) -> list[str]:
    path = directory / "squeue-calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a job's squeue."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(JOB, "4711")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def left_s(deadline: Deadline) -> float:
    return deadline.at_s - time.monotonic()


def test_the_deadline_is_what_slurm_says_and_a_fifth_earlier_in_a_short_job(slurm: Path) -> None:
    squeue(slurm, f"echo {in_s(100)}")
    with Deadline(None, is_asking=True) as deadline:
        until(lambda: deadline.at_s < math.inf, within_s=60, what="an answer")
        assert left_s(deadline) == pytest.approx(80, abs=5)
    assert calls(slurm) == ["%s  -h -j 4711 -o %e"]


def test_it_moves_with_the_time_limit_in_both_directions(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "LEAST_ASK_S", 0.05)
    squeue(slurm, f"echo {in_s(0.2)}")
    with Deadline(None, is_asking=True) as deadline:
        until(lambda: left_s(deadline) < 1, within_s=60, what="the first answer")
        squeue(slurm, f"echo {in_s(0.4)}; echo {in_s(3600)}")
        until(lambda: len(calls(slurm)) > 3, within_s=60, what="several questions")
        assert left_s(deadline) < 1
        squeue(slurm, "echo UNLIMITED")
        until(lambda: deadline.at_s == math.inf, within_s=60, what="no limit")

    monkeypatch.setattr(stop_signals, "ASK_S", 0.05)
    with deadline:
        squeue(slurm, f"echo {in_s(3600)}")
        until(lambda: deadline.at_s < math.inf, within_s=60, what="a limit again, in the next loop")
        assert left_s(deadline) == pytest.approx(3480, abs=60)


@pytest.mark.parametrize("answer", ["exit 1", "true", "echo slurm_load_jobs error", "echo 99; exit 1"])
def test_where_squeue_fails_the_last_answer_stays(answer: str, slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "ASK_S", 0.05)
    monkeypatch.setattr(stop_signals, "LEAST_ASK_S", 0.05)
    squeue(slurm, f"echo {in_s(1000)}")
    with Deadline(None, is_asking=True) as deadline:
        until(lambda: deadline.at_s < math.inf, within_s=60, what="an answer")
        squeue(slurm, answer)
        num = len(calls(slurm))
        until(lambda: len(calls(slurm)) > num + 2, within_s=60, what="more questions")
        assert left_s(deadline) == pytest.approx(880, abs=30)


@pytest.mark.parametrize(("end", "at_s"), [("", math.inf), ("soon", math.inf), ("1000", 880.0)])
def test_without_squeue_it_is_the_environment_s(
    end: str, at_s: float, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(slurm))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(in_s(1000)) if end == "1000" else end)
    with Deadline(None, is_asking=True) as deadline:
        time.sleep(0.2)
        assert left_s(deadline) == (math.inf if at_s == math.inf else pytest.approx(at_s, abs=30))


def test_a_squeue_that_hangs_holds_up_nothing_and_ends_with_the_loop(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(in_s(1000)))
    squeue(slurm, f"echo $$ > {slurm}/pid; exec sleep 1000")
    began_s = time.monotonic()
    with Deadline(None, is_asking=True) as deadline:
        assert time.monotonic() - began_s < 5
        until(lambda: (slurm / "pid").exists() and (slurm / "pid").read_text().strip(), within_s=60, what="a hang")
        pid = int((slurm / "pid").read_text())
        assert left_s(deadline) == pytest.approx(880, abs=60)
        left_at_s = time.monotonic()
    assert time.monotonic() - left_at_s < 5
    until(lambda: not Path(f"/proc/{pid}").exists(), within_s=60, what="the end of squeue")


def test_a_squeue_that_hangs_is_given_up_and_asked_again(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value_s in (("ANSWER_S", 0.2), ("ASK_S", 0.05), ("LEAST_ASK_S", 0.05)):
        monkeypatch.setattr(stop_signals, name, value_s)
    squeue(slurm, "exec sleep 1000")
    with Deadline(None, is_asking=True) as deadline:
        until(lambda: calls(slurm), within_s=60, what="a question")
        squeue(slurm, f"echo {in_s(1000)}")
        until(lambda: deadline.at_s < math.inf, within_s=60, what="the second answer")


def test_nobody_asks_for_a_deadline_of_the_program_s_on_other_ranks_or_outside_of_slurm(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue(slurm, f"echo {in_s(1000)}")
    with Deadline(in_s(50), is_asking=True) as deadline, Deadline(None, is_asking=False) as others:
        monkeypatch.delenv(JOB)
        with Deadline(None, is_asking=True) as outside:
            time.sleep(0.3)
            assert left_s(deadline) == pytest.approx(50, abs=10)
            assert others.at_s == outside.at_s == math.inf
    assert calls(slurm) == []


def test_the_question_is_for_this_task_of_an_array_and_free_of_the_user_s_defaults(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(VARIABLES[1:], ("4711", "3", "", "PD", "other"), strict=True):
        monkeypatch.setenv(name, value)
    squeue(slurm, "echo N/A")
    with Deadline(None, is_asking=True) as deadline:
        until(lambda: calls(slurm), within_s=60, what="a question")
        assert deadline.at_s == math.inf
    assert calls(slurm) == ["%s  -h -j 4711_3 -o %e"]


def train_in_a_job(directory: str) -> tuple[int, StopReason]:
    os.environ.update({JOB: "4711", "PATH": f"{directory}:/usr/bin:/bin"})
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = engine.loader(TensorDataset(torch.randn(64, 2)), global_batch_size=4)
        engine.checkpoint(f"{directory}/checkpoints", every="100000 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until="1000000 epochs"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).square().mean())
            engine.update(optimizer)
            time.sleep(0.01)
        return engine.step, engine.stop_reason


def test_all_ranks_stop_together_before_slurm_ends_the_job_and_one_asks(tmp_path: Path) -> None:
    end = tmp_path / "end"
    squeue(
        tmp_path,
        f"echo $RANK >> {tmp_path}/ranks; [ -e {end} ] || echo $(($(date +%s) + 8)) > {end}; sleep 1; cat {end}",
    )

    stops = run_ranks(train_in_a_job, 2, str(tmp_path), has_group=False)

    assert stops == [(stops[0][0], StopReason.DEADLINE)] * 2
    assert stops[0][0] > 20
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == [f"step_{stops[0][0]:08}"]
    assert set((tmp_path / "ranks").read_text().split()) == {"0"}
