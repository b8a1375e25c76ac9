"""Hosts that SSH reaches, and a job over all of them: from nothing to nothing, with the command as a person runs it."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support.desk import IMPORT_S, Desk, named, read_until
from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.hosts import Host

HOSTS = ("h1", "h2", "h3", "h4")
BATCH = 24
STEPS = 1000
COUNTING = f"""
import os, socket, sys, time
import torch
from torch import nn
from torch.utils.data import Dataset

import ddpcore

class Numbers(Dataset):
    def __len__(self):
        return {BATCH * STEPS}

    def __getitem__(self, index):
        return index, torch.ones(2)

assert sys.argv[1:] == ["--steps", "as many as it takes"]
with ddpcore.Engine(seed=0, log_every="1 epoch") as engine:
    model = engine.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = engine.loader(Numbers(), global_batch_size=int(os.environ["BATCH"]))
    engine.checkpoint("checkpoints", every="1000 steps", model=model, optimizer=optimizer)
    with open(f"seen-{{socket.gethostname()}}-{{os.getpid()}}-{{time.time_ns()}}", "w", buffering=1) as seen:
        for batch in engine.steps(batches, until="1 epoch"):
            indices = []
            for share, inputs in batch.micro_batches(1):
                indices += share.tolist()
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            time.sleep(0 if os.path.exists("hurry") else 0.1)
            if batch.num_samples:
                print(engine.step, *indices, file=seen)
