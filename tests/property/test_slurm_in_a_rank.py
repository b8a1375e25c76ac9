"""What a rank takes from Slurm makes sense for any environment and any answer of squeue."""

from __future__ import annotations

import math
import time
from datetime import datetime

import hypothesis.strategies as st
from hypothesis import given

from ddpcore.engine.stop_signals import (
    ASK_S,
    DEADLINE_MARGIN_S,
    LEAST_ASK_S,
    margin_s,
    pause_s,
    read_end,
    squeue_argv,
    squeue_environ,
)
from ddpcore.errors import DdpcoreError
from ddpcore.process_group.rendezvous_spec import (
    LocalNumbers,
    RendezvousSpec,
    first_host,
    read_rendezvous,
    slurm_variables,
)

VALUES = st.one_of(st.text(max_size=8), st.integers(-2, 10**11).map(str), st.sampled_from(["h[1-2]", "9" * 5000, "٣"]))
NAMES = (
    "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PMI_SIZE OMPI_COMM_WORLD_SIZE SLURM_PROCID SLURM_STEP_NUM_TASKS "
    "SLURM_JOB_ID SLURM_STEP_ID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES "
    "SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID"
)
ENVIRONMENTS = st.dictionaries(st.sampled_from(NAMES.split()), VALUES)
LEFT_S = st.floats(0, 1e9)


@given(st.text())
def test_any_answer_of_squeue_is_an_end_or_none(answer: str) -> None:
    end = read_end(answer)

    assert end is None or not math.isnan(end)


@given(st.lists(st.integers(0, 10**10), min_size=1))
def test_the_first_end_of_a_job_s_parts_counts(ends: list[int]) -> None:
    assert read_end("\n".join(map(str, ends))) == min(ends)
    assert read_end("\n".join(map(str, [*ends, "UNLIMITED"]))) == min(ends)


@given(st.integers(10**9, 4 * 10**9))
def test_local_time_is_that_of_this_machine(end: int) -> None:
    read = read_end(datetime.fromtimestamp(end).isoformat())  # noqa: DTZ006 - squeue prints local time

    # In the hour that a clock is set back local time is two times: hence SLURM_TIME_FORMAT.
    assert read is not None
    assert time.localtime(read)[:6] == time.localtime(end)[:6]


@given(LEFT_S)
def test_a_margin_leaves_most_of_a_job_for_training(left_s: float) -> None:
    assert 0 <= margin_s(left_s) <= DEADLINE_MARGIN_S
    assert margin_s(left_s) <= left_s / 4


@given(LEFT_S, LEFT_S)
def test_a_later_end_is_a_later_deadline(one_s: float, other_s: float) -> None:
    first_s, second_s = sorted([one_s, other_s])

    assert first_s - margin_s(first_s) <= second_s - margin_s(second_s)


@given(st.floats(allow_nan=False))
def test_slurm_is_asked_every_minute_at_most_and_not_every_second(left_s: float) -> None:
    assert LEAST_ASK_S <= pause_s(left_s) <= ASK_S


@given(ENVIRONMENTS)
def test_squeue_is_asked_for_one_job_by_number(environ: dict[str, str]) -> None:
    argv = squeue_argv(environ)

    assert not argv or argv[3].replace("_", "").isdecimal()
    assert squeue_environ(environ)["SLURM_TIME_FORMAT"] == "%s"


@given(ENVIRONMENTS)
def test_any_environment_is_a_placement_none_or_a_clear_error(environ: dict[str, str]) -> None:
    try:
        spec = read_rendezvous(None, None, None, environ)
    except DdpcoreError:
        return
    if spec is None:
        assert not slurm_variables(environ)
    else:
        assert 0 <= spec.rank < spec.world_size
        assert 0 < spec.master_port < 65_536


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) > 1),
    st.integers(1, 10**9),
    st.integers(0, 10**4),
)
def test_all_tasks_of_a_step_meet_at_one_place_with_a_rank_each(sizes: list[int], job: int, step: int) -> None:
    specs: list[RendezvousSpec] = []
    for node, size in enumerate(sizes):
        ids = [str(len(specs) + number) for number in range(size)]
        for number, procid in enumerate(ids):
            environ = {
                "SLURM_PROCID": procid,
                "SLURM_STEP_NUM_TASKS": str(sum(sizes)),
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_ID": str(step),
                "SLURM_LOCALID": str(number),
                "SLURM_NODEID": str(node),
                "SLURM_GTIDS": ",".join(ids),
                "SLURM_STEP_NODELIST": f"gpu[07-{6 + len(sizes):02}]" if len(sizes) > 1 else "gpu07",
                "SLURM_STEP_NUM_NODES": str(len(sizes)),
            }
            spec = read_rendezvous(None, None, None, environ)
            assert spec is not None
            assert spec.local == LocalNumbers(number, size, node)
            specs.append(spec)

    assert [spec.rank for spec in specs] == list(range(sum(sizes)))
    assert {spec.world_size for spec in specs} == {sum(sizes)}
    assert len({(spec.master_addr, spec.master_port) for spec in specs}) == 1
    assert specs[0].master_addr == ("gpu07" if len(sizes) > 1 else "127.0.0.1")
    assert 15_000 <= specs[0].master_port < 25_000
    assert [spec.hosts_store for spec in specs] == [True] + [False] * (sum(sizes) - 1)


@given(st.integers(1, 10**8), st.integers(1, 100), st.integers(0, 90), st.integers(0, 90))
def test_jobs_that_run_side_by_side_take_different_ports(job: int, apart: int, step: int, other_step: int) -> None:
    ports = {
        slurm_variables(
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(one), "SLURM_STEP_ID": str(of)}
        )["MASTER_PORT"]
        for one, of in ((job, step), (job + apart, other_step))
    }

    assert len(ports) == 2


@given(st.text(), st.lists(st.from_regex(r"[a-z]{1,5}[0-9]{0,3}", fullmatch=True), min_size=1))
def test_the_first_of_a_plain_list_is_its_first_word(anything: str, names: list[str]) -> None:
    first_host(anything)

    assert first_host(",".join(names)) == names[0]
