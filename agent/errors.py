"""What goes wrong in an agent, by who must act.

    AgentError
    +-- OperatorError                 the operator: the message gives what to do
    |   +-- StateDirError             the agent's directory is not safe to use
    |   +-- AgentRunningError         another agent serves that directory
    |   +-- NoAgentError              no agent answers there
    |   |   +-- FrozenAgentError      its process is stopped
    |   +-- DaemonFailedError         an agent was started and did not come up
    +-- MetricPatternError            the sender of the job: a pattern for figures in its lines is of no use
    +-- SpawnError                    the starter of the job: a process could not be made
    +-- InvalidTransitionError        us: our own shell sent a core an event that cannot be

What a peer does wrong is a value, not an exception: `agent.wire.commands.Refused` for commands, a counter for reports.

`log_line` writes an agent's lines for people to standard error, which may be a file on a full disk, or a pipe that
nobody reads.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class AgentError(Exception):
    """The root of the tree; `exit_code` is the command's."""

    exit_code = 1


class OperatorError(AgentError):
    """The user must change what was asked for."""

    exit_code = 2


class StateDirError(OperatorError):
    """The agent's directory is not ours alone, or cannot be used."""


class AgentRunningError(OperatorError):
    """Another agent serves the directory."""


class NoAgentError(OperatorError):
    """No agent answers on the directory's command socket."""

    exit_code = 3


class FrozenAgentError(NoAgentError):
    """The agent's process is stopped: it answers nobody until it is continued or killed."""

    def __init__(self, directory: Path, pid: int) -> None:
        super().__init__(f"the agent in {directory} (pid {pid}) is frozen: kill -CONT {pid}, or kill -KILL {pid}")


class DaemonFailedError(OperatorError):
    """An agent that was to serve in the background ended instead; the message and the code are its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class MetricPatternError(AgentError):
    """A pattern that cannot find figures in lines."""


class SpawnError(AgentError):
    """A process could not be started."""


class InvalidTransitionError(AgentError):
    """Our own shell fed a core an event that cannot happen in its state; `story` holds its last events."""

    def __init__(self, message: str, story: Iterable[str]) -> None:
        self.story = tuple(story)
        super().__init__("\n".join((message, *(f"  {line}" for line in self.story))))


def log_line(text: str) -> None:
    """Log a line; never raises."""
    with contextlib.suppress(OSError):
        click.echo(f"agent: {text}", err=True)