"""
"""Says which samples it has used in which step; takes its time until it is told to hurry."""


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network(*HOSTS) as network:
        yield network


@pytest.fixture
def desk(network: Network) -> Iterator[Desk]:
    desk = Desk(network)
    yield desk
    desk.end()


@pytest.fixture
def project(network: Network) -> Path:
    """A directory that all hosts share, as by NFS."""
    project = network.directory / "project"
    project.mkdir()
    (project / "train.py").write_text(COUNTING)
    return project


def uses_of_samples(project: Path) -> Counter[int]:
    """Return how often each sample was used."""
    lines = [line.split() for path in project.glob("seen-*") for line in path.read_text().splitlines()]
    return Counter(int(index) for line in lines for index in line[1:])


@pytest.fixture
def inventory(desk: Desk, project: Path) -> None:
    """All hosts, with two ranks each, are what a command is about that names none."""
    nodes = "".join(f'[[node]]\nhost = "{host}"\nnproc = 2\n' for host in HOSTS)
    nodes += '[job.gpt]\ncommand = ["train.py"]\nhosts = ["h*"]\nenv = { BATCH = "24" }\nallow_faults = true\n'
    (project / "rankdeck.toml").write_text(f'[cluster]\nname = "lab"\nworkdir = "{project}"\n{nodes}')
    desk.directory, desk.at = project, ()


def freeze_and_thaw(desk: Desk, console: subprocess.Popen[str]) -> None:
    """Freeze a rank of the third host; whoever asks is told that it is the one."""
    code, stdout, stderr = desk.run("fault", "freeze", "--rank", "5")
    assert (code, stdout) == (0, "job gpt on h3: rank 5 is frozen (SIGSTOP)\n"), stderr
    assert "rank 5 on h3 is frozen" in read_until(console, "is frozen")
    until(lambda: desk.run("status")[0] == 10, 20, "a verdict stands")
    verdicts = desk.json("status", codes=(10,))["verdicts"]
    assert [(verdict["cause"], verdict["culprits"]) for verdict in verdicts] == [("frozen", [5])]
    found = desk.json("stacks", "gpt")
    assert [(rank["rank"], rank["node"]) for rank in found["ranks"]] == [(r, HOSTS[r // 2]) for r in range(8)]
    assert desk.run("fault", "thaw", "--rank", "5")[0] == 0


def lose_and_find_a_host(desk: Desk, host: Host) -> None:
    """Look on without a host, and with it once it is back."""
    host.pull_cable()
    code, stdout, stderr = desk.run("status")
    assert (code in {0, 10}, f"{host.name}: " in stderr, stdout.startswith("h1, h2 and h3: up, h4: lost")) == (
        *(True, True, True),
    ), (code, stdout, stderr)
    follower = desk.start("attach", "--headless")
    assert "going on without 1 of 4 hosts" in read_until(follower, "going on")
    host.plug_in_cable()
    assert f"{host.name}: the connection is back" in read_until(follower, "is back")
    follower.send_signal(signal.SIGINT)
    said = follower.communicate(timeout=20)[1]
    assert "job gpt goes on; watch it: rankdeck attach, look: rankdeck status, end it: rankdeck stop gpt" in said


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("inventory")
def test_a_job_over_four_hosts_is_watched_harmed_stopped_and_goes_on_over_three(
    desk: Desk, network: Network, project: Path
) -> None:
    brought_up = desk.json("up")["hosts"]
    assert [(row["host"], row["is_new"], row["error"]) for row in brought_up] == [(host, True, None) for host in HOSTS]
    console = desk.start("start", "gpt", "--json", "--", "--steps", "as many as it takes")
    assert "job gpt started on h1, h2 and 2 more with 8 ranks" in read_until(console, "started")
    read_until(console, "8 ranks training")
    freeze_and_thaw(desk, console)
    step = desk.watch_until_steps_move()
    console.send_signal(signal.SIGKILL)  # as if the machine of the console had lost its power
    console.communicate(timeout=10)
    lose_and_find_a_host(desk, network["h4"])
    assert desk.watch_until_steps_move() > step

    stopped = desk.json("stop", "gpt")
    assert (stopped["state"], [row["host"] for row in stopped["hosts"]]) == ("stopped", list(HOSTS))
    before = uses_of_samples(project)
    assert max(before.values()) == 1
    assert len(before) < BATCH * STEPS, "the stop came before the end"
    code, _, stderr = desk.run("restart", "gpt", "--exclude", "h1")
    assert (code, "only 3 of the 4 nodes of job gpt can be asked" in stderr) == (2, True), stderr
    (project / "hurry").touch()
    again = desk.json("restart", "gpt", "--exclude", "h1", "--on-these-hosts")
    assert (again["attempt"], again["num_ranks"], again["hosts"]) == (1, 6, ["h2", "h3", "h4"])
    until(lambda: desk.json("status", codes=(0, 10))["jobs"][0]["state"] == "succeeded", IMPORT_S, "it ends")
    assert uses_of_samples(project) == Counter(range(BATCH * STEPS)), "each sample once, over eight ranks and six"

    down = desk.json("down")["hosts"]
    assert [(row["host"], row["num_jobs_left"]) for row in down] == [(host, 0) for host in HOSTS]
    for host in network.hosts.values():
        until(lambda host=host: host.processes() == [], 10, f"nothing runs on {host.name}")  # type: ignore[misc]
    assert list(desk.runtime.iterdir()) == []


def test_what_keeps_a_job_from_several_hosts_is_said_of_each_and_nothing_starts(
    desk: Desk, network: Network, project: Path
) -> None:
    run = ("run", "--name", "gpt", "--nproc-per-node", "1", "--workdir", str(project), "--detach")
    network["h3"].stop_sshd()

    code, stdout, stderr = desk.run(*run, *named("h1", "h2", "h3"), "--", "train.py")

    assert (code, stdout) == (3, "")
    assert "h3: " in stderr
    assert "1 of 3 hosts cannot take part" in stderr

    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--max-restarts", "2", "--", "train.py")
    assert (code, "a job over several hosts is not begun again by itself" in stderr) == (2, True)
    code, _, stderr = desk.run(*run, "--", "train.py")
    assert (code, "there is no inventory to choose hosts from" in stderr) == (2, True)
    network["h2"].exec("ip", "route", "add", "unreachable", f"{network['h1'].address}/32")
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--", "train.py")
    assert (code, "in the way of job gpt (rankdeck doctor says more" in stderr) == (1, True), stderr
    assert "rankdeck: h2: " in stderr
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--no-doctor", "--", "train.py")
    assert (code, "h2 refused (unreachable): no way from here to" in stderr) == (4, True), stderr
    assert "--master-addr" in stderr
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--no-doctor", "--", "missing.py")
    assert (code, "no_script" in stderr) == (4, True)
    assert "(h2: not asked)" in stderr, "what became of each host is said"
    for host in ("h1", "h2"):
        status = desk.json("status", "--host", host)
        assert status["jobs"] == [], "nothing is left of it"
    desk.json("down", "h2")
    follower = desk.start("attach", *named("h1", "h2"), "--headless")
    assert "going on without 1 of 2 hosts" in read_until(follower, "going on")
    desk.json("up", "h2")
    assert "h2: the connection is back" in read_until(follower, "is back"), "its agent was looked for again"
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=20)
    desk.json("down", "h1", "h2")


@pytest.mark.ranks
def test_ranks_that_a_failure_elsewhere_leaves_hanging_are_ended_while_somebody_looks_on(
    desk: Desk, network: Network, project: Path
) -> None:
    (project / "half.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(2)\n"
        "    sys.exit('out of luck')\n"
        "signal.sigwait({signal.SIGUSR1})\n"
    )
    run = ("run", "--nproc-per-node", "1", "--workdir", str(project), "--no-doctor", "--no-probe")

    assert desk.run(*run, *named("h1", "h2"), "--name", "other", "--detach", "--", "half.py")[0] == 0

    def states() -> list[str]:
        return [row["state"] for row in desk.json("status", *named("h1", "h2"), codes=(0, 1, 10))["jobs"]]

    until(lambda: states() == ["failed"], IMPORT_S, "it fails on one of them")
    there = desk.json("status", "--host", "h1")
    assert there["jobs"][0]["state"] in {"running", "starting"}, "who only looks ends nothing"
    assert desk.run("kill", "other", *named("h1", "h2"))[0] == 0

    code, stdout, stderr = desk.run(*run, "--json", *named("h1", "h2"), "--name", "half", "--", "half.py")

    assert code in {1, 10}, stderr
    assert "what was left of job half on h1 was ended: it has failed on another node" in stderr
    assert json.loads(stdout)["job"]["state"] == "failed"
    assert "out of luck" in stdout

    def state_there() -> str:
        return str(desk.json("status", "--host", "h1", codes=(0, 1, 10))["jobs"][0]["state"])

    until(lambda: state_there() == "stopped", 20, "it ends there too")
    audit = (network.directory / "state" / "rankdeck" / "audit.jsonl").read_text().splitlines()
    told = [(entry["action"], *sorted(entry["hosts"]), entry["outcome"]) for entry in map(json.loads, audit)]
    assert sorted(told[:2]) == [("up", "h1", "done"), ("up", "h2", "done")]
    begun = ("start", "h1", "h2", "done")
    assert told[2:] == [begun, ("kill", "h1", "h2", "done"), begun, ("stop", "h1", "done")]
    desk.json("down", "h1", "h2")
