"""`rankdeck exec` and `rankdeck env`, typed by a person: what a command says, takes and leaves is its own."""

from __future__ import annotations

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.demo_runs import DemoHouse
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKDECK = (sys.executable, "-P", "-m", "app")
END_S = 60.0
TRAIN = (
    "import pathlib, torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "while not pathlib.Path('end').exists(): dist.all_reduce(torch.ones(1)); dist.barrier()\n"
)


@pytest.fixture(scope="module")
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        run(house, *RANKDECK, "up")
        yield house
        run(house, *RANKDECK, "down", "--kill-jobs")


def run(house: DemoHouse, *argv: str) -> tuple[int, str, str]:
    process = house.start_command(*argv)
    stdout, stderr = process.communicate(timeout=END_S)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize(
    "command",
    [
        ("sh", "-c", "echo out; echo err >&2; exit 3"),
        ("sh", "-c", "kill -TERM $$"),
        # What is ignored and blocked, which a command inherits: Python itself ignores SIGPIPE.
        ("grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"),
        ("printf", "%s|", "--name", "--", "a b", "$HOME"),
        ("sh", "-c", "yes | head -1"),
    ],
)
def test_a_command_is_as_without_it(house: DemoHouse, command: tuple[str, ...]) -> None:
    assert run(house, *RANKDECK, "exec", "--name", "x", "--", *command) == run(house, *command)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--", "no-such-command", "x"], 127, r"no-such-command cannot be run: No such file or directory\n"),
        (["/etc/passwd"], 126, r"/etc/passwd cannot be run: Permission denied\n"),
        ([], 2, r"exec wants a command \(rankdeck exec -- torchrun .*\)\n"),
        (["--name", "No Name!", "true"], 2, r".*No Name!.*\n"),
    ],
)
def test_what_cannot_be_run_is_one_line(house: DemoHouse, arguments: list[str], code: int, said: str) -> None:
    found, stdout, stderr = run(house, *RANKDECK, "exec", *arguments)
    assert (found, stdout) == (code, "")
    assert re.fullmatch(f"rankdeck: {said}", stderr), stderr


def test_without_an_agent_it_runs_all_the_same_and_says_so() -> None:
    with DemoHouse() as house:
        (house.home / ".local").write_text("in the way of the agent's directory")
        code, stdout, stderr = run(house, *RANKDECK, "exec", "--", "echo", "done")
        assert (code, stdout) == (0, "done\n")
        assert re.fullmatch(r"rankdeck: not watched: .*\n", stderr), stderr


def test_env_prints_what_a_shell_takes(house: DemoHouse) -> None:
    script = (
        f'eval "$({shlex.join(RANKDECK)} env --name gpt)"; echo "$RANKDECK_JOB_ID|$PYTHONPATH|$RANKDECK_PROBED_PID"'
    )
    code, stdout, stderr = run(house, "env", "RANKDECK_PROBED_PID=1", "PYTHONPATH=/a b", "sh", "-c", script)
    assert (code, stderr) == (0, "")
    assert re.fullmatch(r"gpt\|.*/ddpcore/launch_plugin:/a b\|\n", stdout), stdout


@pytest.mark.ranks
def test_ctrl_c_at_the_terminal_ends_the_launcher_as_ever_and_the_job_is_told(house: DemoHouse) -> None:
    (house.home / "train.py").write_text(TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    terminal, slave = pty.openpty()
    with (
        os.fdopen(slave),
        subprocess.Popen(
            [*RANKDECK, "exec", "--name", "typed", "--", *torchrun],
            cwd=house.home,
            env=house.environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        ) as process,
    ):
        until(lambda: "2 ranks" in run(house, *RANKDECK, "status", "typed")[1], END_S, "its ranks are seen")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(END_S) != 0
        until(lambda: "failed" in run(house, *RANKDECK, "status", "typed")[1], END_S, "its end is seen")
    said = os.read(terminal, 65536).decode(errors="replace")
    os.close(terminal)
    assert "the ranks of this command are watched" in said
