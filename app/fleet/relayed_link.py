"""The agent of a node without SSH: the agent has connected to a relay, which carries commands and reports.

Only the agent is within reach: no program is run on the node, and its agent is started and ended there.
"""

from __future__ import annotations

import shlex
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from agent.wire.codec import CONTROL_SOCKET
from agent.wire.reports import READABLE_VERSIONS, WIRE_VERSION
from app.errors import (
    AgentUnreachableError,
    HostUnreachableError,
    IncompatibleAgentError,
    NoAgentError,
    SessionError,
    UsageError,
)
from app.fleet.agent_link import DEFAULT_PYTHON, AgentLink, AgentPlace, Kept, TakesFrame
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.ssh.tunnel import Tunnel
from app.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.commands import Accepted
    from agent.wire.relay import RosterEntry
    from app.fleet.relay_hub import RelayHub
    from app.ssh.io_thread import ByteChannel
    from app.ssh.remote_command import Finished

BY_ITS_OWN_MEANS = "do it where they are started: srun, or ssh to the node"


class RelayedLink(AgentLink):
    """A node of a relay; the caller closes the relay's connection."""

    def __init__(self, node: str, hub: RelayHub, number: int) -> None:
        """`hub` is connected; `number` is the node's own among its links."""
        super().__init__(node, DEFAULT_PYTHON)
        self._hub = hub
        self._near = Path(hub.directory_of(node)) if hub.is_here else hub.near_directory / str(number)
        self._tunnel: Tunnel | None = None
        self._announced: tuple[RosterEntry, AgentPlace] | None = None
        """Last roster entry of its agent, and the place decoded from it."""

    @property
    def directory(self) -> Path:
        """Directory in which the agent's command socket appears on this machine."""
        return self._near

    @property
    def is_alive(self) -> bool:
        """False once the connection to the relay is lost."""
        return self._hub.is_alive

    @property
    def is_relayed(self) -> bool:
        """True: its reports come in the relay's frames."""
        return True

    @property
    def kept(self) -> Kept:
        """The relay's connection."""
        return self._hub

    @property
    def unreachable_reason(self) -> UnreachableReason | None:
        """Why reports of the node are missing, else None; only an agent that has reported its end has ended."""
        entry = self._hub.entry(self.host)
        if entry is None or not entry.is_here:
            has_ended = entry is not None and entry.has_ended
            return UnreachableReason(
                self._unreachable_text(entry), UnreachableKind.AGENT if has_ended else UnreachableKind.CONNECTION
            )
        try:
            place = self._place_of(entry)
        except IncompatibleAgentError as error:  # another agent has taken the place of the one found
            return UnreachableReason(error.whole_of(self.host), UnreachableKind.FITTING_AGENT)
        if place.wire_version not in READABLE_VERSIONS:
            return UnreachableReason(self._other_version(place), UnreachableKind.FITTING_AGENT)
        self.place, self.python = place, place.python  # those of the agent that is there now
        return None

    @property
    def runs_programs(self) -> bool:
        """False: the relay carries commands for its agent, nothing else."""
        return False

    def connect(self) -> None:
        """Do nothing: the relay is connected."""

    def shut_down(self, *, kill_jobs: bool) -> Accepted:
        """Refuse: whatever started the agent would start it again, or miss it."""
        verb = shlex.join(["python", "-P", "-m", "agent", "shutdown", *(["--kill-jobs"] if kill_jobs else [])])
        raise UsageError(f"the agent on {self.host} is not ended through a relay", f"{BY_ITS_OWN_MEANS}: {verb}")

    def open_sockets(self, on_frame: TakesFrame) -> None:
        """Receive the node's reports, and make its command socket appear here."""
        self._hub.follow(self.host, on_frame)
        if self._hub.is_here:
            return
        try:
            self._near.mkdir(mode=0o700, exist_ok=True)
            self._tunnel = Tunnel(self._near / CONTROL_SOCKET, lambda: self._hub.open_control(self.host))
        except OSError as error:
            reason = f"no socket for {self.host} can be opened here: {error.strerror}"
            raise SessionError(reason, "for many hosts raise ulimit -n") from error

    def forget_refusals(self) -> None:
        """See `AgentLink.forget_refusals`; applies to the relay's connection."""
        self._hub.forget_refusals()

    def reconnect(self, *, asks: bool = False) -> None:  # noqa: ARG002 - as below
        """Check that the node is there: its connection is the relay's."""
        self.find()

    def go_again(self, *, asks: bool = False) -> None:
        """Do nothing: its connection is the relay's."""

    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:  # noqa: ARG002 - as it is asked
        self._refuse(argv[0])

    def _open(self, argv: Sequence[str]) -> ByteChannel:
        self._refuse(argv[0])

    def close(self) -> None:
        """Close the node's channel; safe to call twice."""
        tunnel, self._tunnel = self._tunnel, None
        if tunnel is not None:
            tunnel.close()

    def _asked_place(self, *arguments: str) -> AgentPlace:  # noqa: ARG002 - it can be asked nothing but this
        entry = self._hub.entry(self.host)
        if entry is None or not entry.is_here:
            hint = "start its agent: srun python -P -m agent serve --relay INVITATION"
            if entry is not None and entry.has_ended:
                raise NoAgentError(self.host, self._unreachable_text(entry), hint)
            raise HostUnreachableError(self.host, self._unreachable_text(entry), hint)
        place = self._place_of(entry)
        self.python = place.python
        return place

    def _how_to_install(self, *options: str) -> str:  # noqa: ARG002 - as it is asked
        return f"rankdeck {version('rankdeck')} in {clean(self.python)} there, and its agent started again: srun"

    def _place_of(self, entry: RosterEntry) -> AgentPlace:
        if self._announced is None or self._announced[0] is not entry:
            self._announced = (entry, _place(entry))
        return self._announced[1]

    def _refuse(self, what: str) -> NoReturn:
        raise AgentUnreachableError(self.host, f"{clean(what)} is not within reach of a relay", BY_ITS_OWN_MEANS)

    def _unreachable_text(self, entry: RosterEntry | None) -> str:
        if entry is None:
            return f"the relay on {self._hub.host} does not know it"
        if entry.has_ended:
            return f"it has ended, as it reported to the relay on {self._hub.host}"
        return f"the relay on {self._hub.host} has it no more: {clean(entry.why)}"

    def _other_version(self, place: AgentPlace) -> str:
        return f"the agent speaks wire version {place.wire_version}, this console {WIRE_VERSION}"


def _place(entry: RosterEntry) -> AgentPlace:
    """Return the place that an agent has announced.

    Raises:
        IncompatibleAgentError: It cannot be decoded.
    """
    try:
        place = msgspec.json.decode(entry.place, type=AgentPlace)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IncompatibleAgentError(entry.node, f"its agent answers something else: {clean(str(error))}") from error
    return msgspec.structs.replace(place, is_new=False)
