"""What `rankdeck.toml` says of jobs, and that each thing that is wrong in it is said with its line."""

from __future__ import annotations

import pytest

from app.inventory.inventory import WrongInventoryError, read_inventory
from app.inventory.jobs import JobEntry

JOBS = """\
[job.gpt]
command = ["train.py", "--config", "a b.toml", ""]
hosts = ["gpu*", "big1"]
nproc = 8
workdir = "~/project"
python = "~/venv/bin/python"
env = { NCCL_DEBUG = "WARN", EMPTY = "" }
master_addr = "10.0.0.5"
max_restarts = 3
grace_s = 120
save_s = 600
abandon_s = 1800.0
metrics = ['loss=(\\S+)']
share_gpus = true
probe = false
allow_faults = true

[job.small]
command = ["-m", "pkg.train"]
"""


def wrong(text: str) -> list[str]:
    with pytest.raises(WrongInventoryError) as caught:
        read_inventory(text, "rankdeck.toml")
    return [str(trouble) for trouble in caught.value.troubles]


def test_a_job_has_what_is_said_of_it_and_else_what_run_would_take() -> None:
    gpt, small = read_inventory(JOBS, "rankdeck.toml").jobs

    assert gpt == JobEntry(
        name="gpt",
        command=("train.py", "--config", "a b.toml", ""),
        hosts=("gpu*", "big1"),
        num_ranks=8,
        workdir="~/project",
        python="~/venv/bin/python",
        env=(("NCCL_DEBUG", "WARN"), ("EMPTY", "")),
        master_addr="10.0.0.5",
        max_restarts=3,
        grace_s=120.0,
        save_s=600.0,
        abandon_s=1800.0,
        metrics=(r"loss=(\S+)",),
        shares_gpus=True,
        is_probed=False,
        allow_faults=True,
    )
    assert small == JobEntry("small", ("-m", "pkg.train"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("job = 3\n", "rankdeck.toml:1: job is a table of tables: write [job.NAME] above each job"),
        ("[job]\ngpt = 3\n", "rankdeck.toml:2: job is a table: write [job.gpt] above its keys"),
        ("[job.gpt]\n", "rankdeck.toml:1: a job has a command: command = "),
        ("[job.GPT]\ncommand = ['a']\n", "rankdeck.toml:1: 'GPT' cannot be a job's name: up to 64"),
        ("[job.a]\ncommand = 'train.py'\n", "rankdeck.toml:2: command: 'train.py' is no list of words"),
        ("[job.a]\ncommand = []\n", "rankdeck.toml:2: command: [] is no list of words"),
        ("[job.a]\ncommand = ['a', 3]\n", "rankdeck.toml:2: command: ['a', 3] is no list of words"),
        ('[job.a]\ncommand = ["a\\u0000b"]\n', r"rankdeck.toml:2: command: ['a\x00b'] is no list of words"),
        (
            "[job.a]\ncommand = ['a']\ncomand = 1\n",
            "rankdeck.toml:3: comand: no such key of job; the nearest is command",
        ),
        ("[job.a]\ncommand = ['a']\nhosts = 'x'\n", "rankdeck.toml:3: hosts: 'x' is no list of texts"),
        ("[job.a]\ncommand = ['a']\nhosts = [3]\n", "rankdeck.toml:3: hosts: 3 is no text of one line"),
        ("[job.a]\ncommand = ['a']\nnproc = 0\n", "rankdeck.toml:3: nproc: 0 is no number from 1 to 4096"),
        ("[job.a]\ncommand = ['a']\nnproc = true\n", "rankdeck.toml:3: nproc: true is no number"),
        ("[job.a]\ncommand = ['a']\ngrace_s = -1\n", "rankdeck.toml:3: grace_s: -1 is no number of seconds"),
        ("[job.a]\ncommand = ['a']\nsave_s = nan\n", "rankdeck.toml:3: save_s: nan is no number of seconds"),
        ("[job.a]\ncommand = ['a']\nprobe = 1\n", "rankdeck.toml:3: probe: 1 is neither true nor false"),
        ("[job.a]\ncommand = ['a']\nenv = 'A=1'\n", "rankdeck.toml:3: env: 'A=1' is no table of variables"),
        ("[job.a]\ncommand = ['a']\nenv = {'A=' = '1'}\n", "rankdeck.toml:3: env: 'A=' is no name of a variable"),
        ("[job.a]\ncommand = ['a']\nenv = {A = 1}\n", "rankdeck.toml:3: env: A: 1 is no text"),
        ("[job.a]\ncommand = ['a']\nmetrics = ['" + "x" * 513 + "']\n", "rankdeck.toml:3: metrics: at most 8 patterns"),
        ("[jobs.a]\ncommand = ['a']\n", "rankdeck.toml:1: jobs: no such table; there are console, "),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, told: str) -> None:
    (trouble,) = wrong(text)

    assert trouble.startswith(told)


def test_more_jobs_than_anybody_has_are_refused() -> None:
    many = "".join(f"[job.j{number}]\ncommand = ['a']\n" for number in range(1025))

    assert wrong(many) == ["rankdeck.toml:1: 1025 jobs are more than 1024"]
