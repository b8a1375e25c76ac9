"""A job of light ranks over hosts of `tests.support.hosts`, and what it truly does, whatever any agent says of it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import psutil

from agent.wire.jobs import JobSpec
from app.session.remote_job import RunRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.hosts import Host

PROGRAMS = Path(__file__).parent / "programs"
GRACE_S = 2.0


class JobProcess(NamedTuple):
    """A process that carries a job's mark: its shim, its launcher, a rank, or what these have started."""

    host: str
    attempt: int
    rank: int | None
    process: psutil.Process


class LightJob:
    """What a job is started with, in a directory that all hosts share, and what becomes of it."""

    def __init__(self, directory: Path, job_id: str = "train", num_ranks: int = 1) -> None:
        """`num_ranks` are those of each host; set `lines_a_step` before the start for ranks that print much."""
        self.lines_a_step = 0
        self.job_id = job_id
        self.num_ranks = num_ranks
        self.directory = directory / f"job-{job_id}"
        self.directory.mkdir()
        (self.directory / "train.py").touch()
        self.python = self.directory / "python"
        launcher = shlex.join([sys.executable, "-S", str(PROGRAMS / "light_launcher.py")])
        packages = Path(msgspec.__file__).parents[1]
        self.python.write_text(f'#!/bin/sh\nexport LIGHT_RANK_PACKAGES={packages}\nexec {launcher} "$@"\n')
        self.python.chmod(0o755)

    @property
    def request(self) -> RunRequest:
        return RunRequest(
            ("train.py",),
            self.job_id,
            num_ranks=self.num_ranks,
            python=str(self.python),
            workdir=str(self.directory),
            grace_s=GRACE_S,
            env=(("LIGHT_RANK_LINES", str(self.lines_a_step)),),
            is_beside=True,
            allow_faults=True,
        )

    def specs(self, *nodes: str, master_addr: str) -> dict[str, JobSpec]:
        """Return what each node is told, without a session."""
        return {
            node: JobSpec(
                job_id=self.job_id,
                attempt=0,
                python=str(self.python),
                command=["train.py"],
                workdir=str(self.directory),
                num_nodes=len(nodes),
                node_rank=number,
                first_rank=number * self.num_ranks,
                local_world_size=self.num_ranks,
                world_size=len(nodes) * self.num_ranks,
                master_addr=master_addr,
                grace_s=GRACE_S,
                allow_faults=True,
            )
            for number, node in enumerate(nodes)
        }

    def progress(self) -> dict[int, tuple[int, int]]:
        """Return the latest attempt of each rank that has begun, and its step in it."""
        found: dict[int, tuple[int, int]] = {}
        for path in self.directory.glob("truth-*"):
            _, attempt, rank = map(int, path.name.replace("truth", "0").split("-"))
            with contextlib.suppress(ValueError, IndexError):  # it is being written for the first time
                found[rank] = max(found.get(rank, (0, 0)), (attempt, int(path.read_text().split()[1])))
        return found

    def steps(self) -> dict[int, int]:
        """Return the step of each rank that has begun."""
        return {rank: step for rank, (_, step) in self.progress().items()}

    def end_well(self) -> None:
        """Let the program come to its end."""
        (self.directory / "over").touch()

    def processes(self, hosts: Iterable[Host]) -> list[JobProcess]:
        """Return all of it that is alive on some hosts, by its mark."""
        found = []
        for host in hosts:
            for process in host.processes() if host.is_on else ():
                with contextlib.suppress(psutil.Error):
                    environ = process.environ()
                    if environ.get("RANKDECK_JOB_ID") == self.job_id:
                        rank = environ.get("RANK")
                        attempt = int(environ["RANKDECK_ATTEMPT"])
                        found.append(JobProcess(host.name, attempt, None if rank is None else int(rank), process))
        return found
