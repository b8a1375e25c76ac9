"""`rankdeck inspect` over SSH: two hosts without an agent, a job of another user than root; nothing is left there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.inspect import on_host
from tests.support.desk import Desk, named
from tests.support.hosts import Host, Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

USER = 1001
SOON_S = 120.0
LEFT = "what ranks that are gone may have left: rankdeck help inspect"
HANGS = """
import sys, time
import torch, torch.distributed as dist
def load(path):
    open(sys.argv[1] + str(dist.get_rank()), "w").close()
    time.sleep(3600)
def main():
    dist.init_process_group("gloo")
    for step in range(100):
        if dist.get_rank() == 2 and step == 30:
            load("secret-path")
        if step == 30:
            open(sys.argv[1] + str(dist.get_rank()), "w").close()
        dist.all_reduce(torch.ones(4))
main()
"""


@pytest.fixture
def desk() -> Iterator[Desk]:
    with desk_with_a_user() as desk:
        yield desk


@contextlib.contextmanager
def desk_with_a_user() -> Iterator[Desk]:
    """Give two hosts a user without rights, and a directory that this user may write to."""
    require_hosts()
    with Network("h1", "h2") as network:
        network.directory.chmod(0o755)
        for host in network.hosts.values():
            host.home.chmod(0o755)
            (host.directory / "home/alice").mkdir()
            shutil.chown(host.directory / "home/alice", USER, USER)
            host.open_python_to_users()
            with (host.directory / "passwd").open("a") as users:
                users.write(f"alice:x:{USER}:{USER}::{host.home}/alice:/bin/bash\n")
        desk = Desk(network)
        shared = network.directory / "shared"
        shared.mkdir()
        shutil.chown(shared, USER, USER)
        yield desk
        desk.end()


@contextlib.contextmanager
def training(network: Network, directory: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run two ranks on each host until rank 2 stands and the others wait for it; give the launchers."""
    script = directory / "train.py"
    script.write_text(HANGS)
    launchers = [
        start(host, number, network["h1"].address, script) for number, host in enumerate(network.hosts.values())
    ]
    try:
        until(lambda: all((directory / f"at{rank}").exists() for rank in range(4)), SOON_S, "step 30")
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()  # what it has started there ends with the host
            launcher.wait()


def start(host: Host, number: int, address: str, script: Path) -> subprocess.Popen[bytes]:
    return start_torchrun(host, number, address, 2, str(script), str(script.with_name("at")))


