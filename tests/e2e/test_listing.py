"""The verbs that print rows of a job, over a real one on this machine."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.demo_runs import DemoHouse
from tests.support.desk import named
from tests.support.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.desk import Desk

PROGRAM = r"""
import pathlib, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
print(f"rank {rank} begins \x1b[31m", flush=True)
dist.barrier()
while rank == 1 and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
dist.all_reduce(torch.ones(3))
print(f"rank {rank} ends", file=sys.stderr, flush=True)
dist.destroy_process_group()
"""

HOSTS = ("h1", "h2")
BEGINS = "begins \\x1b[31m"


@pytest.fixture
def house() -> Iterator[DemoHouse]:
    with DemoHouse() as house:
        yield house


class Here:
    """Commands about jobs on this machine."""

    def __init__(self, house: DemoHouse) -> None:
        self._house = house

    def start(self, *argv: str) -> subprocess.Popen[str]:
        return self._house.start_command(sys.executable, "-P", "-m", "app", *argv)

    def run(self, *argv: str, codes: tuple[int, ...] = (0,)) -> str:
        process = self.start(*argv)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode in codes, stderr
        return stdout


@pytest.mark.ranks
def test_rows_and_lines_of_a_job_are_printed_and_followed_to_its_end(house: DemoHouse, tmp_path: Path) -> None:
    here = Here(house)
    program, go_on = tmp_path / "train.py", tmp_path / "go_on"
    program.write_text(PROGRAM)
    here.run("run", "--detach", "--name", "gpt", "--nproc-per-node", "2", "--", str(program), str(go_on))
    any_code = (0, 10)

    def waits() -> list[dict[str, object]]:
        barriers: list[dict[str, object]] = json.loads(here.run("barriers", "--json", codes=any_code))["barriers"]
        return barriers

    until(lambda: bool(waits()), 60, "rank 0 waits")
    following = here.start("logs", "-f", "--rank", "0", "--json")

    (wait,) = waits()
    assert (wait["waiting"], wait["missing"], wait["op"]) == ([0], [1], "all_reduce")
    header, line = here.run("barriers", "gpt", codes=any_code).splitlines()
    assert header.startswith("CALL")
    assert "all_reduce" in line
    (row,) = json.loads(here.run("ranks", "--rank", "1", "--json", codes=any_code))["ranks"]
    assert (row["rank"], row["state"]) == (1, "missing")
    assert [line.split()[0] for line in here.run("memory", codes=any_code).splitlines()] == ["RANK", "0", "1"]
    assert "job gpt: running" in here.run("events")
    assert here.run("logs", "--grep", "begins").splitlines() in (
        [f"localhost:r{rank}  rank {rank} begins \\x1b[31m" for rank in order] for order in ((0, 1), (1, 0))
    )
    assert here.run("logs", "-n", "0") == ""
    assert "begins" in here.run("logs", "--since", "1h")
    assert here.run("logs", "--since", "0s") == ""
    watching = here.start("ranks", "--watch", "--json")
    recording = here.start("record", str(tmp_path / "gpt.rdk"), "gpt")

    assert watching.stdout is not None
    watching.stdout.readline()
    assert recording.stderr is not None
    recording.stderr.readline()
    go_on.touch()

    lines = [json.loads(line) for line in following.communicate(timeout=60)[0].splitlines()]
    assert all(line["age_s"] >= 0 for line in lines)
    assert [(line["rank"], line["stream"], line["text"]) for line in lines] == [
        (0, "stdout", "rank 0 begins \x1b[31m"),
        (0, "stderr", "rank 0 ends"),
    ]
    views = [json.loads(line) for line in watching.communicate(timeout=60)[0].splitlines()]
    assert {row["state"] for row in views[-1]["ranks"]} == {"done"}
    assert watching.returncode == 0
    assert "job gpt: succeeded" in recording.communicate(timeout=60)[0]
    assert "job gpt: succeeded" in here.run("replay", "--headless", str(tmp_path / "gpt.rdk"))
    assert "down" in here.run("down") + here.run("up", "localhost")
    check_lines_of_files(here)


def check_lines_of_files(here: Here) -> None:
    """Check what is printed of job `gpt` once an agent serves that began after its end."""
    begins, ends = BEGINS, "ends"
    stdout, stderr = here.start("logs", "gpt").communicate(timeout=60)
    assert stdout.splitlines() == [
        f"localhost:r{rank}  rank {rank} {what}" for rank in (0, 1) for what in (begins, ends)
    ]
    assert "from the log files on localhost: rank after rank, since files have no times" in stderr
    (row,) = here.run("logs", "gpt", "--json", "--rank", "1", "--grep", ends).splitlines()
    assert json.loads(row) == {"node": "localhost", "rank": 1, "stream": "stderr", "text": "rank 1 ends", "age_s": None}
    assert here.run("logs", "gpt", "--since", "0s") == ""
    followed = here.run("logs", "gpt", "-f", "-n", "1", "--rank", "0")
    assert followed.splitlines() == [f"localhost:r0  rank 0 {what}" for what in (begins, ends)]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("network")
def test_lines_of_a_host_whose_agent_was_replaced_are_printed_before_those_of_the_other(desk: Desk) -> None:
    (desk.directory / "train.py").write_text(PROGRAM)
    (desk.directory / "go_on").touch()
    hosts = named(*HOSTS)
    run = (
        "run",
        "--name",
        "gpt",
        "--nproc-per-node",
        "1",
        "--workdir",
        str(desk.directory),
        "--no-doctor",
        "--headless",
    )
    code, _, stderr = desk.run(*run, *hosts, "--", "train.py", "go_on")
    assert code == 0, stderr
    assert [desk.run(verb, "h2")[0] for verb in ("down", "up")] == [0, 0]

    code, stdout, stderr = desk.run("logs", "gpt", *hosts, "--grep", "^rank")

    texts = [f"h{host}:r{rank}  rank {rank} {what}" for host, rank in ((2, 1), (1, 0)) for what in (BEGINS, "ends")]
    of_files, kept = stdout.splitlines()[:2], stdout.splitlines()[2:]
    # What an agent keeps is in the order in which it was read: stdout and stderr are files of their own.
    assert (code, [*of_files, *sorted(kept)]) == (0, texts)
    assert "from the log files on h2: rank after rank" in stderr


def test_where_no_job_is_known_that_is_said_and_nothing_is_waited_for(house: DemoHouse) -> None:
    here = Here(house)
    here.run("up", "localhost")

    assert here.run("ranks") == "no job is known there\n"
    following = here.start("attach", "--headless")
    assert following.stderr is not None
    assert any("no job yet" in line for line in following.stderr)
    following.send_signal(signal.SIGINT)
    assert following.communicate(timeout=60)[1].splitlines()[-1] == "rankdeck: interrupted, no job was seen there"
    process = here.start("logs", "-f")

    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (0, "")
    assert "no job is known there" in stderr
