"""The unit that `python -m agent unit` prints, under a real systemd: a manager in a mount namespace of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from tests.support.jobs import make_local_spec
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

MANAGER = Path("/lib/systemd/systemd")
UNIT = "rankdeck-agent"
# systemd wants to see that the machine was booted by it.
IN_ITS_WORLD = f"mount -t tmpfs none /run/systemd && mkdir /run/systemd/system && exec {MANAGER} --user"

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(os.geteuid() != 0 or not MANAGER.exists(), reason="needs root and systemd"),
]


class Home:
    """A user's home with a manager of its services."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        runtime = directory / "run"
        runtime.mkdir(mode=0o700)
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        self.environment = {**kept, "HOME": str(directory), "XDG_RUNTIME_DIR": str(runtime)}
        units = directory / ".config/systemd/user"
        units.mkdir(parents=True)
        (units / f"{UNIT}.service").write_text(self.run(sys.executable, "-P", "-m", "agent", "unit"))
        self.manager = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", IN_ITS_WORLD],
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(lambda: self.manager.poll() is not None or (runtime / "systemd/private").exists(), 20, "the manager")

    def run(self, *argv: str, text: str | None = None) -> str:
        """Run a command as this user and return what it prints."""
        return subprocess.run(
            argv, env=self.environment, input=text, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    def systemctl(self, *words: str) -> str:
        """Ask the manager."""
        return self.run("systemctl", "--user", *words).strip()

    def agent(self, *words: str, text: str | None = None) -> dict[str, Any]:
        """Ask the agent, which finds its directory by itself."""
        told: dict[str, Any] = json.loads(self.run(sys.executable, "-P", "-m", "agent", *words, text=text))
        return told

    def main_pid(self) -> int:
        """Return the agent's pid as the manager knows it; 0 while there is none."""
        return int(self.systemctl("show", UNIT, "-p", "MainPID", "--value"))

    def workers(self) -> dict[int, int]:
        """Return the pid of each rank."""
        return {worker["rank"]: worker["pid"] for worker in self.agent("status")["report"].get("workers", [])}


@pytest.fixture
def home() -> Iterator[Home]:
    # Short, since a socket's path has 108 bytes.
    directory = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
    home = Home(directory)
    try:
        if home.manager.poll() is not None:
            pytest.skip("this machine runs no systemd of a user")
        yield home
    finally:
        if home.manager.poll() is None:
            subprocess.run(["systemctl", "--user", "exit"], env=home.environment, timeout=30, check=False)
            home.manager.wait(30)
        for process in psutil.process_iter(["cmdline"]):  # what a failed test leaves: jobs outlive all of the above
            if any(str(directory) in word for word in process.info["cmdline"] or ()):
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow
def test_the_unit_keeps_an_agent_and_the_agent_its_job(home: Home) -> None:
    home.systemctl("daemon-reload")
    home.systemctl("start", UNIT)  # returns once the agent has said that it is ready
    assert home.systemctl("show", UNIT, "-p", "StatusText", "--value").startswith("serving ")
    (home.directory / "train.py").write_text("import time; time.sleep(600)")
    spec = make_local_spec(home.directory, command=["train.py"], python=sys.executable)
    home.agent("prepare", text=msgspec.json.encode({"spec": spec}).decode())
    home.agent("commit", "--job", "train")
    ranks = until(lambda: len(found := home.workers()) == 2 and found, 60, "two ranks")
    assert isinstance(ranks, dict)

    first = home.main_pid()
    os.kill(first, signal.SIGKILL)
    until(lambda: home.main_pid() not in (0, first), 30, "another agent")
    until(lambda: home.systemctl("show", UNIT, "-p", "ActiveState", "--value") == "active", 30, "it serves")
    until(lambda: home.workers() == ranks, 30, "it has found the ranks again")

    home.systemctl("stop", UNIT)
    assert all(is_alive(pid) for pid in ranks.values())
    home.systemctl("start", UNIT)
    until(lambda: home.workers() == ranks, 30, "it has found the ranks again")
    home.agent("kill", "--job", "train")
    until(lambda: not any(is_alive(pid) for pid in ranks.values()), 30, "nothing is left of the job")
    assert psutil.Process(home.main_pid()).is_running()