def start_torchrun(
    host: Host, number: int, address: str, num_ranks: int, *program: str, variables: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start the ranks of one of two nodes as the user; `variables` are written as `NAME=VALUE`."""
    user = ("setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups")
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
        *("--master-addr", address, "--master-port", "29500", "--nproc-per-node", str(num_ranks), *program),
    ]
    return host.start(*user, "env", *variables, *torchrun)


def test_the_rank_that_stands_is_named_over_two_hosts_by_its_own_user(desk: Desk) -> None:
    shared = desk.network.directory / "shared"
    for host in desk.network.hosts.values():
        for module in ("json", "platform", "shutil"):  # a login begins in its home
            (host.directory / f"home/alice/{module}.py").write_text("raise SystemExit('not ours')")
    with training(desk.network, shared):
        found = desk.json("inspect", "--looks", "12", *named("alice@h1", "alice@h2"), codes=(10,))
        everything = shared / "seen.json"
        code, text, _ = desk.run("inspect", "train.py", "--evidence", str(everything), *named("alice@h1", "alice@h2"))
        desk.network["h2"].stop_sshd()
        elsewhere, _, errors = desk.run("inspect", "other.py", *named("alice@h1", "alice@h2"))

    (job,) = found["jobs"]
    assert (job["finding"], job["culprits"], job["missing"], job["launcher"]) == ("elsewhere", [2], [], "torchrun")
    assert [(rank["rank"], rank["host"]) for rank in job["ranks"]] == [
        (0, "alice@h1"),
        (1, "alice@h1"),
        (2, "alice@h2"),
        (3, "alice@h2"),
    ]
    assert "it stands at train.py:6 in load" in job["text"]
    assert code == 10
    assert "4 of 4 ranks on alice@h1 and alice@h2" in text
    assert elsewhere == 3, "it may run on the host that was not reached"
    assert "no rank of other.py runs on alice@h1" in errors
    assert "secret-path" not in everything.read_text()
    assert not list(Path("/tmp").glob("rankdeck-inspect-*"))


def test_a_host_without_ranks_and_one_that_is_away_are_said(desk: Desk) -> None:
    desk.network["h2"].stop_sshd()

    code, text, errors = desk.run("inspect", *named("h1", "h2"))

    assert code == 3
    assert text == f"no training ranks run on h1 ({LEFT})\n"
    assert "h2: " in errors


def test_the_hosts_may_be_those_of_a_slurm_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = desk.network.directory / "bin"
    tools.mkdir()
    unknown = "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1"
    for name, given, printed in (
        ("squeue", "--jobs=7", "RUNNING|None|root|0|h[1-2]|7|7"),
        ("scontrol", "h[1-2]", "h1\\nh2"),
    ):
        answer = f'[ "${{@: -1}}" = "{given}" ] && printf "{printed}\\n"'
        (tools / name).write_text(f"#!/bin/bash\n{answer} && exit\n{unknown}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    assert desk.run("inspect", "--slurm", "7")[:2] == (0, f"no training ranks run on h1 and h2 ({LEFT})\n")
    code, _, errors = desk.run("inspect", "--slurm", "8")
    assert (code, "Slurm job 8 is on no node: not known to squeue" in errors) == (2, True)


def test_a_damaged_py_spy_is_not_kept(tmp_path: Path) -> None:
    argv = [sys.executable, on_host.__file__, on_host.DIGEST + "0" * 64, "2", "0"]
    done = subprocess.run(
        argv, input=b"damaged", env={"TMPDIR": str(tmp_path)}, capture_output=True, timeout=SOON_S, check=False
    )

    assert done.returncode != 0
    assert b"py-spy arrived damaged" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_console_shows_it_over_two_hosts_and_a_signal_ends_it(desk: Desk) -> None:
    shared = desk.network.directory / "shared"
    hosts = named("alice@h1", "alice@h2")
    assert desk.run("up", "alice@h1", "alice@h2")[0] == 0
    with training(desk.network, shared) as launchers:
        terminal = desk.terminal("console", "attach", *hosts)
        terminal.until_it_shows("i: look at a job of other launchers, 4 ranks on alice@h1 and alice@h2", SOON_S)
        terminal.keys("i")
        terminal.until_it_shows("rank 2 has not come to the call in which others wait", SOON_S)
        terminal.keys("2")
        shown = terminal.until_it_shows("train.py:6 in load", SOON_S)
        terminal.keys("x")
        terminal.until_it_shows("Send SIGTERM to ranks 0-1 on alice@h1 (pids", SOON_S, "alice@h2 (pids")
        terminal.key_that_marks("Enter", "Do nothing", SOON_S)
        terminal.key_that_marks("Right", "Send SIGTERM", SOON_S)
        terminal.keys("Enter")
        terminal.until_it_shows("all its ranks have ended", SOON_S)
        assert all(launcher.wait(SOON_S) for launcher in launchers)
        terminal.keys("q")
        terminal.until_it_shows("exit code 0", SOON_S)

    rows = [line.split() for line in shown.splitlines()]
    assert [(row[0], row[1]) for row in rows if len(row) > 3 and row[3] == "waiting"] == [
        ("0", "alice@h1"),
        ("1", "alice@h1"),
        ("3", "alice@h2"),
    ]
    until(lambda: not list(Path("/tmp").glob("rankdeck-inspect-*")), SOON_S, "py-spy is removed again")
    desk.run("down", "alice@h1", "alice@h2")
