"""Runs `rankdeck demo` as a person would, in a runtime directory of its own, and looks for what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

RUN_S = 300.0
"""A demo of some steps takes ten seconds on a quiet machine, and up to a minute waits for a verdict."""
GONE_S = 30.0
"""For what is killed, or told to end before the command has ended, to be gone."""


class DemoHouse:
    """A short-named runtime directory; every process of a demo started in it inherits its name and is found by it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rd-", dir="/tmp"))
        self.home = self.directory / "home"
        self.home.mkdir()
        self.runtime = self.directory / "run"
        self.runtime.mkdir(mode=0o700)
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # gone meanwhile
                process.kill()
        for started in self._started:
            started.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANKDECK_", "TORCH"))}
        return {**kept, "XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.runtime), "HOME": str(self.home)}

    def argv(self, *options: str) -> list[str]:
        return [sys.executable, "-P", "-m", "app", "demo", *options]

    def start(self, *options: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return self.start_command(*self.argv(*options), environment=environment)

    def start_command(self, *argv: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            argv,
            env=self.environment if environment is None else environment,
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *options: str, within_s: float = RUN_S) -> Finished:
        process = self.start(*options)
        stdout, stderr = process.communicate(timeout=within_s)
        return Finished(process.returncode, stdout, stderr)

    def processes(self) -> list[psutil.Process]:
        """All living processes that were started in this house."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("XDG_RUNTIME_DIR") == str(self.runtime):
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if _is_alive(process)]

    def ranks(self) -> dict[int, psutil.Process]:
        """The worker processes, by rank: the oldest that have it, since their children may have it too."""
        ranks: dict[int, psutil.Process] = {}
        for process in sorted(self.processes(), key=psutil.Process.create_time):
            try:
                rank = process.environ().get("RANK")
            except psutil.Error:
                continue
            if rank is not None:
                ranks.setdefault(int(rank), process)
        return ranks

    def leftovers(self) -> list[str]:
        """What is still there: processes, sockets and files."""
        return _entries(self.runtime) + _entries(self.home) + [str(process) for process in self.processes()]

    def assert_nothing_is_left(self, within_s: float = GONE_S) -> None:
        until(lambda: not self.leftovers(), within_s, f"nothing left behind: {self.leftovers()}")


class Finished:
    """A run that has ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def summary(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.stdout)
        return parsed

    def said(self) -> Sequence[str]:
        return self.stderr.strip().splitlines()


def _entries(root: Path) -> list[str]:
    """All that lies below a directory; what vanishes while one looks is not there (`Path.rglob` would raise)."""
    return [str(Path(directory, name)) for directory, folders, files in os.walk(root) for name in (*folders, *files)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
