"""Ranks are found and numbered by what each launcher leaves in environments and process trees."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.inspect.on_host import (
    DIGEST,
    KEPT_VARIABLES,
    MAX_TEXT,
    OWN_JOB,
    directory_of,
    find_ranks,
    integer,
    kept_frame,
    main_frames,
    program_of,
    set_ancestors,
    spy_of,
    wanted_s,
    without_pools,
)
from app.inspect.seen import HostSeen, Look, SeenRank, jobs_of
from ddpcore.wire import ENV_JOB_ID

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
    return {row["pid"]: {**usual, "variables": {}, "above": row.get("parent", 1), **row} for row in rows}


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


def test_ranks_name_the_job_of_rankdeck_that_they_are_of() -> None:
    own = {**TORCHRUN, "MASTER_PORT": "29501", ENV_JOB_ID: "beside"}
    found = processes(
        {"pid": 11, "variables": {**TORCHRUN, "RANK": "0"}},
        {"pid": 12, "variables": {**own, "RANK": "0"}},
    )

    assert OWN_JOB == ENV_JOB_ID
    ranks = find_ranks(found, lambda _one: True, lambda _pid: "bash")
    assert {rank["pid"]: rank["own_job"] for rank in ranks} == {11: "", 12: "beside"}


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


def test_a_child_that_a_rank_runs_by_a_shell_is_no_rank() -> None:
    found = processes(
        {"pid": 11, "parent": 10, "variables": {**TORCHRUN, "RANK": "2"}},
        {"pid": 14, "parent": 13, "variables": {**TORCHRUN, "RANK": "2"}},
    )
    set_ancestors(found, {13: 12, 12: 11, 10: 1})

    assert (found[14]["above"], found[11]["above"]) == (11, 1)
    assert numbers(found) == {11: (2, 4, "torchrun")}


def test_a_number_that_no_world_has_is_no_rank() -> None:
    found = processes(
        {"pid": 11, "variables": {**TORCHRUN, "RANK": "999999999"}},
        {"pid": 12, "variables": {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "999999999"}},
    )

    assert numbers(found) == {12: (1, None, "torchrun")}


@pytest.mark.parametrize(("is_distributed", "trouble", "num"), [(False, "", 0), (True, "", 2), (False, "unseen", 2)])
def test_a_pool_of_spawned_workers_is_no_job(is_distributed: bool, trouble: str, num: int) -> None:
    looks = [{"is_distributed": False, "trouble": ""}], [{"is_distributed": is_distributed, "trouble": trouble}]
    pool = [{"how": "spawn", "key": "pid 9", "looks": look} for look in looks]
    other = {"how": "torchrun", "key": "k", "looks": [{"is_distributed": False, "trouble": ""}]}

    assert without_pools([*pool, other], set()) == [*pool[:num], other]


VALUES = st.dictionaries(st.sampled_from(KEPT_VARIABLES), st.text(max_size=MAX_TEXT) | st.integers(0).map(str))


@given(st.lists(VALUES, max_size=6), st.lists(st.integers(0, 6), min_size=6, max_size=6))
def test_whatever_is_in_environments_can_be_read_and_told(rows: list[dict[str, str]], parents: list[int]) -> None:
    found = processes(
        *({"pid": pid, "parent": parents[pid], "variables": variables} for pid, variables in enumerate(rows))
    )
    ranks = find_ranks(found, lambda _one: True, lambda _pid: "slurmstepd")
    looks = [msgspec.to_builtins(LOOK)]
    text = json.dumps(
        {
            "ranks": [dict(rank, looks=looks, age_s=0.0) for rank in ranks],
            "unseen": {},
            "user": "",
            "is_root": False,
            "yama": None,
        }
    )

    jobs = jobs_of([("h1", msgspec.json.decode(text, type=HostSeen))])
    assert sum(len(job.ranks) for job in jobs) == len(ranks)
    assert all(len(job.missing) + len(job.ranks) == job.size for job in jobs)


def test_a_py_spy_that_was_sent_lies_where_it_can_be_run_and_only_while_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, noexec = tmp_path / "home", tmp_path / "noexec"
    home.mkdir()
    noexec.mkdir()
    binary = b"\x7fELF"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(noexec))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(binary)))
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).is_relative_to(home))

    with spy_of(DIGEST + hashlib.sha256(binary).hexdigest()) as spy:
        assert Path(spy).read_bytes() == binary
        assert (Path(spy).stat().st_mode & 0o777, Path(spy).parent.stat().st_mode & 0o777) == (0o700, 0o700)
        assert Path(spy).parent.parent == home
    assert sorted(tmp_path.rglob("*")) == [home, noexec]


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


def test_the_directory_of_a_process_is_that_in_which_it_runs() -> None:
    assert directory_of(os.getpid()) == str(Path.cwd())
    assert directory_of(2**30) == "", "there is no such process"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count it")
def test_how_long_a_main_thread_has_wanted_a_core_is_what_it_has_computed_and_not_what_it_has_slept() -> None:
    before_s = wanted_s(os.getpid())
    assert before_s is not None
    time.sleep(0.2)
    slept_s = (wanted_s(os.getpid()) or 0.0) - before_s
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass

    assert slept_s < 0.15
    assert (wanted_s(os.getpid()) or 0.0) - before_s - slept_s > 0.15
    assert wanted_s(2**30) is None
