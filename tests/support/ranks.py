"""Real ranks for tests: torchrun on loopback with the launch plug-in, and an inbox that takes their reports."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

from ddpcore.wire import (
    ENV_ATTEMPT,
    ENV_FAULTS,
    ENV_INBOX,
    ENV_JOB_ID,
    ENV_LOG_DIR,
    ENV_PROBED_PID,
    ENV_REQUEST_DIR,
    ENV_STORE_FD,
    LOGS_SPECS_NAME,
    Fault,
    GroupReport,
    ProbeRequest,
    RankReport,
    decode_report,
    encode_faults,
    encode_request,
)
from ddpcore.wire_launch import LAUNCH_PLUGIN_DIR
from tests.support.meeting import held_port

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

EXAMPLES = Path(__file__).parents[2] / "ddpcore" / "examples"
PROGRAMS = Path(__file__).parent / "programs"

START_S = 60.0
"""Four ranks that import torch on two busy cores."""

END_S = 60.0
"""What is killed ends at once; a machine that stands still takes as long as it likes."""

Reports = dict[int, RankReport]


class RealRanks:
    """One torchrun with its ranks, ended and cleaned up by the `with` block.

    The program runs in the job's directory, which is gone afterwards.

    Args:
        command: The program and its arguments.
        num_ranks: Ranks, all on this machine.
        faults: Injected at their steps.
        env: More variables for the job.
        is_watched: False starts the job without probe and plug-in's logs, for comparison.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        num_ranks: int,
        *,
        faults: Sequence[Fault] = (),
        env: Mapping[str, str] | None = None,
        is_watched: bool = True,
    ) -> None:
        self.num_ranks = num_ranks
        self.reports: Reports = {}
        self.history: list[RankReport] = []
        # Short, since a socket's path has 108 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="rd-"))
        self._inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._inbox.bind(str(self.directory / "inbox.sock"))
        self._pids: set[int] = set()
        log_path = self.directory / "launcher.log"
        self._port_holder = held_port()
        self.port: int = self._port_holder.getsockname()[1]
        if is_watched:
            self._port_holder.listen()  # the plug-in hands it to the store
        with log_path.open("wb") as log:
            self.launcher = subprocess.Popen(
                self._argv(command, is_watched=is_watched),
                env=self._environment(env or {}, faults, self._port_holder.fileno(), is_watched=is_watched),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[self._port_holder.fileno()] if is_watched else [],
            )
        if is_watched:
            self._port_holder.close()  # the launcher has it

    def _argv(self, command: Sequence[str | Path], *, is_watched: bool) -> list[str]:
        options = {
            "nnodes": 1,
            "nproc-per-node": self.num_ranks,
            "max-restarts": 0,
            "rdzv-backend": "static",
            "master-addr": "127.0.0.1",
            "master-port": self.port,
            "node-rank": 0,
            "monitor-interval": 0.1,
        }
        if is_watched:
            options["logs-specs"] = LOGS_SPECS_NAME
        else:
            options |= {"log-dir": self.directory / "logs", "redirects": 3}
        flags = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "torch.distributed.run", *flags, *map(str, command)]

    def _environment(
        self, env: Mapping[str, str], faults: Sequence[Fault], store_fd: int, *, is_watched: bool
    ) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name != ENV_PROBED_PID}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_FR_BUFFER_SIZE": "64",
            "PYTHONUNBUFFERED": "1",
        }
        if is_watched:
            environment |= {
                "PYTHONPATH": os.pathsep.join([str(LAUNCH_PLUGIN_DIR), *filter(None, [environment.get("PYTHONPATH")])]),
                ENV_INBOX: str(self.directory / "inbox.sock"),
                ENV_REQUEST_DIR: str(self.directory),
                ENV_LOG_DIR: str(self.directory),
                ENV_JOB_ID: "job",
                ENV_ATTEMPT: "1",
                ENV_STORE_FD: str(store_fd),
                ENV_FAULTS: encode_faults(list(faults)),
            }
        return {**environment, **env}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.take_reports()
        tree = self.processes()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()
        self.launcher.wait(END_S)
        psutil.wait_procs(tree, timeout=END_S)
        self._inbox.close()
        self._port_holder.close()
        shutil.rmtree(self.directory)

    def processes(self) -> list[psutil.Process]:
        """Return what is alive of the job: launcher, ranks, and their children."""
        roots = {self.launcher.pid, *self._pids}
        found = {process.pid: process for process in descendants(*roots)}
        for pid in roots - found.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[pid] = psutil.Process(pid)
        return [process for process in found.values() if still_runs(process)]

    def take_reports(self, timeout_s: float = 0.0) -> None:
        """Take every report that is there, waiting up to `timeout_s` for the first."""
        select.select([self._inbox], [], [], timeout_s)
        while True:
            try:
                report = decode_report(self._inbox.recv(65_536))
            except BlockingIOError:
                return
            self.reports[report.rank] = report
            self.history.append(report)
            self._pids.add(report.pid)

    def wait_until(self, condition: Callable[[Reports], bool], what: str, timeout_s: float = START_S) -> Reports:
        """Take reports until the newest of each rank satisfy `condition`, which is asked once all have reported."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.take_reports(timeout_s=0.05)
            if len(self.reports) == self.num_ranks and condition(self.reports):
                return self.reports
            if self.launcher.poll() is not None:
                self.take_reports()
                if len(self.reports) == self.num_ranks and condition(self.reports):
                    return self.reports
                break
        raise AssertionError(f"not within {timeout_s} s: {what}\n{self.reports}\n{self.logs()}")

    def wait_for_end(self, timeout_s: float = START_S) -> int:
        """Take reports until torchrun has ended, and return its exit status."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            self.take_reports(timeout_s=0.05)
            status = self.launcher.poll()
            if status is not None:
                self.take_reports()
                return status
        raise AssertionError(f"torchrun has not ended within {timeout_s} s\n{self.reports}\n{self.logs()}")

    def ask(self, rank: int, request: ProbeRequest) -> None:
        """Send a request to a rank's probe."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(encode_request(request), str(self.directory / f"rank-{rank}.sock"))

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank."""
        os.kill(self.reports[rank].pid, number)

    def log(self, rank: int, stream: str = "stdout") -> str:
        """Return what a rank has printed."""
        return (self.directory / f"rank-{rank}.{stream}.log").read_text(errors="replace")

    def logs(self) -> str:
        """Return everything that was printed, for a failure's message."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.directory.rglob("*.log"))
        )


def descendants(*pids: int) -> list[psutil.Process]:
    """Return what runs below some processes, as the kernel lists it: psutil would read all of /proc for each.

    A test that waits looks every few milliseconds. Source: proc_pid_task(5), `children`.
    """
    found: dict[int, psutil.Process] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for thread in Path(f"/proc/{pid}/task").iterdir():
                children = thread.joinpath("children").read_bytes().split()
                for child in map(int, children):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if child not in found:
                            found[child] = psutil.Process(child)
                            waiting.append(child)
    return list(found.values())


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return still_runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def still_runs(process: psutil.Process) -> bool:
    """Say whether it is this process that runs, and not another one of its number; a zombie does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def group(report: RankReport, name: str) -> GroupReport | None:
    """Return what a rank says of one process group."""
    return next((group for group in report.groups if group.group == name), None)
