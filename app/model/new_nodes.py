"""Nodes that joined after the console was opened and are not part of it. Pure."""

from __future__ import annotations

from typing import NamedTuple

SETTLE_S = 2.0
"""Seconds without another new node until those that came are reported; agents of one `srun` come within a second."""
MAX_WAIT_S = 10.0
"""Seconds until they are reported, even if more still come."""
MAX_KNOWN = 16_384
"""Names of reported nodes kept; only a faulty relay has more, and then a node is reported twice."""


class NewNodes(NamedTuple):
    """The new nodes, and where they are.

    Attributes:
        relay: Machine of the relay that they joined, as the user names it.
        nodes: Those that are there now.
    """

    relay: str = ""
    nodes: tuple[str, ...] = ()


class NewNodeWatch:
    """Reports each new node once, even if it leaves and comes back."""

    def __init__(self) -> None:
        self._notified: frozenset[str] = frozenset()
        self._waiting: frozenset[str] = frozenset()
        self._first_s = self._last_s = 0.0

    def news(self, new_nodes: NewNodes, now_s: float) -> NewNodes:
        """Return the new nodes to report now."""
        waiting = frozenset(new_nodes.nodes) - self._notified
        if waiting != self._waiting:
            self._first_s = self._first_s if self._waiting else now_s
            self._waiting, self._last_s = waiting, now_s
        if not waiting or (now_s - self._last_s < SETTLE_S and now_s - self._first_s < MAX_WAIT_S):
            return NewNodes()
        self._notified = waiting | (self._notified if len(self._notified) < MAX_KNOWN else frozenset())
        self._waiting = frozenset()
        return new_nodes._replace(nodes=tuple(node for node in new_nodes.nodes if node in waiting))
