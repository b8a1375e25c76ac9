"""The console's errors, by who can fix them.

    AppError                      exit code, hint
      UsageError                  2   the user at the keyboard
        HostsBusyError            2   the user, who may agree to share the hosts
      SessionError                2   the machine the console runs on (no directory, no memory)
      HostUnreachableError        3   who administers the host, the network or the keys
        HostKeyError              3   the host's key is unknown, changed or revoked
        LoginRefusedError         3   who administers the keys there
        AnswerNeededError         3   the user at the keyboard, who cannot be asked now
      AgentUnreachableError       3   the operator of the node
        NoAgentError              3   who starts agents: none runs there
        FrozenAgentError          3   who stopped its process
      AgentRefusedError           4   the agent's message gives the reason; 2 for a job that it does not know
      NotInstalledError           4   who administers the host's Python
      IncompatibleAgentError      5   who installs: the versions differ

`app.cli.main.main` prints an error in one line; the error itself only formats its facts.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command `rankdeck`."""

    WELL = 0
    JOB_FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    INCOMPATIBLE = 5
    VERDICT_STANDS = 10
    INTERRUPTED = 130


class AppError(Exception):
    """An error that a user must see: what happened, where, and what to do.

    Attributes:
        exit_code: The command's exit code.
        hint: What to do about it; empty when the message contains it.
    """

    exit_code = ExitCode.JOB_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def whole(self) -> str:
        """The message, followed by the hint in brackets."""
        return self._with_hint(str(self))

    def text_for(self, host: str) -> str:
        """Return the message without this host's name, for a place that shows it already; other names stay."""
        return str(self).removeprefix(f"{host}: ")

    def whole_of(self, host: str) -> str:
        """Return `text_for(host)`, followed by the hint in brackets."""
        return self._with_hint(self.text_for(host))

    def _with_hint(self, message: str) -> str:
        return f"{message} ({self.hint})" if self.hint else message


class UsageError(AppError):
    """A wrong option, file or value."""

    exit_code = ExitCode.USAGE


class HostsBusyError(UsageError):
    """Another job runs on the hosts, and nobody has agreed to one beside it."""


class SessionError(AppError):
    """This machine cannot hold a session: no writable directory, a package is missing."""

    exit_code = ExitCode.USAGE


class HostUnreachableError(AppError):
    """A host cannot be reached by SSH, or refuses the login.

    Attributes:
        is_answerable: Whether a user's answer would help and can be asked for.
    """

    exit_code = ExitCode.UNREACHABLE
    is_answerable = False

    def __init__(self, host: str, detail: str, hint: str = "") -> None:
        super().__init__(f"{host}: {detail}", hint)
        self.host = host


class HostKeyError(HostUnreachableError):
    """A host's key is unknown, has changed, or is revoked: nothing is sent to it."""


class LoginRefusedError(HostUnreachableError):
    """A host has refused our keys; it is not tried again by itself, since attempts are counted there."""


class AllocationEndedError(HostUnreachableError):
    """The Slurm job of a relay has ended, and its agents and jobs with it."""


class AnswerNeededError(HostUnreachableError):
    """A login needs a user's answer, such as a second factor, and there is nobody to ask now."""

    is_answerable = True


class AgentUnreachableError(AppError):
    """An agent does not answer."""

    exit_code = ExitCode.UNREACHABLE
    head = "the agent on {} does not answer: "

    def __init__(self, node: str, detail: str, hint: str = "") -> None:
        super().__init__(self.head.format(node) + detail, hint)
        self.detail = detail

    def text_for(self, host: str) -> str:
        """Return the message for a place that names the agent already."""
        return str(self).removeprefix(self.head.format(host))


class NoAgentError(AgentUnreachableError):
    """The node is reachable, and no agent serves there."""

    head = "no agent runs on {}: "


class FrozenAgentError(AgentUnreachableError):
    """The process of an agent is stopped."""

    def __init__(self, node: str, pid: int) -> None:
        AppError.__init__(self, f"the agent on {node} (pid {pid}) is frozen", f"on {node}: kill -CONT {pid}")
        self.detail = f"its process (pid {pid}) is frozen"

    def text_for(self, host: str) -> str:
        """Return the message for a place that names the agent already."""
        return super().text_for(host) if host not in str(self) else self.detail


_LOOK_THERE = "rankdeck status shows what runs there"
_AFTER_REFUSAL = {
    "job_exists": _LOOK_THERE,
    "malformed": "rankdeck run --help shows what it takes",
    "no_script": "--workdir names another directory there",
    "no_workdir": "--workdir names another directory there",
    "unknown_job": _LOOK_THERE,
    "unknown_rank": _LOOK_THERE,
    "wrong_state": _LOOK_THERE,
}
"""What to do after a refusal whose message does not contain it, by `agent.wire.commands.RefusalReason`."""


class AgentRefusedError(AppError):
    """An agent refused a command; that it knows no such job is wrong use, as where the console finds that out."""

    exit_code = ExitCode.REFUSED

    def __init__(self, node: str, reason: str, message: str, next_attempt: int | None = None) -> None:
        super().__init__(f"{node} refused: {message}", _AFTER_REFUSAL.get(reason, ""))
        self.exit_code = ExitCode.USAGE if reason == "unknown_job" else ExitCode.REFUSED
        self.reason = reason
        self.message = message
        self.next_attempt = next_attempt


class NotInstalledError(AppError):
    """rankdeck cannot be installed into a host's Python."""

    exit_code = ExitCode.REFUSED

    def __init__(self, host: str, detail: str, hint: str = "") -> None:
        super().__init__(f"{host}: {detail}", hint)


class IncompatibleAgentError(AppError):
    """An agent speaks another version of the wire protocol."""

    exit_code = ExitCode.INCOMPATIBLE

    def __init__(self, node: str, detail: str, hint: str = "") -> None:
        super().__init__(f"{node}: {detail}", hint or "the same on both sides: rankdeck install HOST --restart-agent")
