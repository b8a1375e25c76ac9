"""What `leftovers --clean` ends without being asked by name: what an agent has launched and nobody watches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from agent.processes.leftovers import chosen, find_leftovers
from ddpcore.wire import ENV_INBOX, ENV_JOB_ID
from ddpcore.wire_launch import ENV_EXEC_PID, prepared_env

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

MARKS = {ENV_INBOX: "/gone/inbox.sock", ENV_JOB_ID: "train"}
WAIT = "sleep 600 >&- & echo $!; exec >&-; wait"


Shells = list[subprocess.Popen[bytes]]


@pytest.fixture
def shells() -> Iterator[Shells]:
    shells: Shells = []
    yield shells
    for shell in shells:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def begin(shells: Shells, script: str, env: dict[str, str]) -> int:
    """Start a shell that leaves another to init, which prints the pid of the process that counts; return that."""
    shell = subprocess.Popen(
        ["bash", "-c", f"{{ {script}; }} &"], env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    shells.append(shell)
    assert shell.stdout is not None
    with shell.stdout:
        return int(shell.stdout.readline())


def pids_cleaned(watched: Collection[int] = ()) -> set[int]:
    return {int(item.name.split(":")[1]) for item in chosen(find_leftovers(watched), []) if item.is_ours}


def test_what_runs_in_a_prepared_shell_is_no_leftover(shells: Shells) -> None:
    assert begin(shells, WAIT, prepared_env(os.environ, "gpt")) not in pids_cleaned()


def test_what_an_agent_has_launched_is_one_unless_somebody_watches_it(shells: Shells) -> None:
    orphan = begin(shells, WAIT, {**os.environ, **MARKS})
    executed = begin(shells, f"{ENV_EXEC_PID}=$BASHPID exec bash -c '{WAIT}'", {**os.environ, **MARKS})
    assert {orphan, executed} & pids_cleaned() == {orphan}
    assert orphan not in pids_cleaned(watched={orphan})
