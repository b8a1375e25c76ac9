"""Which agents a relay knows, by the connections that they came by. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from agent.wire.relay import MAX_NODES, RELAY_VERSION, SILENT_S, Hello


class Known(msgspec.Struct):
    """An agent that was let in."""

    peer: bytes
    """Its connection, as ZeroMQ calls it."""
    hello: Hello
    received_at_s: float

    @property
    def node(self) -> str:
        """What it calls its node."""
        return self.hello.node


class LetIn(NamedTuple):
    """An agent is known from now on."""

    known: Known
    instead_of: Known | None
    """One that is not any more."""


class Turned(NamedTuple):
    """An agent is not let in."""

    why: str
    in_the_way: Known | None = None
    """Agent that has its name; without that one it would be let in."""


class Roster:
    """The agents that are there; times are of one monotonic clock.

    Attributes:
        num_expected: The most nodes that anybody has announced.
    """

    def __init__(self, num_expected: int = 0) -> None:
        self._by_peer: dict[bytes, Known] = {}
        self._by_node: dict[str, Known] = {}
        self.num_expected = num_expected

    def __len__(self) -> int:
        return len(self._by_node)

    @property
    def peers(self) -> list[bytes]:
        """The connections of those that are there."""
        return list(self._by_peer)

    def hello(self, peer: bytes, hello: Hello, now_s: float) -> LetIn | Turned:
        """Take that an agent has come."""
        if hello.version != RELAY_VERSION:
            return Turned(f"the relay speaks version {RELAY_VERSION}, this agent {hello.version}: install the same one")
        before = self._by_node.get(hello.node)
        if before is not None and before.hello.instance != hello.instance:
            reason = f"another agent is called {hello.node} there: name this one by serve --node"
            return Turned(reason, before)
        if before is None and len(self._by_node) >= MAX_NODES:
            return Turned(f"the relay has {MAX_NODES} nodes already")
        if (other := self._by_peer.get(peer)) is not None and other.node != hello.node:
            return Turned(f"this connection is that of {other.node}")
        if before is not None:
            self.forget(before.peer)
        known = Known(peer, hello, now_s)
        self._by_peer[peer] = self._by_node[hello.node] = known
        self.num_expected = max(self.num_expected, hello.num_expected)
        return LetIn(known, before)

    def mark_seen(self, peer: bytes, now_s: float) -> Known | None:
        """Take that somebody speaks; return who, None if he was not let in."""
        if (known := self._by_peer.get(peer)) is not None:
            known.received_at_s = now_s
        return known

    def by_peer(self, peer: bytes) -> Known | None:
        """Return who is at the other end of a connection, if he was let in."""
        return self._by_peer.get(peer)

    def find(self, node: str) -> Known | None:
        """Return the agent of a node, if it is there."""
        return self._by_node.get(node)

    def forget(self, peer: bytes) -> Known | None:
        """Take that a connection is gone; return whose."""
        if (known := self._by_peer.pop(peer, None)) is not None:
            del self._by_node[known.node]
        return known

    def silent(self, now_s: float) -> list[Known]:
        """Return those that have sent nothing for too long."""
        return [known for known in self._by_peer.values() if now_s - known.received_at_s > SILENT_S]
