"""What is made of the answers of NCCL's RAS and of nvidia-smi, recorded on an H100.

2026-11-26, four ranks of one job on one GPU (NCCL 2.30.7, NCCL_MULTI_RANK_GPU_ENABLE=1), driver 580.159.04: a whole
inspection while rank 2 slept in step 20, one while its GPU stood in a kernel that did not end in front of an
all_reduce, the answer while it was stopped, and two answers while all trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.diagnosis.causes import Severity
from app.inspect.comparison import What, finding_of, standing_of
from app.inspect.inspection_text import job_lines, job_object, sentence
from app.inspect.nccl_ras import behind, decoded, ranks_behind, ras_lines
from app.inspect.seen import Gpu, GpusSeen, HostSeen, RasSeen, SeenJob, SmiSeen, gpus_by_pid, jobs_of

RECORDED = Path(__file__).parent / "recorded"


def recorded_job(name: str) -> SeenJob:
    seen = msgspec.json.decode((RECORDED / f"{name}.json").read_bytes(), type=HostSeen)
    (job,) = jobs_of([("gpu1", seen)])
    return job


def training(first: str, second: str) -> SeenJob:
    return msgspec.structs.replace(recorded_job("nccl_kernel_hangs"), ras=RasSeen("2.30.7", [first, second], ""))


def answer(*counts: int, size: int | None = None, pids: tuple[int, ...] = ()) -> str:
    """Return an answer about one communicator whose ranks have launched so many collectives."""
    ranks = [
        {
            "rank": rank,
            "pid": pids[rank] if pids else 954 + rank,
            "collective_counts": {"AllReduce": count, "Reduce": 1},
        }
        for rank, count in enumerate(counts)
    ]
    communicator = {"hash": "0x1", "secondary_hash": "0x2:0x3", "size": size or len(counts), "ranks": ranks}
    return "SERVER PROTOCOL 2\nOK\nOK\n" + json.dumps({"communicators": [communicator]})


def test_a_rank_that_sleeps_is_named_by_its_stack_and_by_what_it_has_launched() -> None:
    job = recorded_job("nccl_rank_sleeps")
    standings = [standing_of(rank) for rank in job.ranks]

    finding = finding_of(job, standings, ranks_behind(job))
    lines = job_lines(job, standings, finding)

    assert [one.rank.rank for one in finding.culprits] == [2]
    assert lines[-1].strip() == (
        "NCCL's RAS: rank 2 has launched 44 collectives, others 46 (AllReduce), twice within 1 s"
    )
    assert "ranks 0-1, 3: wait for their GPUs, prog.py:34 in <module>, runs, 100 % CPU, GPUs 100 %, 218 of 700 W" in (
        line.strip() for line in lines
    )
    assert job_object(job, standings, finding)["ranks"][0]["gpu"]["busy_percent"] == 100


def test_where_all_wait_for_their_gpus_the_option_that_asks_nccl_is_named() -> None:
    asked = recorded_job("nccl_kernel_hangs")
    job = msgspec.structs.replace(asked, ras=None)
    standings = [standing_of(rank) for rank in job.ranks]

    assert "NCCL may know which rank is behind: --nccl" in sentence(job, finding_of(job, standings))
    assert "--nccl" not in sentence(asked, finding_of(asked, standings))


def test_nobody_is_behind_while_a_kernel_hangs_in_front_of_a_call_that_all_have_launched() -> None:
    job = recorded_job("nccl_kernel_hangs")

    assert ranks_behind(job) == set()
    assert ras_lines(job) == ["NCCL's RAS: no rank is behind the others in what it has launched, twice within 1 s"]


def test_a_rank_whose_stack_looks_like_the_others_is_named_once_it_has_stood_behind_for_long() -> None:
    job = training(answer(41, 41, 39, 41), answer(41, 41, 39, 41))
    long = [msgspec.structs.replace(rank, looks=[*rank.looks[:-1], later(rank.looks[-1], 60.0)]) for rank in job.ranks]
    looked_long = msgspec.structs.replace(job, ranks=long)

    first = finding_of(job, [standing_of(rank) for rank in job.ranks], ranks_behind(job))
    sure = finding_of(looked_long, [standing_of(rank) for rank in long], ranks_behind(looked_long))

    assert (first.what, first.severity, [one.rank.rank for one in first.culprits]) == (
        What.ELSEWHERE,
        Severity.WARNING,
        [2],
    )
    assert (sure.severity, [[one.rank.rank for one in group] for group in sure.waiting]) == (
        Severity.CRITICAL,
        [[0, 1, 3]],
    )


def later(look: msgspec.Struct, seconds: float) -> msgspec.Struct:
    return msgspec.structs.replace(look, at_s=look.at_s + seconds, cpu_s=look.cpu_s + seconds)  # type: ignore[attr-defined]


def test_training_ranks_are_not_behind() -> None:
    first, second = ((RECORDED / f"ras_training_{number}.txt").read_text() for number in (1, 2))

    assert decoded(first) != decoded(second)
    assert behind(training(first, second)) == []


@pytest.mark.parametrize(
    ("then", "now", "ranks"),
    [
        ((41, 41, 39, 41), (41, 41, 39, 41), {2}),
        ((41, 41, 39, 41), (41, 41, 40, 41), set()),  # it moves
        ((40, 41, 39, 39), (41, 42, 39, 39), {2, 3}),  # the others move away
        ((7, 7, 7, 7), (7, 7, 7, 7), set()),
        ((5, 9, 7, 9), (5, 9, 7, 9), {0}),  # the one that is furthest behind
    ],
)
def test_who_stands_behind_in_both_answers_is_behind(
    then: tuple[int, ...], now: tuple[int, ...], ranks: set[int]
) -> None:
    assert ranks_behind(training(answer(*then), answer(*now))) == ranks


def test_ranks_of_a_smaller_communicator_are_known_by_their_pids() -> None:
    job = recorded_job("nccl_kernel_hangs")
    pids = {rank.rank: rank.pid for rank in job.ranks}
    pair = (pids[3], pids[1])

    def seen(pids: tuple[int, ...]) -> SeenJob:
        return training(answer(8, 6, pids=pids), answer(8, 6, pids=pids))

    assert ranks_behind(seen(pair)) == {1}
    assert ras_lines(seen(pair)) == [
        "NCCL's RAS of a communicator of 2: rank 1 has launched 7 collectives, others 9 (AllReduce), twice within 1 s"
    ]
    # In a container it has another pid: then only its number within the communicator is known.
    assert ranks_behind(seen((17, 18))) == set()
    assert ras_lines(seen((17, 18)))[0].startswith("NCCL's RAS of a communicator of 2: rank 1 in it has launched 7")


def test_a_rank_that_does_not_answer_is_told() -> None:
    stopped = (RECORDED / "ras_rank_stopped.txt").read_text()

    assert ras_lines(training(stopped, stopped)) == ["NCCL's RAS: rank 2 does not answer: stopped, ended or cut off"]


def test_the_json_of_2_28_9_lacks_a_comma() -> None:
    whole = (RECORDED / "ras_rank_stopped.txt").read_text()
    missing = whole.index('"missing_ranks"')
    broken = whole[:missing] + whole[missing:].replace('"nvml_dev": 0,', '"nvml_dev": 0')

    assert broken != whole
    assert decoded(broken) == decoded(whole)
    assert decoded(whole) is not None


@given(st.one_of(st.text(), st.recursive(st.integers() | st.text(), st.lists).map(json.dumps)))
def test_no_answer_raises(text: str) -> None:
    job = training(text, text)

    assert ranks_behind(job) == set()
    assert len(ras_lines(job)) == 1


def test_an_answer_that_is_refused_is_told() -> None:
    job = msgspec.structs.replace(recorded_job("nccl_kernel_hangs"), ras=RasSeen("2.26.2", [], "not asked\x1b[2J"))

    assert ras_lines(job) == ["NCCL's RAS: not asked\\x1b[2J"]


GPUS = "GPU-a, 100, 121.94, 700.00\nGPU-b, 0, 71.10, 700.00\nGPU-c, [N/A], [Not Supported], [N/A]\n"


def test_a_gpu_belongs_to_the_processes_that_use_it() -> None:
    seen = GpusSeen(
        SmiSeen(GPUS, ""), SmiSeen("11, GPU-a\n12, GPU-b\n13, GPU-c\n14, GPU-a\n14, GPU-b\n15, GPU-z\n", "")
    )

    assert gpus_by_pid(seen) == {11: Gpu(100, 121.94, 700.0), 12: Gpu(0, 71.1, 700.0), 13: Gpu(None, None, None)}


@given(st.text(), st.text())
def test_whatever_nvidia_smi_prints_raises_nothing(gpus: str, processes: str) -> None:
    assert gpus_by_pid(GpusSeen(SmiSeen(gpus, ""), SmiSeen(processes, ""))) == {}


def test_a_rank_that_computes_while_its_gpu_is_idle_does_not_wait_for_it() -> None:
    # Recorded: a loop of Python alone beside `item()`, both at full CPU and at a line of the program without a call.
    (rank, *_) = recorded_job("nccl_kernel_hangs").ranks

    waits = standing_of(rank)
    computes = standing_of(msgspec.structs.replace(rank, gpu=Gpu(0, 123.34, 700.0)))

    assert (waits.is_waiting, computes.is_waiting) == (True, False)
