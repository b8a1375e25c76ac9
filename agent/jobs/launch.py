"""What a job holds on this node: its directory, its port, its shim.

`Launch` carries out what the lifecycle decides. `read_round` reads what torchrun, through our plug-in, has decided when
it gathered the nodes of an elastic job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from agent.errors import SpawnError
from agent.files import read_regular
from agent.jobs.lifecycle import LauncherNotStarted, LauncherStarted, Round
from agent.jobs.preflight import interface_to, local_address
from agent.jobs.torchrun import LaunchPaths, launcher_argv, launcher_env, why_unprobed
from agent.logs.failure_files import find_failure, first_failure, last_failure, reported_exit_codes
from agent.processes.shim_process import (
    Invocation,
    LoneLauncher,
    ShimProcess,
    find_lone_launcher,
    find_shim,
    recorded_exit_code,
    spawn_shim,
)
from agent.wire.commands import RefusalReason, Refused
from agent.wire.logs import LAUNCHER_RANK
from ddpcore.wire import DECODE_ERRORS, ROUND_FILE, encode_request

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path

    from agent.jobs.job import Job
    from agent.jobs.preflight import Address
    from agent.logs.traceback_text import FoundFailure
    from agent.wire.jobs import JobSpec
    from ddpcore.wire import ProbeRequest, ReportNow, StopTraining


class Launch:
    """Resources of a job on this node, from `Prepare` on."""

    def __init__(
        self, job: Job, job_dir: Path, address: Address | None, port_holder: socket.socket | None = None
    ) -> None:
        """`job_dir` is of the launcher's start; `address` is where its store listens, None in old records."""
        self.job = job
        self.job_dir = job_dir
        self.address = address
        self._port_holder = port_holder
        self._chosen_port = 0
        self.prepared_s = boot_clock_s()
        """Time of the last `Prepare`, by `boot_clock_s`."""
        self.shim: ShimProcess | None = None
        """None before the start and after the end."""
        self.look: asyncio.Task[Refused | None] | None = None
        """The look at the files of its next attempt, while that waits for it."""
        self.kept_ranks = b""
        """The last reports of its ranks, as they are on disk."""
        self.before: Launch | None = None
        """The ended attempt whose place this one takes, until it begins to run."""

    @property
    def job_id(self) -> str:
        return self.job.spec.job_id

    @property
    def attempt(self) -> int:
        return self.job.attempt

    @property
    def ranks(self) -> range:
        return self.job.ranks

    @property
    def python(self) -> str:
        """The interpreter of its ranks."""
        return self.job.spec.python

    def new_request_id(self) -> int:
        """Return a number that no other request to a probe of this job has."""
        return self.job.new_request_id()

    @property
    def master_port(self) -> int:
        """Port of the job's store; 0 when an earlier agent chose it."""
        if self._port_holder:
            self._chosen_port = int(self._port_holder.getsockname()[1])
        return self._chosen_port or self.job.spec.master_port

    def take(self, job_dir: Path, port_holder: socket.socket | None) -> None:
        self.job_dir = job_dir
        self._port_holder = port_holder

    def start(self, spec: JobSpec, inbox_path: str, *, dies_with_us: bool) -> LauncherStarted | LauncherNotStarted:
        """Spawn the shim, with torchrun below it."""
        store_fd = self._port_holder.fileno() if self._port_holder else None
        paths = LaunchPaths(inbox_path, str(self.job_dir))
        try:
            self.shim = spawn_shim(
                Invocation(
                    launcher_argv(spec, self.master_port, self._local_address()),
                    launcher_env(spec, os.environ, paths, self._interface(), store_fd),
                    spec.workdir,
                    store_fd,
                ),
                run_dir=self.job_dir,
                grace_s=spec.grace_s,
                dies_with_us=dies_with_us,
            )
        except SpawnError as error:
            return LauncherNotStarted(str(error))
        except OSError as error:
            return LauncherNotStarted(f"there is no way to {spec.master_addr}: {error.strerror}")
        return LauncherStarted(why_unprobed(spec, os.environ))

    def adopt(self) -> bool:
        """Take over the shim that lives there, or the launcher if its shim was killed; return whether one lives."""
        self.shim = find_shim(self.job_dir)
        if self.shim is None and recorded_exit_code(self.job_dir) is None:
            self.shim = find_lone_launcher(self.job_dir)
        return self.shim is not None

    @property
    def is_lone(self) -> bool:
        """Whether its launcher runs without a shim."""
        return isinstance(self.shim, LoneLauncher)

    def launcher_pid(self) -> int | None:
        """Return torchrun's pid; None until it is known, and after the end."""
        return self.shim.launcher_pid() if self.shim else None

    @property
    def ranks_dir(self) -> Path:
        """Directory of the ranks' files: each gathering of an elastic job's launcher has one of its own."""
        return self.job_dir.parent / str(self.job.attempt)

    def _local_address(self) -> str:
        """Return the address of this node that the job's first node can reach."""
        if self.address is None or self.job.spec.node_rank == 0:
            return self.job.spec.master_addr
        return local_address(self.address)

    def _interface(self) -> str:
        """Return the network interface set for the ranks; empty leaves the choice to gloo and NCCL."""
        spec = self.job.spec
        return spec.interface or (interface_to(self.address) if self.address else "")

    def next_round(self) -> Round | None:
        """Return what the launcher of an elastic job has gathered, None for every other job."""
        return read_round(self.job_dir) if self.job.spec.elastic_min_nodes else None

    def release_port(self) -> None:
        """Close this process's copy of the port's socket; a launcher that runs has its own."""
        if self._port_holder:
            self._port_holder.close()
            self._port_holder = None

    def ask_probe(self, rank: int, request: ProbeRequest) -> Refused | None:
        """Send a request to the probe of a rank; return why that cannot be done, or None."""
        if self.ask(rank, request):
            return None
        return Refused(
            RefusalReason.NO_PROBE,
            f"rank {rank} has no probe that listens: it has not imported torch yet, or is frozen",
        )

    def ask_all(self, request: StopTraining | ReportNow) -> None:
        """Send a request to the probes of all ranks; to stop training, one that receives it is enough."""
        for rank in self.job.ranks:
            self.ask(rank, request)

    def failure_of(self, rank: int, signal: int | None) -> FoundFailure | None:
        """Return the failure in a rank's files; `signal` is what ended it, None with an exit code."""
        return find_failure(self.ranks_dir, rank, signal)

    def last_failure_of(self, rank: int, code: int | None) -> FoundFailure | None:
        """Return the last line of a rank that ended with a code and left no exception."""
        return last_failure(self.ranks_dir, rank) if code else None

    def any_failure(self, exit_code: int) -> FoundFailure | None:
        """Return the first failure in the files of this node's ranks, else of the launcher, which ended with a code."""
        codes = reported_exit_codes(self.job_dir)
        found = first_failure(self.ranks_dir, self.job.ranks, self.job_dir, codes)
        # One that refuses its arguments, or has no torch, prints why, and no traceback.
        return found or (last_failure(self.job_dir, LAUNCHER_RANK) if exit_code > 0 and not codes else None)

    def remove_sockets(self) -> None:
        """Remove the sockets of probes whose ranks were killed; a rank that ends by itself removes its own."""
        for path in self.ranks_dir.glob("rank-*.sock"):
            with contextlib.suppress(OSError):
                path.unlink()

    def ask(self, rank: int, request: ProbeRequest) -> bool:
        """Send a request to a rank's probe; return whether it listens."""
        return ask_rank(self.ranks_dir, rank, request)

    def close(self) -> None:
        """Release the port and the shim, whether it lives or not."""
        self.release_port()
        if self.shim:
            self.shim.close()
            self.shim = None


def ask_rank(ranks_dir: Path, rank: int, request: ProbeRequest) -> bool:
    """Send a request to the probe that has its socket in a directory; return whether it listens."""
    path = ranks_dir / f"rank-{rank}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(encode_request(request), str(path))
        except OSError:
            return False
    return True


def listens(path: Path) -> bool:
    """Return whether a probe has its socket at a path."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as asker:
        try:
            asker.connect(str(path))
        except OSError:
            return False
    return True


def boot_clock_s() -> float:
    """Return the time of a clock that goes on while the machine is suspended. Source: clock_gettime(2)."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


MAX_ROUND_BYTES = 1024


def read_round(job_dir: Path) -> Round | None:
    """Return the latest round of a launcher that was started in `job_dir`; None before the first.

    The file may be hostile: a link, a pipe or nonsense is no round.
    """
    try:
        return msgspec.json.decode(read_regular(job_dir / ROUND_FILE, MAX_ROUND_BYTES), type=Round)
    except (OSError, *DECODE_ERRORS):
        return None
