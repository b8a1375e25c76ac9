"""Who a rank is by the variables of any launcher, and what its job is called."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.codec import JobId
from ddpcore.launchers import Meeting, is_named_by_torchrun, job_name, launched_rank

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
LIGHTNING_CHILD = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"}
NODE_OF_KUBERNETES = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "meeting", "rank"),
    [
        pytest.param(TORCHRUN, Meeting(), (5, 8, 1, 4), id="torchrun"),
        pytest.param(OPEN_MPI, Meeting(), (1, 4, 2, 4), id="Open MPI, whose local ranks are in any order"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, Meeting(), (0, 2, 0, 2), id="MPICH"),
        pytest.param(SRUN, Meeting(), (3, 4, 1, 4), id="srun"),
        pytest.param(LIGHTNING_CHILD, Meeting(1, 2), (1, 2, 1, 2), id="a child of Lightning"),
        pytest.param({}, Meeting(0, 2), (0, 2, 0, 2), id="spawned, as the program says"),
        pytest.param({}, Meeting(init_method="tcp://h:1?rank=2&world_size=3"), (2, 3, 2, 3), id="in the URL"),
        pytest.param(TORCHRUN, Meeting(0, 2), (0, 2, 1, 4), id="the program contradicts the launcher"),
        pytest.param({}, Meeting(), None, id="nobody"),
        pytest.param(BATCH, Meeting(), None, id="a batch script"),
        pytest.param({}, Meeting(2, 2), None, id="a rank outside of its world"),
        pytest.param({"RANK": "x", "WORLD_SIZE": "2"}, Meeting(), None, id="nonsense"),
    ],
)
def test_a_rank_is_who_its_program_or_its_launcher_says(
    environ: dict[str, str], meeting: Meeting, rank: tuple[int, int, int, int] | None
) -> None:
    found = launched_rank(environ, meeting)

    shown = None if found is None else (found.rank, found.world_size, found.local_rank, found.local_world_size)
    assert shown == rank


@pytest.mark.parametrize("environ", [OPEN_MPI, SRUN, BATCH, LIGHTNING_CHILD, NODE_OF_KUBERNETES, {}])
def test_only_torchrun_s_variables_name_a_rank_from_the_start(environ: dict[str, str]) -> None:
    assert is_named_by_torchrun(TORCHRUN)
    assert not is_named_by_torchrun(environ)


@pytest.mark.parametrize(
    ("environ", "init_method", "name"),
    [
        ({"RANKDECK_JOB_ID": "gpt"}, None, "gpt"),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "MASTER_PORT": "1"}, None, "slurm-12-0"),
        ({"SLURM_JOB_ID": "12", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, None, "slurm-12-train-29500"),
        ({"PMIX_NAMESPACE": "prterun-h1-77@1", "MASTER_PORT": "29500"}, None, "train-prterun-h1-77-1"),
        ({"TORCHELASTIC_RUN_ID": "night-7", "MASTER_PORT": "1"}, None, "train-night-7"),
        ({"TORCHELASTIC_RUN_ID": "3f1b8a52-aaaa-bbbb-cccc-0123456789ab"}, None, "train-3f1b8a52"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, None, "train-29500"),
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "env://", "train-10-0-0-1-29500"),
        ({}, "tcp://localhost:7777", "train-7777"),
        ({}, "file:///tmp/x", "train-99"),
        ({}, "tcp://[nonsense", "train-99"),
    ],
)
def test_a_job_is_called_by_what_all_its_ranks_have_in_common(
    environ: dict[str, str], init_method: str | None, name: str
) -> None:
    assert job_name(environ, "/home/u/train.py", 99, init_method) == name


@given(
    environ=st.dictionaries(
        st.sampled_from(
            [*TORCHRUN, *OPEN_MPI, *SRUN, "RANKDECK_JOB_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR"]
        ),
        st.text(max_size=300),
    ),
    script=st.text(max_size=100),
    init_method=st.none() | st.text(max_size=50),
    rank=st.integers(-1, 9),
)
def test_any_environment_is_a_rank_of_its_world_or_none_and_its_job_has_a_name(
    environ: dict[str, str], script: str, init_method: str | None, rank: int
) -> None:
    found = launched_rank(environ, Meeting(rank, -1, init_method))

    assert found is None or (0 <= found.rank < found.world_size and 0 <= found.local_rank < found.local_world_size)
    msgspec.convert(job_name(environ, script, 1, init_method), JobId)
