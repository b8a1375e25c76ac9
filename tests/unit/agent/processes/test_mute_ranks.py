"""Ranks of another launcher's job that no probe reports, and why."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.processes.mute_ranks import mute_ranks, why_mute
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR, RANK_VARIABLES
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    launcher: subprocess.Popen[str],
) -> None:
    shell = psutil.Process(launcher.pid)
    children = until(lambda: found if len(found := shell.children(recursive=True)) == 4 else [], 60, "all run")
    of_rank = {process.environ()["RANK"]: process for process in sorted(children, key=lambda one: -one.pid)}

    found = mute_ranks(launcher.pid, of_rank["0"].pid, {0})

    assert [(one.rank, one.pid, one.why) for one in found] == [
        (1, of_rank["1"].pid, "python -I"),
        (2, of_rank["2"].pid, ""),
    ]
    assert mute_ranks(launcher.pid, of_rank["0"].pid, {0, 1, 2}) == []
