"""Jobs over several hosts that cannot begin, and that fail on one of them, with the command as a person runs it."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.desk import IMPORT_S, Desk, named, read_until
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.hosts import Network

HOSTS = ("h1", "h2", "h3")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def project(network: Network) -> Path:
    """A directory that all hosts share, as by NFS."""
    project = network.directory / "project"
    project.mkdir()
    (project / "train.py").touch()
    return project


@pytest.mark.fault(row=24)
@pytest.mark.slow
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
    assert (code, "a job over several hosts is not restarted by itself" in stderr) == (2, True)
    assert (len(stderr.splitlines()), "and then: rankdeck restart gpt)" in stderr) == (1, True), "what to do instead"
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--", "missing.py")
    refused = f"h1 refused: missing.py is not a file (seen from {project})"
    hint = "--workdir names another directory there"
    assert (code, stderr.splitlines()[-1]) == (4, f"rankdeck: {refused} ({hint})"), "before they are examined"
    network["h2"].exec("ip", "route", "add", "unreachable", f"{network['h1'].address}/32")
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--", "train.py")
    assert (code, "in the way of job gpt (rankdeck doctor shows more" in stderr) == (1, True), stderr
    assert "rankdeck: h2: " in stderr
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--no-doctor", "--", "train.py")
    assert (code, "h2 refused: no way from here to" in stderr) == (4, True), stderr
    assert "--master-addr" in stderr
    code, _, stderr = desk.run(*run, *named("h1", "h2"), "--no-doctor", "--", "missing.py")
    assert (code, "missing.py is not a file" in stderr) == (4, True)
    assert "h2: not asked)" in stderr, "what became of each host is said"
    for host in ("h1", "h2"):
        status = desk.json("status", "--host", host)
        assert status["jobs"] == [], "nothing is left of it"
    desk.json("down", "h2")
    follower = desk.start("attach", *named("h1", "h2"), "--headless")
    assert "going on without 1 of 2 hosts" in read_until(follower, "going on")
    desk.json("up", "h2")
    assert "h2: the agent is back" in read_until(follower, "is back"), "its agent was looked for again"
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=60)
    desk.json("down", "h1", "h2")


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_that_a_failure_elsewhere_leaves_hanging_are_ended_while_somebody_looks_on(
    desk: Desk, network: Network, project: Path
) -> None:
    (project / "half.py").write_text(
        "import os, signal, sys, time\n"
        "if os.path.exists('mended'):\n"
        "    sys.exit()\n"
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
    code, _, stderr = desk.run(
        "run", "--name", "other", "--workdir", str(project), *named("h1", "h2"), "--detach", "--", "half.py"
    )
    assert (code, "(rankdeck stop other first, or another --name)" in stderr) == (4, True), stderr
    assert desk.run("kill", "other", *named("h1", "h2"))[0] == 0

    code, stdout, stderr = desk.run(*run, "--json", *named("h1", "h2"), "--name", "half", "--", "half.py")

    assert code in {1, 10}, stderr
    assert "what was left of job half on h1 was ended: it has failed on another node" in stderr
    assert json.loads(stdout)["job"]["state"] == "failed"
    assert "out of luck" in stdout

    def state_there() -> str:
        return str(desk.json("status", "--host", "h1", codes=(0, 1, 10))["jobs"][0]["state"])

    until(lambda: state_there() == "stopped", 60, "it ends there too")
    (project / "mended").touch()
    again = desk.json("restart", "half", *named("h1", "h2"))
    assert (again["attempt"], again["num_ranks"]) == (1, 2)
    until(lambda: "succeeded" in states(), IMPORT_S, "begun again on both it ends well")
    audit = (network.directory / "state" / "rankdeck" / "audit.jsonl").read_text().splitlines()
    told = [(entry["action"], *sorted(entry["hosts"]), entry["outcome"]) for entry in map(json.loads, audit)]
    assert sorted(told[:2]) == [("up", "h1", "done"), ("up", "h2", "done")]
    begun = ("start", "h1", "h2", "done")
    ended = ("stop", "h1", "done")
    assert told[2:] == [begun, ("kill", "h1", "h2", "done"), begun, ended, ("restart", "h1", "h2", "done")]
    desk.json("down", "h1", "h2")
