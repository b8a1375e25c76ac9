"""`rankdeck doctor` on hosts that SSH reaches: well, odd, cut off from each other, and gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


HOSTS = ("h1", "h2", "h3")
JOB_PYTHON = """#!/bin/sh
echo '{"python": "3.11.9", "torch": "%s", "is_imported": true, "num_gpus": 0}'
"""
"""What the jobs' interpreter says: three imports of torch at once would take a test's time, and would be alike."""

pytestmark = pytest.mark.timeout(400)


def beside_waits(stderr: str) -> list[str]:
    """Return the lines but those on whom the doctor waits for: a busy machine may need the 5 s for one."""
    return [line for line in stderr.splitlines() if "rankdeck doctor looks at " not in line]


class Desk:
    """A directory with an inventory, in which a person calls the command."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        self.directory = directory
        lines = ['[cluster]\nworkdir = "~/work"\n'] + [f'[[node]]\nhost = "{host}"\n' for host in HOSTS]
        (directory / "rankdeck.toml").write_text("".join(lines))
        for host in HOSTS:
            (network[host].home / "work").mkdir()
            self.write(host, "1", "2.13.0")

    def write(self, host: str, program: str, torch: str) -> None:
        """Give a host a program, and a torch."""
        home = self.network[host].home
        (home / "work/train.py").write_text(program)
        (home / "python").write_text(JOB_PYTHON % torch)
        (home / "python").chmod(0o700)

    def doctor(self, *arguments: str) -> tuple[int, str]:
        """Run it; what goes wrong is told on standard output."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "app", "doctor", "--job-python", "~/python", *arguments],
            cwd=self.directory,
            env={
                **os.environ,
                "HOME": str(self.directory),
                "COLUMNS": "80",
                "RANKDECK_PYTHON": sys.executable,
                "RANKDECK_SSH_CONFIG": str(self.network.ssh_config),
                "XDG_RUNTIME_DIR": str(self.network.directory),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert beside_waits(done.stderr) == []
        return done.returncode, done.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    require_hosts()
    with Network(*HOSTS) as network:
        yield Desk(network, tmp_path)
        for host in network.hosts.values():
            until(lambda host=host: host.processes() == [], 60, "nothing is left on the host")  # type: ignore[misc]


@pytest.mark.slow
def test_hosts_that_are_alike_are_well_and_one_that_differs_is_named(desk: Desk) -> None:
    code, stdout = desk.doctor("--json")

    found = json.loads(stdout)
    assert (code, found["schema"], found["exit_code"]) == (0, 1, 0)
    assert [host["host"] for host in found["hosts"]] == [*HOSTS]
    assert [row["detail"].partition(" (")[0] for row in found["rows"]] == ["every host reaches every other"]
    for host in found["hosts"]:
        rows = {row["name"]: row for row in host["rows"]}
        assert {"reachable", "host_key", "torch", "code", "clock", "shared_memory"} <= set(rows)
        assert all(row["todo"] for row in rows.values() if row["status"] != "ok")
        assert host["facts"]["address"] == desk.network[host["host"]].address
        assert abs(host["clock"]["offset_s"]) <= host["clock"]["uncertainty_s"] + 0.1

    desk.write("h3", "2", "2.12.0")
    code, stdout = desk.doctor()

    lines = stdout.splitlines()
    assert code == 1
    assert lines[0] == "h3"
    assert "  BAD   torch            2.12.0; the others have 2.13.0" in lines
    assert "  BAD   code             not the program of the others: train.py differs" in lines
    assert max(map(len, lines)) <= 80


def test_roads_that_are_cut_and_hosts_that_are_gone_are_told_of_whom_they_are(desk: Desk) -> None:
    desk.network["h2"].lose_road_to(desk.network["h1"])
    desk.network["h3"].stop_sshd()

    code, stdout = desk.doctor()

    assert code == 3
    told = " ".join(stdout.split())
    assert f"it does not reach h1 at {desk.network['h1'].address}:" in told
    assert "no route to host" in told
    assert f"{desk.network['h3'].address} port 22 refuses connections -> is sshd running there?" in told
    assert stdout.splitlines()[-1].endswith("1 could not be examined.")


def test_the_doctor_of_this_machine_needs_no_ssh(tmp_path: Path) -> None:
    (tmp_path / "python").write_text(JOB_PYTHON % "2.13.0")
    (tmp_path / "python").chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "app", "doctor", "localhost", "--all", "--job-python", str(tmp_path / "python")],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": tempfile.gettempdir()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert (done.returncode, beside_waits(done.stderr)) == (0, [])
    assert "  ok    torch            2.13.0" in done.stdout.splitlines()
