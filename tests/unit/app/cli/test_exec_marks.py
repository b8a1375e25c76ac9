"""Where `rankdeck exec` leaves its mark: with the agent that its ranks report to."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from app.cli.exec import _leave_mark
from ddpcore.adoption import agent_directory
from ddpcore.wire_launch import ADOPTED_DIR, ENV_AGENT_DIR, EXEC_SUFFIX, INBOX_SOCKET, agent_directories

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_after_another_step_of_the_job_the_mark_is_left_with_the_agent_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h1")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv(ENV_AGENT_DIR, raising=False)
    for name in ("JOB_ID", "STEP_ID", "PROCID", "STEP_NUM_TASKS", "STEP_NUM_NODES"):
        monkeypatch.setenv(f"SLURM_{name}", "7")
    own, usual = agent_directories(os.environ, "h1")
    for directory in (own, usual):
        directory.mkdir(mode=0o700, parents=True)

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(usual / INBOX_SOCKET))
        _leave_mark()
        assert agent_directory(os.environ) == usual

    assert [path.name.split("-")[0] for path in (usual / ADOPTED_DIR).glob(f"*{EXEC_SUFFIX}")] == [str(os.getpid())]
    assert list(own.iterdir()) == []
