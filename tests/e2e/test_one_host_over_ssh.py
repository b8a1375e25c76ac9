"""A host that SSH reaches, from nothing to a job and back to nothing, with the command as a person runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.desk import IMPORT_S, Desk, read_until, told_of
from tests.support.hosts import Host, Network, require_hosts
from tests.support.ranks import PROGRAMS
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

TWO_RANKS = ("--nproc-per-node", "2", "--name", "gpt")
PLAIN = """
import time, torch, torch.distributed as dist
import ddpcore
dist.init_process_group("gloo")
tensor = torch.ones(1000)
for step in range(1, 1_000_000):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
    time.sleep(0.005)
    ddpcore.report_step(step, loss=1.0 / step)
    if step % 50 == 0:
        print("step", step, "\\x1b[2J", flush=True)
"""
LEISURELY = PLAIN.replace("import time,", "import os, time,").replace(
    "sleep(0.005)", "sleep(0.005 if os.path.exists('hurry') else 0.2)"
)
"""Five steps a second at most until it is told to hurry: a step to come has not gone by when a command arrives."""
SOON_S = 60.0
"""What takes a second or two."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    options = getattr(request, "param", ())
    with Network("h1", sshd_options=options) as network:
        yield network


@pytest.fixture
def host(network: Network) -> Host:
    host = network["h1"]
    (host.home / "train.py").write_text(PLAIN)
    return host


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "network",
    [
        pytest.param((), id="forwarding"),
        pytest.param(("AllowStreamLocalForwarding no",), id="no forwarding"),
    ],
    indirect=True,
)
def test_a_job_is_started_watched_left_found_again_and_stopped_and_nothing_stays(desk: Desk, host: Host) -> None:
    brought_up = desk.json("up", "h1")
    assert brought_up["is_new"] is True
    again = desk.json("up", "h1")
    assert (again["is_new"], again["epoch"]) == (False, brought_up["epoch"])

    console = desk.start(
        "run", "--host", "h1", "--nproc-per-node", "2", "--name", "gpt", "--headless", "--", "train.py"
    )
    line = read_until(console, "step ")
    assert "\x1b" not in line
    console.send_signal(signal.SIGKILL)  # as if the machine of the console had lost its power
    console.wait(SOON_S)

    desk.watch_until_steps_move()
    code, _, stderr = desk.run("fault", "kill", "--host", "h1", "--rank", "1")
    assert (code, "job gpt does not allow faults" in stderr) == (4, True)
    assert console.returncode == -signal.SIGKILL

    def asked() -> list[tuple[int, str, str]]:
        found = desk.json("stacks", "gpt", "--host", "h1")
        return [(rank["rank"], rank["node"], rank["source"]) for rank in found["ranks"]]

    # A probe has a second to answer: one that has no core in this time is looked at from outside.
    until(lambda: asked() == [(0, "h1", "probe"), (1, "h1", "probe")], SOON_S, "both probes answer")
    code, printed, said = desk.run("stacks", "gpt", "--host", "h1", "--all")
    assert (code, "job gpt: 2 ranks in " in said) == (0, True)
    assert f"  > {host.home}/train.py:" in printed
    kept = desk.json("evidence", "gpt", "--host", "h1", "--output", str(desk.network.directory / "gpt.zip"))
    assert kept["num_records"] > 20, "what the agent remembers of the time before is in it"
    code, printed, said = desk.run("replay", kept["path"])
    assert (code in {0, 10}, "rank 1 on h1: " in printed) == (True, True), said
    follower = desk.start("attach", "--host", "h1", "--headless")
    read_until(follower, "training")
    follower.send_signal(signal.SIGINT)
    _, said = follower.communicate(timeout=SOON_S)
    assert follower.returncode == 130
    assert "job gpt goes on" in said
    assert "rankdeck attach gpt --host h1" in said

    assert desk.json("stop", "gpt", "--host", "h1")["state"] == "stopped"
    assert desk.json("down", "h1")["num_jobs_left"] == 0
    until(lambda: host.processes() == [], SOON_S, f"nothing runs on the host: {host.processes()}")
    assert list(desk.runtime.iterdir()) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_jobs_outlive_the_agent_and_are_stopped_at_a_step_by_the_next_one(desk: Desk, host: Host) -> None:
    checkpoints = host.home / "checkpoints"
    options = ("--nproc-per-node", "2", "--name", "gpt", "--detach")
    code, stdout, stderr = desk.run(
        "run", "--host", "h1", *options, "--", str(PROGRAMS / "paced_engine.py"), str(checkpoints)
    )
    assert (code, stdout) == (0, "gpt\n")
    assert "rankdeck stop gpt --host h1" in stderr
    before = desk.watch_until_steps_move()

    assert desk.json("down", "h1")["num_jobs_left"] == 1
    assert desk.run("status", "--host", "h1")[0] == 3
    assert desk.json("up", "h1")["is_new"] is True

    assert desk.watch_until_steps_move() > before
    assert desk.json("stop", "gpt", "--host", "h1")["state"] == "stopped"
    assert [path.name for path in checkpoints.iterdir() if path.name.startswith("step_")]

    again = desk.json("restart", "gpt", "--host", "h1", "--nproc-per-node", "1")
    assert (again["attempt"], again["num_ranks"]) == (1, 1)
    assert desk.watch_until_steps_move() > before, "it goes on from its checkpoint"
    desk.json("down", "h1", "--kill-jobs")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_of_a_job_that_allows_it_is_frozen_at_a_step_and_thawed(desk: Desk, host: Host) -> None:
    (host.home / "train.py").write_text(LEISURELY)
    assert desk.run("run", "--host", "h1", *TWO_RANKS, "--allow-faults", "--detach", "--", "train.py")[0] == 0
    step = desk.watch_until_steps_move() + 300
    fault = ("fault", "freeze", "--host", "h1", "--rank", "1", "--at-step", str(step))
    code, stdout, stderr = desk.run(*fault)
    assert (code, stdout) == (0, f"job gpt on h1: rank 1 will be frozen (SIGSTOP) at step {step}\n"), stderr
    (host.home / "hurry").touch()

    def status_once_it_is_named() -> dict[str, Any]:
        status = desk.json("status", "--host", "h1", codes=(0, 10))
        return status if told_of(status) == [("frozen", [1])] else {}

    status = until(status_once_it_is_named, SOON_S, "it is named, and nobody else is")
    assert desk.run("status", "--host", "h1")[0] == 10
    assert status["ranks"][1]["step"] == step
    assert status["jobs"][0]["allow_faults"] is True
    assert desk.run(*fault)[0] == 4
    follower = desk.start("attach", "--host", "h1", "--headless")
    assert "rankdeck replay " in read_until(follower, " is kept; look at it again")
    follower.send_signal(signal.SIGINT)
    assert "Traceback" not in follower.communicate(timeout=SOON_S)[1]
    assert len(list((desk.network.directory / "state/rankdeck/evidence").glob("gpt-*.zip"))) == 1

    thawed = desk.json("fault", "thaw", "--host", "h1", "--rank", "1", "--job", "gpt")
    assert (thawed["job_id"], thawed["kind"], thawed["rank"], thawed["at_step"]) == ("gpt", "thaw", 1, None)
    assert desk.watch_until_steps_move() > step
    desk.json("down", "h1", "--kill-jobs")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_lost_connection_is_told_and_comes_back_while_the_job_goes_on(desk: Desk, host: Host) -> None:
    console = desk.start("run", "--host", "h1", *TWO_RANKS, "--json", "--", "train.py")
    read_until(console, "training")

    host.drop_sessions()

    assert "no job ends by that" in read_until(console, "h1: the connection is lost")
    read_until(console, "h1: the connection is back after")
    desk.watch_until_steps_move()
    assert desk.json("kill", "gpt", "--host", "h1")["state"] == "stopped"
    stdout, stderr = console.communicate(timeout=SOON_S)
    assert "Traceback" not in stderr
    assert (json.loads(stdout)["job"]["state"], console.returncode) == ("stopped", 1), "who goes on only after success"
    desk.json("down", "h1")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed")
