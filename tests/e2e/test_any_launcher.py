"""`rankdeck exec` and `rankdeck env`, typed by a person: what a command says, takes and leaves is its own."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

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
    "end = torch.zeros(1)\n"
    "while not end: end.fill_(pathlib.Path('end').exists()); dist.all_reduce(end); dist.barrier()\n"
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


def status_of(house: DemoHouse, job: str) -> dict[str, Any]:
    stdout = run(house, *RANKDECK, "status", *filter(None, [job]), "--json")[1]
    found: dict[str, Any] = json.loads(stdout) if stdout else {"ranks": [], "jobs": []}
    return found


def names(house: DemoHouse) -> set[str]:
    status = status_of(house, "")
    return {job["job_id"] for job in [*status["jobs"], *status.get("other_jobs", [])]}


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
        (["/" + "x" * 5000], 126, r"/x{254}… cannot be run: File name too long\n"),
        (["/etc/passwd/train"], 126, r"/etc/passwd/train cannot be run: Not a directory\n"),
        ([], 2, r"exec wants a command \(rankdeck exec -- torchrun .*\)\n"),
        (["--name", "No Name!", "true"], 2, r".*No Name!.*\n"),
    ],
)
def test_what_cannot_be_run_is_one_line(house: DemoHouse, arguments: list[str], code: int, said: str) -> None:
    found, stdout, stderr = run(house, *RANKDECK, "exec", *arguments)
    assert (found, stdout) == (code, "")
    assert re.fullmatch(f"rankdeck: {said}", stderr), stderr


def test_a_program_that_is_no_command_is_refused_before_an_agent_is_started() -> None:
    with DemoHouse() as house:
        (house.home / "train.py").touch()
        said = "train.py cannot be run: No such file or directory (rankdeck exec -- python3 train.py)"
        assert run(house, *RANKDECK, "exec", "train.py") == (127, "", f"rankdeck: {said}\n")
        assert not list(house.home.glob(".local/state/rankdeck/*/*"))


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
def test_a_job_without_any_probe_is_seen_by_its_processes_and_other_commands_are_no_job(house: DemoHouse) -> None:
    (house.home / "mute.py").write_text(TRAIN)
    torchrun = (*(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"), "--standalone")
    command = (*torchrun, "--no-python", sys.executable, "-I", "mute.py")
    environ = {**house.environment, "SLURM_PROCID": "0", "RANK": "0", "WORLD_SIZE": "2"}
    idle = [sys.executable, "-c", "import torch, sys; print('ready', flush=True); sys.stdin.read()"]
    pipe = subprocess.PIPE
    before = names(house)
    with (
        subprocess.Popen([*RANKDECK, "exec", "--", *idle], env=environ, stdin=pipe, stdout=pipe) as other,
        house.start_command(*RANKDECK, "exec", "--name", "mute", "--", *command) as process,
    ):
        assert other.stdout
        assert other.stdout.readline() == b"ready\n"
        status = until(lambda: seen if (seen := status_of(house, "mute"))["ranks"] else {}, END_S, "it is seen")
        assert [rank["state"] for rank in status["ranks"]] == ["unprobed", "unprobed"]
        assert all("no probe (python -I)" in rank["detail"] for rank in status["ranks"])
        assert any("ranks 0-1 have no probe (python -I)" in note for note in status["jobs"][0]["notes"])
        marks = ".local/state/rankdeck/*/adopted/*.exec"
        assert {int(path.stem.partition("-")[0]) for path in house.home.glob(marks)} == {process.pid, other.pid}

        (house.home / "end").touch()
        assert process.wait(END_S) == 0
        until(lambda: status_of(house, "mute")["jobs"][0]["state"] == "succeeded", END_S, "its end is seen")
        assert names(house) == before | {"mute"}
        other.communicate()
    until(lambda: not list(house.home.glob(marks)), END_S, "no mark is left")
    (house.home / "end").unlink()


@pytest.mark.ranks
def test_the_end_of_agents_spares_a_job_of_another_launcher_and_says_so() -> None:
    with DemoHouse() as house:
        (house.home / "train.py").write_text(TRAIN)
        run(house, *RANKDECK, "up")
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "train.py")
        with house.start_command(*RANKDECK, "exec", "--name", "kept", "--", *torchrun) as process:
            until(lambda: status_of(house, "kept")["ranks"], END_S, "its rank is seen")

            code, stdout, stderr = run(house, *RANKDECK, "down")
            assert (code, stderr) == (0, "")
            assert stdout.endswith("is down; one job goes on: rankdeck up localhost takes it up again\n")
            code, stdout, stderr = run(house, *RANKDECK, "down", "--kill-jobs")
            assert (code, process.poll()) == (4, None)
            assert stdout.startswith("no agent runs on localhost; one job goes on")
            assert "--kill-jobs spares it (kill it: rankdeck up localhost; rankdeck kill --host localhost)" in stderr

            (house.home / "end").touch()
            assert process.wait(END_S) == 0


@pytest.mark.ranks
def test_ctrl_c_at_the_terminal_ends_the_launcher_as_ever_and_is_no_failure(house: DemoHouse) -> None:
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
        until(lambda: "job typed: stopped" in run(house, *RANKDECK, "status", "typed")[1], END_S, "its end is seen")
    code, stdout, _ = run(house, *RANKDECK, "status", "typed")
    assert (code, "interrupted by SIGINT" in stdout, "CRITICAL" in stdout) == (0, True, False), stdout
    said = os.read(terminal, 65536).decode(errors="replace")
    os.close(terminal)
    assert "the ranks of this command are watched" in said
