"""The life of an agent process: its directory, its event loop, its end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import sys
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.daemon import Daemon
from agent.errors import AgentError, OperatorError, log_line
from agent.processes.parent_watch import watch_console, watch_signals, watch_slurm
from agent.service.agent_info import own
from agent.service.daemonise import bound_log
from agent.service.systemd import ServiceManager
from agent.state_dir import StateDir, remove_old_slurm_dirs
from agent.wire.slurm import slurm_step

if TYPE_CHECKING:
    from pathlib import Path

    from agent.relay.dialer import Dialer

CARE_PERIOD_S = 10.0
"""Seconds between looks at the length of the log; a watchdog may want a sign of us sooner."""
STEP_IDLE_S, STEP_WAIT_S = 20.0, 600.0
"""Seconds without a job after which a daemon in a step of a Slurm job ends: after its last one, and before any."""


class ServeOptions(NamedTuple):
    """What an agent may do besides.

    Attributes:
        ready_fd: Where a daemon reports that it serves; None reports it on standard output.
        metrics: Address and port for Prometheus; empty serves none.
        invitation: That of the relay to dial, if there is one.
        ends_with_relay: Whether the relay's end is that of the jobs and of the agent.
    """

    ready_fd: int | None = None
    metrics: str = ""
    invitation: Path | None = None
    ends_with_relay: bool = False


def serve_until_stopped(directory: Path, node: str, options: ServeOptions, *, is_private: bool) -> None:
    """Serve until the agent has ended. A private agent's jobs have ended then, another's continue.

    A private agent, with its jobs, ends with the pipe on standard input. Raises OperatorError if the directory or the
    address cannot be used, AgentError if a socket or a file cannot be opened now.
    """
    # Without a descriptor libzmq ends the process (`report_sockets`). A job has the limit that we had: `shim_process`.
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    manager = ServiceManager(os.environ)
    state_dir = StateDir(directory)
    state_dir.open(is_private=is_private)
    server = _Server(state_dir, node, manager, options, is_private=is_private)
    try:
        asyncio.run(server.run())
    except OSError as error:
        # It may pass: whoever restarts agents tries again.
        raise AgentError(f"cannot serve in {state_dir.path}: {error}") from error
    finally:
        state_dir.close(remove_all=is_private)


class _Server:
    """A daemon and what surrounds it: signals, the service manager, the log."""

    def __init__(
        self, state_dir: StateDir, node: str, manager: ServiceManager, options: ServeOptions, *, is_private: bool
    ) -> None:
        self._state_dir = state_dir
        self._node = node
        self._manager = manager
        self._options = options
        self._is_private = is_private
        self._dialing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        is_daemon = self._options.ready_fd is not None
        daemon = Daemon(self._state_dir, self._node, is_private=self._is_private)
        watch_signals(daemon.end_soon, outlives_terminal=is_daemon)
        if self._is_private:
            watch_console(daemon.end_soon)
        elif step := slurm_step(os.environ):
            watch_slurm(lambda: self._end_with_jobs(daemon, f"Slurm ends job {step.job_id}"))
            remove_old_slurm_dirs(self._state_dir.path)
        dialer = self._dialer(daemon)
        care = asyncio.create_task(self._take_care(daemon, is_daemon=is_daemon))
        try:
            with contextlib.ExitStack() as opened:
                metrics_port = self._serve_metrics(daemon, opened)
                await daemon.run(lambda: self._begin(daemon, dialer, metrics_port))
        finally:
            self._manager.stopping("ending")
            tasks = [task for task in (care, self._dialing) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not self._is_private:
            self._print_farewell(daemon.num_jobs_left)

    def _end_with_jobs(self, daemon: Daemon, why: str) -> None:
        """Stop the jobs, then end: Slurm kills at once what is left of a task that has ended."""
        if daemon.end_with_jobs(why):
            log_line(f"{why}: what runs here is stopped, then this agent ends")

    def _serve_metrics(self, daemon: Daemon, opened: contextlib.ExitStack) -> int:
        """Serve metrics if they are wanted, and return the port; 0 without."""
        if not self._options.metrics:
            return 0
        try:
            from agent.transport.metrics import MetricsServer  # noqa: PLC0415 - whoever serves none does not pay for it
        except ModuleNotFoundError as error:
            raise OperatorError(f"{error.name} is missing: install rankdeck[metrics]") from error
        server = MetricsServer(self._options.metrics, lambda: daemon.latest_report)
        port = server.open()
        opened.callback(server.close)
        return port

    def _dialer(self, daemon: Daemon) -> Dialer | None:
        if self._options.invitation is None:
            return None
        from agent.relay.dialer import Dialer  # noqa: PLC0415 - whoever dials nobody does not pay for it

        directory, epoch = self._state_dir.path, daemon.epoch
        dialer = Dialer(self._options.invitation.absolute(), directory, self._node, epoch, daemon.reports, os.environ)
        if self._options.ends_with_relay:
            dialer.on_relay_end = functools.partial(self._end_with_jobs, daemon)
            dialer.is_busy = lambda: daemon.num_jobs_left > 0
        return dialer

    def _begin(self, daemon: Daemon, dialer: Dialer | None, metrics_port: int) -> None:
        if dialer is not None:
            self._dialing = asyncio.create_task(dialer.run(), name="rankdeck-dialer")
        self._print_ready(daemon.epoch, metrics_port)

    def _print_ready(self, epoch: str, metrics_port: int) -> None:
        line = msgspec.json.encode(own(self._state_dir.path, self._node, epoch, metrics_port)) + b"\n"
        self._manager.ready(f"serving {self._node} in {self._state_dir.path}")
        if self._options.ready_fd is None:
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
            return
        try:
            os.write(self._options.ready_fd, line)
        except BrokenPipeError:
            pass  # whoever started us has gone: a daemon goes on
        finally:
            os.close(self._options.ready_fd)

    def _print_farewell(self, num_jobs_left: int) -> None:
        left = {0: "no job runs", 1: "one job goes on"}.get(num_jobs_left, f"{num_jobs_left} jobs go on")
        adopted = ", until another agent in this directory takes it up" if num_jobs_left else ""
        log_line(f"ended; {left}{adopted}")

    async def _take_care(self, daemon: Daemon, *, is_daemon: bool) -> None:
        """Report to the service manager that we live, keep the log short, and end where nobody else would end us."""
        period_s = min(CARE_PERIOD_S, self._manager.watchdog_s / 3 or CARE_PERIOD_S)
        reported = -1
        # Where Slurm follows a step's processes by their parents, it leaves a daemon behind.
        is_of_step = is_daemon and slurm_step(os.environ) is not None
        idle_s = 0.0
        while True:
            self._manager.alive()
            if reported != daemon.num_jobs_left:
                reported = daemon.num_jobs_left
                self._manager.status(f"{reported} job{'' if reported == 1 else 's'} running")
            if is_daemon:
                with contextlib.suppress(OSError):  # full, or read-only by now
                    bound_log(self._state_dir.path)
            idle_s = 0.0 if daemon.num_jobs_left else idle_s + period_s
            if is_of_step and idle_s > (STEP_IDLE_S if daemon.has_had_jobs else STEP_WAIT_S):
                daemon.end_soon()
            await asyncio.sleep(period_s)
