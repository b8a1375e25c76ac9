"""The agent of a host: finds, starts and ends it there, whatever the connection to the host is.

Everything here blocks, within bounds.

`AgentLink` is the link to one host. `LinkGroup` opens and closes those of several hosts together. `Talk` is a verb of
the agent that stays open: one line there, one line back.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.commands import Accepted, decode_reply
from agent.wire.reports import READABLE_VERSIONS, WIRE_VERSION
from app.errors import (
    AgentRefusedError,
    AgentUnreachableError,
    AppError,
    ExitCode,
    FrozenAgentError,
    HostUnreachableError,
    IncompatibleAgentError,
    NoAgentError,
)
from app.text import LINE_LIMIT, clean
from app.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from pathlib import Path

    from app.model.unreachable_reason import UnreachableReason
    from app.ssh.io_thread import ByteChannel, RingingChannel
    from app.ssh.remote_command import Finished

LINE_TIMEOUT_S = 20.0
"""Seconds for a start of Python on a busy machine; also the timeout of a channel."""
MAX_LINE_BYTES = 65_536
_CHANNEL_ERRORS = (OSError, EOFError)
"""Errors of an open channel, paramiko's own among them; its SSHException concerns the opening of one."""


class Talk:
    """A process on a host, from its start to `close`; used by one thread at a time."""

    def __init__(self, host: str, verb: str, channel: ByteChannel) -> None:
        self._host = host
        self._verb = verb
        self._channel = channel
        self._buffer = bytearray()

    def line(self, timeout_s: float = LINE_TIMEOUT_S) -> bytes:
        """Return the next line that is JSON; a login shell may print others before.

        Raises:
            AgentUnreachableError: It has ended, or prints something else.
            HostUnreachableError: The connection broke, or nothing came in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            whole, newline, rest = bytes(self._buffer).partition(b"\n")
            if newline:
                self._buffer = bytearray(rest)
                if whole.startswith(b"{"):
                    return whole
                continue
            if len(self._buffer) > MAX_LINE_BYTES:
                raise AgentUnreachableError(self._host, f"`agent {self._verb}` there answers something else")
            if time.monotonic() > deadline_s:
                raise HostUnreachableError(self._host, f"`agent {self._verb}` answers nothing")
            self._buffer += self._piece()

    def send(self, line: bytes) -> None:
        """Send a line.

        Raises:
            HostUnreachableError: The connection broke.
        """
        try:
            self._channel.sendall(line + b"\n")
        except _CHANNEL_ERRORS as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """End it; safe to call twice."""
        with contextlib.suppress(*_CHANNEL_ERRORS):
            self._channel.close()

    def _piece(self) -> bytes:
        try:
            piece = self._channel.recv(MAX_LINE_BYTES)
        except TimeoutError as error:
            raise HostUnreachableError(self._host, f"`agent {self._verb}` answers nothing") from error
        except _CHANNEL_ERRORS as error:
            raise self._broken(error) from error
        if not piece:
            raise AgentUnreachableError(self._host, f"`agent {self._verb}` ended there")
        return piece

    def _broken(self, error: Exception) -> HostUnreachableError:
        return HostUnreachableError(self._host, f"the connection broke: {clean(str(error))}")


VERB_TIMEOUT_S = 45.0
"""Seconds for two starts of Python on a busy machine, and for an agent to take up its jobs."""
DEFAULT_PYTHON = "python3"
"""Python of a host for which no other is configured."""
EXIT_NO_COMMAND = 127
EXIT_CANNOT_EXECUTE = 126
_OLD_PYTHON = "python -h"
"""Part of the message of a Python before 3.11 on the option -P: "Try `python -h' for more information."."""
_FROZEN = re.compile(r"\(pid (\d{1,10})\) is frozen")
"""Matches a verb's message about an agent whose process is stopped."""
_OLD_RANKDECK = ("No such command", "No such option")
"""Parts of click's messages about a verb or an option that its program does not have."""


