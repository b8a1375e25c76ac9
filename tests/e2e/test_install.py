"""`rankdeck install`: from hosts with a bare Python to agents that serve, without a package index.

The hosts' network reaches nothing: what they lack comes along, packed again from what the tests run with.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.install.on_host import STAGING_PREFIX
from app.install.own_wheel import named_wheel, own_wheel
from tests.support.bare_python import LACKING, fill_wheelhouse, link_packages, required_by
from tests.support.commands import run_rankdeck
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.hosts import Host, Network

HOSTS = ("h1", "h2", "h3")


class Desk:
    """The machine at which a person calls `rankdeck install`."""

    def __init__(self, network: Network, wheel: Path) -> None:
        self.network = network
        self.wheel = wheel

    def run(self, *arguments: str, interpreter: str = sys.executable, **environ: str) -> tuple[int, str, str]:
        here = {"RANKDECK_SSH_CONFIG": str(self.network.ssh_config), "XDG_RUNTIME_DIR": str(self.network.directory)}
        return run_rankdeck(
            *arguments,
            cwd=self.network.directory,
            environ={**os.environ, **here, **environ},
            interpreter=interpreter,
            timeout_s=150,
        )

    def install(self, *arguments: str) -> tuple[int, str, str]:
        return self.run("install", *arguments, "--wheel", str(self.wheel))

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """Return what is said of each host in JSON."""
        return list(json.loads(self.install(*arguments, "--json")[1])["hosts"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return Path(own_wheel(tmp_path_factory.mktemp("wheel")).wheel.path)


@pytest.fixture(scope="module")
def changed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the same version with other content, as that of a checkout at work."""
    path = tmp_path_factory.mktemp("changed") / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            more = b"\n# changed\n" if info.filename == "app/__main__.py" else b""
            new.writestr(info, old.read(info) + more)
    return path


@pytest.fixture(scope="module")
def required(wheel: Path) -> list[str]:
    """The names of all that rankdeck requires."""
    return required_by(wheel)


@pytest.fixture(scope="module")
def wheelhouse(required: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What hosts lack."""
    assert set(LACKING) <= set(required)
    directory = tmp_path_factory.mktemp("wheelhouse")
    fill_wheelhouse(directory)
    return directory


@pytest.fixture(scope="module")
def packages(required: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What hosts have already, as those do where people train: all but a little of what rankdeck requires."""
    directory = tmp_path_factory.mktemp("packages")
    link_packages(set(required) - set(LACKING), directory)
    return directory


def set_up(host: Host, **variables: str) -> Path:
    """Give a host a place of its own for temporary files, and what else its sshd and its programs are told."""
    temporary = host.directory / "tmp"
    temporary.mkdir(mode=0o1777)
    host.tell_sshd(TMPDIR=str(temporary), **variables)
    return temporary


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_a_bare_python_to_an_agent_and_to_the_next_one(
    network: Network, wheel: Path, changed_wheel: Path, wheelhouse: Path, packages: Path
) -> None:
    desk = Desk(network, wheel)
    staging = [set_up(network["h1"], PYTHONPATH=str(packages)), set_up(network["h2"], PYTHONPATH=str(packages))]
    network["h3"].stop_sshd()
    # A home that hosts share: whoever comes first makes the venv, the other one waits and finds all done.
    venv = network.directory / "shared/rd"
    python = f"{venv}/bin/python"
    how = ("--python", sys.executable, "--venv", str(venv), "--wheelhouse", str(wheelhouse))

    code, stdout, stderr = desk.install("h1", "h2", "h3", *how)

    assert code == 3, stderr
    version = named_wheel(wheel).wheel.version
    ours = f"rankdeck {version}"
    said = [line.split(" (")[0] for line in stdout.splitlines()]
    assert sorted(line.removeprefix("h1 ").removeprefix("h2 ") for line in said) == [
        f"has {ours} already",
        f"has {ours} now",
    ]
    assert "no torch, which ranks need" in stdout
    assert "h1: sends rankdeck" in stderr
    assert "h3: " in stderr
    assert "refuses connections" in stderr
    assert f'write python = "{python}" into rankdeck.toml' in stderr
    for directory in staging:
        assert list(directory.glob(f"{STAGING_PREFIX}*")) == []

    code, stdout, _ = desk.install("h1", "h2", *how)
    assert (code, [line.split(" (")[0] for line in stdout.splitlines()]) == (
        0,
        [f"h1 has {ours} already", f"h2 has {ours} already"],
    )

    # What has been installed is packed again, from its files, and is the same.
    again = ("install", "h2", "--python", sys.executable, "--venv", str(venv))
    code, stdout, _ = desk.run(*again, interpreter=python, PYTHONPATH=str(packages))
    assert (code, stdout.split(" (")[0]) == (0, f"h2 has {ours} already")

    there = ("h1", "--python", python)
    assert desk.run("up", *there)[0] == 0
    assert [row["is_agent_older"] for row in desk.rows(*there)] == [False]
    desk.wheel = changed_wheel
    code, stdout, _ = desk.install(*there, "--wheelhouse", str(wheelhouse))
    assert (code, stdout.split(" (")[0]) == (0, f"h1 has {ours} now")
    assert f"rankdeck down h1 --python {python}; rankdeck up h1 --python {python} (jobs go on)" in stdout
    pid = json.loads(desk.run("up", *there, "--json")[1])["hosts"][0]["pid"]
    (row,) = desk.rows(*there, "--restart-agent")
    assert (row["is_new"], row["is_agent_restarted"], row["num_jobs_left"]) == (False, True, 0)
    assert json.loads(desk.run("up", *there, "--json")[1])["hosts"][0]["pid"] != pid
    assert desk.run("down", *there)[0] == 0
    for host in network.hosts.values():
        until(lambda host=host: host.processes() == [], 60, "nothing runs on the host")  # type: ignore[misc]


def test_this_machine_runs_it_already(tmp_path: Path, wheel: Path) -> None:
    code, stdout, stderr = run_rankdeck("install", "localhost", "--wheel", str(wheel), cwd=tmp_path, environ=os.environ)

    assert (code, stderr) == (0, "")
    assert stdout == f"localhost runs rankdeck {metadata.version('rankdeck')} already ({sys.executable})\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--wheelhouse", "/nowhere"), "'/nowhere' does not exist"),
        (("--wheel", "app"), "'app' does not exist"),
        (("--wheelhouse", "/proc/self/fdinfo"), "no wheel is in /proc/self/fdinfo"),
    ],
)
def test_wrong_options_are_said_before_anything_is_done(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    code, stdout, stderr = run_rankdeck("install", "localhost", *arguments, cwd=tmp_path, environ=os.environ)

    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert told in stderr
