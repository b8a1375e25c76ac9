"""Which road a host's reports take that are to come straight over TCP: when to ask its agent, when to give it up. Pure.

Silence is all that is looked at: an agent that began anew, a lease that was lost, a refusal, a broken connection and a
firewall look the same from here, and each begins with the same question over SSH. Only where the agent answers that
and is heard on none of its addresses its reports come over SSH from then on.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from app.roads.direct_addresses import MAX_ADDRESSES, addresses_to_try

if TYPE_CHECKING:
    from agent.wire.direct import Listening

SILENT_S = 4.0
"""An agent speaks once a second at least."""
TRY_S = 3.0
"""For the first report from an address, which takes a second at most where nothing is in the way."""
RETRY_S = 2.0
"""Before an agent is asked again that has not answered."""
MAX_ROUNDS = 3
"""In which an agent tells of another place each time, and is heard nowhere."""
MIN_LEASE_S = 15.0
RENEWALS = 3
"""Questions in the time of one lease."""


class Ask(msgspec.Struct, frozen=True):
    """Ask the agent to listen."""


class HearAt(msgspec.Struct, frozen=True):
    """Begin to hear the host there, by a new socket."""

    address: str
    port: int
    server_key: str


class FallBack(msgspec.Struct, frozen=True):
    """Have its reports come over SSH from now on; the words say why, and what to do."""

    words: str


Effect = Ask | HearAt | FallBack


class _State(Enum):
    RESTING = auto()
    ASKING = auto()
    TRYING = auto()
    HEARD = auto()
    ON_SSH = auto()


class RoadChoice:
    """The choice of one host."""

    def __init__(self, preferred: str) -> None:
        """`preferred` is the address under which SSH goes there; empty where it is not known."""
        self._preferred = preferred
        self._state = _State.RESTING
        self._has_tried_all = False
        """Whether the agent is asked since nothing was heard at any of its addresses."""
        self._since_s = 0.0
        """When the present address began to be tried."""
        self._until_s = 0.0
        """When to ask again: of a lease, or of an agent that has not answered."""
        self._heard_s: float | None = None
        self._told: tuple[str, int, list[str]] | None = None
        self._left: list[str] = []
        """Addresses that are still to be tried."""
        self._num_rounds = 0
        self._is_asked_once_more = False

    def look(self, now_s: float, heard_s: float | None) -> Effect | None:
        """Return what is to be done; `heard_s` is when the host was heard last."""
        self._heard_s = heard_s
        if self._state is _State.RESTING and now_s >= self._until_s:
            return self._ask()
        if self._state is _State.TRYING:
            if heard_s is not None and heard_s >= self._since_s:
                self._state, self._num_rounds = _State.HEARD, 0
            elif now_s - self._since_s >= TRY_S:
                return self._hear_next(now_s) if self._left else self._ask(has_tried_all=True)
        if self._state is _State.HEARD and (not self._is_heard(now_s) or now_s >= self._until_s):
            return self._ask()
        return None

    def answered(self, listening: Listening, now_s: float) -> Effect | None:
        """Take where the agent listens."""
        self._is_asked_once_more = False
        told = (listening.server_key, listening.port, listening.addresses)
        is_same, self._told = told == self._told, told
        self._until_s = now_s + max(MIN_LEASE_S, listening.lease_s) / RENEWALS
        if is_same and self._is_heard(now_s):
            self._state = _State.HEARD
            return None
        if self._has_tried_all:
            self._num_rounds += 1
            if is_same or self._num_rounds >= MAX_ROUNDS:
                return self._fall_back(_nothing_heard(listening))
        self._left = addresses_to_try(listening.addresses, self._preferred)
        if not self._left:
            return self._fall_back("its agent listens at no address that leads there: name another telemetry_interface")
        return self._hear_next(now_s)

    def refused(self, words: str, now_s: float, *, may_pass: bool = False) -> Effect | None:
        """Take that the agent will not, and why; what may pass is asked once more."""
        if may_pass and not self._is_asked_once_more:
            self._is_asked_once_more = True
            self.unanswered(now_s)
            return None
        return self._fall_back(words)

    def unanswered(self, now_s: float) -> None:
        """Take that nobody has answered."""
        self._state, self._until_s = _State.RESTING, now_s + RETRY_S

    def _is_heard(self, now_s: float) -> bool:
        return self._heard_s is not None and now_s - self._heard_s < SILENT_S

    def _ask(self, *, has_tried_all: bool = False) -> Ask:
        self._state, self._has_tried_all = _State.ASKING, has_tried_all
        return Ask()

    def _hear_next(self, now_s: float) -> HearAt:
        assert self._told is not None
        self._state, self._since_s = _State.TRYING, now_s
        self._preferred = self._left.pop(0)
        return HearAt(self._preferred, self._told[1], self._told[0])

    def _fall_back(self, words: str) -> FallBack:
        self._state = _State.ON_SSH
        return FallBack(words)


def _nothing_heard(listening: Listening) -> str:
    where = ", ".join(listening.addresses[:MAX_ADDRESSES])
    return (
        f"it listens at {where}, TCP port {listening.port}, and nothing comes from there: let that through the "
        "firewall (telemetry_port fixes the port), or name another telemetry_interface"
    )
