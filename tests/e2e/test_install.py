"""`rankdeck install`: from hosts with a bare Python to agents that serve, without a package index; and who refuses why.

The hosts' network reaches nothing: what they lack comes along, packed again from what the tests run with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from app.installing.on_host import STAGING_PREFIX
from app.installing.own_wheel import named_wheel, own_wheel, repacked
from app.installing.wheels import FarPython, Wheel, needed, wheel_of
from tests.support.hosts import Host, Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LACKING = ("click", "msgspec", "rich", "pygments")
"""Of what rankdeck requires, by itself or by another, pure and compiled."""
SFTP = "Subsystem sftp internal-sftp"


class Desk:
    """The machine at which a person calls `rankdeck install`."""

    def __init__(self, network: Network, wheel: Path) -> None:
        self.network = network
        self.wheel = wheel

    def run(self, *arguments: str, interpreter: str = sys.executable, **environ: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [interpreter, "-P", "-m", "app", *arguments],
            env={
                **os.environ,
                "RANKDECK_SSH_CONFIG": str(self.network.ssh_config),
                "XDG_RUNTIME_DIR": str(self.network.directory),
                **environ,
            },
            cwd=self.network.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

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
    here = [found for distribution in metadata.distributions() if (found := named(distribution))]
    choice = needed(named_wheel(wheel).wheel.requires, here, FarPython((3, 11, 0), ""))
    assert choice.lacking == ()
    return [found.name for found in choice.wheels]


@pytest.fixture(scope="module")
def wheelhouse(required: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What hosts lack."""
    directory = tmp_path_factory.mktemp("wheelhouse")
    for name in LACKING:
        assert name in required
        repacked(name, directory)
    return directory


@pytest.fixture(scope="module")
def packages(required: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What hosts have already, as those do where people train: all but a little of what rankdeck requires."""
    directory = tmp_path_factory.mktemp("packages")
    for name in set(required) - set(LACKING):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            link = directory / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))
    return directory


def named(distribution: metadata.Distribution) -> Wheel | None:
    """Return what is installed as the wheel that it may have been."""
    name = distribution.name.replace("-", "_")
    return wheel_of(f"{name}-1-py3-none-any.whl", requires=tuple(distribution.requires or ()))


@pytest.fixture
def network() -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", "h3") as network:
        yield network


def set_up(host: Host, *options: str, **variables: str) -> Path:
    """Give a host a place of its own for temporary files, and what else its sshd and its programs are told."""
    temporary = host.directory / "tmp"
    temporary.mkdir(mode=0o1777)
    set_env = " ".join(f"{name}={value}" for name, value in {"TMPDIR": str(temporary), **variables}.items())
    config = host.directory / "sshd_config"
    config.write_text(config.read_text() + "\n".join([f"SetEnv {set_env}", *options]) + "\n")
    host.restart_sshd()
    return temporary


def bare_venv(directory: Path, *options: str) -> str:
    subprocess.run([sys.executable, "-m", "venv", *options, str(directory)], check=True, timeout=60)
    return str(directory / "bin/python")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.slow
def test_from_a_bare_python_to_an_agent_and_to_the_next_one(
    network: Network, wheel: Path, changed_wheel: Path, wheelhouse: Path, packages: Path
) -> None:
    desk = Desk(network, wheel)
    staging = [set_up(network["h1"], SFTP, PYTHONPATH=str(packages)), set_up(network["h2"], PYTHONPATH=str(packages))]
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
        until(lambda host=host: host.processes() == [], 10, "nothing runs on the host")  # type: ignore[misc]


@pytest.fixture
def refused(network: Network, wheel: Path) -> Callable[..., str]:
    """Install on h1 in vain; return what was said last."""
    desk, staging = Desk(network, wheel), set_up(network["h1"], SFTP)

    def install(python: str, *more: str, code: int = 4) -> str:
        got, stdout, stderr = desk.install("h1", "--python", python, *more)
        assert (got, stdout) == (code, "")
        assert list(staging.iterdir()) == []
        return stderr.splitlines()[-1].removeprefix("rankdeck: h1: ")

    return install


def test_a_python_that_will_not_do_is_said_with_what_to_do(network: Network, refused: Callable[..., str]) -> None:
    home = network["h1"].home
    assert refused("/no/python") == "/no/python does not run there (name one: --python)"
    old = script(home / "old", 'echo \'{"version": [3, 9, 2], "executable": "old"}\'')
    assert refused(old) == f"{old} is Python 3.9.2, older than 3.11 (name a newer one: --python)"
    older = script(home / "older", "echo 'SyntaxError: future feature annotations is not defined' >&2; exit 1")
    assert refused(older) == f"{older} is older than Python 3.11 (name a newer one: --python)"
    odd = refused(script(home / "odd", "echo 'hello \033[2J'"), code=3)
    assert "does not do as asked" in odd
    assert "\x1b" not in odd

    without_pip = bare_venv(home / "without-pip", "--without-pip")
    hint = f"there: {without_pip} -m ensurepip, or apt install python3-pip"
    assert refused(without_pip) == f"{without_pip} has no pip ({hint})"
    (home / "papers").mkdir()
    (home / "papers/thesis.tex").touch()
    said = refused(sys.executable, "--venv", "~/papers")
    assert said == f"{home}/papers is not empty, and no venv (name another directory: --venv)"


@pytest.mark.slow
def test_what_keeps_pip_from_installing_is_said_and_nothing_is_left(
    network: Network, refused: Callable[..., str], wheelhouse: Path
) -> None:
    host = network["h1"]
    python = bare_venv(host.home / "bare")
    said = refused(python, "--wheelhouse", str(wheelhouse))
    kind = f"Python {sys.version_info.major}.{sys.version_info.minor} on "
    assert said.startswith(f"{wheelhouse} has no wheel for {kind}")
    assert "numpy" in said
    assert "click" not in said
    said = refused(python)
    assert said.startswith("pip there reaches no package index")
    assert "rankdeck install h1 --wheelhouse DIR" in said

    place = Path(python).parents[1] / f"lib/python3.{sys.version_info.minor}/site-packages/rankdeck-9.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: rankdeck\nVersion: 9\n")
    (place / "direct_url.json").write_text('{"url": "file:///src/deck", "dir_info": {"editable": true}}')
    assert "is the checkout /src/deck (pip install -e), which is left alone" in refused(python)
    shutil.rmtree(place)

    host.exec("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(host.directory / "tmp"))
    said = refused(python)
    assert "are needed there, " in said
    assert "make room" in said


def test_this_machine_runs_it_already(tmp_path: Path, wheel: Path) -> None:
    argv = [sys.executable, "-P", "-m", "app", "install", "localhost", "--wheel", str(wheel)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == f"localhost runs rankdeck {metadata.version('rankdeck')} already ({sys.executable})\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--wheelhouse", "/nowhere"), "'/nowhere' does not exist"),
        (("--wheel", "app"), "'app' does not exist"),
        (("--wheelhouse", "/proc/self/fdinfo"), "no wheel is in /proc/self/fdinfo"),
    ],
)
def test_wrong_options_are_said_before_anything_is_done(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    argv = [sys.executable, "-P", "-m", "app", "install", "localhost", *arguments]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert told in done.stderr
