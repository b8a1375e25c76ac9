"""What the launch plug-in changes in a process that no agent has launched: nothing that its program could see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ddpcore.adoption import agent_directory
from ddpcore.wire_launch import ENV_AGENT_DIR, INBOX_SOCKET, LAUNCH_PLUGIN_DIR, SLURM_INFIX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HOST = "h1"
SEEN_BY_A_PROGRAM = """
import inspect, pickle, sys
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
opening = dist.init_process_group
assert opening is distributed_c10d.init_process_group
assert getattr(device_mesh, "init_process_group", opening) is opening
print(inspect.signature(opening), opening.__module__, opening.__qualname__, opening.__doc__[:60].split())
assert pickle.loads(pickle.dumps(opening)) is opening
for arguments in ({"backend": "no such"}, {"backend": "gloo", "init_method": "bad://x", "rank": 0, "world_size": 1}):
    try:
        opening(**arguments)
    except Exception as error:
        print(type(error).__name__, error, error.__cause__, error.__context__)
try:
    opening("gloo", "env://", None, None, None, None, None, None, None, None, None)
except Exception as error:
    print(type(error).__name__)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
print(dist.get_rank(), dist.get_world_size())
dist.destroy_process_group()
"""


def printed(program: str, environ: Mapping[str, str]) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_a_program_sees_the_function_of_torch_with_the_same_face_and_the_same_exceptions(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    environ = {"PYTHONPATH": str(LAUNCH_PLUGIN_DIR), ENV_AGENT_DIR: str(tmp_path / "state")}

    with_plugin = printed(f"{SEEN_BY_A_PROGRAM}\nprint('probed:', 'ddpcore.probe.bootstrap' in sys.modules)", environ)
    without = printed(f"{SEEN_BY_A_PROGRAM}\nprint('probed: True')", {})

    assert with_plugin == without


@pytest.mark.parametrize("environ", [{}, {"RANKDECK_UNPROBED": "1"}, {"RANKDECK_PROBED_PID": "1"}])
def test_a_process_that_is_no_rank_is_left_alone(environ: dict[str, str], tmp_path: Path) -> None:
    program = "import sys, torch\nprint('ddpcore.probe.bootstrap' in sys.modules)"

    assert printed(program, {"PYTHONPATH": str(LAUNCH_PLUGIN_DIR), "HOME": str(tmp_path), **environ}) == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_the_agent_of_this_host_is_found_by_rule_and_in_a_slurm_step_that_of_the_step_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: HOST)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    usual = tmp_path / "rankdeck" / HOST
    step = {f"SLURM_{name}": "7" for name in ("JOB_ID", "STEP_ID", "PROCID", "STEP_NUM_TASKS", "STEP_NUM_NODES")}
    own = tmp_path / "rankdeck" / f"{HOST}{SLURM_INFIX}7"

    assert agent_directory(environ) == usual
    assert agent_directory(environ | step) == own

    usual.mkdir(mode=0o700, parents=True)
    assert agent_directory(environ | step) == usual  # that of the batch script serves

    own.mkdir(mode=0o700)
    assert agent_directory(environ | step) == own
    assert agent_directory(environ | {ENV_AGENT_DIR: str(usual)}) == usual
    assert agent_directory({"HOME": "not absolute"}) is None

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(usual / INBOX_SOCKET))
        assert agent_directory(environ | step) == usual  # an earlier step of the job has left its own
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as another:
            another.bind(str(own / INBOX_SOCKET))
            assert agent_directory(environ | step) == own
        assert agent_directory(environ | step) == usual  # what a killed agent has left serves nobody


def test_a_directory_that_others_may_enter_is_not_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert agent_directory({ENV_AGENT_DIR: str(tmp_path)}) is None

    tmp_path.chmod(0o700)
    assert agent_directory({ENV_AGENT_DIR: str(tmp_path)}) == tmp_path
    (tmp_path.parent / "link").symlink_to(tmp_path)
    assert agent_directory({ENV_AGENT_DIR: str(tmp_path.parent / "link")}) is None