def test_a_person_opens_the_console_leaves_it_and_comes_back(desk: Desk, host: Host) -> None:
    terminal = desk.terminal("first", "run", "--host", "h1", *TWO_RANKS, "--", "train.py")
    terminal.until_it_shows("2 ranks training", IMPORT_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", SOON_S, "job gpt goes on")

    terminal = desk.terminal("second", "attach", "--host", "h1")
    terminal.until_it_shows("2 ranks training", IMPORT_S, "rankdeck on h1")
    host.drop_sessions()
    terminal.until_it_shows("the connection is back after", SOON_S)
    terminal.until_it_shows("2 ranks training", SOON_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", SOON_S)

    desk.watch_until_steps_move()
    assert desk.json("down", "h1", "--kill-jobs")["num_jobs_left"] == 0
    until(lambda: host.processes() == [], SOON_S, "nothing runs on the host")


@pytest.mark.slow
def test_what_cannot_be_is_said_in_one_line_with_its_exit_code(desk: Desk, network: Network, host: Host) -> None:
    def fails(*arguments: str) -> tuple[int, str]:
        code, stdout, stderr = desk.run(*arguments)
        assert stdout == ""
        assert len(stderr.splitlines()) == 1, stderr
        return code, stderr

    code, said = fails("status", "--host", "h1")
    assert (code, "rankdeck up h1" in said) == (3, True)
    code, said = fails("up", "h1", "--python", "/no/python")
    assert (code, "/no/python does not run there" in said) == (3, True)
    without_rankdeck = host.home / "python"
    without_rankdeck.write_text("#!/bin/sh\necho 'python: No module named agent' >&2\nexit 1\n")
    without_rankdeck.chmod(0o700)
    code, said = fails("up", "h1", "--python", "~/python")
    assert (code, "has no rankdeck" in said) == (3, True)
    assert "(rankdeck install h1 --python '~/python'; or name another Python: --python, or in a rankdeck.toml)" in said
    desk.json("up", "h1")
    code, said = fails("stop", "nothing", "--host", "h1")
    assert (code, "there is no job nothing" in said) == (2, True)
    code, said = fails("evidence", "nothing", "--host", "h1")
    assert (code, "there is no job nothing on h1; none is there" in said) == (2, True)
    code, said = fails("stacks", "nothing", "--host", "h1")
    assert (code, "there is no job nothing" in said) == (2, True)
    assert fails("run", "--host", "h1", "--detach", "--", "missing.py")[0] == 4
    assert fails("run", "--host", "h1", "--name", "NO", "--", "train.py")[0] == 2
    assert fails("status", "--host", "-oProxyCommand=id")[0] == 2
    code, said = fails("fault", "kill", "--host", "h1", "--rank", "0")
    assert (code, "no job runs on h1" in said) == (2, True)
    assert fails("fault", "kill", "--host", "h1", "--rank", "0", "--factor", "2")[0] == 2
    assert fails("fault", "frieze", "--host", "h1", "--rank", "0")[0] == 2
    desk.json("down", "h1")

    network.known_hosts.write_text("")
    code, said = fails("up", "h1")
    assert (code, "SHA256:" in said) == (3, True)
    network.trust_all()
    host.change_host_key()
    code, said = fails("down", "h1")
    assert (code, "HAS CHANGED" in said) == (3, True)
    assert Path(host.directory, "sshd.log").exists()
