"""Ranks of another launcher's job that no probe reports, and why."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.processes.mute_ranks import mute_ranks, unreported_ranks, why_mute
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR, RANK_VARIABLES
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PREPARED = {b"PYTHONPATH": os.fsencode(LAUNCH_PLUGIN_DIR)}
WAIT = "import sys; sys.stdin.read()"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("python -I train.py", "python -I"),
        ("python -uE train.py", "python -E"),
        ("python -W ignore -X dev -I -m train", "python -I"),
        ("python -Wignore -BI train.py", "python -I"),
        ("python --check-hash-based-pycs never -E train.py", ""),
        ("python -u train.py -I", ""),
        ("python -m train -E", ""),
        ("python -c -I", ""),
        ("python -mI", ""),
        ("python -X E train.py", ""),
        ("python - -I", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_the_option_that_keeps_the_probe_out_is_found_before_the_program(line: str, why: str) -> None:
    assert why_mute(line.encode().split(b" "), PREPARED) == why


def test_what_the_environment_keeps_out_is_named() -> None:
    assert why_mute([b"python"], {**PREPARED, b"TORCH_DEVICE_BACKEND_AUTOLOAD": b"0"}).endswith("=0 keeps it out")
    assert "PYTHONPATH" in why_mute([b"python"], {b"PYTHONPATH": b"/elsewhere"})


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    """Three ranks and a child of the last, below a shell; the second ignores PYTHONPATH."""
    python = f"exec {sys.executable}"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{WAIT}'])"
    script = (
        f"exec 3<&0; (RANK=0 {python} -c '{WAIT}' <&3) & (RANK=1 {python} -I -c '{WAIT}' <&3) & "
        f'(RANK=2 {python} -c "{child}" <&3) & wait'
    )
    environ = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environ |= {"PYTHONPATH": str(LAUNCH_PLUGIN_DIR), "SLURM_PROCID": "0"}
    with subprocess.Popen(["sh", "-c", script], env=environ, stdin=subprocess.PIPE, text=True) as launcher:
        yield launcher
        for process in psutil.Process(launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_each_is_found_by_its_first_process_and_those_that_report_are_left_out(
    launcher: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = psutil.Process(launcher.pid)
    children = until(lambda: found if len(found := shell.children(recursive=True)) == 4 else [], 60, "all run")
    of_rank = {process.environ()["RANK"]: process for process in sorted(children, key=lambda one: -one.pid)}

    assert mute_ranks(launcher.pid, of_rank["0"].pid, {0}) == {1: (of_rank["1"].pid, "python -I")}
    assert mute_ranks(launcher.pid, of_rank["0"].pid, {0, 1, 2}) == {}

    monkeypatch.setattr("agent.processes.mute_ranks.IMPORT_S", 0.0)
    assert mute_ranks(launcher.pid, of_rank["0"].pid, {0, 1}) == {2: (of_rank["2"].pid, "torch not imported")}


TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "3"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
RANK = """
import ctypes, mmap, subprocess, sys, threading
file = open(sys.argv[1], "r+b")
held = mmap.mmap(file.fileno(), 0) if "torch" in sys.argv[2] else None
def run():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
    print("ready", flush=True)
    sys.stdin.read()
if "child" in sys.argv[2]:
    subprocess.Popen([sys.executable, "-I", *sys.argv[:2], sys.argv[2].replace("child", "torch")])
if "group" in sys.argv[2]:
    threading.Thread(target=run).start()
else:
    print("ready", flush=True)
sys.stdin.read()
"""
"""Looks like a process that has loaded torch, or opened a group, or started a child that has."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a shell that runs such processes, each by its option of Python, what it is and its variables."""
    (tmp_path / "libtorch_cpu.so").write_bytes(b"x")
    (tmp_path / "train.py").write_text(RANK)
    outside = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    started: list[subprocess.Popen[str]] = []

    def start(*ranks: tuple[str, str, dict[str, str]]) -> subprocess.Popen[str]:
        lines = []
        for option, what, environ in ranks:
            variables = " ".join(f"{name}={value}" for name, value in environ.items())
            lines.append(f"env {variables} {sys.executable} {option} train.py libtorch_cpu.so {what} <&3 &")
        environ = {**outside, "PYTHONPATH": str(LAUNCH_PLUGIN_DIR)}
        argv = ["sh", "-c", f"exec 3<&0; {' '.join(lines)} wait"]
        launcher = subprocess.Popen(
            argv, env=environ, cwd=tmp_path, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(launcher)
        assert launcher.stdout
        for _ in range(sum(1 + ("child" in what) for _, what, _ in ranks)):
            assert launcher.stdout.readline() == "ready\n"
        return launcher

    yield start
    for launcher in started:
        launcher.communicate("")


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        (
            [("-I", "torch", {**TORCHRUN, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}) for rank in (0, 1)],
            [("train-29500", 3, 2, 0, 0), ("train-29500", 3, 2, 1, 1)],
        ),
        ([("-I", "group", {**MPI, "OMPI_COMM_WORLD_RANK": "1", "PMIX_NAMESPACE": "a"})], [("train-a", 0, 2, 1, 1)]),
        ([("-E", "group", {**SLURM, "SLURM_PROCID": "2"})], [("slurm-7-0", 0, 4, 2, 2)]),
        ([("-E", "group", {"RANK": "0", "MASTER_PORT": "1"})], [("train-1", 0, 1, 0, 0)]),
        # A child of a rank is none.
        ([("-I", "torch,child", {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})], [("train-29500", 3, 2, 0, 0)]),
        # It may still import torch.
        ([("", "torch", {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})], []),
        # It has not imported torch, or opened no group, or is a node by its container's variables.
        ([("-I", "nothing", {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"})], []),
        ([("-I", "torch", {**SLURM, "SLURM_PROCID": "0"}), ("-I", "torch", {**MPI, "OMPI_COMM_WORLD_RANK": "0"})], []),
        ([("-I", "torch", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"})], []),
        # Each process of a batch script has its rank, and so have ranks that spawn has started in a step.
        ([("-I", "group", {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"})], []),
        ([("-I", "group", {**SLURM, "SLURM_PROCID": "0"})] * 2, []),
        # Not a rank at all; or one that another agent has launched.
        ([("-I", "torch,group", {})], []),
        ([("-I", "torch", {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "RANKDECK_INBOX": "/x"})], []),
    ],
)
def test_without_any_report_ranks_are_found_by_what_they_show_and_nothing_else_is(
    ranks: list[tuple[str, str, dict[str, str]]],
    found: list[tuple[str, int, int, int, int]],
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    launcher = start(*ranks)
    seen = unreported_ranks(launcher.pid, ())

    assert sorted(one[:5] for one in seen) == found
    assert {one.why for one in seen} <= {"python -I", "python -E"}
    assert unreported_ranks(launcher.pid, {one.pid for one in seen}) == []


def test_a_launcher_may_be_its_only_rank_and_a_torch_that_loads_no_probe_is_named_after_a_minute(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = start(("", "torch", {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}))
    (rank,) = psutil.Process(launcher.pid).children()
    monkeypatch.setattr("agent.processes.mute_ranks.IMPORT_S", 0.0)

    (seen,) = unreported_ranks(rank.pid, ())
    assert (seen.pid, seen.why) == (rank.pid, "torch older than 2.5, or a Python without rankdeck")
