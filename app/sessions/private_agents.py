"""Agents that live and die with this console: the nodes of the demo.

Each has its own 0700 directory and watches the pipe on its standard input: when this process ends, however it ends, the
kernel closes the pipe, and the agent kills its job, removes its directory and exits.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import SessionError
from app.runtime_dir import runtime_directory
from app.safe_text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

READY_TIMEOUT_S = 30.0
"""A Python start on a machine busy with other things."""
FAREWELL_TIMEOUT_S = 6.0
"""For an agent to end a job and tidy up; after that it is killed and tidied up after."""
_LONGEST_NAME = "/rankdeck-12345678/jobs/demo/0/rank-12.sock"


class PrivateAgents:
    """Starts agents as children of this process, and ends them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.directories: dict[str, Path] = {}
        """Each agent's directory, by node name; exists from `make_directories` on."""

    def make_directories(self) -> None:
        """Make a 0700 directory for each agent.

        Raises:
            SessionError: There is no place for one.
        """
        parent = runtime_directory(_LONGEST_NAME)
        for name in self._names:
            try:
                directory = Path(tempfile.mkdtemp(prefix="rankdeck-", dir=parent))
                self.directories[name] = directory
                (directory / "work").mkdir(mode=0o700)
            except OSError as error:
                self.remove_directories()
                raise SessionError(
                    f"cannot make a directory in {parent}: {error.strerror}", "set TMPDIR to a writable directory"
                ) from error

    async def start(self) -> None:
        """Start all agents and wait until each listens.

        Raises:
            SessionError: One did not come up; its own words are in the message.
        """
        await asyncio.gather(*(self._start(name) for name in self._names))

    async def close(self) -> None:
        """End all agents with everything they run, and remove what they left. Safe to call at any time, and twice."""
        await asyncio.gather(*(_end(process) for process in self._processes.values()))
        self._processes.clear()
        self.remove_directories()

    def remove_directories(self) -> None:
        """Remove the directories, as far as the agents have not done so themselves."""
        for directory in self.directories.values():
            shutil.rmtree(directory, ignore_errors=True)

    async def _start(self, name: str) -> None:
        argv = (sys.executable, "-P", "-m", "agent", "serve")
        process = await asyncio.create_subprocess_exec(
            *argv,
            *("--dir", str(self.directories[name]), "--node", name, "--private"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal is the console's to answer
        )
        self._processes[name] = process
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            raise SessionError(f"the agent {name} did not start in {READY_TIMEOUT_S:.0f} s") from None
        if not ready:
            said = (await process.stderr.read()).decode(errors="replace").strip()
            raise SessionError(f"the agent {name} did not start: {clean(said, LINE_LIMIT) or 'it said nothing'}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the pipe that the agent watches, and see it off."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(FAREWELL_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
