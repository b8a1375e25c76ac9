"""How a rank is bound to its launcher, and what it leaves for torchrun when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil

from ddpcore.probe.bootstrap import _is_orphaned, _parent_of, pid_namespace

if TYPE_CHECKING:
    from pathlib import Path

GONE_PID = 2**22 + 1
"""Above the kernel's highest pid."""


def test_a_child_of_the_launcher_is_no_orphan() -> None:
    assert not _is_orphaned(os.getppid(), pid_namespace())


def test_a_shell_between_launcher_and_rank_makes_no_orphan() -> None:
    grandparent = psutil.Process(os.getppid()).ppid()
    if grandparent > 1:
        assert not _is_orphaned(grandparent, pid_namespace())


def test_a_rank_whose_launcher_is_no_ancestor_is_an_orphan() -> None:
    assert _is_orphaned(GONE_PID, pid_namespace())


def test_a_launcher_in_another_pid_namespace_tells_nothing() -> None:
    assert not _is_orphaned(GONE_PID, "pid:[1]")
    assert not _is_orphaned(GONE_PID, "")


def test_a_process_that_has_gone_has_no_parent() -> None:
    assert _parent_of(GONE_PID) == 0
    assert _parent_of(os.getpid()) == os.getppid()


def test_an_orphan_exits_at_once_instead_of_training(tmp_path: Path) -> None:
    environment = os.environ | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "RANKDECK_INBOX": str(tmp_path / "inbox.sock"),
        "RANKDECK_LAUNCHER_PID": str(GONE_PID),
        "RANKDECK_LAUNCHER_NAMESPACE": pid_namespace(),
    }

    done = subprocess.run(
        [sys.executable, "-c", "from ddpcore.probe.bootstrap import start_in_rank; start_in_rank(); print('trains')"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.stdout, done.returncode) == ("", 137), done.stderr