class AgentPlace(msgspec.Struct, frozen=True):
    """Where and what an agent is, as it reports itself; the schema is `agent.service.agent_info`."""

    ready: bool
    dir: str
    python: str
    home: str
    wire_version: int
    node: str = ""
    epoch: str = ""
    pid: int = 0
    is_frozen: bool = False
    is_new: bool = False
    rankdeck: str = ""
    addresses: list[str] = []
    """As `10.0.0.5/24`; the one under which SSH has come there is first."""


class TakesFrame(Protocol):
    """Takes an encoded report, and its age in seconds at most; called from a thread."""

    def __call__(self, frame: bytes, age_s: float = 0.0) -> None:
        """Take a report; see the class."""
        ...


class Kept(Protocol):
    """A connection that is brought back when it is lost."""

    host: str
    is_forwarded: bool

    @property
    def is_alive(self) -> bool:
        """False once it is lost."""
        ...

    def reconnect(self, *, asks: bool = False) -> None:
        """Reconnect; see `AgentLink.reconnect`."""
        ...

    def find(self) -> object:
        """Check that the other end serves; raises where it does not."""
        ...


class AgentLink(ABC):
    """A link to a host and its agent; the `with` block closes it, and leaves what runs there alone.

    Attributes:
        host: Name of the host, as the user typed it.
        place: Where the agent serves; None before it is found.
        is_forwarded: False where sshd forwards no sockets: then `agent proxy` carries them.
        python: The interpreter there that has rankdeck, or is to have it.
    """

    def __init__(self, host: str, python: str) -> None:
        """Make the local end; see `python` above."""
        self.host = host
        self.place: AgentPlace | None = None
        self._known_place: AgentPlace | None = None
        """The agent's last answer, whether it serves or not."""
        self.is_forwarded = True
        self.python = python

    @property
    @abstractmethod
    def directory(self) -> Path:
        """Directory of the agent's sockets on this machine."""

    @property
    def is_somewhere(self) -> bool:
        """False while the directory of the agent's sockets on this machine is unknown."""
        return True

    @property
    def is_relayed(self) -> bool:
        """Whether reports come through a relay, to the `on_frame` of `open_sockets`, instead of by `directory`."""
        return False

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """False once the connection is lost."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def connect(self) -> None:
        """Connect to the host.

        Raises:
            HostUnreachableError: It cannot be reached, or refuses the login.
        """

    def bring_up(self) -> AgentPlace:
        """Start the agent unless it serves already, and return where.

        Raises:
            AgentUnreachableError: It does not start; its output is in the message.
            IncompatibleAgentError: It speaks another version.
        """
        self.place = self._ask_place("serve", "--daemon")
        return self.place

    def find(self) -> AgentPlace:
        """Return where the agent serves.

        Raises:
            NoAgentError: None serves.
            FrozenAgentError: The agent's process is stopped.
            AgentUnreachableError: It cannot be asked.
            IncompatibleAgentError: It speaks another version.
        """
        place = self._ask_place("where")
        if place.is_frozen:
            raise FrozenAgentError(self.host, place.pid)
        if not place.ready:
            raise NoAgentError(self.host, "nothing is known of jobs there", f"rankdeck up {self.host}")
        self.place = place
        return place

    def serving(self) -> AgentPlace | None:
        """Return the agent that serves there, of whichever version; None if there is none.

        Raises:
            AgentUnreachableError: It cannot be asked.
            IncompatibleAgentError: Its answer is not an agent's.
        """
        place = self._asked_place("where")
        return place if place.ready else None

    def shut_down(self, *, kill_jobs: bool) -> Accepted:
        """End the agent; return when it is gone, with its answer: how many jobs keep running, and how many ended.

        Raises:
            AgentUnreachableError: None serves there.
            AgentRefusedError: It refuses.
        """
        options = ("--kill-jobs",) if kill_jobs else ()
        line = self._run("shutdown", *options)
        try:
            reply = decode_reply(line)
        except MalformedMessageError as error:
            raise AgentUnreachableError(self.host, clean(str(error))) from error
        if not isinstance(reply, Accepted):
            raise AgentRefusedError(self.host, "shutdown", clean(str(reply)))
        return reply

    @abstractmethod
    def open_sockets(self, on_frame: TakesFrame) -> None:
        """Make the agent's sockets appear in `directory`; they serve once the host has been reached.

        Args:
            on_frame: Called from a thread with each report, where `is_relayed`; must not block.

        Raises:
            HostUnreachableError: The connection broke.
        """

    @abstractmethod
    def reconnect(self, *, asks: bool = False) -> None:
        """Connect after the connection was lost, or for the first time: the sockets of `open_sockets` serve again.

        Args:
            asks: Ask the user where the login needs it.

        Raises:
            HostKeyError: The host's key is not the known one.
            HostUnreachableError: It still cannot be reached.
            AgentUnreachableError: No agent serves there now.
            IncompatibleAgentError: Another agent serves there now, in another place or of another version.
        """

    def forget_refusals(self) -> None:  # noqa: B027 - most connections have no questions
        """Allow questions that the user has left unanswered to be asked again."""

    @property
    def kept(self) -> Kept:
        """The connection to keep so that this link lives: itself, or one shared with other hosts."""
        return self

    @property
    def unreachable_reason(self) -> UnreachableReason | None:
        """Why no reports come from there although `kept` is connected; None where nothing is known."""
        return None

    @property
    def runs_programs(self) -> bool:
        """False where only the agent can be reached."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Disconnect from the host; safe to call twice."""

    def run_python(self, arguments: Sequence[str], timeout_s: float, given: bytes = b"") -> Finished:
        """Run the Python there to its end; see `_execute`."""
        return self._execute([self.python, *arguments], given, timeout_s)

    def open_python(self, arguments: Sequence[str]) -> ByteChannel:
        """Start the Python there; see `_open`."""
        return self._open([self.python, *arguments])

    @abstractmethod
    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:
        """Run a program there to its end.

        Args:
            argv: The program and its arguments.
            given: Bytes for its standard input.
            timeout_s: None is `VERB_TIMEOUT_S`.

        Raises:
            HostUnreachableError: It did not run to its end in time.
        """

    def _argv(self, *arguments: str) -> list[str]:
        # -P: the directory that a login begins in may hold an `agent` of its own.
        return [self.python, "-P", "-m", "agent", *arguments]

    def _ask_place(self, *arguments: str) -> AgentPlace:
        place = self._asked_place(*arguments)
        if place.wire_version not in READABLE_VERSIONS:
            detail = f"the agent speaks wire version {place.wire_version}, this console {WIRE_VERSION}"
            hint = f"bring this console's there: {self._how_to_install('--restart-agent')}"
            raise IncompatibleAgentError(self.host, detail, hint)
        self._known_place = place
        return place

    def _asked_place(self, *arguments: str) -> AgentPlace:
        line = self._run(*arguments)
        try:
            return msgspec.json.decode(line, type=AgentPlace)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            detail = f"`agent {arguments[0]}` there answers something else: {clean(str(error))}"
            raise IncompatibleAgentError(self.host, detail, self._how_to_install()) from error

    def _how_to_install(self, *options: str) -> str:
        named = () if self.python in {DEFAULT_PYTHON, sys.executable} else ("--python", self.python)
        return clean(shlex.join(["rankdeck", "install", self.host, *named, *options]), LINE_LIMIT)

    def ask_verb(self, *arguments: str, answered: Container[int] = ()) -> bytes:
        """Run a verb of the agent there, and return its answer; no agent needs to serve.

        Args:
            arguments: The verb and its arguments.
            answered: Exit codes beside 0 that come with an answer, which is JSON.

        Raises:
            AgentUnreachableError: It cannot be run there, or fails; and so the other errors of `find`.
        """
        return self._run(*arguments, answered=answered)

    def begin_verb(self, *arguments: str) -> Talk:
        """Start a verb of the agent there that stays open for a dialogue.

        Raises:
            HostUnreachableError: The host refused.
        """
        return Talk(self.host, arguments[0], self._open(self._argv(*arguments)))

    @abstractmethod
    def go_again(self, *, asks: bool = False) -> None:
        """Connect again after the connection was lost, without looking for an agent.

        Args:
            asks: Whether a user waits for a question.

        Raises:
            HostUnreachableError: It cannot be reached; and so `HostKeyError`.
        """

    def open_in(self, directory: str, socket_name: str) -> RingingChannel:  # noqa: ARG002 - as it is asked
        """Connect to a socket in the directory of an agent or a relay on another machine.

        Raises:
            HostUnreachableError: Nobody listens there, or the host refused.
        """
        raise HostUnreachableError(self.host, f"{socket_name} there is not reached through it")

    @abstractmethod
    def _open(self, argv: Sequence[str]) -> ByteChannel:
        """Start a program there; the channel is its standard input and output, and has a timeout.

        Raises:
            HostUnreachableError: The host refused.
        """

    def _run(self, *arguments: str, answered: Container[int] = ()) -> bytes:
        """Run a verb of the agent there, and return its answer: the last line that was printed.

        A login shell may print lines of its own before.
        """
        done = self._execute(self._argv(*arguments))
        last_line = b"".join(done.stdout.strip().splitlines()[-1:])
        if done.exit_code == 0 or (done.exit_code in answered and last_line.startswith(b"{")):
            return last_line
        if done.exit_code == ExitCode.REFUSED:
            raise AgentRefusedError(self.host, arguments[0], done.error_text)
        if (found := _FROZEN.search(done.error_text)) is not None:
            raise FrozenAgentError(self.host, int(found[1]))
        python = self.python
        if done.exit_code in (EXIT_NO_COMMAND, EXIT_CANNOT_EXECUTE):
            raise AgentUnreachableError(self.host, f"{python} does not run there", "name one: --python")
        if "No module named" in done.error_text:
            hint = f"{self._how_to_install()}; or name another Python: --python, or in a rankdeck.toml"
            raise AgentUnreachableError(self.host, f"{python} has no rankdeck ({done.error_text})", hint)
        if _OLD_PYTHON in done.error_text:
            raise IncompatibleAgentError(self.host, f"{python} is older than 3.11", "name a newer one: --python")
        if any(sign in done.error_text for sign in _OLD_RANKDECK):
            detail = f"rankdeck there is another version ({done.error_text})"
            raise IncompatibleAgentError(self.host, detail, self._how_to_install())
        raise AgentUnreachableError(self.host, done.error_text.removeprefix("agent: ") or f"exit code {done.exit_code}")


class LinkGroup:
    """Links to different hosts; the `with` block closes them all. Everything here blocks, within bounds."""

    def __init__(self) -> None:
        """Make an empty group."""
        self.links: list[AgentLink] = []

    def add(self, link: AgentLink) -> None:
        """Add a link, which is closed with the others from now on."""
        self.links.append(link)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        list(run_parallel(self.links, lambda link: link.close()))

    def connect(
        self, then: Callable[[AgentLink], object], fail: Callable[[str], object] = lambda _host: None
    ) -> Iterator[tuple[str, AppError | None]]:
        """Connect to all hosts in parallel, and call `then` on each; yield each host and its error, or None.

        Args:
            then: Called with each link once it is connected: `AgentLink.find` or `bring_up`.
            fail: Called with each host that cannot be reached, or on which `then` fails, once that is known.
        """

        def go(link: AgentLink) -> None:
            try:
                link.connect()
                then(link)
            except AppError:
                fail(link.host)
                raise

        for link, answer in zip(self.links, run_parallel(self.links, go), strict=True):
            yield link.host, answer if isinstance(answer, AppError) else None
