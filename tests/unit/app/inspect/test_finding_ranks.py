"""Ranks are found and numbered by what each launcher leaves in environments and process trees."""

from __future__ import annotations

from typing import Any

import pytest

from app.inspect.on_host import find_ranks, integer, kept_frame, main_frames, program_of
from app.inspect.seen import HostSeen, Look, SeenRank, jobs_of

TORCHRUN = {
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
STORE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
LOOK = Look(frames=[], trouble="", at_s=0.0, state="S", cpu_s=0.0, switches=0, wchan="")


def processes(*rows: dict[str, Any]) -> dict[int, dict[str, Any]]:
    usual = {"parent": 1, "start": 0, "uid": 0, "program": "train.py", "is_readable": True, "is_spawned": False}
    return {row["pid"]: {**usual, "variables": {}, **row} for row in rows}


def numbers(
    found: dict[int, dict[str, Any]], without_torch: tuple[int, ...] = (), slurm: tuple[int, ...] = ()
) -> dict[int, tuple[int, int | None, str]]:
    ranks = find_ranks(
        found, lambda one: one["pid"] not in without_torch, lambda pid: "slurmstepd" if pid in slurm else "bash"
    )
    return {rank["pid"]: (rank["rank"], rank["size"], rank["how"]) for rank in ranks}


def test_torchrun_s_ranks_are_found_before_they_import_torch_and_their_workers_are_none() -> None:
    found = processes(
        {"pid": 10, "program": "torchrun"},
        {"pid": 11, "parent": 10, "variables": {**TORCHRUN, "RANK": "2"}},
        {"pid": 12, "parent": 10, "variables": {**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1"}},
        {"pid": 13, "parent": 12, "variables": {**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1"}},
    )

    assert numbers(found, without_torch=(11,)) == {11: (2, 4, "torchrun"), 12: (3, 4, "torchrun")}


def test_lightning_s_script_is_its_own_first_rank() -> None:
    child = {**STORE, "NODE_RANK": "1", "WORLD_SIZE": "6"}
    found = processes(
        {"pid": 10},
        {"pid": 12, "parent": 10, "variables": {**child, "LOCAL_RANK": "2"}},
        {"pid": 11, "parent": 10, "variables": {**child, "LOCAL_RANK": "1"}},
        {"pid": 13, "parent": 11, "variables": {**child, "LOCAL_RANK": "1"}},
    )

    assert numbers(found) == {10: (3, 6, "Lightning"), 11: (4, 6, "Lightning"), 12: (5, 6, "Lightning")}


def test_spawned_ranks_are_numbered_in_the_order_of_their_start() -> None:
    found = processes(
        {"pid": 10},
        {"pid": 11, "parent": 10, "start": 7, "is_spawned": True},
        {"pid": 12, "parent": 10, "start": 5, "is_spawned": True},
        {"pid": 13, "parent": 10, "start": 6, "is_spawned": True},
        {"pid": 14, "parent": 11, "start": 9, "is_spawned": True},
    )

    assert numbers(found, without_torch=(13,)) == {12: (0, 2, "spawn"), 11: (1, 2, "spawn")}


def test_mpirun_s_ranks_need_no_range() -> None:
    found = processes(
        {
            "pid": 11,
            "variables": {
                "OMPI_COMM_WORLD_RANK": "2",
                "OMPI_COMM_WORLD_SIZE": "3",
                "PMIX_NAMESPACE": "prterun-h1-9@1",
            },
        },
        {"pid": 12, "variables": {"PMI_RANK": "1", "PMI_SIZE": "3"}},
    )

    assert numbers(found) == {11: (2, 3, "mpirun"), 12: (1, 3, "mpirun")}


def test_only_a_child_of_slurmstepd_is_a_rank_of_srun() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    found = processes(
        {"pid": 11, "parent": 5, "variables": {**slurm, "SLURM_PROCID": "1"}},
        {"pid": 12, "parent": 6, "variables": {**slurm, "SLURM_PROCID": "0"}},
        {"pid": 13, "parent": 11, "variables": {**slurm, "SLURM_PROCID": "1"}},
    )

    assert numbers(found, slurm=(5,)) == {11: (1, 2, "srun")}


def test_rank_alone_is_a_rank_unless_a_launcher_runs_under_it() -> None:
    by_hand = {**STORE, "RANK": "1", "WORLD_SIZE": "2"}
    found = processes(
        {"pid": 10, "variables": by_hand},
        {"pid": 20, "variables": by_hand, "program": "torchrun"},
        {"pid": 21, "parent": 20, "variables": {**TORCHRUN, "RANK": "4"}},
    )

    assert numbers(found) == {10: (1, 2, "RANK"), 21: (4, 4, "torchrun")}


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["python", "-u", "train.py", "--token", "secret"], "train.py"),
        (["/usr/bin/python3", "-X", "dev", "-m", "pkg.train", "secret"], "-m pkg.train"),
        (["python", "-c", "print('secret')"], "-c"),
        (["torchrun"], "torchrun"),
    ],
)
def test_a_program_is_named_without_its_arguments(words: list[str], program: str) -> None:
    assert program_of(words) == program


def test_of_local_variables_only_small_numbers_of_known_names_leave_the_host() -> None:
    variables = [
        {"name": "step", "repr": "57"},
        {"name": "src", "repr": "0"},
        {"name": "epoch", "repr": "'secret'"},
        {"name": "i", "repr": "12345678901"},
        {"name": "password", "repr": "1234"},
    ]

    assert kept_frame({"filename": "a.py", "line": 3, "name": "f", "locals": variables})[3] == {"step": 57, "src": 0}
    assert [integer(text) for text in ("7", "-1", "1.5", "", None)] == [7, None, None, None, None]


def test_the_main_thread_is_found_in_a_container_too() -> None:
    threads: list[dict[str, Any]] = [
        {"os_thread_id": 8, "frames": [{"name": "worker"}]},
        {"os_thread_id": 1, "frames": [{"name": "main"}]},
    ]
    named: list[dict[str, Any]] = [{"os_thread_id": None, "thread_name": "MainThread", "frames": [{"name": "main"}]}]

    assert main_frames(threads, 4711) == [{"name": "main"}]
    assert main_frames(named, 4711) == [{"name": "main"}]
    assert main_frames([], 4711) == []


def seen(*ranks: tuple[int, str, str]) -> HostSeen:
    rows = [SeenRank(100 + rank, 0, 0, "train.py", rank, 4, how, key, [LOOK]) for rank, how, key in ranks]
    return HostSeen(ranks=rows, unseen={}, user="root", is_root=True, yama=None)


def test_ranks_of_one_store_are_one_job_over_hosts_and_a_loopback_store_is_another_on_each() -> None:
    one = [("h1", seen((0, "torchrun", "10.0.0.1:29500"))), ("h2", seen((2, "torchrun", "10.0.0.1:29500")))]
    apart = [
        ("h1", seen((0, "torchrun", "none localhost:29500"))),
        ("h2", seen((2, "torchrun", "none localhost:29500"))),
    ]

    assert [([rank.rank for rank in job.ranks], job.missing) for job in jobs_of(one)] == [([0, 2], [1, 3])]
    assert len(jobs_of(apart)) == 2


def test_two_jobs_that_share_a_key_are_kept_apart_by_their_ranks() -> None:
    twice = [("h1", seen((0, "torchrun", "10.0.0.1:29500"))), ("h2", seen((0, "torchrun", "10.0.0.1:29500")))]

    assert [rank.host for job in jobs_of(twice) for rank in job.ranks] == ["h1", "h2"]
