"""What an agent reports of itself to whoever starts or looks for it: where it lives, and whether it serves."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from agent.errors import NoAgentError
from agent.machine.host import own_addresses
from agent.processes.worker_sampler import is_stopped
from agent.state_dir import holder_of
from agent.transport.command_socket import ask
from agent.wire.commands import GetStatus, Status
from agent.wire.reports import WIRE_VERSION, NodeReport


class AgentInfo(msgspec.Struct, frozen=True):
    """One JSON line of `serve`, `serve --daemon` and `where`."""

    ready: bool
    """True if an agent serves, and answers."""
    dir: str
    """Directory of the agent, or where it would be."""
    node: str = ""
    epoch: str = ""
    pid: int = 0
    """Pid of the agent that serves, or that holds the directory and does not."""
    is_frozen: bool = False
    """True if the process that holds the directory is stopped by a signal or a debugger: it answers nobody."""
    metrics_port: int = 0
    """Port on which this command serves Prometheus; 0 without."""
    is_new: bool = False
    """True if this command has started it."""
    python: str = sys.executable
    home: str = str(Path("~").expanduser())
    rankdeck: str = version("rankdeck")
    wire_version: int = WIRE_VERSION
    addresses: list[str] = msgspec.field(default_factory=lambda: own_addresses(os.environ))
    """Addresses of this node; see `own_addresses`."""


def own(directory: Path, node: str, epoch: str, metrics_port: int = 0) -> AgentInfo:
    """Return the line of an agent that has just begun to serve."""
    return AgentInfo(
        ready=True,
        dir=str(directory),
        node=node,
        epoch=epoch,
        pid=os.getpid(),
        metrics_port=metrics_port,
        is_new=True,
    )


def frozen_holder(directory: Path) -> int | None:
    """Return the pid of the agent that holds a directory if its process is stopped."""
    pid = holder_of(directory)
    return pid if pid is not None and is_stopped(pid) else None


def look(directory: Path) -> AgentInfo:
    """Return the agent that answers in a directory; without a wait where it is frozen."""
    if (pid := frozen_holder(directory)) is not None:
        return AgentInfo(ready=False, dir=str(directory), pid=pid, is_frozen=True)
    report: NodeReport | None = None
    with contextlib.suppress(NoAgentError):
        _, reply = ask(directory, GetStatus())
        report = reply.report if isinstance(reply, Status) else None
    if report is None:
        return AgentInfo(ready=False, dir=str(directory), pid=holder_of(directory) or 0)
    return AgentInfo(
        ready=True,
        dir=str(directory),
        node=report.node,
        epoch=report.epoch,
        pid=report.agent_pid,
        wire_version=report.wire_version,
    )
