"""`rankdeck demo`: a real DDP job on this machine, over two private agents that stand for two nodes.

Everything that crosses nodes in a cluster crosses here too: two agents, two launchers, one rendezvous. Nothing of it
listens beyond this machine: our sockets are files in 0700 directories, torch's store and gloo are pinned to loopback.

`PrivateAgents` are agents that end with this console. Each has its own 0700 directory and watches the pipe on its
standard input. When this process ends, however it ends, the kernel closes the pipe. The agent then kills its job,
removes its directory and exits.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.wire.jobs import JobSpec
from app.errors import SessionError, UsageError
from app.fleet.local_link import LocalLink
from app.inventory.inventory import HostEntry
from app.paths import runtime_directory
from app.session.hosts import HostDoctor, Hosts
from app.session.options import SessionOptions  # noqa: TC001 - msgspec looks at it
from app.session.remote_job import even_split
from app.session.session import DEFAULT_OPTIONS, Session
from app.ssh.config import LOOPBACK, THIS_MACHINE
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.wire import Fault

JOB_ID = "demo"
NUM_NODES = 2
MAX_RANKS = 32
"""The demo's global batch has 32 samples: one for each rank."""
DEFAULT_RANKS = 4
HEADLESS_STEPS = 200
CONSOLE_STEPS = 10_000
"""Steps of the job in a terminal, where it runs until the user quits; at 25 steps a second this is 7 minutes."""
GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL; the demo has nothing to save."""
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, not written to
SHM_WANTED_BYTES = 64 * 1024 * 1024


class DemoOptions(msgspec.Struct, frozen=True):
    """Options of the demo."""

    num_ranks: int = DEFAULT_RANKS
    steps: int = HEADLESS_STEPS
    fault: Fault | None = None
    port: int = 0
    """Rendezvous port on loopback; 0 takes a free one."""
    session: SessionOptions = DEFAULT_OPTIONS
    """Options of the session; by default without evidence and recording, so that no file is left."""


def check_options(options: DemoOptions) -> None:
    """Check the options before anything is started.

    Raises:
        UsageError: The options contradict each other.
        SessionError: This environment cannot run a DDP job.
    """
    fault = options.fault
    if fault is not None:
        if fault.rank >= options.num_ranks:
            last = options.num_ranks - 1
            raise UsageError(f"--fault names rank {fault.rank}, and the demo has ranks 0 to {last}", "or give --ranks")
        if fault.at_step is not None and not 1 <= fault.at_step <= options.steps:
            strikes = f"--fault strikes at step {fault.at_step}"
            raise UsageError(f"{strikes}, and the demo has steps 1 to {options.steps}", "or give --steps")
    if importlib.util.find_spec("torch") is None:
        raise SessionError(
            f"PyTorch is not installed for {sys.executable}",
            "pip install '.[train]' in rankdeck's clone, or torch itself",
        )


def environment_notes(num_ranks: int) -> list[str]:
    """Return sentences about limits of this machine that affect the demo."""
    notes = []
    num_cpus = len(os.sched_getaffinity(0))
    if num_ranks > num_cpus:
        notes.append(f"{num_ranks} ranks share {num_cpus} CPU cores: steps take longer than with a core a rank")
    try:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free_bytes = 0
    if free_bytes < SHM_WANTED_BYTES:
        notes.append(f"{SHARED_MEMORY} has no room: the demo does without it, a DataLoader with workers would not")
    return notes


class Demo(Session):
    """The demo's agents, job and session.

    `view`, the `drain_` methods and the properties are for the frame loop (`app.tui.source.ConsoleSource`); the
    coroutines run on the same loop. Call `close` however it ends.
    """

    title = "rankdeck demo"
    outside = None
    watched_job = JOB_ID
    leaving = "the session ends what it started"

    def __init__(self, options: DemoOptions) -> None:
        """Make the directories of the agents; nothing runs yet.

        Raises:
            SessionError: A directory cannot be made, or see `Session`; all of them are removed again.
        """
        self._options = options
        num_nodes = min(NUM_NODES, options.num_ranks)
        self._nodes = [f"demo-{index}" for index in range(num_nodes)]
        self._agents = PrivateAgents(self._nodes)
        self._agents.make_directories()
        try:
            super().__init__(self._agents.directories, options.session)
            self._notices = environment_notes(options.num_ranks)
            self.doctor = HostDoctor(Hosts((LocalLink(),), (HostEntry(THIS_MACHINE),), "", {}))
        except SessionError:
            self._agents.remove_directories()
            raise

    @property
    def can_inject(self) -> bool:
        """True unless the session is read-only."""
        return not self.is_read_only

    async def start(self) -> None:
        """Start the agents, then the job on them.

        Raises:
            AppError: The start failed; no process of the job is left running.
        """
        await self._agents.start()
        await self.connect()
        self._notices.append(f"agents {' and '.join(self._nodes)} are up")
        await self.start_job(self._specs())
        self._notices.append(f"torchrun started on {len(self._nodes)} nodes; importing torch takes some seconds")

    def farewell(self) -> str:
        """Return what to type next; nothing of the demo keeps running."""
        return "rankdeck: your own program under this console: rankdeck run train.py"

    async def close(self) -> None:
        """End the job and the agents, and remove their files."""
        await super().close()
        await self._agents.close()

    def _specs(self) -> dict[str, JobSpec]:
        options = self._options
        specs = {}
        first_rank = 0
        # All nodes are one machine, so they share one directory and one command.
        command = self._command(self._agents.directories[self._nodes[0]] / "work" / "checkpoints")
        local_sizes = even_split(options.num_ranks, len(self._nodes))
        for node_rank, (node, local_size) in enumerate(zip(self._nodes, local_sizes, strict=True)):
            workdir = self._agents.directories[node] / "work"
            specs[node] = JobSpec(
                job_id=JOB_ID,
                attempt=0,
                python=sys.executable,
                command=command,
                workdir=str(workdir),
                num_nodes=len(self._nodes),
                node_rank=node_rank,
                local_world_size=local_size,
                first_rank=first_rank,
                world_size=options.num_ranks,
                master_addr=LOOPBACK,
                master_port=options.port,
                interface="lo",
                env={"TMPDIR": str(workdir)},  # torch leaves caches there
                allow_faults=True,
                faults=[options.fault] if options.fault else [],
                grace_s=GRACE_S,
            )
            first_rank += local_size
        return specs

    def _command(self, checkpoint_dir: Path) -> list[str]:
        return [
            *("-m", "ddpcore.examples.bytegpt"),
            *("--steps", str(self._options.steps), "--checkpoint-dir", str(checkpoint_dir)),
        ]


DOCTOR_HINT = "rankdeck doctor localhost shows what is in the way"
READY_TIMEOUT_S = 30.0
"""Seconds for a Python to start on a busy machine."""
FAREWELL_TIMEOUT_S = 6.0
"""Seconds for an agent to end its job and remove its files; then it is killed, and this process removes them."""
_LONGEST_NAME = "/rankdeck-12345678/jobs/demo/0/rank-12.sock"


class PrivateAgents:
    """Starts agents as child processes, and ends them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self.directories: dict[str, Path] = {}
        """Directory of each agent by node name; exists after `make_directories`."""

    def make_directories(self) -> None:
        """Make a 0700 directory for each agent.

        Raises:
            SessionError: A directory cannot be made.
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
            SessionError: An agent did not start; the message holds its output.
        """
        await asyncio.gather(*(self._start(name) for name in self._names))

    async def close(self) -> None:
        """End all agents with everything they run, and remove their files. May be called at any time, and twice."""
        await asyncio.gather(*(_end(process) for process in self._processes.values()))
        self._processes.clear()
        self.remove_directories()

    def remove_directories(self) -> None:
        """Remove the directories that the agents have not removed themselves."""
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
            start_new_session=True,  # the console handles a Ctrl-C at the terminal
        )
        self._processes[name] = process
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            raise SessionError(f"the agent {name} did not start in {READY_TIMEOUT_S:.0f} s", DOCTOR_HINT) from None
        if not ready:
            output = (await process.stderr.read()).decode(errors="replace").strip()
            why = clean(output, LINE_LIMIT) or "it printed nothing"
            raise SessionError(f"the agent {name} did not start: {why}", DOCTOR_HINT)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the pipe that the agent watches, and wait for its end."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(FAREWELL_TIMEOUT_S):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
