"""Which Slurm step a process runs in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.slurm import SlurmStep, slurm_step

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "h[1-2]",
}


def test_a_task_of_srun_knows_its_step() -> None:
    assert slurm_step(STEP) == SlurmStep("4711", 1, 4, 2, "h[1-2]")


@pytest.mark.parametrize("name", ["SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_STEP_NUM_NODES"])
@pytest.mark.parametrize("text", [None, "", "../x", "4294967294x", "1" * 11, "-1"])
def test_a_batch_script_and_nonsense_are_no_step(name: str, text: str | None) -> None:
    environ = {key: value for key, value in STEP.items() if key != name}

    assert slurm_step(environ if text is None else {**environ, name: text}) is None


@given(st.dictionaries(st.sampled_from([*STEP]), st.text()))
def test_whatever_the_variables_are_the_job_s_id_is_fit_for_a_name_of_a_directory(environ: dict[str, str]) -> None:
    step = slurm_step({**STEP, **environ})

    assert step is None or (step.job_id.isascii() and step.job_id.isdigit())
