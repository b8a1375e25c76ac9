"""The console's errors, by who must act.

    AppError                      exit code, hint
      UsageError                  2   the person at the keyboard
      SessionError                2   the machine the console runs on (no directory, no memory)
      HostUnreachableError        3   whoever keeps the host, the network or the keys
        HostKeyError              3   the host is not, or not known to be, who it says
        AnswerNeededError         3   the person at the keyboard, whom we cannot ask now
      AgentUnreachableError       3   the operator of the node
        NoAgentError              3   whoever starts agents: none serves there
        FrozenAgentError          3   whoever stopped its process
      AgentRefusedError           4   the agent said why
      NotInstalledError           4   whoever keeps the Python of the host
      IncompatibleAgentError      5   versions do not fit

An error formats itself from facts and never prints itself: `app.cli.main.main` does, in one line.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the command `rankdeck` tells the shell."""

    WELL = 0
    JOB_FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    INCOMPATIBLE = 5
    VERDICT_STANDS = 10
    INTERRUPTED = 130


class AppError(Exception):
    """Something a person must know: what happened, to whom, and what to do.

    Attributes:
        exit_code: For the shell.
        hint: What to do about it, empty when the message says it.
    """

    exit_code = ExitCode.JOB_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def whole(self) -> str:
        """The message, and in brackets what to do."""
        return self._with_hint(str(self))

    def text_for(self, host: str) -> str:
        """Return the message for a place where the host's name stands already; the name of another one stays in it."""
        return str(self).removeprefix(f"{host}: ").removeprefix(f"the agent on {host} does not answer: ")

    def whole_of(self, host: str) -> str:
        """Return the same, and in brackets what to do."""
        return self._with_hint(self.text_for(host))

    def _with_hint(self, message: str) -> str:
        return f"{message} ({self.hint})" if self.hint else message


class UsageError(AppError):
    """A wrong option, file or value."""

    exit_code = ExitCode.USAGE


class SessionError(AppError):
    """This machine cannot hold a session: no writable directory, a package is missing."""

    exit_code = ExitCode.USAGE


class HostUnreachableError(AppError):
    """A host cannot be reached by SSH, or does not let us in.

    Attributes:
        is_answerable: Whether an answer of a person would help, and one may be asked for.
    """

    exit_code = ExitCode.UNREACHABLE
    is_answerable = False

    def __init__(self, host: str, detail: str, hint: str = "") -> None:
        super().__init__(f"{host}: {detail}", hint)
        self.host = host


class HostKeyError(HostUnreachableError):
    """A host's key is unknown, has changed, or is revoked: nothing is sent to it."""


class AnswerNeededError(HostUnreachableError):
    """A host lets nobody in without an answer of a person, such as a second factor, and there is nobody to ask now."""

    is_answerable = True


class AgentUnreachableError(AppError):
    """An agent does not answer."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, node: str, detail: str, hint: str = "") -> None:
        super().__init__(f"the agent on {node} does not answer: {detail}", hint)
        self.detail = detail


class NoAgentError(AgentUnreachableError):
    """There is a way to a node, and no agent serves there."""


class FrozenAgentError(AgentUnreachableError):
    """The process of an agent is stopped."""

    def __init__(self, node: str, pid: int) -> None:
        AppError.__init__(self, f"the agent on {node} (pid {pid}) is frozen", f"on {node}: kill -CONT {pid}")
        self.detail = f"its process (pid {pid}) is frozen"

    def text_for(self, host: str) -> str:
        """Return the message for a place where the agent is spoken of already."""
        return super().text_for(host) if host not in str(self) else self.detail


class AgentRefusedError(AppError):
    """An agent refused a command."""

    exit_code = ExitCode.REFUSED

    def __init__(self, node: str, reason: str, message: str) -> None:
        super().__init__(f"{node} refused ({reason}): {message}")
        self.reason = reason
        self.message = message


class NotInstalledError(AppError):
    """The Python of a host takes no rankdeck."""

    exit_code = ExitCode.REFUSED

    def __init__(self, host: str, detail: str, hint: str = "") -> None:
        super().__init__(f"{host}: {detail}", hint)


class IncompatibleAgentError(AppError):
    """An agent speaks another version of the vocabulary."""

    exit_code = ExitCode.INCOMPATIBLE

    def __init__(self, node: str, detail: str, hint: str = "") -> None:
        super().__init__(f"{node}: {detail}", hint or "the same on both sides: rankdeck install HOST --restart-agent")
